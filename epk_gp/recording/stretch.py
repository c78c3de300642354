"""Checking and recording of a run's steps: each at once, or a stretch of them in a small network.

In a small network the arithmetic of a step costs less than the calls that carry it out. So steps wait until there are
several, and rows, output gradients and changes of the weights are compared for all of them together.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.graphs import tensors_of
from epk_gp.core.losses import (
    ClassLoss,
    Loss,
    PerSampleLoss,
    UnstatedLoss,
    ignored_class,
    loss_derivatives,
    sample_weights,
)
from epk_gp.core.model import FEW_WEIGHTS
from epk_gp.core.row_identity import RowIdentity
from epk_gp.core.show import warn_caller, warn_uncertified
from epk_gp.core.step import Step
from epk_gp.optimizers.torch_rules import learning_rate
from epk_gp.optimizers.update_rules import (
    LinearStep,
    Number,
    UpdateCoefficients,
    coefficient_of_all,
    largest_entry,
    linear_step,
    predict_step,
    relative_rounding,
    stack_steps,
    step_tolerance,
)
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.check import (
    CheckSchedule,
    DerivativeProbe,
    check_records,
    check_step,
    edit_of,
    needs_exact_check,
)
from epk_gp.recording.distributed import Ranks
from epk_gp.recording.gradient_fit import GradientTerms
from epk_gp.recording.history import CommitSchedule, RunHistory, StepResult
from epk_gp.recording.mismatches import ObservedStep, StepMeasures
from epk_gp.recording.passes import TOLERANCE, PassRecords
from epk_gp.recording.seen import CapturedForward, MadeStep
from epk_gp.recording.setup import TrainingSetup
from epk_gp.storage.training_state import TrainingState

MOST_STEPS, MOST_BYTES = 64, 1 << 22  # largest number and size of waiting steps


@dataclass(eq=False)
class WaitingStep:
    """A step with the weights and moving statistics around it.

    Attributes:
        index: Its number.
        made: The optimizers' step.
        start: The weights before it, (P,).
        end: The weights after it, (P,).
        before: The moving statistics before it, (Q,).
        statistics: The moving statistics after it.
        snapshot: The training state after it, for a run on disk.
    """

    index: int
    made: MadeStep
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    before: Float[Tensor, " Q"]
    statistics: Float[Tensor, " Q"]
    snapshot: Mapping[str, Any] | None = None


def num_bytes(made: MadeStep) -> int:
    """Return the memory of a waiting step in bytes."""
    passes = [forward for batch in made.announced for forward in batch.forwards]
    seen = sum(v.nbytes for f in passes for v in (f.inputs, *tensors_of(f.returned), *f.sent.values()))
    return seen + 3 * made.gradient.nbytes


def plain_records(
    setup: TrainingSetup, differs_in: Callable[[Bool[Tensor, " modules"]], bool], index: int, steps: Sequence[MadeStep]
) -> list[Step | None]:
    """Return the records of steps that follow completely from weights, data, batch and loss; None for the others.

    Args:
        setup: The training.
        differs_in: Whether the network computes something else in some modes than in evaluation mode.
        index: Number of the first step.
        steps: Consecutive steps.
    """
    forwards = [_plain_pass(setup, made) for made in steps]
    chosen = [(k, f) for k, f in enumerate(forwards) if f is not None and not differs_in(f.modes)]
    records: list[Step | None] = [None] * len(steps)
    if not chosen:
        return records
    counts = [f.inputs.shape[0] for _, f in chosen]
    samples = torch.cat([steps[k].announced[0].samples for k, _ in chosen])
    rows = samples.to(setup.X.device)
    outputs = [f.outputs for _, f in chosen if f.outputs is not None]
    y, z, delta = setup.y[rows], torch.cat(outputs).double(), torch.cat([f.sent[f.place] for _, f in chosen]).double()
    is_same = (torch.cat([f.inputs for _, f in chosen]) == setup.X[rows]).reshape(len(rows), -1).all(dim=1)
    c, derivative = _weights_of(setup.loss, y, counts)[:, None], loss_derivatives(setup.loss, z, y)
    share, floor = TOLERANCE[outputs[0].dtype]
    bound = share * (c * derivative).abs().amax(dim=1, keepdim=True) + floor * c.abs()
    is_same &= ((delta.reshape(z.shape) - c * derivative).abs() <= bound).all(dim=1)
    for (k, _), own, batch in zip(chosen, is_same.split(counts), samples.split(counts), strict=True):
        if bool(own.all()):
            made = steps[k]
            records[k] = Step(index + k, made.lr, None if made.announced[0].indices is None else batch)
    return records


def _plain_pass(setup: TrainingSetup, made: MadeStep) -> CapturedForward | None:
    """Return the only pass of a step if it may be plain, judging by single values."""
    if len(made.announced) != 1 or made.others or setup.model.statistics or setup.model.signature.graph is not None:
        return None
    (batch,) = made.announced
    is_one = len(batch.forwards) == 1 and batch.position >= 0 and batch.targets is None
    if not is_one or isinstance(batch.weight, Tensor) or batch.weight != 1 or isinstance(setup.loss, UnstatedLoss):
        return None
    (forward,) = batch.forwards
    record, z = forward.record, forward.outputs
    is_alike = (forward.inputs.shape[1:], forward.inputs.dtype) == (setup.X.shape[1:], setup.X.dtype)
    is_seen = (
        z is not None
        and z.ndim == 2
        and z.dtype in TOLERANCE
        and forward.sent.keys() == {forward.place}
        and forward.stray is None
    )
    special = record.random_state, record.device_random_state, record.autocast, record.settings, record.weights
    is_plain = is_alike and is_seen and all(value is None for value in special)
    return forward if is_plain and forward.inputs.shape[0] == batch.samples.numel() else None


def _weights_of(loss: Loss, y: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the weights of the rows of several batches in the loss of their own batch."""
    by_target = isinstance(loss, PerSampleLoss) and loss.counts is not None
    if isinstance(loss, ClassLoss) and not y.is_floating_point():
        by_target = loss.class_weights is not None or bool((y == ignored_class(loss)).any())
    if by_target:
        return torch.cat([sample_weights(loss, own) for own in y.split(list(counts))])
    of_count = {n: sample_weights(loss, y[:n]) for n in set(counts)}
    return torch.cat([of_count[n] for n in counts])


