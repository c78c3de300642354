"""Computed weight states: averaged weights, and states between kept ones.

Averaged weights (EMA, SWA) form their own path, which ends at the averaged network:

    wbar_0 = w_0,   wbar_{s+1} = (1 - a_s) wbar_s + a_s w_{s+1}

The steps of the average are linear in the steps of the run, and so in all gradients: with d_s = w_{s+1} - w_s and the
lead e_s = w_s - wbar_s of the trained weights,

    wbar_{s+1} - wbar_s = a_s (d_s + e_s),   e_{s+1} = (1 - a_s) (d_s + e_s),   e_0 = 0

A run that keeps only some of its states is computed again from each kept state to the next. From a kept state, the
recorded steps are made again on exact gradients, in the dtype of the computation,

    w~_{s+1} = w~_s + (step of the update rule on the gradient at w~_s),

up to the next kept state. The path follows these states, and goes from the last one to the kept state, so that the step
that ends at a kept state is the law's step plus a jump: the difference of kept and computed state. Sums along the path
are exact for any jumps; a jump belongs to no sample (docs/theory.md, section 4).

Momentum and preconditioners depend on all gradients since the first step. The optimizer's state is therefore computed
once, from the first stretch to the last, and held at the start of each.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from epk_gp.core.checks import door, validate_count, validate_integer
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replay import Segment, Segments, Steps, is_scaled, kept_state, loop_segments, rule_steps
from epk_gp.core.step import tensor_bytes
from epk_gp.core.trajectory import (
    FirstOf,
    States,
    Trajectory,
    WeightAverage,
    aligned,
    flat_weights,
    read_state,
    validate_trajectory,
)
from epk_gp.optimizers.library_rules import share_of_average
from epk_gp.optimizers.update_rules import UpdateCoefficients

# Largest allowed difference of a kept state from the computed one, relative to the distance between two kept states, by
# norms. The same limit as for retrained runs: rounding is amplified along the steps.
JUMP_SHARE = {torch.float64: 1e-6, torch.float32: 1e-2}


def averaging_coefficients(
    num_steps: int, updates: Iterable[int] | None = None, *, decay: float | None = None, copies_first: bool = True
) -> Float64[Tensor, " S"]:
    """Return the coefficients a_s of an average of the weights, as `torch.optim.swa_utils.AveragedModel` computes it.

    Args:
        num_steps: Number S of steps of the run.
        updates: The number of steps made before each call of `update_parameters`; by default it is called after every
            step, range(1, S + 1).
        decay: The decay of an exponential average, as in `get_ema_multi_avg_fn(decay)`. None for the equal average of
            the weights at all updates, `AveragedModel`'s default.
        copies_first: Whether the first update copies the weights, as `AveragedModel` does. Otherwise the average starts
            with the initial weights.

    Returns:
        One coefficient per step. Before a first update that copies, the average follows the weights (a_s = 1), which
        does not change the average at the end.

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
            f"updates must be numbers of steps made, ascending within 1..{num_steps}: got {made[:5]}. After the first "
            "step one step is made."
        )
    a = torch.zeros(num_steps, dtype=torch.float64)
    if copies_first:
        a[: made[0] if made else num_steps] = 1.0
    for count, number in enumerate(made[1:] if copies_first else made, start=1):
        a[number - 1] = 1 / (count + 1) if decay is None else 1 - decay
    return a


