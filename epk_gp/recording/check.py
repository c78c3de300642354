"""The check of one step: is the change of the weights the one that the update rule predicts? And which are checked."""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import allclose
from epk_gp.core.gradients import CANCELLATION_FACTOR, TrainingReplay, batch_gradient, passes_of
from epk_gp.core.plans import TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.torch_rules import GRADIENT_DESCENT
from epk_gp.optimizers.update_rules import (
    CLIP_ROUNDING,
    EPSILON,
    FIELDS,
    Clip,
    ClipNorm,
    ClipValue,
    UpdateCoefficients,
    broadcast_to_params,
    coefficient_of_all,
    largest_entry,
    move_by_rounding,
    predict_step,
    relative_rounding,
    rounded_bound,
    rounding_of_terms,
    scale_gradient,
    step_tolerance,
    weighted_sum,
)
from epk_gp.recording.causes import StepMismatchError, changed_setting
from epk_gp.recording.mismatches import ObservedStep, StepCheck, StepMeasures, explain_mismatch
from epk_gp.recording.observer import MadeStep
from epk_gp.recording.setup import TrainingSetup

# Share of the loop's own time that recording may take, and the length of a step up to which a step is counted as that
# long. Shorter ones pay for more than that: some milliseconds of checks are worth their time in any loop.
_SHARE, _SHORTEST_STEP, _OF_SHORT_STEPS = 0.15, 0.02, 0.005
_SMALLEST_SHARE = 0.01  # for checks, where recording without checks takes all the time that it may
_FIRST_STEPS = 3  # always checked


class CheckSchedule:
    """Chooses the steps that are checked: one in a fixed number, or as many as fit into a share of the loop's time.

    The last step of a recording is checked too, when it ends (`Recorder`).

    Attributes:
        every: One step of each block of so many consecutive ones is checked. None: the first three steps, and then as
            many as keep recording as a whole within 15 % of the time of steps of 20 ms or more.
        device: The device of the training. Time is the thread's own on the CPU, so that nothing else counts.
        num_checked: Steps checked so far.
        cost: Seconds of the last check.
    """

    def __init__(self, every: int | None, device: torch.device) -> None:
        self.every, self.device, self.num_checked = every, device, 0
        self._first: int | None = None  # the first step of this recording
        self._next = 0
        self._loop = self._own = self._checks = 0.0  # seconds outside of the recorder, inside, and in checks
        self._left: float | None = None  # when the recorder was left last
        self._num_steps = 0
        self._gain = _SHARE * _SHORTEST_STEP  # seconds of checks that a step pays for
        self._debt = 0.0  # seconds of checks that no step has paid for
        self.cost = self._smallest_cost = math.inf  # of the last check, and of the cheapest

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside as the recorder's, and the time outside as the loop's."""
        began = self.now()
        self._loop += 0.0 if self._left is None else began - self._left
        try:
            yield
        finally:
            self._left = self.now()
            self._own += self._left - began

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time inside as that of a check, which the steps that follow pay for."""
        began = self.now()
        yield
        self.cost = self.now() - began
        self._checks += self.cost

    def now(self) -> float:
        """Return the time in seconds that checks are measured by."""
        return time.thread_time() if self.device.type == "cpu" else time.perf_counter()

    def begin_step(self) -> None:
        """Settle the account of the steps before; the first is left out, for it loads and makes what all need."""
        self._num_steps += 1
        if self._num_steps <= 2:
            self._loop = self._own = self._checks = 0.0
        count = max(1, self._num_steps - 2)
        loop, own = self._loop / count, (self._own - self._checks) / count
        length = max(loop, _SHORTEST_STEP)
        self._gain = max(_SHARE * length - own, _SMALLEST_SHARE * length) + _OF_SHORT_STEPS * (1 - loop / length)
        self._debt = self._checks - (self._num_steps - 2) * self._gain

    def is_due(self, index: int) -> bool:
        """Return whether the gradient of a step is recomputed.

        Of each block of `every` steps it is one that a hash of the block's number chooses, the first one of the first
        block: no loop can have a period that avoids all checks.
        """
        self._first = index if self._first is None else self._first
        if index == self._first:
            return True
        if self.every is not None:
            block, place = divmod(index, self.every)
            return place == (_hash_of(block) % self.every if block else 0)
        return index < self._first + _FIRST_STEPS or index >= self._next

    def steps_that_pay(self, cost: float) -> int:
        """Return the number of steps that pay for a check of so many seconds; 0 where checks have fixed places."""
        return 0 if self.every is not None else math.ceil(cost / self._gain)

    def add(self, index: int) -> None:
        """Count the check of a step, and choose the next one.

        A hash chooses within a range whose mean is the number of steps that pay for the checks so far.
        """
        self.num_checked += 1
        self._smallest_cost = min(self._smallest_cost, self.cost)
        steps = max(1, math.ceil((self._smallest_cost + self._debt) / self._gain))
        self._next = index + 1 + _hash_of(index) % (2 * steps - 1)


