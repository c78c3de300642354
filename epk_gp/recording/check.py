"""The check of one step: the update rule must predict the change of the weights. The choice of checked steps.

And the probe: along a step autograd's derivative must be the derivative of the outputs.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import allclose
from epk_gp.core.gradients import CANCELLATION_FACTOR, TrainingReplay, batch_gradient, passes_of
from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.core.plans import TensorSpec
from epk_gp.core.show import warn_uncertified
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.torch_rules import GRADIENT_DESCENT
from epk_gp.optimizers.update_rules import (
    CLIP_ROUNDING,
    UpdateCoefficients,
    largest_entry,
    move_by_rounding,
    predict_step,
    relative_rounding,
    rounding_of_terms,
    step_tolerance,
)
from epk_gp.recording.causes import StepMismatchError, changed_setting
from epk_gp.recording.gradient_fit import GradientFit, GradientTerms, exact_factor, fit_gradient
from epk_gp.recording.mismatches import ObservedStep, StepCheck, explain_mismatch
from epk_gp.recording.seen import MadeStep
from epk_gp.recording.setup import TrainingSetup, evenly_spread

_SHARE = 0.05  # share of the time since recording began that checks take
_FIRST_STEPS = 3  # always checked
_LIKE_SCALE = 1e-3  # largest relative difference of a GradScaler's factor from the factor in the outputs' gradients


class CheckSchedule:
    """Chooses the checked steps: one in a fixed number, or as many as fit into a share of the time.

    The last step of a recording is also checked, at its end (`Recorder`).

    Attributes:
        every: One step in each block of this many consecutive steps is checked. None: the first three steps, and then
            as many as take 5 % of the time.
        num_checked: Steps checked so far.
        cost: Duration of the last check in seconds.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self, every: int | None) -> None:
        self.every, self.num_checked, self.cost = every, 0, math.inf
        self._num_made, self._began = 0, 0.0  # steps, and the time of the second one; the first step loads libraries
        self._first: int | None = None  # the first step of this recording
        self._next, self._spent, self._smallest_cost = 0, 0.0, math.inf  # seconds of all checks, of the cheapest

    def count_step(self) -> None:
        """Count a step of the loop."""
        self._num_made += 1
        if self._num_made <= 2:
            self._began, self._spent = self.now(), 0.0

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time inside as a check's, for which the following steps pay."""
        began = self.now()
        yield
        self.cost = self.now() - began
        self._spent += self.cost

    def is_due(self, index: int) -> bool:
        """Return whether to recompute the gradient of a step.

        In each block of `every` steps, a hash of the block's number chooses the step (in the first block, the first
        step): no loop can have a period that avoids all checks.
        """
        self._first = index if self._first is None else self._first
        if index == self._first:
            return True
        if self.every is not None:
            block, place = divmod(index, self.every)
            return place == (_hash_of(block) % self.every if block else 0)
        return index < self._first + _FIRST_STEPS or index >= self._next

    @property
    def _gain(self) -> float:
        """Seconds of checking that one step pays for."""
        return _SHARE * max(self.now() - self._began, 1e-9) / max(1, self._num_made - 2)

    def steps_that_pay(self) -> int:
        """Return the number of steps that pay for another check like the last; 0 if checks have fixed places."""
        return 0 if self.every is not None else math.ceil(self.cost / self._gain)

    def add(self, index: int) -> None:
        """Count the check of a step, and choose the next one.

        A hash chooses within a range whose mean is the number of steps that pay for the checks so far.
        """
        self.num_checked += 1
        self._smallest_cost, gain = min(self._smallest_cost, self.cost), self._gain
        debt = self._spent - gain * (index - (self._first or 0))
        steps = max(1, math.ceil((self._smallest_cost + debt) / gain))
        self._next = index + 1 + _hash_of(index) % (2 * steps - 1)


def _hash_of(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest())


