"""The check of one step.

Is the change of the weights the one that the update rule predicts? And which steps are checked.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import CANCELLATION_FACTOR, TrainingReplay, batch_gradient, passes_of, statistics_error
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.update_rules import (
    NO_UPDATE,
    UpdateCoefficients,
    largest_entry,
    move_by_rounding,
    predict_step,
    relative_rounding,
    scale_gradient,
    stack_coefficients,
    step_tolerance,
)
from epk_gp.recording.causes import StepCheck, StepMismatchError, changed_setting, explain_mismatch
from epk_gp.recording.optimizer import OptimizerPart
from epk_gp.recording.setup import TrainingSetup, inferred_clip, looks_clipped

# Share of the loop's own time that recording may take, and the length of a step up to which a step is counted as that
# long. Shorter ones pay for more than that: some milliseconds of checks are worth their time in any loop.
_SHARE, _SHORTEST_STEP, _OF_SHORT_STEPS = 0.15, 0.02, 0.005
_SMALLEST_SHARE = 0.01  # for checks, where recording without checks takes all the time that it may
_FIRST_STEPS = 3  # always checked; the cheapest one tells what a check costs once everything is loaded
_MEMORY = 0.1  # weight of the last step in the mean length of a step


@dataclass(eq=False)
class CheckSchedule:
    """Chooses the steps that are checked: one in a fixed number, or as many as fit into a share of the loop's time.

    The last step of a recording is checked too, when it ends (`Recorder`).

    Attributes:
        every: One step of each block of so many consecutive ones is checked. None: the first three steps, and then as
            many as keep recording as a whole within 15 % of the time of steps of 20 ms or more.
        device: The device of the training. Time is the thread's own on the CPU, so that nothing else counts.
        num_checked: Steps checked so far.
    """

    every: int | None
    device: torch.device
    num_checked: int = 0
    _first: int | None = None  # the first step of this recording
    _next: int = 0
    _costs: list[float] = field(default_factory=list)
    _debt: float = 0.0  # seconds of checks that the steps since have not paid for; below 0 if they paid for more
    _checked: float = 0.0  # seconds of checks in the present step
    _last_cost: float = 0.0  # seconds of the last check
    _loop: float = 0.0  # seconds of the present step outside of the recorder
    _own: float = 0.0  # and inside
    _mean_loop: float = 0.0
    _mean_own: float = 0.0
    _num_closed: int = 0
    _depth: int = 0
    _since: float | None = None  # when the recorder was entered or left last

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside as the recorder's, and the time outside as the loop's."""
        if not self._depth and self._since is not None:
            self._loop += self.now() - self._since
        began, self._depth = self.now(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._since = self.now()
                self._own += self._since - began

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time inside as that of a check, which the steps that follow pay for."""
        began = self.now()
        yield
        self._last_cost = self.now() - began
        self._checked += self._last_cost

    def now(self) -> float:
        """Return the time in seconds that checks are measured by."""
        return time.thread_time() if self.device.type == "cpu" else time.perf_counter()

    def begin_step(self) -> None:
        """Close the account of the step before.

        That of the first step is left out: it pays for all that is loaded and made once.
        """
        loop, own, checked = self._loop, self._own - self._checked, self._checked
        self._loop = self._own = self._checked = 0.0
        self._num_closed += 1
        if self._num_closed <= 3:  # nothing, the first step, the second step
            self._mean_loop, self._mean_own = loop, own if self._num_closed == 3 else 0.0
            return
        self._mean_loop += _MEMORY * (loop - self._mean_loop)
        self._mean_own += _MEMORY * (own - self._mean_own)
        self._debt = max(-min(self._costs, default=0.0), self._debt + checked - self._gain())

    def _gain(self) -> float:
        """Return the seconds of checks that a step pays for."""
        length = max(self._mean_loop, _SHORTEST_STEP)
        extra = _OF_SHORT_STEPS * (1 - self._mean_loop / length if self._mean_loop < length else 0.0)
        return max(_SHARE * length - self._mean_own, _SMALLEST_SHARE * length) + extra

    def is_due(self, index: int) -> bool:
        """Return whether the gradient of a step is recomputed."""
        if self._first is None:
            self._first = index
        if index == self._first:
            return True
        if self.every is not None:
            return is_recomputed(index, self.every)
        return index < self._first + _FIRST_STEPS or index >= self._next

    def steps_that_pay(self) -> int:
        """Return the number of steps that pay for a check like the last one; 0 where checks have fixed places."""
        return 0 if self.every is not None else math.ceil(self._last_cost / self._gain())

    def add(self, index: int) -> None:
        """Count the check of a step, and choose the next one.

        A hash chooses within a range whose mean is the number of steps that pay for the checks so far, so that no loop
        can have a period that avoids all checks.
        """
        self.num_checked += 1
        if len(self._costs) < _FIRST_STEPS:
            self._costs.append(self._checked)
        steps = max(1, math.ceil((min(self._costs) + self._debt) / self._gain()))
        self._next = index + 1 + _hash_of(index) % (2 * steps - 1)


def is_recomputed(index: int, every: int) -> bool:
    """Return whether the gradient of a step is recomputed: of one step in each block of `every` consecutive ones.

    In the first block it is the first step; in the others a hash of the block's number chooses, so that no loop can
    have a period that avoids all of them.
    """
    block, place = divmod(index, every)
    return place == (_hash_of(block) % every if block else 0)


def _hash_of(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest())


def step_gradient(
    setup: TrainingSetup,
    step: Step,
    state: Float[Tensor, " PQ"],
    end_statistics: Float[Tensor, " Q"],
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, " P"], float]:
    """Return the gradient of a step's loss in the precision of the training, and the error of its moving statistics.

    Args:
        setup: The training.
        step: The step.
        state: The weights before it, then the moving statistics.
        end_statistics: The moving statistics after it.
        dtype: Another dtype for passes that draw no random numbers and use no automatic mixed precision.
    """
    spec = TensorSpec(state.dtype if dtype is None else dtype, state.device)
    model = setup.model if spec == setup.model.spec else setup.model.converted(spec)
    passes = passes_of(step, setup.training_data)
    state = state.to(spec.dtype)
    if not step.passes:
        (data,) = passes
        with disable_fused_attention():
            return batch_gradient(model, state, spec.cast(data.X), data.y, setup.loss, data.c), 0.0
    replay = TrainingReplay(setup.model, setup.loss, spec)
    total, error = torch.zeros_like(state[: setup.model.num_weights]), 0.0
    for data in passes:
        replayed = replay.gradient(state, data)
        total += replayed.gradient
        after = data.forward.statistics_after
        after = end_statistics if after is None else after
        error = max(error, statistics_error(replayed.statistics, after, setup.model.spec.dtype))
    return total, error


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """A step of the optimizer as it was observed right after it.

    Attributes:
        step: Its learning rate and batch.
        start: The weights before it.
        end: The weights after it.
        gradient: The gradient that the optimizer used; zero for a parameter without one.
        without_gradient: Names of the parameters without a gradient. torch neither clips nor moves those whose gradient
            is None; one that was frozen during the run and has a gradient of zeros moves by its momentum and decay.
        update: The coefficients of the step, read from the optimizer, without gradient clipping.
        momentum: The momentum buffer before the step, as the recorder follows it.
        start_statistics: The moving statistics before the step, (Q,).
        end_statistics: Those after it.
        unseen: Why no forward pass was found for the step, as a clause; None if that is not known.
    """

    step: Step
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    gradient: Float[Tensor, " P"]
    without_gradient: Set[str]
    update: UpdateCoefficients
    momentum: Float[Tensor, " P"]
    start_statistics: Float[Tensor, " Q"]
    end_statistics: Float[Tensor, " Q"]
    unseen: str | None = None


@dataclass(frozen=True, eq=False)
class CheckedStep:
    """A step that is the predicted one.

    Attributes:
        update: The coefficients of the step, with gradient clipping.
        momentum: The momentum buffer after the step.
    """

    update: UpdateCoefficients
    momentum: Float[Tensor, " P"]


def observe_step(
    setup: TrainingSetup,
    parts: Sequence[OptimizerPart],
    step: Step,
    *,
    start: Float[Tensor, " P"],
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    statistics: tuple[Tensor, Tensor] | None = None,
    unseen: str | None = None,
) -> ObservedStep:
    """Join the parts of a step that its optimizers have made.

    Args:
        setup: The training.
        parts: What each optimizer that took part did; parameters of others did not move.
        step: Learning rate and batch of the step.
        start: The weights before the step.
        end: The weights after the step.
        momentum: The momentum buffer before the step.
        statistics: The moving statistics before and after the step; None for a network without them.
        unseen: Why no forward pass was found for it, as a clause.
    """
    model = setup.model
    coefficients = {name: value for part in parts for name, value in part.coefficients.items()}
    zeros = model.unflatten(torch.zeros_like(start))
    gradients = {**zeros, **{name: value for part in parts for name, value in part.gradients.items()}}
    moved = {name for part in parts for name in part.coefficients if name not in part.frozen}
    return ObservedStep(
        step=step,
        start=start,
        end=end,
        gradient=model.flatten(gradients),
        without_gradient={*model.names} - moved,
        update=stack_coefficients([coefficients.get(name, NO_UPDATE) for name in model.names], model.sizes),
        momentum=momentum,
        start_statistics=start[:0] if statistics is None else statistics[0],
        end_statistics=start[:0] if statistics is None else statistics[1],
        unseen=unseen,
    )


def check_against_exact_gradient(setup: TrainingSetup, observed: ObservedStep) -> CheckedStep:
    """Compare a step with the update rule, and the gradient that it used with the recomputed one.

    Both are needed: a learning rate of 0, or steps below the rounding of the weights, make any gradient fit the step,
    and a wrong one would stay in the optimizer's momentum.

    Raises:
        StepMismatchError: The step is not the predicted one, or the gradient is not that of the stated loss; the
            message names the likeliest cause.
    """
    sizes, start = setup.model.sizes, observed.start
    check = _with_inferred_clip(setup, _recompute(setup, observed))
    # The buffer follows the gradient that the optimizer used, as the optimizer's own buffer does.
    predicted, momentum = predict_step(observed.update, sizes, start, check.used, observed.momentum)
    change = observed.end - start
    difference = float((change - predicted).abs().max())
    follows_rule = difference <= step_tolerance(start, predicted)
    if not check.statistics_error <= 1:
        cause = changed_setting(setup.net, setup.model) or (
            "running means or variances were edited, or other rows passed the network"
        )
        raise StepMismatchError(
            f"step {observed.step.index}: the moving statistics after a forward pass must be those that its rows give: "
            f"they differ by {check.statistics_error:.2g} times what rounding explains. Likely cause: {cause}."
        )
    if not (follows_rule and consistent_up_to_rounding(setup, check)):
        expected, _ = predict_step(observed.update, sizes, start, check.clipped, observed.momentum)
        if not _is_accepted(setup, observed, change - expected):
            raise StepMismatchError(_describe_mismatch(setup, observed, check, expected, follows_rule))
    return CheckedStep(scale_gradient(observed.update, check.clip_factor, sizes), momentum)


def _share(observed: ObservedStep, residual: Float[Tensor, " P"]) -> float:
    """Return the share of a step that its law does not explain."""
    return float(residual.norm() / (observed.end - observed.start).norm().clamp(min=1e-300))


def _is_accepted(setup: TrainingSetup, observed: ObservedStep, residual: Float[Tensor, " P"]) -> bool:
    """Return whether the run may have as large a part that its law does not explain."""
    accepted = setup.rules.unexplained
    return accepted is not None and _share(observed, residual) <= accepted


def _describe_mismatch(
    setup: TrainingSetup, observed: ObservedStep, check: StepCheck, expected: Tensor, follows_rule: bool
) -> str:
    residual = observed.end - observed.start - expected
    difference, share = float(residual.abs().max()), _share(observed, residual)
    cause = explain_mismatch(setup.net, setup.model, check, follows_rule=follows_rule, unseen=observed.unseen)
    if not is_repeatable(setup, check):
        cause = (
            "the network draws random numbers from another source than torch (NumPy, Python), which cannot be drawn "
            "again: draw them with torch"
        )
    accepted = setup.rules.unexplained
    limit = "" if accepted is None else f" unexplained={accepted:g} accepts less than its share of {share:.2g}."
    return (
        f"step {observed.step.index}: the change of the weights must be {setup.rules.update_rule.name}'s step on "
        f"the gradient of {setup.loss} on the given batch: it differs by {difference:.2e} (largest predicted "
        f"change {float(expected.abs().max()):.2e}), the gradient by "
        f"{float((check.used - check.clipped).abs().max()):.2e} (largest entry "
        f"{float(check.clipped.abs().max()):.2e}). Likely cause: {cause}.{limit}"
    )


def needs_check(setup: TrainingSetup, observed: ObservedStep) -> bool:
    """Return whether a step's record takes its exact gradient: where it is clipped, or looks like that."""
    clip = setup.rules.clip
    return looks_clipped(observed.gradient) or (clip is not None and clip.may_have_clipped(observed.gradient))


def _with_inferred_clip(setup: TrainingSetup, check: StepCheck) -> StepCheck:
    """Return a check that knows the clipping of the loop, where that shows and was not stated."""
    if setup.rules.clip is not None or consistent_up_to_rounding(setup, check):
        return check
    clip = inferred_clip(check.used, check.gradient)
    return check if clip is None else replace(check, clip_factor=clip.factor(check.gradient))


def check_against_used_gradient(setup: TrainingSetup, observed: ObservedStep) -> CheckedStep:
    """Compare a step with the step that the update rule predicts from the gradient that the optimizer used.

    Whether that is the gradient of the stated loss is not checked.

    Raises:
        StepMismatchError: The step is not the predicted one.
    """
    start, sizes = observed.start, setup.model.sizes
    predicted, momentum = predict_step(observed.update, sizes, start, observed.gradient, observed.momentum)
    residual = (observed.end - start).sub_(predicted)
    difference = float(largest_entry(residual))
    if not difference <= step_tolerance(start, predicted) and not _is_accepted(setup, observed, residual):
        raise StepMismatchError(
            f"step {observed.step.index}: the change of the weights must be {setup.rules.update_rule.name}'s step on "
            f"the gradient that backward() left: it differs by {difference:.2e}. Another optimizer or option is at "
            "work, or the weights were changed."
        )
    return CheckedStep(observed.update, momentum)


def _recompute(setup: TrainingSetup, observed: ObservedStep) -> StepCheck:
    """Recompute the gradient of a step, and the factor by which the stated clipping multiplies it."""
    step, start, clip = observed.step, observed.start, setup.rules.clip
    state = torch.cat([start, observed.start_statistics])
    parts_of_step = passes_of(step, setup.training_data)
    try:
        gradient, statistics_error = step_gradient(setup, step, state, observed.end_statistics)
    except ValueError as error:
        raise StepMismatchError(f"step {step.index}: {error}") from error
    parts = setup.model.unflatten(gradient)
    for name in observed.without_gradient:
        parts[name].zero_()
    is_one_shape = len({part.X.shape[1:] for part in parts_of_step}) == 1
    return StepCheck(
        state=state,
        step=step,
        used=observed.gradient,
        gradient=gradient,
        clip_factor=1.0 if clip is None else clip.factor(gradient),
        X=torch.cat([part.X for part in parts_of_step]) if is_one_shape else parts_of_step[0].X,
        y=torch.cat([part.y for part in parts_of_step]) if is_one_shape else parts_of_step[0].y,
        c=torch.cat([part.c for part in parts_of_step]) if is_one_shape else parts_of_step[0].c,
        loss=setup.loss,
        statistics_error=statistics_error,
        without_gradient=observed.without_gradient,
    )


def consistent_up_to_rounding(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether the optimizer's gradient is the stated one, up to what its dtype can lose by cancellation.

    In float32 the loss by cancellation is measured: it is the difference of the recomputed gradient from the same
    gradient in float64. In float64 it is the difference from the gradient of the rows in reverse order, at weights that
    are moved by their own rounding. Recorded forward passes keep their order.
    """
    difference = (check.used - check.clipped).abs().max()
    if difference <= relative_rounding(check.state.dtype) * check.clipped.abs().max():
        return True
    if not is_repeatable(setup, check):
        return False
    cancelled = (check.gradient - _gradient_beside(setup, check)).abs().max()
    return bool(difference <= CANCELLATION_FACTOR * cancelled)


def is_repeatable(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether a replayed gradient comes out the same again; random numbers from elsewhere than torch do not."""
    if not check.is_replayed:
        return True
    again = step_gradient(setup, check.step, check.state, check.state[setup.model.num_weights :])[0]
    return bool((again - check.gradient).abs().max() <= relative_rounding(again.dtype) * check.gradient.abs().max())


def _gradient_beside(setup: TrainingSetup, check: StepCheck) -> Float[Tensor, " P"]:
    """Return the gradient of a step once more, as another computation would round it."""
    gradient = _rounded_otherwise(setup, check)
    parts = setup.model.unflatten(gradient)
    for name in check.without_gradient:
        parts[name].zero_()
    return gradient


def _rounded_otherwise(setup: TrainingSetup, check: StepCheck) -> Float[Tensor, " P"]:
    P, state = setup.model.num_weights, check.state
    if state.dtype != torch.float64 and not check.is_replayed:
        return step_gradient(setup, check.step, state, state[P:], torch.float64)[0]
    moved = torch.cat([move_by_rounding(state[:P], torch.finfo(state.dtype).eps), state[P:]])
    if check.is_replayed:
        return step_gradient(setup, check.step, moved, state[P:])[0]
    X, y, c = check.X, check.y, check.c
    return batch_gradient(setup.model, moved, X.flip(0), y.flip(0), check.loss, c.flip(0))