def _hash_of(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest())


_BLOCK = 1 << 18  # weights that are looked at together: new memory for large vectors costs more than their sums
_NUM_SAMPLES = 1024  # weights whose size is looked at first


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
        made: What the optimizers did.
        states: The weights before and after the step.
        before: The momentum buffer before it.
        memory: A momentum buffer that is not used any more, for the one after the step.
    """
    update, used, sizes, (start, end) = made.update, made.gradient, setup.model.sizes, states
    if update.has_matrices or len(before) > len(start):
        predicted, momentum = predict_step(update, sizes, start, used, before)
        found = [_sizes_of(end - start - predicted, used)]
    else:
        momentum, found = torch.empty_like(start) if memory is None else memory, []
        scratch = start.new_empty(2, min(_BLOCK, len(start)) if start.device.type == "cpu" else len(start))
        for c, block in _blocks(update, sizes, start, scratch.shape[1]):
            w, g, m = start[block], used[block], momentum[block]
            own, residual = scratch[:, : len(w)]
            h = weighted_sum(own, (c["grad_scale"], g), (c["weight_decay"], w))
            if (after := weighted_sum(m, (c["one_minus_dampening"], h), (c["beta"], before[block]))) is not m:
                m.copy_(after)
            torch.sub(end[block], w, out=residual)
            rates = (c["momentum_lr"], m), (c["lr"], h), (c["decoupled_decay"], w)
            found.append(_sizes_of(weighted_sum(residual, (1.0, residual), *rates), g))
    differences, largest, norms = torch.stack(found).double().unbind(dim=1)
    return StepMeasures(momentum, float(differences.max()), float(largest.max()), float(norms.norm()))


def _sizes_of(residual: Tensor, used: Tensor) -> Float[Tensor, "3"]:
    return torch.stack([largest_entry(residual), largest_entry(used), torch.linalg.vector_norm(used)])


def _blocks(
    update: UpdateCoefficients, sizes: Sequence[int], like: Float[Tensor, " P"], most: int
) -> Iterator[tuple[dict[str, float | Tensor], slice]]:
    """Divide flat weights into blocks of at most so many: yield the coefficients of each, and its place."""
    held = {name: getattr(update, name) for name in FIELDS}
    first = place = 0
    while first < len(sizes):
        last, size = first + 1, sizes[first]
        while last < len(sizes) and size + sizes[last] <= most:
            size, last = size + sizes[last], last + 1
        for begin in range(place, place + size, most):
            block, numbers = slice(begin, min(begin + most, place + size)), dict[str, float | Tensor]()
            for name, value in held.items():
                is_whole, own = len(value) != len(sizes), sizes[first:last]
                numbers[name] = value[block].to(like) if is_whole else coefficient_of_all(value[first:last], own, like)
            yield numbers, block
        first, place = last, place + size


def needs_exact_check(setup: TrainingSetup, observed: ObservedStep) -> bool:
    """Return whether a step's record takes its exact gradient: where it is clipped, or looks like that.

    Clipping leaves a gradient whose norm, or whose largest entry, is the bound. Bounds are chosen by people: three
    digits are enough for them, and by chance a norm is as close to such a number once in some thousand steps.
    """
    used, clip = observed.made.gradient, setup.clip
    rounding = 8 * torch.finfo(used.dtype).eps
    norm, largest = observed.measures.norm, observed.measures.largest
    # torch divides by a norm to which it adds 1e-6, so that the norm of what it clips is short of the bound by that
    for size, short in ((norm, EPSILON + rounding * norm), (largest, rounding * largest)):
        if 0 < size < float("inf") and -short < size - rounded_bound(size) < rounding * size:
            return True
    if clip is not None:  # up to rounding, its norm is not below the stated bound
        size = float(torch.linalg.vector_norm(used, clip.norm_type))
        if not size * (1 + CLIP_ROUNDING[False]) + EPSILON < clip.bound:
            return True
    return observed.penalty.needs_check(observed.start, used)


def inferred_clip(used: Float[Tensor, " P"], gradient: Float[Tensor, " P"]) -> Clip | None:
    """Return the clipping that makes of a gradient the one that was used, if its bound has at most three digits.

    Args:
        used: The gradient that the optimizer used.
        gradient: The gradient of the loss.
    """
    if not torch.isfinite(used).all() or not used.any():
        return None
    norm, largest = float(torch.linalg.vector_norm(used)), float(used.abs().max())
    for clip in (ClipNorm(rounded_bound(norm)), ClipValue(rounded_bound(largest))):
        predicted = gradient * clip.factor(gradient)
        rounding = CLIP_ROUNDING[used.dtype == torch.float64] * largest
        if not torch.equal(predicted, gradient) and bool(((predicted - used).abs() <= rounding).all()):
            return clip
    return None


def clipped_apart(
    used: Float[Tensor, " P"], gradient: Float[Tensor, " P"], sizes: Sequence[int]
) -> Float[Tensor, " L"] | None:
    """Return the factor of each parameter where the norm of some of them alone was clipped; None if it was not.

    These share one factor, all others have 1, and the bound of their norm has at most three digits.
    """
    rounding = CLIP_ROUNDING[used.dtype == torch.float64]
    pairs = list(zip(used.split(list(sizes)), gradient.split(list(sizes)), strict=True))
    is_clipped = torch.stack([u @ g < (1 - rounding) * (g @ g) for u, g in pairs])
    if not bool(is_clipped.any()) or bool(is_clipped.all()):
        return None
    chosen = [pair for pair, own in zip(pairs, is_clipped.tolist(), strict=True) if own]
    clipped, norm = (torch.cat(parts).norm() for parts in zip(*chosen, strict=True))
    bound = rounded_bound(float(clipped))
    factors = torch.where(is_clipped, bound / (norm + EPSILON), 1.0).double()
    predicted = gradient * broadcast_to_params(factors, sizes, gradient)
    is_same = bool(((predicted - used).abs() <= rounding * used.abs().max()).all())
    return factors if is_same and bound > 0 and abs(float(clipped) - bound) <= EPSILON + rounding * bound else None


def check_step(setup: TrainingSetup, observed: ObservedStep, *, exact: bool = True) -> UpdateCoefficients:
    """Compare a step with the update rule, and the gradient that it used with the recomputed one.

    Both are needed: a learning rate of 0, or steps below the rounding of the weights, make any gradient fit the step,
    and a wrong one would stay in the optimizer's momentum.

    Args:
        setup: The training.
        observed: The step.
        exact: Whether to recompute the gradient.

    Returns:
        The coefficients of the step, with gradient clipping.

    Raises:
        StepMismatchError: The step is not the predicted one, or the gradient is not that of the stated loss; the
            message names the likeliest cause.
    """
    made, start, sizes = observed.made, observed.start, setup.model.sizes
    expected = f"the change of the weights must be {setup.update_rule.name}'s step on the gradient"
    difference, few = observed.measures.difference, start[:: 1 + len(start) // _NUM_SAMPLES]
    # the rounding of some weights is at most that of all, and that at most the step's: mostly it is enough
    follows_rule, residual = any(difference <= step_tolerance(w, w.new_zeros(1)) for w in (few, start)), None
    if not follows_rule:
        predicted, _ = predict_step(made.update, sizes, start, made.gradient, observed.momentum)
        residual = observed.end - start - predicted
        terms = rounding_of_terms(made.update, sizes, start, made.gradient, observed.momentum)
        follows_rule = difference <= step_tolerance(start, predicted) or bool((residual.abs() <= terms).all())
    if not follows_rule and setup.update_rule is GRADIENT_DESCENT:
        raise StepMismatchError(
            "weights that no optimizer moves must move by -lr * gradient, with one lr for all of them and the gradient "
            f"that they had at recorder.batch(): they differ by {difference:.2e} from lr={made.lr:.6g}. Call batch() "
            "right before the update; state another update as update_rule=, or write it as a torch.optim.Optimizer."
        )
    if not follows_rule and setup.update_rule.refusal and observed.step.index < 2:
        raise StepMismatchError(setup.update_rule.refusal)
    if not exact:
        if residual is not None and not follows_rule and not _is_accepted(setup, observed, residual):
            raise StepMismatchError(
                f"{expected} that backward() left: it differs by {difference:.2e}. Another optimizer or option is at "
                "work, or the weights were changed."
            )
        return observed.penalty.added_to(made.update)
    gradient, error = _gradient_of(setup, observed)
    if not error <= 1:
        edited = "running means or variances were edited, or other rows passed the network"
        cause = changed_setting(setup.net, setup.model) or edited
        raise StepMismatchError(
            "the moving statistics after a forward pass must be those that its rows give: they differ by "
            f"{error:.2g} times what rounding explains. Likely cause: {cause}."
        )
    penalty, checks = observed.penalty, list[StepCheck]()
    for mask in penalty.masks(made.gradient, gradient):
        own, rates = mask * gradient, penalty.rates
        check = _with_penalty(setup, StepCheck(observed, own, own, mask=mask), penalty.gradient(mask * start))
        checks.append(check)
        is_consistent = _is_consistent(setup, check)
        if not is_consistent and (inferred := _with_inferred(setup, check)) is not None:
            (check, rates), is_consistent = inferred, True
        if is_consistent:
            penalty.learn(rates, start, made.gradient)
            penalty.mask = mask
            break
    else:
        check = checks[0]
    if not (follows_rule and is_consistent):
        clipped = check.expected
        predicted, _ = predict_step(made.update, sizes, start, clipped, observed.momentum)
        residual = observed.end - start - predicted
        if not _is_accepted(setup, observed, residual):
            cause = explain_mismatch(setup, check, follows_rule=follows_rule)
            if not _is_repeatable(setup, check):
                source = "from another source than torch (NumPy, Python), which cannot be drawn again"
                cause = f"the network draws random numbers {source}: draw them with torch"
            limit = f" unexplained={setup.unexplained:g} accepts less." if setup.unexplained is not None else ""
            raise StepMismatchError(
                f"{expected} of {setup.loss} on the given batch: it differs by {largest_entry(residual):.2e} (largest "
                f"predicted change {largest_entry(predicted):.2e}), the gradient by "
                f"{largest_entry(made.gradient - clipped):.2e} (largest entry {largest_entry(clipped):.2e}). Likely "
                f"cause: {cause}.{limit}"
            )
    update = scale_gradient(made.update, check.clip_factor if check.factors is None else check.factors, sizes)
    return penalty.added_to(update)


def check_records(
    setup: TrainingSetup, records: Sequence[ObservedStep], keeps_factor: bool | None, *, exact: bool
) -> tuple[ObservedStep, UpdateCoefficients, bool | None]:
    """Check a step of one or two records (`PassRecords.step`), of which it has one.

    Args:
        setup: The training.
        records: The step with each of them.
        keeps_factor: Whether it is the second one that steps before had; None if that is not known.
        exact: Whether to recompute the gradient.

    Returns:
        The step with its record, its coefficients, and whether that is the second one.

    Raises:
        StepMismatchError: It has none of them.
    """
    is_read = any(batch.weight is None for batch in records[0].made.announced)
    first, *others = records[::-1] if (is_read if keeps_factor is None else keeps_factor) else records
    try:
        return first, check_step(setup, first, exact=exact), first is records[-1] if others else keeps_factor
    except StepMismatchError:
        for other in others if exact else ():
            with suppress(StepMismatchError):
                return other, check_step(setup, other), other is records[-1]
        raise


def _with_inferred(setup: TrainingSetup, check: StepCheck) -> tuple[StepCheck, Float[Tensor, " L"]] | None:
    """Return the check with a clipping and an L2 penalty that nobody stated, and its rates; None if it has neither."""
    observed, used = check.observed, check.observed.made.gradient
    penalty, w = observed.penalty, check.mask * observed.start

    def candidates() -> Iterator[Float[Tensor, " L"] | None]:
        yield penalty.rates
        if not penalty.is_fixed:
            yield torch.zeros_like(penalty.rates)
            yield penalty.fitted(used, check.gradient, w)
            yield penalty.fitted(used, check.gradient, w, is_scaled=True)
            is_within = used.abs() < (1 - CLIP_ROUNDING[0]) * used.abs().max()  # not clipped entry by entry
            yield penalty.fitted(*(is_within * value for value in (used, check.gradient, w)))

    for rates in candidates():
        if rates is None:
            continue
        other = _with_penalty(setup, check, penalty.gradient(w, rates))
        clip = inferred_clip(used, other.expected) if setup.clip is None else None
        other = other if clip is None else _with_penalty(setup, check, penalty.gradient(w, rates), clip)
        is_same = clip is None and torch.equal(rates, penalty.rates)
        if not is_same and _is_consistent(setup, other):
            return other, rates
        factors = clipped_apart(used, other.expected, setup.model.sizes) if setup.clip is None else None
        if factors is not None:
            factor, penalty.is_always_checked = broadcast_to_params(factors, setup.model.sizes, used), True
            return replace(other, expected=other.expected * factor, clip_factor=factor, factors=factors), rates
    return None


def _with_penalty(
    setup: TrainingSetup, check: StepCheck, penalty: Float[Tensor, " P"] | None, clip: Clip | None = None
) -> StepCheck:
    """Return the check with the gradient of a penalty, and a clipping of the sum: the stated one if there is one."""
    expected = check.gradient
    if penalty is not None:
        expected = expected + _without_gradient_of(setup, check.observed.made, penalty)
    clip = setup.clip or clip
    factor = 1.0 if clip is None else clip.factor(expected)
    return replace(check, expected=expected * factor, clip_factor=factor)


def _is_accepted(setup: TrainingSetup, observed: ObservedStep, residual: Float[Tensor, " P"]) -> bool:
    """Return whether the run may have as large a part that its law does not explain."""
    if setup.unexplained is None:
        return False
    return bool(residual.norm() <= setup.unexplained * (observed.end - observed.start).norm())


def _gradient_of(
    setup: TrainingSetup, observed: ObservedStep, other: Float[Tensor, " PQ"] | None = None
) -> tuple[Float[Tensor, " P"], float]:
    """Return the gradient of a step's loss before it, and the error of its moving statistics.

    It is zero for parameters that have none. `other` is a state to take it at in place of the one before the step, in
    its own dtype; rows without recorded passes then come in reverse order.
    """
    model, error, step = setup.model, 0.0, observed.step
    state = torch.cat([observed.start, observed.start_statistics]) if other is None else other
    spec, passes = TensorSpec(state.dtype, state.device), passes_of(step, setup.X, setup.y, setup.loss)
    if step.passes:
        replay = TrainingReplay(model, setup.loss, spec)
        gradient, error = replay.step_gradient(state, passes, observed.end_statistics, setup.unexplained)
    else:
        (data,) = passes
        X, y, c = (v if other is None else v.flip(0) for v in (data.X, data.y, data.c))
        with disable_fused_attention():
            wide = model if spec == model.spec else model.converted(spec)
            gradient = batch_gradient(wide, state, spec.cast(X), y, setup.loss, c)
    return _without_gradient_of(setup, observed.made, gradient), error


def _without_gradient_of(setup: TrainingSetup, made: MadeStep, flat: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return a gradient that is zero for parameters that have none, in its place."""
    for name, part in zip(setup.model.names, flat.split(setup.model.sizes), strict=True):
        if name in made.without_gradient:
            part.zero_()
    return flat


