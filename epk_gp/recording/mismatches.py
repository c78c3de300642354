"""Why a recorded step is not the one that was stated: guesses that are tested before one of them is named.

What a loop did shows in three places, which are looked at in the order in which it did it. The outputs of a pass are
those of the recorded network, or the network computed something else. The gradient in the outputs is that of the stated
loss, or another loss, other targets or a factor is at work. The optimizer's gradient is what comes through the outputs,
or something was added to it, left in it or done to it afterwards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from epk_gp.core.checks import allclose
from epk_gp.core.gradients import PassData, TrainingReplay, passes_of, seen_losses
from epk_gp.core.graphs import rows_of
from epk_gp.core.losses import (
    ELEMENTWISE,
    ClassLoss,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    PerSampleLoss,
    UnstatedLoss,
    as_loss,
    classes_second,
    fit_targets,
    ignored_class,
    loss_derivatives,
    loss_input,
    per_sample_losses,
    sample_weights,
    soft_targets,
)
from epk_gp.core.model import device_random_state
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import ForwardPass, Step
from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop, quiet_checkpoints
from epk_gp.optimizers.update_rules import WeightPenalty, predict_step, relative_rounding, rounded_bound, step_tolerance
from epk_gp.recording.causes import NEXT_LABELS, changed_setting
from epk_gp.recording.observer import CapturedForward, MadeStep
from epk_gp.recording.passes import KnownLoss, common_factor, of_nodes, read_targets, rounding_of, row_factors
from epk_gp.recording.setup import TrainingSetup

_OF_OUTPUTS = 10  # times the rounding of a gradient in the outputs: a replay of these may sum in another order
_ROOM = 1e-4  # in numbers that are computed from it

_MOST_TARGETS = 64  # that are tried in the place of a row's own, beside those of the batch
_RECORDS = "State the loop's loss (loss=); loss=None records the run without one"


class StepMeasures(NamedTuple):
    """How far a step is from the update rule's step on the gradient that the optimizer used.

    Attributes:
        momentum: The momentum buffer after it. It follows the gradient that was used, as the optimizer's own does.
        difference: Largest distance of a weight's step from the predicted one.
        largest: Largest entry of the gradient.
        norm: Its 2-norm.
    """

    momentum: Float[Tensor, " B"]
    difference: float
    largest: float
    norm: float


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """A made step with its record, and the weights and moving statistics around it.

    Attributes:
        made: What the optimizers did.
        step: Learning rate, batch and forward passes.
        start: The weights before it.
        end: The weights after it.
        momentum: The momentum buffer before it, as the recorder follows it.
        start_statistics: The moving statistics before it; of no entries for a network without them.
        end_statistics: Those after it.
        penalty: The L2 penalty of the loop's loss, as the checked steps before it show it.
        measures: How far it is from the update rule's step.
    """

    made: MadeStep
    step: Step
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    momentum: Float[Tensor, " P"]
    start_statistics: Float[Tensor, " Q"]
    end_statistics: Float[Tensor, " Q"]
    penalty: WeightPenalty
    measures: StepMeasures


@dataclass(frozen=True, eq=False)
class StepCheck:
    """A step beside the gradient that was recomputed from what the user states of it.

    Attributes:
        observed: The step.
        gradient: Gradient of the stated loss on the stated batch before the step, (P,), not clipped; zero for
            parameters that have none in this step.
        expected: The gradient that the optimizer must have used: the stated loss's and an L2 penalty's, clipped, (P,).
        clip_factor: The factor by which the stated clipping multiplies that gradient: one number, or one per weight.
        factors: The same of each parameter, (L,), where some parameters were clipped by themselves.
    """

    observed: ObservedStep
    gradient: Float[Tensor, " P"]
    expected: Float[Tensor, " P"]
    clip_factor: float | Float[Tensor, " P"] = 1.0
    factors: Float[Tensor, " L"] | None = None

    @property
    def used(self) -> Float[Tensor, " P"]:
        """The gradient that the optimizer used."""
        return self.observed.made.gradient

    @property
    def state(self) -> Float[Tensor, " PQ"]:
        """Weights before the step, then moving statistics."""
        return torch.cat([self.observed.start, self.observed.start_statistics])


@dataclass(frozen=True, eq=False)
class SeenPass:
    """A forward pass of a step as the hooks saw it, beside its record.

    Attributes:
        captured: What the hooks saw.
        data: What was recorded of it.
        z: What the loss took.
        delta: The gradient of the loop's loss in it.
        factor: The factor in front of the loss of each row, as stated, (n,).
        share: Share of the batch's rows that are this pass's.
        rounding: Share of a gradient in the outputs that is rounding.
    """

    captured: CapturedForward
    data: PassData
    z: Float[Tensor, "n ..."]
    delta: Float[Tensor, "n ..."]
    factor: Float[Tensor, " n"]
    share: float
    rounding: float

    def recorded(self, loss: Loss) -> Float[Tensor, "n ..."]:
        """Return the gradient of the recorded loss in the outputs, with targets and weights as recorded."""
        with torch.enable_grad():
            z = self.z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.data.c.to(z) @ seen_losses(loss, z, self.data), z)
        return gradient

    def weights(self, loss: Loss, y: Shaped[Tensor, "n ..."]) -> Float[Tensor, " n"]:
        """Return the weights of the rows in the loss of their step."""
        share = self.share if loss.reduction == "mean" else 1.0
        return self.factor.to(self.z) * share * sample_weights(loss, y).to(self.z)

    def expected(self, loss: Loss, y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the gradient of a loss in the outputs."""
        return self.by_row(self.weights(loss, y)) * loss_derivatives(loss, self.z, y)

    def by_row(self, values: Float[Tensor, " n"]) -> Float[Tensor, "n ..."]:
        """Return one number per row, as a factor of the outputs."""
        return values.view(-1, *[1] * (self.z.ndim - 1))

    def rows_like(self, expected: Float[Tensor, "n ..."]) -> Bool[Tensor, " n"]:
        """Return in which rows a gradient in the outputs is the loop's up to rounding."""
        size = self.factor.abs().max() / len(self.factor) + expected.abs().max()
        return (self.delta - expected).abs().flatten(1).amax(dim=1) <= self.rounding * float(size)


