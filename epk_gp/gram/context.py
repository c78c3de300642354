"""A path kernel while it is being evaluated: what all tiles of a Gram block share."""

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.representations import ContractionCost, LeftFactor
from epk_gp.core.losses import Head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.show import warn_uncertified
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureStatus, Rule, WeightPath, straight, stretch_of
from epk_gp.storage.states import StoredStates
from epk_gp.work.sums import Sums

_PREFETCH = 2  # states read ahead: the two that the next step needs; a choice, other numbers were not timed


class WeightPrefetcher:
    """Flat weights of a run, and its moving statistics behind them, for a pass from its first step to its last.

    States in memory are returned as they are. Others are read by a thread of their own, two before they are asked for,
    and kept for a while: states on disk, and states that go to another device.

    Args:
        trajectory: The run.
        reference: Gives dtype and device.
    """

    def __init__(self, trajectory: Trajectory, reference: Float[Tensor, "..."]) -> None:
        self.trajectory, self.reference = trajectory, reference
        reads = isinstance(trajectory.states, StoredStates) or reference.device != trajectory.device
        self._reader = ThreadPoolExecutor(1) if reads else None
        self._stream = torch.cuda.current_stream(reference.device) if reference.is_cuda else None
        self._requested: dict[int, Future[Tensor]] = {}

    def get(self, state: int, keep: int) -> Float[Tensor, " PQ"]:
        """Return a state.

        Args:
            state: s in 0 .. S.
            keep: How many states before it may be asked for again.
        """
        if self._reader is None:
            return flat_state(self.trajectory, state, self.reference)
        if state not in self._requested and self._requested and state < min(self._requested):
            self._requested.clear()  # another pass
        for number in range(state, min(state + _PREFETCH, self.trajectory.num_steps) + 1):
            if number not in self._requested:
                self._requested[number] = self._reader.submit(self._fetch, number)
        for number in [number for number in self._requested if number < state - keep]:
            del self._requested[number]
        return self._requested[state].result()

    def _fetch(self, state: int) -> Tensor:
        """Read a state; copy it to a GPU behind the work that is queued there, without waiting for that."""
        if self._stream is None or self.trajectory.device.type != "cpu":
            return flat_state(self.trajectory, state, self.reference)
        row = flat_state(self.trajectory, state, self.reference.new_empty(0, device="cpu"))
        with torch.cuda.stream(self._stream):
            return row.pin_memory().to(self.reference.device, non_blocking=True)


def integral_counts(integral: Integral) -> Sums:
    """Return how many integrals of some points over a step have each status, and their largest residual.

    Gram blocks have no certificate of their own: their nodes are those on which the adaptive rule integrated the
    network's outputs. The counts stay on the device.
    """
    has_it = integral.status[:, None] == torch.arange(len(QuadratureStatus), device=integral.status.device)
    residuals = (integral.residual[:, None] * has_it).nan_to_num(0.0).amax(dim=0)
    return Sums({"integrals": has_it.sum(dim=0)}, {"residuals": residuals.double()})


def warn_of_integrals(sums: Sums) -> None:
    """Emit one `CertificateWarning` if integrals (`integral_counts`) are not the change of the outputs."""
    if "integrals" not in sums.added:
        return
    counts, residuals = sums.added["integrals"].tolist(), sums.largest["residuals"].tolist()
    found = [status for status in QuadratureStatus if counts[status] and not status.is_supported]
    if not found:
        return
    reasons = ", ".join(f"{counts[status]} {status.name}" for status in found)
    warn_uncertified(
        f"the adaptive rule must integrate the outputs' change over each step: {sum(counts[s] for s in found)} "
        f"of {sum(counts)} integrals of a point over a step did not ({reasons}; largest residual "
        f"{max(residuals[status] for status in found):.2g}), so that nodes, and kernel values, are not exact. See "
        "QuadratureStatus, and epk_gp.reconstruct for the certificate."
    )


class KeptSums:
    """Keeps sums while they fit into some memory; those that do not are computed again by each tile.

    Attributes:
        max_bytes: Limit of what is kept; 0, nothing, until a block with several tiles sets one.
    """

    def __init__(self) -> None:
        self.max_bytes = 0
        self._num_bytes = 0
        self._sums: dict[Hashable, dict[int, LeftFactor]] = {}

    def get(self, key: Hashable) -> dict[int, LeftFactor] | None:
        """Return the sums that are kept under a key, if there are any."""
        return self._sums.get(key)

    def put(self, key: Hashable, sums: dict[int, LeftFactor]) -> None:
        """Keep sums if they fit."""
        num_bytes = sum(factor.nbytes for factor in sums.values())
        if self._num_bytes + num_bytes <= self.max_bytes:
            self._num_bytes += num_bytes
            self._sums[key] = sums