def _is_consistent(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether the optimizer's gradient is the stated one, up to what its dtype can lose by cancellation.

    In float32 the loss by cancellation is measured: it is the difference of the recomputed gradient from the same
    gradient in float64. In float64 it is the difference from the gradient of the rows in reverse order, at weights that
    are moved by their own rounding. Recorded forward passes keep their order.
    """
    observed = check.observed
    state, difference = observed.start, largest_entry(observed.made.gradient - check.expected)
    if difference <= relative_rounding(state.dtype) * largest_entry(check.expected):
        return True
    if not _is_repeatable(setup, check):
        return False
    if state.dtype != torch.float64 and not observed.step.passes:
        other, _ = _gradient_of(setup, observed, check.state.double())
    else:
        moved = torch.cat([move_by_rounding(state, torch.finfo(state.dtype).eps), observed.start_statistics])
        other, _ = _gradient_of(setup, observed, moved)
    return bool(difference <= CANCELLATION_FACTOR * largest_entry(check.gradient - check.mask * other))


def _is_repeatable(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether a replayed gradient comes out the same again; random numbers from elsewhere than torch do not."""
    if not check.observed.step.passes:
        return True
    again, _ = _gradient_of(setup, check.observed)
    return allclose(check.mask * again, check.gradient)  # kernels of a GPU may add in any order
