"""Recorded steps computed again: their gradients, alone or together with neighbouring steps, and their updates.

The gradients of different steps do not depend on each other. If the passes are those of the network in evaluation mode
on recorded rows, the states of neighbouring steps are stacked in one mapped pass, so that a small network does not wait
for Python. Such gradients are accepted if they reproduce the recorded steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.gradients import PassData, TrainingReplay, passes_of, stacked_gradients
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import MemoryPlan, TensorSpec, weight_rows
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import MappedRows, disable_fused_attention, filter_own_warnings
from epk_gp.core.trajectory import (
    Trajectory,
    batch_of,
    flat_state,
    flat_weights,
    has_coarse_steps,
    initial_momentum,
    step_coefficients,
)
from epk_gp.core.update_law import UpdateLaw
from epk_gp.optimizers.update_rules import UpdateCoefficients, largest_entry, predict_step, relative_rounding


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A step that was computed again from the training gradients.

    Attributes:
        step: Its learning rate, batch and forward passes.
        w: The weights w_s before it.
        d: The update w_{s+1} - w_s that the update rule predicts from exact gradients, including the move after the
            step.
        momentum: The momentum buffer before it.
        gradient: The exact gradient of its loss, not clipped.
        as_trained: The update predicted from gradients in the precision of the training; `d` itself without automatic
            mixed precision.
        statistics_error: Largest difference between replayed and recorded moving statistics after a pass, in units of
            the expected rounding; 0 without them.
        by_options: The update that the optimizer's recorded options and state give on the gradients of `as_trained`;
            None if not requested, or if the recorded coefficients are those of the options.
    """

    step: Step
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    momentum: Float[Tensor, " P"]
    gradient: Float[Tensor, " P"]
    as_trained: Float[Tensor, " P"]
    statistics_error: float = 0.0
    by_options: Float[Tensor, " P"] | None = None


@dataclass(frozen=True, eq=False)
class UnseenMove:
    """A change of moving statistics between recorded passes: by passes without a loss, a reset, or another process.

    Attributes:
        moved: A mask of the statistics that changed, by whole tensors.
        values: All statistics after the change.
        is_reset: Whether the changed statistics are as in a new network, so that they do not depend on the weights.
        returns: Whether all statistics are again those at the start of the step, as at the start of each process.
    """

    moved: Bool[Tensor, " Q"]
    values: Float[Tensor, " Q"]
    is_reset: bool
    returns: bool


def replayed_steps(
    run: "RunReplay", steps: slice = slice(None), law: UpdateLaw | None = None
) -> Iterator[ReplayedStep]:
    """Replay a run: yield each step with the update that the update rule predicts.

    Args:
        run: Computes the gradients.
        steps: The steps to replay; they must begin with the first one if a step depends on earlier ones (`has_memory`).
        law: The steps as functions, for `by_options`.
    """
    trajectory, model, reference = run.trajectory, run.model, run.reference
    memory = None if law is None else law.initial()
    # trained: gradients in the precision of the training
    momentum = momentum_trained = initial_momentum(trajectory, flat_weights(trajectory, 0, reference))
    for step in trajectory.steps[steps]:
        w, before, before_trained = flat_weights(trajectory, step.index, reference), momentum, momentum_trained
        update = step_coefficients(trajectory, step.index, reference)
        g, error, d, momentum = run.predict(step, update, w, before)
        as_trained, g_trained, momentum_trained, by_options = d, g, momentum, None
        # rounding differs in another dtype, and a preconditioner can amplify it
        is_other_dtype = trajectory.dtype != model.spec.dtype
        if step.passes and (is_other_dtype or any(forward.autocast is not None for forward in step.passes)):
            g_trained, error = run.gradient(step, exact=False)
            as_trained, momentum_trained = predict_step(update, model.sizes, w, g_trained, before_trained)
        if law is not None and memory is not None:
            memory = replace(memory, momentum=before_trained)
            law.see_clip(step.index, g_trained)
            by_options, memory = law.step(step.index).replayed(update, memory, w, g_trained)
        d, as_trained = (trajectory.with_move(step, w, own) for own in (d, as_trained))
        yield ReplayedStep(step, w, d, before, g, as_trained, error, by_options)