def seen_passes(setup: TrainingSetup, made: MadeStep, step: Step) -> list[SeenPass]:
    """Return the passes of a step whose outputs and gradient in them were seen; none if a batch's were not."""
    announced, has_graph = made.announced, setup.model.signature.graph is not None
    captured = [[of_nodes(f, b.samples) if has_graph else f for f in b.forwards] for b in announced]
    counts = [len(f.inputs) for of_batch in captured for f in of_batch]
    if not all(captured):
        return []
    if not step.passes:  # rows of other processes come before
        rest = (len(setup.X) if step.batch is None else len(step.batch)) - sum(counts)
        step = replace(step, passes=tuple(ForwardPass(n) for n in (rest, *counts)))
    passes = iter(passes_of(step, setup.X, setup.y, setup.loss)[-len(counts) :])
    seen = list[SeenPass]()
    for batch, of_batch in zip(announced, captured, strict=True):
        weight = torch.as_tensor(1.0 if batch.weight is None else batch.weight, dtype=torch.float64)
        factors = weight.expand(len(batch.samples)).split([len(f.inputs) for f in of_batch])
        for f, factor in zip(of_batch, factors, strict=True):
            data, z, delta = next(passes), f.outputs, f.output_gradient
            if z is not None and delta is not None:
                share = len(factor) / len(batch.samples)
                one = SeenPass(f, data, z.double(), delta.double(), factor, share, rounding_of(z))
                scale = _factor_of_labels(setup.loss, one) if batch.weight is None else 1.0
                seen.append(replace(one, factor=scale * factor))
    return seen