@door
def averaged_trajectory(
    trajectory: Trajectory,
    coefficients: Float[Tensor, " S"],
    *,
    network: nn.Module | None = None,
    start: Float[Tensor, " P"] | None = None,
) -> Trajectory:
    """Return the path of the averaged weights of a run, which ends at the averaged network.

        wbar_0 = w_0,   wbar_{s+1} = (1 - a_s) wbar_s + a_s w_{s+1}

    Pass it to `reconstruct` and `attribute`: they then explain the averaged network exactly. Every training gradient is
    that of the recorded run, taken at w_s, and every test point is integrated along the average.

    Args:
        trajectory: Training run with S steps.
        coefficients: a_s in [0, 1], as returned by `averaging_coefficients`.
        network: The loop's averaged network, such as an `AveragedModel`. It is compared with the average. Its moving
            statistics may differ from the run's (`update_bn`, averaged buffers): the last step of the path then leads
            to them, and its contribution is included in the term `statistics`.
        start: The average wbar_0 when recording began, if it is not w_0. Its contribution to the predictions is
            included in the source "before the recording".

    Raises:
        TypeError: The trajectory is not a recorded run.
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
            f"{tuple(a.shape)} and values {a[:5].tolist()}."
        )
    lead = None if start is None else trajectory.states[0].double() - start
    states, statistics = AveragedStates(trajectory.states, a, lead, trajectory.model.spec), None
    whole = trajectory.statistics
    if network is not None and (statistics := _statistics_of_average(trajectory, states, network)) is not None:
        whole = EndingWith(whole, len(states), end=statistics)
    digest = hashlib.blake2b(trajectory.digest.encode(), digest_size=16)
    for value in (a, lead, statistics):
        digest.update(b"" if value is None else tensor_bytes(value))
    average = WeightAverage(trajectory, a, lead)
    return replace(trajectory, states=states, statistics=whole, average=average, digest=digest.hexdigest())


@door
def schedule_free_average(trajectory: Trajectory, *, network: nn.Module | None = None) -> Trajectory:
    """Return the path of the average x of a schedule-free run, the weights that `optimizer.eval()` sets.

    Args:
        trajectory: The run; the weights of all parameters must be averaged at the same rate.
        network: The network in evaluation mode; see `averaged_trajectory`.

    Raises:
        ValueError: The optimizer is not schedule-free, or its groups have different betas.
    """
    groups = trajectory.optimizer_groups
    betas = [share_of_average(group.options) for group in groups if "ScheduleFree" in group.rule]
    if not betas or len(betas) < len(groups) or len({*betas}) > 1:
        rule = trajectory.update_rule
        raise ValueError(f"the run must be of a schedule-free optimizer, with one beta for all groups: got {rule}.")
    beta, u = betas[0], trajectory.momentum  # the lead of z before y
    shares = [1 - float(trajectory.updates[s].beta.min()) for s in range(trajectory.num_steps)]
    a = torch.tensor([c / (1 - beta * (1 - c)) for c in shares], dtype=torch.float64)
    # y = (1 - beta) (y + u) + beta x
    start = None if u is None else trajectory.states[0] - (1 - beta) / beta * u.to(trajectory.states[0])
    return averaged_trajectory(trajectory, a, network=network, start=start)


@dataclass(frozen=True, eq=False)
class EndingWith(FirstOf):
    """Moving statistics whose last state `end` differs from the run's."""

    end: Any = None

    def __getitem__(self, place: int) -> Any:
        """Return the statistics of one state."""
        return self.end if place == self.count - 1 else super().__getitem__(place)


def _statistics_of_average(run: Trajectory, states: States, network: nn.Module) -> Tensor | None:
    """Return the moving statistics of an averaged network if they differ from the run's last ones.

    Raises:
        ValueError: The network's weights are not the average, or a parameter is missing.
    """
    model, S = run.model, run.num_steps
    named = {**dict(network.named_buffers()), **dict(network.named_parameters())}
    held = {name.removeprefix("module."): value.detach() for name, value in named.items()}
    missing = [name for name in model.names if name not in held]
    if missing:
        raise ValueError(f"network must have the parameters of the trained one: got none of the name {missing[0]!r}.")
    expected = states[S]
    w = model.flatten({name: held[name] for name in model.names}).to(expected)
    difference = float((w - expected).abs().max())
    allowed = 4 * torch.finfo(expected.dtype).eps * (S + 1) * float(expected.abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"network must hold the average of the run's weights: it differs by {difference:.2e}, more than rounding "
            f"explains ({allowed:.2e}). Check after which steps it was updated (`updates`), and its decay."
        )
    if run.statistics is None or any(name not in held for name in model.statistics):
        return None
    statistics, last = model.flatten_statistics(held), run.statistics[S]
    return None if torch.equal(statistics, last.to(statistics)) else statistics.to(last)