def _num_rows(trajectory: Trajectory, step: Step) -> int:
    return trajectory.num_points if step.batch is None else len(step.batch)


class RunReplay:
    """Recomputes the gradients of a run's steps; used by one thread only.

    Args:
        trajectory: The run; for an average, the run that is averaged.
        model: Its network in the dtype of the computation.
        reference: Tensor whose dtype and device the computation has.
        memory: Chooses how many neighbouring steps are computed together, for a computation that visits all steps; None
            for one at a time.
        within: The steps that the computation visits.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        model: FunctionalModel,
        reference: Tensor,
        memory: MemoryPlan | None = None,
        *,
        within: slice = slice(None),
    ) -> None:
        self.trajectory, self.model, self.reference, self.memory = trajectory.trained, model, reference, memory
        self.within = range(trajectory.num_steps)[within]
        self._together, self._held = MappedRows(), dict[int, Tensor]()  # gradients of a step's neighbours
        self._accepted = dict[int, Tensor]()  # gradients that reproduce the recorded step, as many as memory holds

    def data(self, step: Step) -> list[PassData]:
        """Return the forward passes of a step with their data."""
        return passes_of(step, self.trajectory.inputs, self.trajectory.targets, self.trajectory.loss)

    @cached_property
    def passes(self) -> TrainingReplay:
        """Replays the forward passes, in the run's own dtype where random numbers are drawn."""
        model = self.trajectory.model.variant(TensorSpec(self.trajectory.dtype, self.model.spec.device))
        return TrainingReplay(model, self.trajectory.loss, self.model.spec)

    def gradient(self, step: Step, *, exact: bool = True) -> tuple[Float[Tensor, " P"], float]:
        """Return the gradient of a step's loss, and the error of its statistics in units of their rounding."""
        return self.gradient_at(step, flat_state(self.trajectory, step.index, self.reference), exact=exact)

    def predict(
        self, step: Step, update: UpdateCoefficients, w: Float[Tensor, " P"], momentum: Float[Tensor, " B"]
    ) -> tuple[Float[Tensor, " P"], float, Float[Tensor, " P"], Float[Tensor, " B"]]:
        """Return the result of `gradient`, with the step and the next momentum that the update rule predicts.

        A gradient that was computed together with other steps is accepted if it reproduces the recorded step, up to
        rounding, because torch's batching rules are not correct for every function: they forget the padding index of an
        embedding.
        """
        run, sizes = self.trajectory, self.model.sizes
        if (g := self._accepted.get(step.index)) is not None:
            return g, 0.0, *predict_step(update, sizes, w, g, momentum)
        if self._at_once > 1 and not step.passes and self._together.works is not False:
            if step.index not in self._held:
                self._held = self._neighbours(step)
            g = self._held[step.index]
            d, after = predict_step(update, sizes, w, g, momentum)
            missed = flat_weights(run, step.index + 1, w) - w - run.with_move(step, w, d)
            if largest_entry(missed) <= replay_rounding(w, d, w.dtype):
                if self.memory and len(self._accepted) < weight_rows(self.memory.budget // 2, w.element_size(), len(w)):
                    self._accepted[step.index] = g
                return g, 0.0, d, after
        g, error = self.gradient(step)
        return g, error, *predict_step(update, sizes, w, g, momentum)

    @cached_property
    def _at_once(self) -> int:
        """Number of neighbouring steps whose gradients are taken together; 1 if more gain nothing."""
        run, memory = self.trajectory, self.memory
        # torch computes convolutions with separate weights by copies, rows of a graph share their pass, and states that
        # are computed one after another are not read twice
        is_alone = self.model.signature.graph is not None or hasattr(run.states, "at")
        # in less than float64 the unexplained rest of a step is a separate term, and rounding differs when steps are
        # stacked
        is_alone = is_alone or {run.dtype, self.model.spec.dtype} != {torch.float64} or has_coarse_steps(run)
        if memory is None or is_alone or memory.plan.calls_convolutions:
            return 1
        return memory.stacked_weights(max([1, *(_num_rows(run, step) for step in run.steps)]))

    def _neighbours(self, step: Step) -> dict[int, Tensor]:
        """Return the gradients of a step and its neighbours, with states and batches stacked in one pass."""
        run, first = self.trajectory, step.index // self._at_once * self._at_once  # aligned, for equal bytes
        near = (own for own in run.steps[first : first + self._at_once] if own.index in self.within and not own.passes)
        alike = [own for own in near if _num_rows(run, own) == _num_rows(run, step)]
        states = [flat_state(run, own.index, self.reference) for own in alike]
        batches = [batch_of(run, own, state) for own, state in zip(alike, states, strict=True)]

        def single(k: int) -> list[Tensor]:
            return [self.gradient_at(alike[k], states[k])[0]]

        def together() -> list[Tensor]:
            X, y, c = map(torch.stack, zip(*batches, strict=True))
            with filter_own_warnings("error", Warning):  # torch warns of its slow loops
                return [stacked_gradients(self.model, torch.stack(states), X, y, run.loss, c)]

        with disable_fused_attention():
            (gradients,) = self._together(len(alike), together, single, compares=True)
        # for batches of another size
        others = {index: g for index, g in self._held.items() if first <= index < first + self._at_once}
        return others | dict(zip([own.index for own in alike], gradients, strict=True))

    def gradient_at(
        self, step: Step, state: Float[Tensor, " PQ"], *, exact: bool = True, reverse: bool = False
    ) -> tuple[Float[Tensor, " P"], float]:
        """Return the gradient of a step's loss at any state, and the error of its statistics.

        The rows of a step without recorded passes may be summed in reverse order.
        """
        if not step.passes:
            (data,) = self.data(step)
            if reverse:
                data = PassData(data.forward, *(v.flip(0) for v in (data.samples, data.X, data.y, data.c)))
            return self.passes.gradient(state, data, exact=True).gradient, 0.0
        run, end = self.trajectory, state.new_empty(0)
        end = end if run.statistics is None else run.statistics[step.index + 1]
        return self.passes.step_gradient(state, self.data(step), end, run.unexplained, exact=exact)

    def unseen_moves(self, step: Step, passes: Sequence[PassData]) -> list[UnseenMove | None]:
        """Return the changes of the statistics before each pass of a step and after the last; None without one."""
        recorded = self.trajectory.statistics
        if recorded is None:
            return [None] * (len(passes) + 1)
        start, end = recorded[step.index], recorded[step.index + 1]
        forwards = [data.forward for data in passes]
        starts = [start if forward.statistics is None else forward.statistics for forward in forwards]
        ends = [end if forward.statistics_after is None else forward.statistics_after for forward in forwards]
        return [self._unseen_move(a, b, start) for a, b in zip([start, *ends], [*starts, end], strict=True)]

    def _unseen_move(self, end: Tensor, start: Tensor, first: Tensor) -> UnseenMove | None:
        """Compare the statistics after one pass with those at the start of the next."""
        sizes = [shape.numel() for shape in self.model.statistic_shapes]
        moved, is_reset = torch.zeros_like(start, dtype=torch.bool), True
        parts = zip(self.model.statistics, *(values.split(sizes) for values in (end, start, moved)), strict=True)
        for name, before, after, is_moved in parts:
            if not torch.equal(before, after.to(before)):
                is_moved.fill_(True)
                is_reset &= bool((after == (1.0 if name.endswith("running_var") else 0.0)).all())
        return UnseenMove(moved, start, is_reset, torch.equal(start, first)) if bool(moved.any()) else None


def replay_rounding(w: Float[Tensor, " P"], d: Float[Tensor, " P"], dtype: torch.dtype) -> float:
    """Return the size of a difference between replayed and recorded step that counts as rounding.

    It is the rounding of the weights w and a small share of the step d, in the coarser dtype of run and computation.
    """
    eps = torch.finfo(dtype).eps
    share = 2**16 * eps if dtype == torch.float64 else relative_rounding(dtype)
    return float(4 * eps * largest_entry(w) + share * largest_entry(d))