_BLOCK = 1 << 18  # weights compared at a time: new memory for large vectors costs more than their sums
_NUM_SAMPLES = 1024  # weights whose size is sampled first


def measure_step(
    setup: TrainingSetup,
    made: MadeStep,
    states: tuple[Float[Tensor, " P"], Float[Tensor, " P"]],
    before: Float[Tensor, " B"],
    memory: Tensor | None = None,
) -> StepMeasures:
    """Compare a step with the update rule's, block by block.

    Args:
        setup: The training.
        made: The optimizers' step.
        states: The weights before and after the step.
        before: The momentum buffer before it.
        memory: A momentum buffer to overwrite, for the one after the step.
    """
    update, used, sizes, (start, end) = made.update, made.gradient, setup.model.sizes, states
    if update.has_matrices or len(before) > len(start):
        predicted, momentum = predict_step(update, sizes, start, used, before)
        found = [largest_entry(end - start - predicted)]
    else:
        momentum, found = torch.empty_like(start) if memory is None else memory, []
        coefficients = [coefficient_of_all(value, sizes, start) for value in update]
        size = min(_BLOCK, len(start)) if start.device.type == "cpu" else len(start)
        h, step, residual = start.new_empty(3, size)
        for block in (slice(first, first + size) for first in range(0, len(start), size)):
            w, m, count = start[block], momentum[block], len(start[block])
            c = [value[block] if isinstance(value, Tensor) else value for value in coefficients]
            moved, after = linear_step(c, w, used[block], before[block], (h[:count], m, step[:count]))
            if after is not m:
                m.copy_(after)
            found.append(largest_entry(torch.sub(end[block], w, out=residual[:count]).add_(moved)))
    difference, few = float(torch.stack(found).max()), start[:: 1 + len(start) // _NUM_SAMPLES]
    # the rounding of some weights is at most that of all, and that at most the step's: mostly this is enough
    follows_rule = any(difference <= step_tolerance(w, w.new_zeros(1)) for w in (few, start))
    return StepMeasures(momentum, difference, follows_rule)


def measure_together(
    sizes: Sequence[int], steps: Sequence[WaitingStep], momentum: Float[Tensor, " B"]
) -> list[StepMeasures] | None:
    """Compare steps of a small network with the update rule's, as `measure_step` does for one step.

    Args:
        sizes: Number of weights of each parameter.
        steps: Consecutive steps.
        momentum: The momentum buffer before the first one.

    Returns:
        None if a step uses matrix products or a second buffer.
    """
    updates = stack_steps([own.made.linear for own in steps], sizes)
    if any(update.has_matrices for update in updates) or len(momentum) > len(steps[0].start):
        return None
    momenta, sizes_of = list[Tensor](), list[Tensor]()
    for own, update in zip(steps, updates, strict=True):
        own.made.update, linear, w, g = update, own.made.linear, own.start, own.made.gradient
        if isinstance(linear, LinearStep):
            c: Sequence[Number] = linear.numbers
        else:
            c = [coefficient_of_all(value, sizes, w) for value in update]
        step, momentum = linear_step(c, w, g, momentum)
        momenta.append(momentum)
        sizes_of += torch._foreach_norm([own.end - w + step, step, w], ord=math.inf)
    numbers = torch.stack(sizes_of).double().view(-1, 3).tolist()
    rounding, eps = relative_rounding(steps[0].start.dtype), torch.finfo(steps[0].start.dtype).eps
    return [
        StepMeasures(momentum, difference, difference <= rounding * step + 4 * eps * weight)
        for momentum, (difference, step, weight) in zip(momenta, numbers, strict=True)
    ]


@contextmanager
def errors_of_step(index: Callable[[], int]) -> Iterator[None]:
    """Turn each `ValueError` inside into `StepMismatchError`, with the number of the step in front of its message."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, StepMismatchError) and error.step is not None:
            raise  # from a step that waited
        cause, numbered = None if isinstance(error, StepMismatchError) else error, index()
        raise StepMismatchError(f"step {numbered}: {error}", step=numbered) from cause


def _validate_weights(w: Float[Tensor, " P"]) -> None:
    if not is_finite(w):
        raise StepMismatchError(
            "the weights must stay finite: training diverged (NaN or infinity). Lower the learning rate."
        )


class Stretch:
    """Checks and records the steps of a run: each at once, or some of a small network together.

    Args:
        setup: The training.
        ranks: The processes that train.
        history: The recorded steps.
        training: The training state, which includes the momentum buffer.
        commits: The commits of a run on disk; None for a run in memory.
        start: The weights at which the recording begins.
        check_every: The recorder's argument.
        may_wait: Whether steps of a small network may wait for others.

    Attributes:
        schedule: Chooses the steps whose gradient is recomputed.
        has_refused: Whether the last step was refused, so that the network differs from the run.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        ranks: Ranks,
        history: RunHistory,
        training: TrainingState,
        commits: CommitSchedule | None,
        start: Float[Tensor, " P"],
        check_every: int | None,
        *,
        may_wait: bool,
    ) -> None:
        self._setup, self._ranks, self._history = setup, ranks, history
        self._training, self._commits = training, commits
        self._passes, self._identity = PassRecords(setup, start), RowIdentity(setup.X, setup.y, setup.loss)
        self._probe, self._terms = DerivativeProbe(), GradientTerms(setup.model.sizes)
        self.schedule, self.has_refused = CheckSchedule(check_every), False
        self._unchecked: Callable[[], ObservedStep] | None = None  # the last step, if its gradient was not recomputed
        # momentum buffers before the last two steps; the first is overwritten, because new memory costs more
        self._momenta: tuple[Tensor | None, Tensor | None] = None, None
        self._has_said_note = False  # the warning that the loop scales and shifts its rows
        self._keeps_factor: bool | None = None  # whether factors of the loss reach the optimizer, unlike a GradScaler's
        self._waiting, self._num_bytes = list[WaitingStep](), 0  # waiting steps, and their memory
        self._may_wait = may_wait and setup.model.num_weights <= FEW_WEIGHTS and ranks.size == 1
        self._first_step = self.num_steps

    @property
    def num_steps(self) -> int:
        """Number of steps made so far."""
        return self._history.num_steps + len(self._waiting)

    @property
    def last(self) -> WaitingStep | StepResult:
        """The last step that was made."""
        return self._waiting[-1] if self._waiting else self._history.last

    def take(self, made: MadeStep, statistics: Callable[[], Float[Tensor, " Q"]]) -> None:
        """Take a step of the optimizers; `statistics` returns the moving statistics after it.

        Raises:
            StepMismatchError: This step, or one that waited, is not the stated one.
        """
        self.has_refused = True
        self.schedule.count_step()
        with self._ranks.together() if self._ranks.size > 1 else nullcontext(), errors_of_step(lambda: self.num_steps):
            if self._ranks.size > 1:
                self._record_whole(made, statistics)
            else:
                self._waiting.append(self._made_step(made, statistics))
                self._num_bytes += num_bytes(made)
        self.has_refused = False
        is_full = len(self._waiting) >= MOST_STEPS or self._num_bytes > MOST_BYTES
        if is_full or not self._may_wait or self._history.num_steps < self._first_step + 3:
            self.record()

    def _made_step(self, made: MadeStep, statistics: Callable[[], Float[Tensor, " Q"]]) -> WaitingStep:
        """Return a step with the weights and moving statistics around it."""
        self._setup.validate_modules()
        if not made.announced:
            raise StepMismatchError("optimizer.step() must be preceded by recorder.batch(indices): it was not.")
        if not made.is_seen_enough:
            raise StepMismatchError(f"{made.unseen}.")
        if not all(0 <= rate < math.inf for rate in made.rates):
            learning_rate(self._setup.optimizers)
        last, after = self.last, statistics()
        before = after if last.statistics is None else last.statistics
        return WaitingStep(self.num_steps, made, last.end, self._setup.weights(), before, after)

    def _record_whole(self, made: MadeStep, statistics: Callable[[], Float[Tensor, " Q"]]) -> None:
        """Record the step of several processes, on the writing process."""
        setup, index, end = self._setup, self.num_steps, self._setup.weights()

        def own_step() -> tuple[tuple[Step, ...], Tensor, Tensor]:
            step = self._made_step(made, statistics)
            _validate_weights(end)
            unknown = torch.full_like(step.statistics, torch.nan)
            return self._passes.step(index, made, (unknown, unknown)), step.before, step.statistics

        whole = self._ranks.whole_step(own_step, setup, made, end)
        if whole is not None:
            records, before, after = whole
            self._record_step(WaitingStep(index, made, self._history.last.end, end, before, after), records, None)

    def record(self) -> None:
        """Check and record the waiting steps.

        Raises:
            StepMismatchError: A step is not the stated one; earlier steps are recorded.
        """
        self._waiting = [step for step in self._waiting if step.index >= self._history.num_steps]  # after an interrupt
        if not self._waiting:
            return
        setup, steps, self.has_refused = self._setup, [*self._waiting], True
        plain: list[Step | None] = [None] * len(steps)
        with suppress(IndexError, RuntimeError, ValueError):  # an error of one step is raised again below
            plain = plain_records(setup, self._passes.differs_in, steps[0].index, [own.made for own in steps])
        measures = measure_together(setup.model.sizes, steps, self._training.momentum) if len(steps) > 1 else None
        try:
            with errors_of_step(lambda: self._history.num_steps):
                for number, step in enumerate(steps):
                    records = None if (record := plain[number]) is None else (record,)
                    self._record_step(step, records, None if measures is None else measures[number])
                    if step.snapshot is not None and self._commits is not None:
                        self._commits.complete_iteration(step.snapshot)
                    del self._waiting[0]
        except Exception:  # after an interrupt the others stay, and are recorded later
            self._waiting = []
            raise
        self.has_refused, self._num_bytes = False, 0

    def _record_step(self, step: WaitingStep, records: Sequence[Step] | None, measures: StepMeasures | None) -> None:
        """Check and record a step; its possible records and its measures are computed if they are not given."""
        made, setup, momentum, index = step.made, self._setup, self._training.momentum, self._history.num_steps
        if measures is None or not math.isfinite(measures.difference):
            _validate_weights(step.end)
        made.unseen = made.unseen or (self._ranks.warning if self._ranks.size == 1 else None)
        is_plain, is_kept = records is not None, measures is not None
        records = records or self._passes.step(index, made, (step.before, step.statistics))
        if measures is None:
            measures = measure_step(setup, made, (step.start, step.end), momentum, self._momenta[0])
        observe, observed = partial(self._observed, step, momentum, measures), None
        if is_plain and is_kept and measures.follows_rule and self._is_unedited(index, made):
            (record,), update = records, made.update
            self._unchecked = partial(observe, record, 1.0)
        else:
            scales = (made.scale, 1.0)  # only the first record may lack a factor
            observed, update = self._checked([observe(*pair) for pair in zip(records, scales, strict=False)])
            record = observed.step
        if index >= self._probe.next:
            self._probe.look_at(setup, observed or observe(record, 1.0), self.schedule)
        self._momenta, self._training.momentum = (self._momenta[1], momentum), measures.momentum
        replay = None if self._commits is None else self._commits.replay_of(made, self._ranks.size)
        after = step.statistics if len(step.statistics) else None
        record = record if made.groups is None else replace(record, groups=made.groups)
        self._history.append(record, step.end, update, after, replay, is_kept=is_plain and is_kept)
        if record.passes:
            self._passes.warn_of(record)
        setup.live.know_copy(step.end, self._history.last.end)

    def _observed(
        self, step: WaitingStep, momentum: Float[Tensor, " B"], measures: StepMeasures, record: Step, scale: float
    ) -> ObservedStep:
        edit = edit_of(step.made, scale, step.start, self._terms)
        around = step.start, step.end, momentum, step.before, step.statistics
        return ObservedStep(step.made, record, *around, measures, self._terms, *edit)

    def _is_unedited(self, index: int, made: MadeStep) -> bool:
        """Return whether the gradient of a step that need not be checked was not changed."""
        is_unedited = made.arrived is made.gradient and self._terms.is_empty and self._setup.clip is None
        return is_unedited and made.doubt is None and not self.schedule.is_due(index)

    def _checked(self, records: Sequence[ObservedStep]) -> tuple[ObservedStep, UpdateCoefficients]:
        """Check a step, and return it with its record and coefficients; recompute its gradient if that is due."""
        setup, first = self._setup, records[0]
        is_exact = self.schedule.is_due(first.step.index) or first.made.doubt is not None
        is_unclear = len(records) > 1 and (self._keeps_factor is None or bool(first.made.others))
        is_exact = is_exact or is_unclear or needs_exact_check(setup, first)
        with self.schedule.checking() if is_exact else nullcontext():
            observed, update, self._keeps_factor = check_records(setup, records, self._keeps_factor, exact=is_exact)
            record, self._unchecked = observed.step, None if is_exact else lambda: observed
            # at first every step is informative; rows of a stream are numbered by their content
            if setup.stream is None and record.passes and (is_exact or not self._identity.num_judged):
                self._require_identity(self._identity.look_at(record))
            if setup.stream is None and (outside := self._identity.look_outside(record)) is not None:
                warn_uncertified(f"{outside}.")
        if is_exact:
            self.schedule.add(record.index)
        return observed, update

    def complete_iteration(self, snapshot: Mapping[str, Any]) -> None:
        """Store the training state after the steps so far, for a run on disk."""
        if self._commits is not None and not self._waiting:
            self._commits.complete_iteration(snapshot)
        elif self._commits is not None:
            self._waiting[-1].snapshot = snapshot
            self.record_if_due()

    def record_if_due(self) -> None:
        """Record the waiting steps if they have to be committed."""
        if self._commits is not None and self._commits.needs_steps(len(self._waiting)):
            self.record()

    def _require_identity(self, error: str | None, end: str = "") -> None:
        """Raise if rows contradict the announced indices, and warn once that the loop scales and shifts them."""
        if error is not None:
            raise StepMismatchError(
                f"recorder.batch() must get the indices of the rows that the network saw: {error}. Likely causes: "
                "indices counted beside a shuffled loader; X and y of another data set, or in another order; "
                f"placeholders. Take the indices from IndexedDataset (of a Subset, those in the whole data set).{end}"
            )
        if self._identity.note is not None and not self._has_said_note:
            self._has_said_note = True
            warn_caller(
                "the loader normalises: pass X as the network sees it, or the trajectory's outputs at raw points are "
                f"not those of your network ({self._identity.note})."
            )

    def finish(self) -> None:
        """Judge the remaining rows, and check the last step, on the writing process.

        Raises:
            StepMismatchError: Rows contradict the announced indices, or the last step is not the stated one.
        """
        self._require_identity(self._identity.finish(), end=" The steps are kept, and results will not be certified.")
        if self._identity.doubt is not None:
            warn_uncertified(
                f"rows could not be matched with X: {self._identity.doubt}. Contributions stand under the announced "
                "indices, which nothing confirms."
            )
        if self._unchecked is not None:
            unchecked = self._unchecked()
            self._terms.is_fixed = True
            try:
                check_step(self._setup, unchecked)
                self.schedule.num_checked += 1
            except StepMismatchError as error:
                raise StepMismatchError(
                    f"step {unchecked.step.index}: {error} The step is kept, and results will not be certified."
                ) from None