def edit_of(
    made: MadeStep, scale: float, w: Float[Tensor, " P"], terms: GradientTerms
) -> tuple[bool, Float[Tensor, " P"], GradientFit | None]:
    """Return the changes that a loop made to a gradient between backward() and the optimizer's step.

    Args:
        made: The step.
        scale: The factor of the outputs' gradients relative to the recorded loss, as with a GradScaler, which divides
            the gradient by it afterwards; NaN if it is not seen.
        w: The weights before it.
        terms: The terms that earlier steps showed.

    Returns:
        Whether the changes are seen; the gradient as it arrived, without a GradScaler's factor (the used gradient if it
        is not seen); and the fit that turns it into the used one, None if a factor and a decay per parameter do not.
    """
    if made.arrived is None or made.arrived is made.gradient:
        return made.arrived is not None, made.gradient, terms.nothing
    if not math.isfinite(scale):
        return False, made.gradient, terms.nothing
    if scale != 1:  # the scale is known up to rounding, and exactly from the gradients
        exact = (terms.scale, exact_factor(made.arrived, made.gradient))
        scale = next((own for own in exact if own and abs(own / scale - 1) < _LIKE_SCALE), scale)
    terms.scale, came = scale, made.arrived if scale == 1 else made.arrived / scale
    return True, came, fit_gradient(made.gradient, came, w, terms.nothing, terms.sizes)


def needs_exact_check(setup: TrainingSetup, observed: ObservedStep) -> bool:
    """Return whether a step's record needs its exact gradient, because other facts do not determine the step."""
    is_unclear = not observed.is_edit_seen and (observed.made.arrived is not None or setup.clip is not None)
    if is_unclear or observed.terms.needs_check(observed.start, observed.came):
        return True
    return observed.edit is None and not _is_accepted(setup, observed, _unexplained(setup, observed, observed.came))


def check_step(setup: TrainingSetup, observed: ObservedStep, *, exact: bool = True) -> UpdateCoefficients:
    """Compare a step with the update rule, and its gradient with the recomputed one.

    Both are needed: with a learning rate of 0, or steps below the rounding of the weights, any gradient fits the step,
    and a wrong gradient would stay in the optimizer's momentum.

    Args:
        setup: The training.
        observed: The step.
        exact: Whether to recompute the gradient.

    Returns:
        The coefficients of the step, with gradient clipping.

    Raises:
        StepMismatchError: The step is not the predicted one, or its gradient is not that of the stated loss; the
            message names the likeliest cause.
    """
    made, start, sizes = observed.made, observed.start, setup.model.sizes
    expected = f"the change of the weights must be {setup.update_rule.name}'s step on the gradient"
    difference, follows_rule, residual = observed.measures.difference, observed.measures.follows_rule, None
    if not follows_rule:
        predicted, _ = predict_step(made.update, sizes, start, made.gradient, observed.momentum)
        residual = observed.end - start - predicted
        terms = rounding_of_terms(made.update, sizes, start, made.gradient, observed.momentum)
        follows_rule = difference <= step_tolerance(start, predicted) or bool((residual.abs() <= terms).all())
    if not follows_rule and setup.update_rule is GRADIENT_DESCENT:
        raise StepMismatchError(
            "weights that no optimizer moves must move by -lr * gradient, with one lr and the gradient at batch(): "
            f"they differ by {difference:.2e} from lr={made.lr:.6g}. Call batch() right before, or state update_rule=."
        )
    if not follows_rule and setup.update_rule.refusal and observed.step.index < 2:
        raise StepMismatchError(setup.update_rule.refusal)
    if not exact:
        if residual is not None and not follows_rule and not _is_accepted(setup, observed, residual):
            raise StepMismatchError(
                f"{expected} that backward() left: it differs by {difference:.2e}. Another optimizer or option is at "
                "work, or the weights were changed."
            )
        return _recorded(setup, observed, observed.terms.inner)
    gradient, error = _gradient_of(setup, observed)
    if not error <= 1:
        edited = "running means or variances were edited, or other rows passed the network"
        cause = changed_setting(setup.net, setup.model) or edited
        raise StepMismatchError(
            "the moving statistics after a forward pass must be those that its rows give: they differ by "
            f"{error:.2g} times what rounding explains. Likely cause: {cause}."
        )
    w = _without_gradient_of(setup, observed.made, start.clone()) if observed.made.without_gradient else start
    check = _explained(setup, StepCheck(observed, gradient, w, observed.terms.inner))
    observed = check.observed
    if not check.is_explained and not observed.is_edit_seen:
        observed = replace(observed, edit=_stated_edit(setup, observed, check.expected))
    if not (follows_rule and check.is_explained):
        residual = _unexplained(setup, observed, check.expected)
        if not _is_accepted(setup, observed, residual):
            cause = explain_mismatch(setup, check, follows_rule=follows_rule)
            if not _is_repeatable(setup, check):
                source = "from another source than torch (NumPy, Python), which cannot be drawn again"
                cause = f"the network draws random numbers {source}: draw them with torch"
            limit = f" unexplained={setup.unexplained:g} accepts less." if setup.unexplained is not None else ""
            raise StepMismatchError(
                f"{expected} of {setup.loss} on the given batch: it differs by {largest_entry(residual):.2e}, the "
                f"gradient by {largest_entry(observed.came - check.expected):.2e} (largest entry "
                f"{largest_entry(check.expected):.2e}). Likely cause: {cause}.{limit}"
            )
    return _recorded(setup, observed, check.inner)


