"""Averaged weights (EMA, SWA) as a path of their own, which ends at the averaged network.

    wbar_0 = w_0,   wbar_{s+1} = (1 - a_s) wbar_s + a_s w_{s+1}

The steps of the average are linear in the steps of the run, and so in all gradients: with d_s = w_{s+1} - w_s and the
lead e_s = w_s - wbar_s of the trained weights,

    wbar_{s+1} - wbar_s = a_s (d_s + e_s),   e_{s+1} = (1 - a_s) (d_s + e_s),   e_0 = 0
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import tensor_bytes
from epk_gp.core.trajectory import ComputedStates, States, Trajectory, WeightAverage, flat_weights, validate_trajectory


def averaging_coefficients(
    num_steps: int, updates: Iterable[int] | None = None, *, decay: float | None = None, copies_first: bool = True
) -> Float64[Tensor, " S"]:
    """Return the coefficients a_s of an average of the weights, as `torch.optim.swa_utils.AveragedModel` makes it.

    Args:
        num_steps: Number S of steps of the run.
        updates: How many steps of the run were made at each call of `update_parameters`; by default it is called after
            every step, range(1, S + 1).
        decay: The decay of an exponential average, of `get_ema_multi_avg_fn(decay)`. None for the equal average of the
            weights at all updates, which is `AveragedModel`'s own.
        copies_first: Whether the first update copies the weights, as that of `AveragedModel` does. Otherwise it counts
            the initial weights as the average so far.

    Returns:
        One coefficient per step. Before a first update that copies, the average follows the weights (a_s = 1): it does
        not matter for the average at the end.

    Raises:
        TypeError: A number is not an integer.
        ValueError: The decay is not in [0, 1], or an update is not one of the steps 1 .. S, in ascending order.
    """
    validate_count(num_steps, "num_steps", minimum=0)
    if decay is not None and not 0 <= decay <= 1:
        raise ValueError(f"decay must lie in [0, 1]: got {decay}.")
    made = list(range(1, num_steps + 1) if updates is None else updates)
    for number in made:
        validate_integer(number, "updates")
    if made != sorted(set(made)) or (made and not 1 <= made[0] <= made[-1] <= num_steps):
        raise ValueError(
            f"updates must be numbers of steps made, ascending within 1..{num_steps}: got {made[:5]}"
            f"{' ...' if len(made) > 5 else ''}. After the first step one step is made."
        )
    a = torch.zeros(num_steps, dtype=torch.float64)
    if copies_first:
        a[: made[0] if made else num_steps] = 1.0
    for count, number in enumerate(made[1:] if copies_first else made, start=1):
        a[number - 1] = 1 / (count + 1) if decay is None else 1 - decay
    return a


def averaged_trajectory(
    trajectory: Trajectory, coefficients: Float[Tensor, " S"], *, network: nn.Module | None = None
) -> Trajectory:
    """Return the path of the averaged weights of a run, whose end is the averaged network.

        wbar_0 = w_0,   wbar_{s+1} = (1 - a_s) wbar_s + a_s w_{s+1}

    `reconstruct`, `attribute` and `attribute_by` explain the averaged network with it, exactly: every training gradient
    is that of the recorded run, taken at w_s, and every test point is integrated along the average.

    Args:
        trajectory: Training run with S steps.
        coefficients: a_s in [0, 1], as `averaging_coefficients` gives them.
        network: The averaged network that the loop made, such as an `AveragedModel`. It is compared with the average.

    Raises:
        TypeError: The trajectory is no recorded run.
        ValueError: The coefficients are not S numbers in [0, 1], the run is an average itself, or the network's weights
            are not the average.
    """
    validate_trajectory(trajectory)
    if trajectory.average is not None:
        raise ValueError("trajectory must be a recorded run: it is the average of one. Combine the coefficients.")
    a = coefficients.detach().to("cpu", torch.float64)
    if a.shape != (trajectory.num_steps,) or not bool(((a >= 0) & (a <= 1)).all()):
        raise ValueError(
            f"coefficients must be one number in [0, 1] per step, ({trajectory.num_steps},): got shape "
            f"{tuple(a.shape)}" + (f" and values in {float(a.min()):.3g}..{float(a.max()):.3g}." if len(a) else ".")
        )
    digest = hashlib.blake2b(trajectory.digest.encode(), digest_size=16)
    digest.update(tensor_bytes(a))
    result = replace(
        trajectory,
        states=AveragedStates(trajectory.states, a),
        average=WeightAverage(trajectory, a),
        digest=digest.hexdigest(),
    )
    if network is not None:
        _validate_average(result, network)
    return result


class AveragedStates:
    """The averaged weights wbar_0 .. wbar_S, computed from those of a run.

    Every k-th one is kept, k about the root of S, and the others of one stretch at a time. Averages are taken in
    float64.

    Args:
        states: The weights of the run.
        coefficients: a_s, (S,).
    """

    def __init__(self, states: States, coefficients: Float64[Tensor, " S"]) -> None:
        self.states, self.coefficients = states, coefficients
        self.stride = max(1, int(len(states) ** 0.5))
        self._reference = states[0].new_empty(0)
        self._anchors = [states[0].double()]
        for first in range(0, len(coefficients), self.stride):
            self._anchors.append(self._average(first, self._anchors[-1])[-1])
        self._stretch: tuple[int, list[Tensor]] = (-1, [])
        self._of: dict[TensorSpec, AveragedStates] = {}

    def __len__(self) -> int:
        """Count the states, S + 1."""
        return len(self.states)

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read one state, negative from the end."""
        if not -len(self) <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1} (or be negative): got {state}.")
        number, place = divmod(state % len(self), self.stride)
        first = number * self.stride
        if not place:
            return self._anchors[number].to(self._reference)
        held, stretch = self._stretch
        if held != first:
            stretch = self._average(first, self._anchors[number])
            self._stretch = first, stretch  # at once: several threads may read
        return stretch[place - 1].to(self._reference)

    def at(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Read one state of a computation, whose dtype states may depend on that are computed again."""
        states = self.states
        if not isinstance(states, ComputedStates):
            return self[state]
        if spec not in self._of:
            self._of[spec] = AveragedStates(_StatesOf(states, spec, len(self)), self.coefficients)
        return self._of[spec][state]

    def _average(self, first: int, start: Tensor) -> list[Tensor]:
        """Return the averages after the state `first`, up to the next one that is kept."""
        averages = []
        for s in range(first, min(first + self.stride, len(self.coefficients))):
            start = torch.lerp(start, self.states[s + 1].double(), float(self.coefficients[s]))
            averages.append(start)
        return averages


@dataclass(frozen=True, eq=False)
class _StatesOf:
    """The states of a run, computed in one dtype."""

    states: ComputedStates
    spec: TensorSpec
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        return self.states.at(state, self.spec)


class PredictedPath:
    """The steps of the path whose end is evaluated, predicted from those that the training gradients give.

    Of a recorded run they are the same. Those of an average follow from the lead e_s, which needs no recorded weights.

    Args:
        trajectory: The run, or its average.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self._lead: Tensor | None = None

    def step(
        self, index: int, w: Float[Tensor, " P"], d: Float[Tensor, " P"]
    ) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """Return start and length of a step of the path; to be called for every step, in their order.

        Args:
            index: Number of the step.
            w: The trained weights before it.
            d: Their predicted change.
        """
        average = self.trajectory.average
        if average is None:
            return w, d
        a = float(average.coefficients[index])
        moved = d if self._lead is None else d + self._lead
        self._lead = (1 - a) * moved
        return flat_weights(self.trajectory, index, w), a * moved


def _validate_average(trajectory: Trajectory, network: nn.Module) -> None:
    buffers = {name.removeprefix("module."): value for name, value in network.named_buffers()}
    if trajectory.statistics is not None and all(name in buffers for name in trajectory.model.statistics):
        held = trajectory.model.flatten_statistics(buffers)
        recorded = trajectory.statistics[trajectory.num_steps].to(held)
        if not torch.allclose(held, recorded, rtol=1e-6, atol=0):
            raise ValueError(
                "network must have the moving statistics of the run's last step: it has others (update_bn, or averaged "
                "buffers), which the path of the average does not lead to."
            )
    found = {name.removeprefix("module."): value for name, value in network.named_parameters()}
    missing = [name for name in trajectory.model.names if name not in found]
    if missing:
        raise ValueError(f"network must have the parameters of the trained one: got none of the name {missing[0]!r}.")
    expected = trajectory.states[trajectory.num_steps]
    w = trajectory.model.flatten({name: found[name].detach() for name in trajectory.model.names}).to(expected)
    difference, largest = float((w - expected).abs().max()), float(expected.abs().max())
    allowed = 4 * torch.finfo(expected.dtype).eps * (trajectory.num_steps + 1) * largest
    if not difference <= allowed:
        raise ValueError(
            f"network must hold the average of the run's weights: it differs by {difference:.2e}, more than rounding "
            f"explains ({allowed:.2e}). Check after which steps it was updated (`updates`), and its decay."
        )