def _factor_of_labels(loss: Loss, seen: SeenPass) -> float:
    """Return what multiplies the loop's cross entropy of any labels in all rows alike; 1 if its loss is none."""
    if not isinstance(loss, CrossEntropy) or seen.z.ndim > 2:
        return 1.0
    (low, label), c = seen.delta.min(dim=1), seen.weights(loss, seen.data.y)
    factors = (low / (seen.z.softmax(dim=1).gather(1, label[:, None]).squeeze(1) - 1) / c)[c != 0]
    is_one = len(factors) and bool((factors - factors[0]).abs().max() <= _ROOM * factors[0].abs())
    return float(factors[0]) if is_one else 1.0


def doubt_of_loss(setup: TrainingSetup, made: MadeStep, step: Step) -> str | None:
    """Say what the loop's loss is, if passes of a step show that it is not the stated one; None if they do not."""
    seen = seen_passes(setup, made, step)
    if not is_stated_loss(setup, seen):
        return _loss_cause(setup, seen)
    is_read = any(batch.weight is None for batch in made.announced)
    return "weight=None found no factor of the stated loss that all rows have" if is_read else None


def is_stated_loss(setup: TrainingSetup, seen: Sequence[SeenPass]) -> bool:
    """Return whether the loop's loss is the stated one as far as it was seen, but for a factor (a GradScaler's)."""
    if isinstance(setup.loss, UnstatedLoss) or not seen:
        return True
    expected = [p.recorded(setup.loss) for p in seen]
    ratio = _common_factor(seen, expected)
    return any(all(bool(p.rows_like(r * e).all()) for p, e in zip(seen, expected, strict=True)) for r in (1.0, ratio))


def _common_factor(seen: Sequence[SeenPass], expected: Sequence[Tensor]) -> float:
    return common_factor(torch.cat([p.delta.flatten() for p in seen]), torch.cat([e.flatten() for e in expected]))