def require_gradients_of_rows(model: FunctionalModel) -> None:
    """Raise if the gradient of a point's outputs depends on the points that are evaluated beside it.

    Raises:
        ValueError: An embedding divides gradients by how often a token occurs.
    """
    for name, module in model.module.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"a kernel needs the gradients of a function: {name} divides them by how often a token occurs in the "
                "batch. Make it with scale_grad_by_freq=False."
            )


@dataclass(frozen=True, eq=False)
class ExecutionContext:
    """A path kernel while it is being evaluated.

    Attributes:
        trajectory: The run.
        net: Its network in the computation's dtype and on its device, with its plan.
        head: Whether f is the logits or their log-softmax.
        rule: Quadrature rule.
        step_weights: eta_s of each of the S steps.
        is_per_class: Only pairs of equal classes are wanted.
        options: How to compute.
        is_traced: Only the sum over pairs of equal classes is wanted; these are then pairs of equal classes, too.
        path: Along which test copies move.
        prefetcher: Reads weight states ahead of their use.
        integrations: Counts of the integrals of an adaptive rule, since they were taken the last time.
        training_sums: Sums of the training side over chords that later tiles ask for again.
    """

    trajectory: Trajectory
    net: PlannedModel
    head: Head
    rule: Rule
    step_weights: tuple[float, ...]
    is_per_class: bool
    options: ComputeOptions
    is_traced: bool = False
    path: WeightPath = straight()
    prefetcher: WeightPrefetcher = field(init=False)
    integrations: Sums = field(init=False, default_factory=Sums)
    training_sums: KeptSums = field(init=False, default_factory=KeptSums)

    def __post_init__(self) -> None:
        """Make the reader of weight states; nothing is read yet."""
        object.__setattr__(self, "prefetcher", WeightPrefetcher(self.trajectory, self.reference))

    def take_integrations(self) -> Sums:
        """Return the counts of integrals, and count anew."""
        found = Sums(dict(self.integrations.added), dict(self.integrations.largest))
        self.integrations.added.clear()
        self.integrations.largest.clear()
        return found

    @property
    def reference(self) -> Float[Tensor, " 0"]:
        """An empty tensor of the computation's dtype and device."""
        return torch.empty(0, dtype=self.net.model.spec.dtype, device=self.net.model.spec.device)

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.trajectory.num_outputs

    @property
    def num_output_pairs(self) -> int:
        """Pairs of outputs whose products are wanted."""
        return self.num_outputs if self.is_per_class else self.num_outputs**2

    @property
    def num_sums(self) -> int:
        """Numbers in the block for each pair of points: pairs of outputs, or one if they are summed."""
        return 1 if self.is_traced else self.num_output_pairs

    def block_shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Return the shape of a class-major block: (K, N, K, M), or (K, N, M) of equal classes, K = 1 if summed."""
        K = 1 if self.is_traced else self.num_outputs
        return (K, num_rows, num_columns) if self.is_per_class else (K, num_rows, K, num_columns)

    @property
    def steps(self) -> list[tuple[int, float]]:
        """The steps that count, (s, eta_s)."""
        return [(s, eta) for s, eta in enumerate(self.step_weights) if eta > 0]

    def stretch(self, s: int) -> range:
        """Return the steps of the stretch of the path that a step belongs to."""
        return stretch_of(self.path, s, self.trajectory.num_steps)

    def stretches(self, steps: list[tuple[int, float]]) -> list[tuple[int, list[tuple[int, float]]]]:
        """Group steps that count, in their order, by the stretch that they belong to, which its first step names."""
        return [(a, list(own)) for a, own in groupby(steps, key=lambda entry: self.stretch(entry[0]).start)]

    @property
    def cost(self) -> ContractionCost:
        """What the choice of representations depends on, between copies of one kind."""
        is_adaptive = isinstance(self.rule, AdaptiveRule)
        return ContractionCost(
            num_output_pairs=self.num_output_pairs,
            num_contractions=self.rule.num_contractions,
            cotangents_are_constant=self.head == "logits",
            all_dense=is_adaptive and not self.net.plan.supports_interpolation,
        )

    @property
    def factored_cost(self) -> ContractionCost:
        """What it depends on along chords: gradients that are written out are written out once for each chord."""
        return replace(self.cost, num_contractions=1)

    @property
    def mixed_cost(self) -> ContractionCost:
        """What it depends on between test and training copies.

        All steps of a chord meet the same test side: a layer whose gradients are not written out is multiplied for
        every node and every step of the chord.
        """
        steps = min(self.path.every, max(1, self.trajectory.num_steps))
        return replace(self.cost, num_contractions=self.rule.num_contractions * steps)

    @property
    def memory(self) -> MemoryPlan:
        """Turns the budget into block sizes."""
        return self.net.memory_plan(self.options.memory_budget)