def _recorded(setup: TrainingSetup, observed: ObservedStep, inner: GradientFit) -> UpdateCoefficients:
    """Return the coefficients of a step on the gradient of its loss.

    Raises:
        StepMismatchError: The gradient was not clipped as stated.
    """
    made, sizes, clip = observed.made, setup.model.sizes, setup.clip
    if clip is not None and observed.edit is not None and observed.is_edit_seen:
        factor = observed.edit.factor
        kept = replace(observed.edit, factor=(factor != 0).to(made.gradient) if isinstance(factor, Tensor) else 1.0)
        whole = kept.of(observed.came, observed.start, sizes)
        missed = largest_entry(made.gradient - whole * clip.factor(whole))
        if not missed <= CLIP_ROUNDING[made.gradient.dtype == torch.float64] * largest_entry(made.gradient):
            before, after = (float(torch.linalg.vector_norm(g, clip.norm_type)) for g in (whole, made.gradient))
            raise StepMismatchError(
                f"the gradient must be clipped as stated, {clip}: its {clip.norm_type:g}-norm was {before:.6g} after "
                f"backward() and {after:.6g} at the step. State the loop's clipping, or none (clip=None)."
            )
    edit = observed.edit or _stated_edit(setup, observed, observed.came)
    return inner.added_to(edit.added_to(made.update, sizes), sizes)


def check_records(
    setup: TrainingSetup, records: Sequence[ObservedStep], keeps_factor: bool | None, *, exact: bool
) -> tuple[ObservedStep, UpdateCoefficients, bool | None]:
    """Check a step with one or two possible records (`PassRecords.step`), one of which is right.

    Args:
        setup: The training.
        records: The step with each of the records.
        keeps_factor: Whether earlier steps had the second record; None if unknown.
        exact: Whether to recompute the gradient.

    Returns:
        The step with its record, its coefficients, and whether the record is the second one.

    Raises:
        StepMismatchError: No record is right.
    """
    is_read = any(batch.weight is None for batch in records[0].made.announced)
    made = records[0].made
    if len(records) > 1 and made.arrived is made.gradient and not made.others:  # no factor was removed from it
        keeps_factor = True
    first, *others = records[::-1] if (is_read if keeps_factor is None else keeps_factor) else records
    try:
        return first, check_step(setup, first, exact=exact), first is records[-1] if others else keeps_factor
    except StepMismatchError:
        for other in others if exact else ():
            with suppress(StepMismatchError):
                return other, check_step(setup, other), other is records[-1]
        raise