def explain_mismatch(setup: TrainingSetup, check: StepCheck, *, follows_rule: bool) -> str:
    """Return the reason why a step is not the stated one, as a clause without a full stop.

    Args:
        setup: The training.
        check: The step beside what was recomputed.
        follows_rule: Whether the step is the update rule's step on the gradient that the optimizer used.
    """
    observed, made = check.observed, check.observed.made
    if not torch.isfinite(check.used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if not follows_rule and allclose(check.used, check.expected):
        return _move_cause(setup, observed)
    if made.unseen is not None and not all(batch.forwards for batch in made.announced):
        return made.unseen
    seen = seen_passes(setup, made, observed.step)
    cause = _kernel_cause(setup, check, seen) or _network_cause(setup, check, seen)
    if cause is None and seen and not isinstance(setup.loss, UnstatedLoss):
        cause = _scale_cause(setup, check, seen)
        if cause is None and not is_stated_loss(setup, seen):
            cause = _loss_cause(setup, seen)
    return cause or _gradient_cause(setup, check, is_shown=bool(seen))


def _move_cause(setup: TrainingSetup, observed: ObservedStep) -> str:
    """Say what moved the weights beside the optimizer's step on the gradient of the stated loss."""
    model, made, known = setup.model, observed.made, "the gradient is that of the stated loss"
    predicted, _ = predict_step(made.update, model.sizes, observed.start, made.gradient, observed.momentum)
    step, allowed = observed.end - observed.start, step_tolerance(observed.start, predicted)
    rest, factor, rule = step - predicted, common_factor(step, predicted), setup.update_rule.name
    rate, is_scaled = -common_factor(rest, made.gradient), allclose(step, factor * predicted)
    moved = [name for name, part in model.unflatten(rest).items() if part.numel() and part.abs().max() > allowed]
    if abs(factor - 1) < 1e-4 and (step - factor * predicted).norm() < 0.5 * rest.norm():
        return (
            f"{known}, and the step is {rule}'s but for {abs(factor - 1):.1g} of it: where it is compiled "
            "or capturable=True, torch computes its rates in float32. Accept it with unexplained=0.001"
        )
    inside = f"the weights moved by {factor:.4g} times {rule}'s step: its learning rate was another inside of step()"
    if rate > 0 and allclose(rest, -rate * made.gradient):
        other = f"another optimizer moved the weights by {rate:.3g} times it too: pass the recorder both"
        return f"{known}, and {other}{f' (or {inside})' * is_scaled}"
    if is_scaled:
        return f"{known}, and {inside}. Change it before or after optimizer.step()"
    if len(moved) < len(model.names):
        return f"{known}, and the weights of {_named(moved)} were changed between batch() and the end of the step"
    return f"{known}, but the weights did not move by {rule}'s rule: another optimizer or option"


def _kernel_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say what the kernels that torch chose in the loop do otherwise than those of a replay; None if nothing."""
    replay = TrainingReplay(setup.model, setup.loss, TensorSpec(check.state.dtype, check.state.device))
    with kernels_of_the_loop():
        gradient = sum((replay.gradient(check.state, p.data).gradient for p in seen), torch.zeros_like(check.used))
    again = gradient * check.clip_factor
    missed, left = ((check.used - g).abs().max() for g in (check.expected, again))
    if not (seen and left < missed / 8 and allclose(check.used, again)):
        return None
    if any(_replayed(replay, check.state, p)[1] for p in seen):
        advice = "Train inside of torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        return f"fused attention draws its dropout otherwise than a replay. {advice}"
    return (
        "the loop computes in less than its dtype. Set torch.backends.cudnn.allow_tf32 = False and "
        "torch.set_float32_matmul_precision('highest'), or say what may be left of a step, unexplained=0.05"
    )


def _network_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say why the outputs of a pass are not those of the recorded network; None where they are."""
    model, net, loss = setup.model, setup.net, setup.loss
    replay = TrainingReplay(model, loss, TensorSpec(check.state.dtype, check.state.device))
    for p in seen:
        returned, draws_otherwise = _replayed(replay, check.state, p)
        is_unstated = isinstance(loss, UnstatedLoss)
        z = rows_of(returned, len(p.data.X)) if is_unstated else loss_input(model.signature, loss, returned, p.data.y)
        if not isinstance(z, Tensor) or z.shape != p.z.shape:
            continue
        difference = float((z.double() - p.z).abs().max())
        if difference <= _OF_OUTPUTS * p.rounding * float(p.z.abs().max()):
            continue
        if (changed := changed_setting(net, model)) is not None:
            return changed
        what = f"the outputs that the loop saw are not the recorded network's (by up to {difference:.2g})"
        if draws_otherwise:
            return (
                f"{what}: it draws other random numbers than torch's default generator gives to its layers. Under "
                "torch.compile set torch._inductor.config.fallback_random = True before the first call; else draw from "
                "that generator"
            )
        layout, own = model.signature.layout, dict(model.module.named_modules())
        hooked = [n for n, part in net.named_modules() if n and len(part._forward_hooks) > len(own[n]._forward_hooks)]
        if hooked:
            return f"{what}: a forward hook of module {_named(hooked)} changes them. Register it before recording"
        if p.captured.num_arguments > (1 if layout is None else len(layout.tensors)):
            return f"{what}: the network was called with further arguments. Pass all that it depends on as X"
        return f"{what}, at the same weights, rows and random numbers: something else in it changes. Let it be a buffer"
    return None


def _replayed(replay: TrainingReplay, state: Float[Tensor, " PQ"], seen: SeenPass) -> tuple[Any, bool]:
    """Replay a pass in the precision of the training: what the network returns, and whether it draws otherwise.

    A pass that leaves torch's random numbers elsewhere than its replay, which goes through the layers as they were
    written, drew others.
    """
    data, forward = seen.data, seen.data.forward
    module, device, autocast = replay.module_in_modes(data), replay.spec.device, forward.autocast
    named = {n: value.clone() for n, value in module.named_buffers()} | replay.params(state, data)

    def call(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, named, args, kwargs)

    mixed = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with torch.no_grad(), disable_fused_attention(), quiet_checkpoints(), replay.random_numbers(data), mixed:
        returned = replay.model.signature.call(call, replay.rows(data), replay.spec)
        reached = torch.random.get_rng_state(), device_random_state(device)
    before, after = (forward.random_state, forward.device_random_state), seen.captured.random_states_after
    states = zip(before, reached, after, strict=True)
    others = (not (used is None or own is None or end is None or torch.equal(own, end)) for used, own, end in states)
    return returned, any(others)


def _explains(seen: Sequence[SeenPass], gradient: Callable[[SeenPass], Tensor]) -> bool:
    """Return whether a gradient in the outputs is the loop's in all passes."""
    with suppress(IndexError, RuntimeError, TypeError, ValueError):  # a loss that cannot take outputs or targets
        return all(bool(p.rows_like(gradient(p)).all()) for p in seen)
    return False


def _scale_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say by what the loop's loss is multiplied, if the gradient is too: a GradScaler takes its factor back."""
    stated = setup.loss
    ratio = _common_factor(seen, [p.expected(stated, p.data.y) for p in seen])
    is_scaled = _explains(seen, lambda p: ratio * p.expected(stated, p.data.y))
    if not is_scaled or abs(ratio - 1) <= _ROOM or not _is_same(check.used, ratio * check.expected):
        return None
    other = replace(stated, reduction="sum" if stated.reduction == "mean" else "mean")
    is_scaled_by, times = f"is {ratio:.6g} times that of the stated loss", seen[0].captured.num_backwards
    if times > 1:
        return f"the gradient {is_scaled_by}: backward() went through the pass {times} times"
    if _explains(seen, lambda p: p.expected(other, p.data.y)):
        return _other(other, stated)
    advice = f"state it, recorder.batch(indices, weight={ratio:.6g}), or let weight=None read it"
    return f"the loop's loss {is_scaled_by}: {advice}"


def _loss_cause(setup: TrainingSetup, seen: Sequence[SeenPass]) -> str:
    """Say what the loop's loss is, where its gradient in the outputs is not that of the stated loss."""
    stated, first = setup.loss, seen[0]
    for clause, loss, targets in _other_losses(stated, first):
        if _explains(seen, lambda p, loss=loss, targets=targets: p.expected(loss, targets(p))):  # type: ignore[misc]
            return clause
    expected = [p.expected(stated, p.data.y) for p in seen]
    if all(p.z.ndim == 2 and p.z.shape[1] > 2 for p in seen):  # of two outputs all gradients are multiples
        factors = [row_factors(p.delta, e) for p, e in zip(seen, expected, strict=True)]
        rows = zip(seen, factors, expected, strict=True)
        if all(bool(p.rows_like(p.by_row(r) * e).all()) for p, r, e in rows):
            low, high = torch.cat(factors).aminmax()
            return (
                f"the loop weights the stated losses of the rows by {low:.3g} to {high:.3g}, as class weights and a "
                f"focal loss do: state them, or pass recorder.batch() a weight per row. {_RECORDS}"
            )
    if (cause := _target_cause(setup, seen)) is not None:
        return cause
    row = int((~first.rows_like(expected[0])).long().argmax())
    got, must = ([float(f"{v:.3g}") for v in value[row].flatten()[:3]] for value in (first.delta, expected[0]))
    return (
        f"the loop's loss is not {_name(stated)} on y[batch]: its gradient in the outputs of row {row} begins with "
        f"{got}, that of the stated loss with {must}. {_RECORDS}"
    )


def _other_losses(stated: Loss, first: SeenPass) -> Iterator[tuple[str, Loss, Callable[[SeenPass], Tensor]]]:
    """Yield losses that loops use in the place of the stated one, with a clause and their targets."""
    y, others, kinds = first.data.y, list[Loss](), (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
    if isinstance(stated, CrossEntropy):
        c, (z, delta) = first.weights(stated, y), (classes_second(value, y) for value in (first.z, first.delta))
        q = z.softmax(dim=1) - delta / c.view(-1, *[1] * (z.ndim - 1))  # the targets, if it is a cross entropy
        smoothing = rounded_bound(z.shape[1] * max(0.0, float(q.amin(dim=1).median())))
        others += [replace(stated, label_smoothing=min(smoothing if smoothing > _ROOM else 0.0, 1.0))]
    modules = (nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)
    for reduction in ("mean", "sum"):
        others += [*(kind(reduction) for kind in kinds), *(as_loss(kind(reduction=reduction)) for kind in modules)]
    is_hard = isinstance(stated, ClassLoss) and not y.is_floating_point()
    is_one_hot, are_entries = is_hard and y.ndim == 1, not is_hard and fit_targets(y, first.z).shape == first.z.shape

    def recorded(p: SeenPass) -> Tensor:
        return p.data.y

    def one_hot(p: SeenPass) -> Tensor:
        return soft_targets(CrossEntropy(), p.data.y, p.z)

    def next_labels(p: SeenPass) -> Tensor:
        return F.pad(p.data.y[:, 1:], (0, 1), value=ignored_class(cast(ClassLoss, stated)))

    def against_all(z: Tensor, y: Tensor) -> Tensor:
        return per_sample_losses(stated, z.expand(-1, len(y)), y.to(z).expand(len(z), -1))

    for loss in others:
        is_class = isinstance(loss, ClassLoss)
        if loss != stated and (is_class or is_one_hot or are_entries):
            yield _other(loss, stated), loss, one_hot if is_one_hot and not is_class else recorded
    is_elementwise = isinstance(stated, PerSampleLoss) and isinstance(stated.function, ELEMENTWISE)
    if (isinstance(stated, MeanSquaredError) or is_elementwise) and y.ndim == 1:
        clause = (
            "the loop's loss broadcasts targets (n,) against outputs (n, 1) to (n, n), every output against every "
            "target: give both one shape, as in net(X).squeeze(1) or y[:, None]"
        )
        yield clause, PerSampleLoss(against_all, stated.reduction), recorded
    if is_hard and y.ndim == 2:
        yield NEXT_LABELS, stated, next_labels


def _target_cause(setup: TrainingSetup, seen: Sequence[SeenPass]) -> str | None:
    """Say which targets give the stated loss the loop's gradient in the outputs, if those of other rows do, or soft."""
    loss, is_class, C = setup.loss, isinstance(setup.loss, ClassLoss), seen[0].z.shape[1]
    weights = getattr(loss, "class_weights", None)
    if not isinstance(loss, KnownLoss) or weights is not None or any(p.z.ndim > 2 for p in seen):
        return None
    z, y = (torch.cat(values) for values in zip(*((p.z, p.data.y) for p in seen), strict=True))
    is_like = torch.cat([p.rows_like(p.expected(loss, p.data.y)) for p in seen])
    room = 10 * seen[0].rounding
    read = [read_targets(loss, p.z, p.delta, p.weights(loss, p.data.y), room) for p in seen]
    used, is_valid = (torch.cat(values) for values in zip(*read, strict=True))

    def as_rows(targets: Tensor) -> Tensor:
        return soft_targets(loss, targets, z) if isinstance(loss, ClassLoss) else targets.to(z).reshape(-1, C)

    is_hard = is_class and not y.is_floating_point()
    others = torch.arange(C, device=y.device) if is_hard else torch.cat([y, setup.y[:_MOST_TARGETS]])
    distances, places = torch.cdist(used, as_rows(others), p=torch.inf).min(dim=1)
    if bool((is_like | (distances <= room * (1 + used.abs().max()))).all()):
        own = torch.cdist(as_rows(y), as_rows(others), p=torch.inf).argmin(dim=1)
        places = torch.where(is_like, own, places)
        row = int((own != places).int().argmax())
        is_same = torch.equal(own.sort()[0], places.sort()[0])
        order = "the batch's in another order" if is_same else "those of other points"
        rows = "X at the announced indices" if all(p.data.forward.inputs is None for p in seen) else "changed rows"
        return (
            f"the network saw {rows}, but the loop's targets are {order}, from row {row} of the batch on. Take rows, "
            "targets and indices from one data set, such as IndexedDataset"
        )
    if is_class and C > 2 and bool((is_like | is_valid).all()):
        return f"the loop's loss takes probabilities that are not y, such as a teacher's. {_RECORDS}"
    return None


def _gradient_cause(setup: TrainingSetup, check: StepCheck, *, is_shown: bool) -> str:
    """Say what happened to the gradient after it came through the outputs, if the gradient in these was seen."""
    model, net, made, w = setup.model, setup.net, check.observed.made, check.observed.start
    used, whole, penalty = check.used, check.expected / check.clip_factor, check.observed.penalty
    rest, bound, ratio = used - whole, float(used.abs().max()), common_factor(used, whole)
    through = "what came through the outputs" if is_shown else "that of the stated loss"
    if setup.clip is not None and _is_same(used, whole):
        return "the gradient is that of the stated loss before clipping: state the loop's clipping, or none"
    if _is_same(used, ratio * whole):
        is_scaled = ratio >= 1 or float(torch.tensor(ratio).log2()).is_integer()  # as by a GradScaler
        stated = f"batch(indices, weight={ratio:.6g})" if is_scaled else f"clip=ClipNorm({float(used.norm()):.6g})"
        if isinstance(setup.loss, UnstatedLoss) and any(batch.weight not in (None, 1.0) for batch in made.announced):
            stated = "no weight= with loss=None, for what came through the outputs has the loop's factors already"
        return f"the gradient is {ratio:.6g} times {through}, clipped or scaled after backward(): state {stated}"
    if _is_same(used, whole.clamp(-bound, bound)):
        return f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, clip=ClipValue(...)"
    if made.has_left_over:
        return (
            "a gradient was left over when backward() through the network began, of a step before or of a term of the "
            "loss that does not depend on its outputs: call optimizer.zero_grad() before backward()"
        )
    if (doubt := made.doubt or made.unseen) is not None:  # of other processes
        return doubt
    pairs = {n: (u, model.unflatten(whole)[n]) for n, u in model.unflatten(used).items() if u.numel()}
    off = {n: (u, g) for n, (u, g) in pairs.items() if not _is_same(u, g)} or pairs
    names, shares = _named([*off]), [common_factor(u, g) for u, g in off.values()]
    if all(not bool(u.any()) for u, _ in off.values()):
        return f"no gradient came to {names}: freeze by requires_grad_(False), and leave .grad as it is"
    hooked = [n for n, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [n for n, part in net.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    if hooked:
        return f"a backward hook at {_named(hooked)} changes gradients; unexplained=SHARE records that as a term"
    if all(_is_same(u, r * g) for r, (u, g) in zip(shares, off.values(), strict=True)):
        return f"the gradients of {names} alone were clipped or scaled (by {shares[0]:.6g}): clip all together"
    rates = penalty.fitted(used, check.gradient, w)
    added = None if rates is None else penalty.gradient(w, rates)
    if added is not None and _is_same(used, check.gradient + added):
        return "the factor of the loss's L2 penalty is not that of the steps checked before: check_every=1 records it"
    share = float(rest.norm() / used.norm())
    if not is_shown:
        return f"the gradient is not {through} on X[batch], y[batch]: {share:.2g} of it, in {names}. {_RECORDS}"
    text = f"{share:.2g} of the gradient, in {names}, does not come through the outputs of the announced rows"
    if rows := sum(len(f.inputs) for f in made.others):
        return f"{text}, and backward() went through {rows} other rows: announce them too, if their gradient is used"
    return f"{text}, as of another penalty than L2, noise or an edit: unexplained=SHARE records it as a term of its own"


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients are the same up to what a guess may leave, relative to the largest entry."""
    return bool((a - b).abs().max() <= 4 * relative_rounding(a.dtype) * b.abs().max())


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _other(loss: Loss, stated: Loss) -> str:
    return f"the loop's loss is that of {_name(loss)}, not of the stated {_name(stated)}: state that one"


def _name(loss: Loss) -> str:
    return f"{loss.name}, reduction={loss.reduction!r}" if isinstance(loss, PerSampleLoss) else str(loss)