class AveragedStates:
    """The averaged weights wbar_0 .. wbar_S, computed in float64 from a run's. Several threads may read at once.

    Args:
        states: The weights of the run.
        coefficients: a_s, (S,).
        lead: The difference of w_0 from the average at the start; None for zero.
        spec: Dtype of the averages; also dtype and device of the run's recomputed states.
    """

    def __init__(
        self, states: States, coefficients: Float64[Tensor, " S"], lead: Float64[Tensor, " P"] | None, spec: TensorSpec
    ) -> None:
        self.states, self.coefficients, self._lead, self._spec = states, coefficients, lead, spec
        self._lock, self._computed = RLock(), dict[TensorSpec, Segments]()

    def __reduce__(self) -> tuple[object, ...]:
        """Return the pickled form, without computed values."""
        return AveragedStates, (self.states, self.coefficients, self._lead, self._spec)

    def __len__(self) -> int:
        """Count the states, S + 1."""
        return len(self.states)

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read one state, negative from the end."""
        return self.at(state, self._spec)

    def until(self, run: Trajectory) -> Trajectory:
        """Return the average of the first steps of the run."""
        S, start = run.num_steps, None if self._lead is None else self[0]
        return averaged_trajectory(run.trained.until(S), self.coefficients[:S], start=start)

    def at(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Read one state for a computation; recomputed states may depend on its dtype."""
        if not -len(self) <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1} (or be negative): got {state}.")
        spec = spec if hasattr(self.states, "at") else self._spec
        with self._lock:
            if spec not in self._computed:
                self._computed[spec] = Segments(self._steps(spec))
            return self._computed[spec].state(state % len(self)).to(spec.dtype)

    def _steps(self, spec: TensorSpec) -> Steps:
        start = read_state(self.states, 0, spec)
        first = start.double() if self._lead is None else start.double() - self._lead

        def step(index: int, average: Tensor, *_: Any) -> tuple[Tensor, None, None]:
            w = read_state(self.states, index + 1, spec)
            return torch.lerp(average, w.double(), float(self.coefficients[index])), None, None

        kept = FirstOf((first,), len(self), (0,))
        return Steps(kept, TensorSpec(torch.float64, start.device), {0}, lambda _: None, step)


class PredictedPath:
    """The steps of the explained path, predicted from the steps that the training gradients give.

    For a recorded run they are the same. For an average they follow from the lead e_s, which needs no recorded weights.

    Args:
        trajectory: The run, or its average.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self._lead = None if trajectory.average is None else trajectory.average.lead

    def step(
        self, index: int, w: Float[Tensor, " P"], d: Float[Tensor, " P"]
    ) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """Return start and length of a step of the path; call it for every step, in order.

        Args:
            index: Number of the step.
            w: The trained weights before it.
            d: Their predicted change.
        """
        average = self.trajectory.average
        if average is None:
            return w, d
        a = float(average.coefficients[index])
        moved = d if self._lead is None else d + self._lead.to(d)
        self._lead = (1 - a) * moved
        return flat_weights(self.trajectory, index, w), a * moved


@dataclass(frozen=True, eq=False)
class Recomputation:
    """The weight states of a run that keeps some of them; the others are computed, in any dtype, when they are read.

    Several threads may read at once.

    Attributes:
        run: The run, whose states are the kept ones and whose coefficients are compact.
        kept: The kept states, [s], numbered by `numbers` in ascending order: the first, the last, and others.
        updates: The coefficients of each step, with one number per parameter if a scale determines the others;
            `places(s)` gives the weight of that number.
    """

    run: Trajectory
    kept: Any
    updates: Any
    _lock: RLock = field(default_factory=RLock, init=False, repr=False)
    _loops: dict[torch.device, tuple[Segments, str | None]] = field(default_factory=dict, init=False, repr=False)
    _missed: dict[tuple[torch.device, int], str | None] = field(default_factory=dict, init=False, repr=False)
    _by_rule: dict[TensorSpec, Segments] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Return the pickled form, without computed values."""
        return Recomputation, (self.run, self.kept, self.updates)

    def __len__(self) -> int:
        """Return the number of states, S + 1."""
        return len(self.kept)

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read one state, computed in the dtype of the weights."""
        return self.at(state, self.run.model.spec)

    def at(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Read one state: kept, or computed in the dtype and on the device of a computation.

        Raises:
            IndexError: The run has no such state.
        """
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        if self.is_kept(state):
            return kept_state(self.kept, state, spec)
        with self._lock:
            return aligned(self.computation(state, spec).state(state).to(dtype=spec.dtype, device=spec.device))

    def is_kept(self, state: int) -> bool:
        """Whether a state is kept."""
        return bool(self.kept.numbers[bisect_right(self.kept.numbers, state) - 1] == state)

    def replay_row(self, state: int) -> Mapping[str, Any]:
        """Return the stored replay data of a state."""
        return self.kept.replay_row(state)  # type: ignore[no-any-return]

    def until(self, run: Trajectory) -> Trajectory:
        """Return the first steps of the run; their last state, even if computed, counts as kept."""
        S = run.num_steps
        numbers = (*(number for number in self.kept.numbers if number < S), S)
        kept, updates = FirstOf(self, S + 1, numbers), FirstOf(self.updates, S)
        return recomputed_run(replace(run, states=kept, updates=updates), kept, updates)

    def stretch(self, step: int, spec: TensorSpec) -> tuple[Segment, int]:
        """Return the steps that are computed together with a step, and its position among them."""
        with self._lock:
            return self.computation(step, spec).segment(step)

    def missed(self, step: int, device: torch.device) -> str | None:
        """Return the reason that the stretch around a step is not the loop's bit by bit; None if it is.

        The first stretch that is read determines the plan for all of them (`epk_gp.core.replay`).
        """
        place = device, bisect_right(self.kept.numbers, step) - 1
        with self._lock:
            if device not in self._loops:
                self._loops[device] = loop_segments(self.run, self.kept, self.updates, *place)
            if place not in self._missed:
                loop, reason = self._loops[device]
                self._missed[place] = reason or loop.missed(place[1])
            return self._missed[place]

    def computation(self, step: int, spec: TensorSpec) -> Segments:
        """Return the steps of a computation: the loop's own, or the update rule's if those give other bits."""
        with self._lock:
            if self.missed(step, spec.device) is None:
                return self._loops[spec.device][0]
            if spec not in self._by_rule:
                self._by_rule[spec] = Segments(rule_steps(self.run, self.kept, self.updates, spec))
            return self._by_rule[spec]

    @property
    def finding(self) -> str | None:
        """The reason that some stretches differ from the loop's bits; None if all stretches read so far are equal."""
        return next((reason for reason in tuple(self._missed.values()) if reason is not None), None)

    def jump(self, state: int, spec: TensorSpec) -> float:
        """Return the norm of the difference between the kept and the computed state; state >= 1."""
        made, place = self.stretch(state - 1, spec)
        end = self.at(state, spec)
        return float((end - made.states[place + 1].to(end)).norm())

    def allowed_jump(self, step: int, dtype: torch.dtype, w: Float[Tensor, " P"], share: float | None = None) -> float:
        """Return the largest norm of the jump at the end of a step for which results are certified.

        Args:
            step: The step before a kept state.
            dtype: The coarser of the dtypes of run and computation.
            w: The weights before the step, which determine dtype and device.
            share: Share of the steps that may be unexplained; None for the run's own limit.
        """
        place = bisect_right(self.kept.numbers, step)
        start, end = (self.kept[self.kept.numbers[number]].to(w) for number in (place - 1, place))
        return (JUMP_SHARE[dtype] + (share or self.run.unexplained or 0.0)) * float((end - start).norm())