def _stated_edit(setup: TrainingSetup, observed: ObservedStep, came: Float[Tensor, " P"]) -> GradientFit:
    """Return the stated clipping of a gradient, if the loop's changes to it are unknown."""
    nothing, clip = observed.terms.nothing, setup.clip
    return nothing if clip is None else replace(nothing, factor=clip.factor(came))


def _unexplained(setup: TrainingSetup, observed: ObservedStep, came: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return the difference of a step from the update rule's step on a gradient with the loop's changes."""
    sizes = setup.model.sizes
    edit = observed.edit or _stated_edit(setup, observed, came)
    used = edit.of(came, observed.start, sizes)
    predicted, _ = predict_step(observed.made.update, sizes, observed.start, used, observed.momentum)
    return observed.end - observed.start - predicted


def _explained(setup: TrainingSetup, check: StepCheck) -> StepCheck:
    """Return the check including masks and decays that arrived in addition to the gradient through the outputs."""
    observed, terms, w = check.observed, check.observed.terms, check.w
    if observed.edit is None:  # or the loop wrote the gradient itself, after a backward pass without effect
        by_hand = replace(check, observed=replace(observed, came=observed.made.gradient, edit=terms.nothing))
        return other if (other := _explained(setup, by_hand)).is_explained else check
    if _is_consistent(setup, check):
        terms.learn(check.inner, w, observed.came)
        return replace(check, is_explained=True)
    if terms.is_fixed:
        return check
    room, given = _room(setup, check), (observed.came, check.gradient, w, terms.inner, setup.model.sizes)
    inner = fit_gradient(*given, room=room, has_factors=not observed.is_edit_seen)
    if inner is None:
        return check
    own, made = torch.as_tensor(inner.factor, dtype=torch.float64), observed.made
    has_factor = not bool(((own == 0) | (own == 1)).all())
    terms.is_always_checked |= has_factor and made.arrived is None
    if not observed.is_edit_seen and made.arrived is not None and bool(made.arrived.isfinite().all()):
        terms.scale = float(own.max() * made.arrived.norm() / made.gradient.norm())
    terms.learn(replace(inner, factor=1.0) if has_factor else inner, w, observed.came)
    return replace(check, inner=inner, is_explained=True)


def _is_accepted(setup: TrainingSetup, observed: ObservedStep, residual: Float[Tensor, " P"]) -> bool:
    """Return whether the run accepts an unexplained difference of this size."""
    if setup.unexplained is None:
        return False
    return bool(residual.norm() <= setup.unexplained * (observed.end - observed.start).norm())


def _gradient_of(
    setup: TrainingSetup, observed: ObservedStep, other: Float[Tensor, " PQ"] | None = None
) -> tuple[Float[Tensor, " P"], float]:
    """Return the gradient of a step's loss before it, and the error of its moving statistics.

    It is zero for parameters without a gradient. `other` is a state that replaces the one before the step, in its own
    dtype; rows without recorded passes then come in reverse order.
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
    """Set a gradient to zero in place for parameters that have none."""
    for name, part in zip(setup.model.names, flat.split(setup.model.sizes), strict=True):
        if name in made.without_gradient:
            part.zero_()
    return flat


def _is_consistent(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether the gradient arrived as expected, up to cancellation in its dtype."""
    came, expected = check.observed.came, check.expected
    difference, rounding = largest_entry(came - expected), relative_rounding(came.dtype) * largest_entry(expected)
    return bool(difference <= rounding) or bool(difference <= _room(setup, check))


def _room(setup: TrainingSetup, check: StepCheck) -> float:
    """Return the largest difference that cancellation can cause; 0 if the gradient is not reproducible.

    In float32 the cancellation is measured as the difference of the recomputed gradient from the same gradient in
    float64. In float64 it is the difference from the gradient of the rows in reverse order, at weights that are moved
    by their own rounding. Recorded forward passes keep their order.
    """
    if not _is_repeatable(setup, check):
        return 0.0
    observed, state = check.observed, check.observed.start
    if state.dtype != torch.float64 and not observed.step.passes:
        other, _ = _gradient_of(setup, observed, check.state.double())
    else:
        moved = torch.cat([move_by_rounding(state, torch.finfo(state.dtype).eps), observed.start_statistics])
        other, _ = _gradient_of(setup, observed, moved)
    return float(CANCELLATION_FACTOR * largest_entry(check.gradient - other))


def _is_repeatable(setup: TrainingSetup, check: StepCheck) -> bool:
    """Return whether a replayed gradient is reproducible; random numbers from outside torch are not."""
    if not check.observed.step.passes:
        return True
    again, _ = _gradient_of(setup, check.observed)
    return allclose(again, check.gradient)  # kernels of a GPU may add in any order


# The probe of a step. Autograd's derivative is not that of the outputs in straight-through estimators, stop-gradients,
# gradient reversal, and outputs that are computed in lower precision than the weights. Outputs that jump (hard routing)
# are found by the results, which are then not certified. Everything is computed in float64 if the network allows it. A
# first look takes a few rows, one position on the step and one combination of the outputs; only suspicious results are
# examined in full.

_FIRST_WAIT, _LEAST_WAIT = 2, 12  # steps; the first if a layer that begins at zero may hide others
# number of examined rows of the batch; rows whose changes and precision are compared; rows of the first looks
_PROBED_ROWS, _COMPARED_ROWS, _FEW_ROWS = 16, 8, 4
_NUM_COMBINATIONS = 3  # random combinations of rows and outputs whose derivatives are compared
_POSITIONS = (0.0, -0.29, 0.33)  # relative to the middle of the step; kinks are most likely at its ends

# Relative changes of the outputs between the two ends of a central difference. In float64 the fine one is exact to
# about 1e-8 of the derivative; wrong derivatives differ by 5 % to 200 % in the measured cases (docs/reliability.md). A
# network of float32 weights may compute in float32 for any inputs: its rounding then spoils the fine difference but not
# the medium one, where a wrong derivative stays wrong. If everything is float32, the coarse one may contain kinks.
_FINE, _MEDIUM, _COARSE = (1e-7, 1e-3), (1e-4, 1e-2), (3e-3, 0.1)  # with the largest error of a correct derivative
_FIRST_TOLERANCE, _STRICTER = 1e-6, 8.0  # for the first looks: results that pass are not examined again

# Outputs in float32 that differ from the float64 ones by more than this share of their size were computed in less than
# float32: bfloat16 loses 2e-3, float16 and TF32 5e-4; float32 itself loses 1e-6 to 1e-5 in deep networks.
_LOST_PRECISION = 2e-4

_SINGLE = (
    "the network computes in float32 inside, though its weights are float64 (as normalisations of transformers' Llama "
    "do). Recorded in float32, net.float(), it costs less and is as exact."
    " Results are certified if the contributions sum to the prediction up to float32's rounding."
)
_MAY_NOT_SUM = ". Contributions may then not sum to the prediction, and results that do not will not be certified."


@dataclass(frozen=True, eq=False)
class _Segment:
    """The network along a step, t from -0.5 to 0.5, at some rows and with the moving statistics at the step's start."""

    model: FunctionalModel
    middle: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    X: Shaped[Tensor, "n ..."]
    statistics: Float[Tensor, " Q"]

    def outputs(self, t: float) -> Float[Tensor, "n C"]:
        with torch.no_grad():
            return self.at(self.weights(t))

    def first_rows(self) -> "_Segment":
        return replace(self, X=self.X[:_COMPARED_ROWS])

    def weights(self, t: float) -> Float[Tensor, " P"]:
        return torch.add(self.middle, self.d, alpha=t) if t else self.middle

    def at(self, w: Float[Tensor, " P"]) -> Float[Tensor, "n C"]:
        state = torch.cat([w, self.statistics.to(w)]) if len(self.statistics) else w
        return self.model(self.model.unflatten(state), self.X)


class DerivativeProbe:
    """Examines the first step that moves the weights, and then steps at growing distances; warns at most once.

    Attributes:
        next: The step of the next look.
    """

    next = 0

    def look_at(self, setup: TrainingSetup, observed: ObservedStep, schedule: CheckSchedule) -> None:
        """Probe a step if it is due, and warn if the run's sums of gradients cannot equal its outputs.

        Args:
            setup: The training.
            observed: The step.
            schedule: The schedule of the checks; the probe takes at most half of their time.
        """
        index = observed.step.index
        if torch.equal(observed.start, observed.end):
            return
        batch = observed.step.batch
        rows = evenly_spread(setup.X if batch is None else batch, _PROBED_ROWS)
        path = (observed.start, observed.end, observed.start_statistics)
        with schedule.checking(), random_state_kept(observed.start.device), disable_fused_attention():
            cause = _find_fault(setup.model, path, rows if batch is None else setup.X[rows])
        gradients = setup.model.unflatten(observed.made.gradient).values()
        hides = not index and not all(bool(g.any()) for g in gradients)  # layers that start at zero hide others
        wait = _FIRST_WAIT if hides else max(_LEAST_WAIT, 3 * index, 2 * schedule.steps_that_pay())
        self.next = index + 1 + wait
        if cause is None:
            return
        self.next = 1 << 62
        warn_uncertified(f"step {index}: {cause}{'' if cause is _SINGLE else _MAY_NOT_SUM}")


def _find_fault(model: FunctionalModel, path: tuple[Tensor, Tensor, Tensor], X: Tensor) -> str | None:
    """Return the reason that gradients along a step do not integrate to the change of the outputs; None if they may.

    Args:
        model: The recorded network.
        path: The weights before and after the step, and the moving statistics before it.
        X: Some rows of the batch.
    """
    start, end, statistics = path
    d, own_dtype, every = end - start, model.spec.dtype, torch.arange(len(X), device=X.device)
    segment = own = _Segment(model, torch.add(start, d, alpha=0.5), d, X, statistics)
    try:
        spec = TensorSpec(torch.float64, d.device)
        wide = model if model.spec == spec else model.converted(spec)
        segment = _Segment(wide, own.middle.double(), d.double(), spec.cast(X), statistics)
        change = segment.first_rows().outputs(0.5) - segment.first_rows().outputs(-0.5)
        few = change.abs().amax(dim=1).topk(min(_FEW_ROWS, len(change))).indices
        look = _Look.at(segment, 0.0, few, 1)
        is_wide = look.f.dtype == torch.float64
    except (RuntimeError, TypeError, ValueError):  # the network or its derivative needs its own dtype
        is_wide = False
    if not is_wide:
        segment, few, look = own, every, _Look.at(own, 0.0, every, _NUM_COMBINATIONS)
    if not 0 < look.size < math.inf:  # dead outputs have derivative 0; NaN and infinity are found elsewhere
        return None
    if (fault := _derivative_fault(look, segment, few, own_dtype)) not in (None, _SINGLE):
        return fault
    middle, exact = (each.first_rows().outputs(0.0).double() for each in (own, segment))
    lost = float((middle - exact).abs().max()) / look.size
    if lost > _LOST_PRECISION:
        return (
            f"the network computes in less precision than its weights have: its outputs are off by {lost:.1e} of "
            "their size (autocast, or a cast in forward)"
        )
    return fault


@dataclass(frozen=True, eq=False)
class _Look:
    """Autograd's derivatives along a step, at one position, of some combinations of the outputs at some rows."""

    segment: _Segment
    t: float
    V: Float[Tensor, "r n C"]
    f: Float[Tensor, "n C"]
    slopes: Float[Tensor, " r"]

    @classmethod
    def at(cls, segment: _Segment, t: float, rows: Int64[Tensor, " n"], combinations: int) -> "_Look":
        segment, generator = replace(segment, X=segment.X[rows]), torch.Generator().manual_seed(0)
        s = torch.zeros_like(segment.d[:1], requires_grad=True)  # along the step
        with torch.enable_grad():
            f = segment.at(segment.weights(t) + s * segment.d)
        V = torch.randn(combinations, *f.shape, generator=generator, dtype=torch.float64).to(f)
        slopes = torch.zeros_like(V[:, 0, 0])
        for number in range(combinations if f.requires_grad else 0):
            (slopes[number],) = torch.autograd.grad(f, s, V[number], retain_graph=number + 1 < combinations)[0]
        return cls(segment, t, V, f.detach(), slopes)

    @cached_property
    def size(self) -> float:
        """The size of the outputs, or of their terms if these cancel.

        A network minus its initial version has outputs near 0, with the rounding of its terms. The size is measured:
        the change of the outputs when weights move by one eps, in units of eps.
        """
        eps = torch.finfo(self.V.dtype).eps
        w = move_by_rounding(self.segment.weights(self.t), eps)
        with torch.enable_grad():
            moved = self.segment.at(w.requires_grad_())  # by the same kernels
        return float(self.f.abs().max() + (moved.detach() - self.f).abs().max() / eps)

    def error(self, change: float, *, allowed: float = 64.0) -> float:
        """Return the distance of slopes from a central difference over a change of the outputs, minus its rounding.

        Args:
            change: The change, as a share of the outputs' size.
            allowed: The allowed rounding, in units of the outputs' rounding.
        """
        segment, t, scale = self.segment, self.t, float(self.V.norm())  # for combinations of outputs of size 1
        eps, slope = torch.finfo(self.V.dtype).eps, float(self.slopes.norm())
        reach, largest = float(largest_entry(segment.d)), float(largest_entry(segment.middle))
        h = min(change * self.size * scale / max(slope, 1e-300), (1e-3 * largest + 1e-6) / reach)
        if h * reach < 1e3 * eps * largest:
            return 0.0  # the weights cannot resolve the change: the training diverges
        difference = (self.V * (segment.outputs(t + h) - segment.outputs(t - h))).sum(dim=(1, 2)) / (2 * h)
        error = float((difference - self.slopes).norm()) - allowed * eps * self.size * scale / h
        return max(error, 0.0) / max(slope, float(difference.norm()), 1e-300)


def _derivative_fault(first: _Look, segment: _Segment, few: Int64[Tensor, " n"], own_dtype: torch.dtype) -> str | None:
    """Return the reason that autograd's derivative differs from central differences beyond the weights' rounding.

    Args:
        first: The first look; further looks are taken as long as the result is suspicious.
        segment: The step.
        few: The rows of the first look.
        own_dtype: The dtype of the run.
    """
    is_wide, every = first.f.dtype == torch.float64, torch.arange(len(segment.X), device=few.device)
    checks = [_FINE, _MEDIUM] if is_wide else [_COARSE]
    if not first.error(checks[0][0], allowed=0.0 if is_wide else 64.0) > (_FIRST_TOLERANCE if is_wide else _COARSE[1]):
        return None
    if is_wide and own_dtype != torch.float64:  # computed in float32 inside: look again at the same rows
        look, (change, tolerance) = _Look.at(segment, 0.0, few, _NUM_COMBINATIONS), _MEDIUM
        if not look.error(change, allowed=0.0) > tolerance / _STRICTER:
            return None
    looks = [_Look.at(segment, t, every, _NUM_COMBINATIONS) for t in _POSITIONS]
    before = math.inf
    for change, tolerance in checks:
        error = float(torch.tensor([look.error(change) for look in looks]).median())  # one of them may be at a kink
        if not error > tolerance and not error > before / 8:  # rounding falls by 1,000; NaN is found elsewhere
            return _SINGLE if (change, own_dtype) == (_MEDIUM[0], torch.float64) else None
        before = error
    return (
        f"the network's derivative is not the derivative of its outputs: along the step they differ by {error:.1%} "
        "(a straight-through estimator, a stop-gradient such as detach(), gradient reversal, rounding, a cast)"
    )