@dataclass(frozen=True, eq=False)
class RecomputedUpdates:
    """Coefficients of steps, computed with the states if a preconditioner scales them.

    Attributes:
        recomputation: Computes the states.
        is_scaled: Whether a preconditioner scales any of them.
    """

    recomputation: Recomputation
    is_scaled: bool

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return len(self.recomputation.updates)

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read the coefficients of one step, computed in the dtype of the weights."""
        return self.at(step, self.recomputation.run.model.spec)

    def at(self, step: int, spec: TensorSpec) -> UpdateCoefficients:
        """Read the coefficients of one step, computed in the dtype and on the device of a computation.

        Raises:
            IndexError: The run has no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        if not self.is_scaled:
            return self.held(step)
        made, place = self.recomputation.stretch(step, spec)
        return made.updates[place]

    def held(self, step: int) -> UpdateCoefficients:
        """Return the stored coefficients of one step: one number per parameter if a scale determines the others."""
        update: UpdateCoefficients = self.recomputation.updates[step]
        return update


def recomputed_run(run: Trajectory, kept: Any, updates: Any) -> Trajectory:
    """Return a run whose states between kept ones are computed when they are read.

    Args:
        run: The run, with `kept` in place of its states and `updates` in place of its coefficients.
        kept: The kept states.
        updates: The coefficients.
    """
    recomputation = Recomputation(run, kept, updates)
    return replace(run, states=recomputation, updates=RecomputedUpdates(recomputation, is_scaled(run)))


def law_of_step(trajectory: Trajectory, step: int, spec: TensorSpec) -> Recomputation | None:
    """Return the recomputation of a step if its states may differ from the recorded ones at both ends; else None."""
    recomputation = recomputation_of(trajectory)
    return None if recomputation is None or recomputation.missed(step, spec.device) is None else recomputation


def described_states(trajectory: Trajectory) -> str:
    """Describe the computation of the states between kept ones if they differ from the loop's bits; otherwise ""."""
    recomputation = recomputation_of(trajectory)
    finding = None if recomputation is None else recomputation.finding
    return "" if finding is None else f"states between kept ones follow the update rule, for {finding}"


def recomputation_of(trajectory: Trajectory) -> Recomputation | None:
    """Return the recomputation of the states of a run, or of an average's run; None if all states are kept."""
    states = trajectory.trained.states
    return states if isinstance(states, Recomputation) else None
