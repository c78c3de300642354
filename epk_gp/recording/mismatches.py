"""Why a recorded step is not the one that was stated: guesses that are tested before one of them is named.

What a loop did shows in three places, which are looked at in the order in which it did it. The outputs of a pass are
those of the recorded network, or the network computed something else. The gradient in the outputs is that of the stated
loss, or another loss, other targets or a factor is at work. The optimizer's gradient is what comes through the outputs,
or something was added to it, left in it or done to it afterwards.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from epk_gp.core.gradients import PassData, TrainingReplay, allclose, passes_of, seen_losses
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
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints
from epk_gp.optimizers.update_rules import predict_step, relative_rounding, rounded_bound, step_tolerance
from epk_gp.recording.causes import NEXT_LABELS, changed_setting
from epk_gp.recording.observer import CapturedForward, ObservedStep
from epk_gp.recording.setup import TrainingSetup

# Differences of a gradient in the outputs that count as rounding, in units of its size, by the dtype of the outputs;
# the outputs themselves may differ by more, for a replay may sum in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_LOW_PRECISION, _OF_OUTPUTS = 2e-2, 10
_ROOM = 1e-4  # in numbers that are computed from it

_MOST_TARGETS = 64  # that are tried in the place of a row's own
_FOCAL = (0.5, 1.0, 2.0, 3.0, 5.0)  # exponents of the focal loss that are tried
_FEW_ENTRIES = 3  # of a gradient, which are changed by hand
_RECORDS = "State the loop's loss (loss=); loss=None records the run without one"


@dataclass(frozen=True, eq=False)
class StepCheck:
    """A step beside the gradient that was recomputed from what the user states of it.

    Attributes:
        state: Weights before the step, then moving statistics, (P + Q,).
        step: The step.
        used: The gradient that the optimizer used, (P,).
        gradient: Gradient of the stated loss on the stated batch before the step, (P,), not clipped.
        expected: The gradient that the optimizer must have used: the stated loss's and an L2 penalty's, clipped, (P,).
        clip_factor: The factor by which the stated clipping multiplies that gradient: one number, or one per weight.
        X: The stated batch.
        y: Its targets.
        c: The weights of its samples, (B,).
        statistics_error: Largest difference of moving statistics after a pass from those that its rows give, in units
            of what rounding explains.
        without_gradient: Names of the parameters that have no gradient in this step; theirs is zero here.
    """

    state: Float[Tensor, " PQ"]
    step: Step
    used: Float[Tensor, " P"]
    gradient: Float[Tensor, " P"]
    expected: Float[Tensor, " P"]
    clip_factor: float | Float[Tensor, " P"]
    X: Shaped[Tensor, "B ..."]
    y: Shaped[Tensor, "B ..."]
    c: Float[Tensor, " B"]
    statistics_error: float = 0.0
    without_gradient: Set[str] = frozenset()


@dataclass(frozen=True, eq=False)
class SeenPass:
    """A forward pass of a step as the hooks saw it, beside its record.

    Attributes:
        captured: What the hooks saw.
        data: What was recorded of it.
        factor: The factor in front of the loss of each row, as stated, (n,).
        share: Share of the batch's rows that are this pass's.
    """

    captured: CapturedForward
    data: PassData
    factor: Float[Tensor, " n"]
    share: float

    @property
    def shown(self) -> bool:
        """Whether outputs and the gradient in them were seen."""
        return self.captured.outputs is not None and self.captured.output_gradient is not None

    @property
    def z(self) -> Float[Tensor, "n ..."]:
        """What the loss took."""
        return torch.zeros(0) if self.captured.outputs is None else self.captured.outputs.double()

    @property
    def delta(self) -> Float[Tensor, "n ..."]:
        """The gradient of the loop's loss in it."""
        gradient = self.captured.output_gradient
        return torch.zeros(0) if gradient is None else gradient.double()

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
        return (self.delta - expected).abs().flatten(1).amax(dim=1) <= self.tolerance * float(size)

    @property
    def tolerance(self) -> float:
        """Share of a gradient in the outputs that is rounding."""
        z = self.captured.outputs
        return _LOW_PRECISION if z is None else _TOLERANCE.get(z.dtype, _LOW_PRECISION)


def seen_passes(setup: TrainingSetup, observed: ObservedStep) -> list[SeenPass]:
    """Return the passes of a step as the hooks saw them; none if those of a batch were not seen."""
    announced, has_graph = observed.made.announced, setup.model.signature.graph is not None
    captured = [[f.of_nodes(b.samples) if has_graph else f for f in b.forwards] for b in announced]
    counts = [len(f.inputs) for of_batch in captured for f in of_batch]
    if not all(captured):
        return []
    step = observed.step
    if not step.passes:  # rows of other processes come before
        rest = (len(setup.X) if step.batch is None else len(step.batch)) - sum(counts)
        step = replace(step, passes=tuple(ForwardPass(n) for n in (rest, *counts)))
    passes = iter(passes_of(step, setup.X, setup.y, setup.loss)[-len(counts) :])
    seen = list[SeenPass]()
    for batch, of_batch in zip(announced, captured, strict=True):
        weight = torch.as_tensor(1.0 if batch.weight is None else batch.weight, dtype=torch.float64)
        factors = weight.expand(len(batch.samples)).split([len(f.inputs) for f in of_batch])
        for f, factor in zip(of_batch, factors, strict=True):
            seen.append(SeenPass(f, next(passes), factor, len(factor) / len(batch.samples)))
    return seen


def is_stated_loss(setup: TrainingSetup, seen: Sequence[SeenPass]) -> bool:
    """Return whether the loop's loss is the stated one as far as it was seen, but for a factor (a GradScaler's)."""
    if isinstance(setup.loss, UnstatedLoss):
        return True
    shown = [p for p in seen if p.shown]
    expected = [p.recorded(setup.loss) for p in shown]
    ratio = _ratio([p.delta for p in shown], expected)
    return any(all(bool(p.rows_like(r * e).all()) for p, e in zip(shown, expected, strict=True)) for r in (1.0, ratio))


def _ratio(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    products, squares = (
        sum(float((a * b).sum()) for a, b in zip(x, expected, strict=True)) for x in (values, expected)
    )
    return products / max(squares, 1e-300)


def explain_mismatch(setup: TrainingSetup, observed: ObservedStep, check: StepCheck, *, follows_rule: bool) -> str:
    """Return the reason why a step is not the stated one, as a clause without a full stop.

    Args:
        setup: The training.
        observed: The step.
        check: The same beside what was recomputed.
        follows_rule: Whether the step is the update rule's step on the gradient that the optimizer used.
    """
    if not torch.isfinite(check.used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if not follows_rule and allclose(check.used, check.expected):
        return _move_cause(setup, observed)
    if observed.made.unseen is not None and not all(batch.forwards for batch in observed.made.announced):
        return observed.made.unseen
    seen = [p for p in seen_passes(setup, observed) if p.shown]
    cause = _network_cause(setup, check, seen)
    if cause is None and seen and not isinstance(setup.loss, UnstatedLoss):
        cause = _scale_cause(setup, check, seen)
        if cause is None and not is_stated_loss(setup, seen):
            cause = next(_loss_causes(setup, seen))
    return cause or _gradient_cause(setup, observed, check, is_shown=bool(seen))


def _move_cause(setup: TrainingSetup, observed: ObservedStep) -> str:
    """Say what moved the weights beside the optimizer's step on the gradient of the stated loss."""
    model, made, known = setup.model, observed.made, "the gradient is that of the stated loss"
    predicted, _ = predict_step(made.update, model.sizes, observed.start, made.gradient, observed.momentum)
    rest, allowed = observed.end - observed.start - predicted, step_tolerance(observed.start, predicted)
    rate = -_ratio([rest], [made.gradient])
    moved = [name for name, part in model.unflatten(rest).items() if part.numel() and part.abs().max() > allowed]
    if allclose(rest, -rate * made.gradient):
        return f"{known}, and another optimizer moved the weights by {rate:.3g} times it too: pass the recorder both"
    if len(moved) < len(model.names):
        return f"{known}, and the weights of {_named(moved)} were changed between batch() and the end of the step"
    return f"{known}, but the weights did not move by {setup.update_rule.name}'s rule: another optimizer or option"


def _network_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say why the outputs of a pass are not those of the recorded network; None where they are."""
    model, net, loss = setup.model, setup.net, setup.loss
    replay = TrainingReplay(model, loss, TensorSpec(check.state.dtype, check.state.device))
    for p in seen:
        returned, is_unstated = _returned(replay, check.state, p.data), isinstance(loss, UnstatedLoss)
        z = rows_of(returned, len(p.data.X)) if is_unstated else loss_input(model.signature, loss, returned, p.data.y)
        if not isinstance(z, Tensor) or z.shape != p.z.shape:
            continue
        difference = float((z.double() - p.z).abs().max())
        if difference <= _OF_OUTPUTS * p.tolerance * float(p.z.abs().max()):
            continue
        changed, layout, recorded = (
            changed_setting(net, model),
            model.signature.layout,
            dict(model.module.named_modules()),
        )
        hooked = [
            n for n, part in net.named_modules() if n and len(part._forward_hooks) > len(recorded[n]._forward_hooks)
        ]
        what = f"the outputs that the loop saw are not the recorded network's (by up to {difference:.2g})"
        if changed is not None:
            return changed
        if _draws_otherwise(replay, p):
            return (
                f"{what}: it draws other random numbers than torch's default generator gives to its layers. Under "
                "torch.compile set torch._inductor.config.fallback_random = True before the first call; else draw from "
                "that generator"
            )
        if hooked:
            return f"{what}: a forward hook of module {_named(hooked)} changes them. Register it before recording"
        if p.captured.num_arguments > (1 if layout is None else len(layout.tensors)):
            return f"{what}: the network was called with further arguments. Pass all that it depends on as X"
        return f"{what}, at the same weights, rows and random numbers: something else in it changes. Let it be a buffer"
    return None


@torch.no_grad()
def _draws_otherwise(replay: TrainingReplay, seen: SeenPass) -> bool:
    """Return whether a pass left torch's random numbers elsewhere than its layers do, as they were written."""
    forward, after = seen.data.forward, seen.captured.random_states_after
    with replay.random_numbers(seen.data), disable_fused_attention():
        replay.model.signature.call(replay.module_in_modes(seen.data), replay.rows(seen.data), replay.spec)
        reached = torch.random.get_rng_state(), device_random_state(replay.spec.device)
    states = zip((forward.random_state, forward.device_random_state), reached, after, strict=True)
    return any(not (used is None or own is None or end is None or torch.equal(own, end)) for used, own, end in states)


def _returned(replay: TrainingReplay, state: Float[Tensor, " PQ"], data: PassData) -> Any:
    """Replay a forward pass in the precision of the training, and return what the network returns."""
    module, autocast = replay.module_in_modes(data), data.forward.autocast
    named = {n: value.clone() for n, value in module.named_buffers()} | replay.params(state, data)
    mixed = torch.autocast(replay.spec.device.type, autocast, enabled=autocast is not None)
    with torch.no_grad(), disable_fused_attention(), quiet_checkpoints(), replay.random_numbers(data), mixed:
        return replay.model.signature.call(
            lambda *args, **kwargs: functional_call(module, named, args, kwargs), replay.rows(data), replay.spec
        )


def _explains(seen: Sequence[SeenPass], gradient: Callable[[SeenPass], Tensor]) -> bool:
    """Return whether a gradient in the outputs is the loop's in all passes."""
    with suppress(IndexError, RuntimeError, TypeError, ValueError):  # a loss that cannot take outputs or targets
        return all(bool(p.rows_like(gradient(p)).all()) for p in seen)
    return False


def _scale_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say by what the loop's loss is multiplied, if the gradient is too: a GradScaler takes its factor back."""
    stated = setup.loss
    ratio = _ratio([p.delta for p in seen], [p.expected(stated, p.data.y) for p in seen])
    is_scaled = _explains(seen, lambda p: ratio * p.expected(stated, p.data.y))
    if not is_scaled or abs(ratio - 1) <= _ROOM or not _is_same(check.used, ratio * check.expected):
        return None
    other, times = (
        replace(stated, reduction="sum" if stated.reduction == "mean" else "mean"),
        seen[0].captured.num_backwards,
    )
    if times > 1:
        return (
            f"the gradient is {ratio:.6g} times that of the stated loss: backward() went through the pass {times} times"
        )
    if _explains(seen, lambda p: p.expected(other, p.data.y)):
        return _other(other, stated)
    advice = f"state it, recorder.batch(indices, weight={ratio:.6g}), or let weight=None read it"
    return f"the loop's loss is {ratio:.6g} times that of the stated loss: {advice}"


def _loss_causes(setup: TrainingSetup, seen: Sequence[SeenPass]) -> Iterator[str]:
    """Yield what the loop's loss is, where its gradient in the outputs is not that of the stated loss."""
    stated, first = setup.loss, seen[0]
    for clause, loss, targets in _other_losses(stated, first):
        if _explains(seen, lambda p, loss=loss, targets=targets: p.expected(loss, targets(p))):  # type: ignore[misc]
            yield clause
    if isinstance(stated, CrossEntropy) and all(p.z.ndim == 2 and p.data.y.ndim == 1 for p in seen):
        yield from _weighted_rows(stated, seen)
    yield from _other_targets(setup, seen)
    if isinstance(stated, CrossEntropy) and first.z.ndim == 2 and first.z.shape[1] > 1:
        q = torch.cat([p.z.softmax(dim=1) - p.delta / p.weights(stated, p.data.y)[:, None] for p in seen])
        if bool((q >= -_ROOM).all()) and bool(((q.sum(dim=1) - 1).abs() <= _ROOM).all()):
            yield f"the loop's loss draws the softmax to probabilities that are not y, such as a teacher's. {_RECORDS}"
    expected = first.expected(stated, first.data.y)
    row = int((~first.rows_like(expected)).long().argmax())
    got, must = ([float(f"{v:.3g}") for v in value[row].flatten()[:3]] for value in (first.delta, expected))
    yield (
        f"the loop's loss is not {_name(stated)}: its gradient in the outputs of row {row} begins with {got}, that of "
        f"the stated loss with {must}. {_RECORDS}"
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
    for loss in others:
        is_class = isinstance(loss, ClassLoss)
        if loss != stated and (is_class or is_one_hot or are_entries):
            takes_one_hot = is_one_hot and not is_class
            yield (
                _other(loss, stated),
                loss,
                lambda p, one_hot=takes_one_hot: soft_targets(CrossEntropy(), p.data.y, p.z) if one_hot else p.data.y,  # type: ignore[misc]
            )
    is_elementwise = isinstance(stated, PerSampleLoss) and isinstance(stated.function, ELEMENTWISE)
    if (isinstance(stated, MeanSquaredError) or is_elementwise) and y.ndim == 1:

        def against_all(z: Tensor, y: Tensor) -> Tensor:
            return per_sample_losses(stated, z.expand(-1, len(y)), y.to(z).expand(len(z), -1))

        yield (
            "the loop's loss broadcasts targets (n,) against outputs (n, 1) to (n, n), every output against every "
            "target: give both one shape, as in net(X).squeeze(1) or y[:, None]",
            PerSampleLoss(against_all, stated.reduction),
            lambda p: p.data.y,
        )
    if is_hard and y.ndim == 2:
        yield (
            NEXT_LABELS,
            stated,
            lambda p: F.pad(p.data.y[:, 1:], (0, 1), value=ignored_class(cast(ClassLoss, stated))),
        )


def _weighted_rows(stated: CrossEntropy, seen: Sequence[SeenPass]) -> Iterator[str]:
    """Yield by what the rows' gradients are multiplied, where each is a multiple of the stated loss's."""
    D = torch.cat([p.expected(replace(stated, class_weights=None), p.data.y) for p in seen])
    delta, z, y = (torch.cat(values) for values in zip(*((p.delta, p.z, p.data.y) for p in seen), strict=True))
    r = (delta * D).sum(dim=1) / D.square().sum(dim=1).clamp(min=1e-300)
    if not bool(((delta - r[:, None] * D).abs() <= _ROOM * delta.abs().max()).all()):
        return
    classes, place, counts = y.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), dtype=r.dtype, device=r.device).index_add_(0, place, r) / counts
    if bool(((r - means[place]).abs() <= _ROOM * r.abs().max()).all()) and bool((counts > 1).any()):
        weights = {int(k): float(f"{v:.3g}") for k, v in zip(classes, means / means.max(), strict=True)}
        yield f"the loop weights the classes as {weights}: state CrossEntropy(class_weights=...)"
    p = z.softmax(dim=1).gather(1, y.clamp(min=0)[:, None])[:, 0]
    for gamma in _FOCAL:
        factor = r / ((1 - p) ** gamma - gamma * p * (1 - p) ** (gamma - 1) * p.log())
        if bool(((factor - factor.mean()).abs() <= _ROOM * factor.abs().max()).all()):
            yield f"the loop's loss is the focal loss of exponent {gamma:g}, not {_name(stated)}. {_RECORDS}"


def _other_targets(setup: TrainingSetup, seen: Sequence[SeenPass]) -> Iterator[str]:
    """Yield whose targets the loop's loss took, if they are those of other rows."""
    loss, pairs = setup.loss, list[tuple[Tensor, Tensor]]()
    for p in seen:
        y, c = p.data.y, p.by_row(p.weights(loss, p.data.y))
        used, is_found = y.clone(), p.rows_like(p.expected(loss, y))
        for target in torch.cat([y, setup.y[:_MOST_TARGETS]]).unique(dim=0)[: 2 * _MOST_TARGETS]:
            like = ~is_found & p.rows_like(c * loss_derivatives(loss, p.z, target.expand(y.shape)))
            used[like], is_found = target, is_found | like
        if not bool(is_found.all()):
            return
        pairs.append((used, y))
    used, y = (torch.cat(values) for values in zip(*pairs, strict=True))
    counted = [values.unique(dim=0, return_counts=True) for values in (used, y)]
    order = "the batch's in another order" if all(map(torch.equal, *counted)) else "those of other points"
    row = int((used != y).reshape(len(y), -1).any(dim=1).long().argmax())
    rows = "X at the announced indices" if all(p.data.forward.inputs is None for p in seen) else "changed rows"
    advice = "Take rows, targets and indices from one data set, such as IndexedDataset"
    yield f"the network saw {rows}, but the loop's targets are {order}, from row {row} of the batch on. {advice}"


def _gradient_cause(setup: TrainingSetup, observed: ObservedStep, check: StepCheck, *, is_shown: bool) -> str:
    """Say what happened to the gradient after it came through the outputs, if the gradient in these was seen."""
    model, net, others, before = setup.model, setup.net, observed.made.others, observed.made.gradient_before
    used, whole = check.used, check.expected / check.clip_factor
    rest, bound, ratio, through = (
        used - whole,
        float(used.abs().max()),
        _ratio([used], [whole]),
        "what came through the outputs",
    )
    through = through if is_shown else "that of the stated loss"
    if setup.clip is not None and _is_same(used, whole):
        return "the gradient is that of the stated loss before clipping: state the loop's clipping, or none"
    if _is_same(used, ratio * whole):
        stated = f"clip=ClipNorm({float(used.norm()):.6g})" if ratio < 1 else f"batch(indices, weight={ratio:.6g})"
        return f"the gradient is {ratio:.6g} times {through}, clipped or scaled after backward(): state {stated}"
    if _is_same(used, whole.clamp(-bound, bound)):
        return f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, clip=ClipValue(...)"
    for passes in (others, *([p] for p in others)):
        if passes and _is_same(rest, _sent(setup, check, passes)):
            rows = sum(len(p.inputs) for p in passes)
            return f"a backward() of {rows} other rows was added, which recorder.batch() did not get: announce it too"
    if len(before) and _is_same(rest, before):
        return "the gradient of the step before was left over: call optimizer.zero_grad() before backward()"
    if observed.made.unseen is not None:  # of other processes
        return observed.made.unseen
    split = [model.unflatten(value) for value in (used, whole, observed.start)]
    triples = {n: (split[0][n], split[1][n], split[2][n]) for n in model.names}
    off = {n: (u, g, w) for n, (u, g, w) in triples.items() if u.numel() and not _is_same(u, g)} or triples
    names, shares = _named([*off]), [_ratio([u], [g]) for u, g, _ in off.values()]
    if all(not bool(u.any()) for u, _, _ in off.values()):
        return f"no gradient came to {names}: freeze by requires_grad_(False), and leave .grad as it is"
    hooked = [n for n, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [n for n, part in net.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    if hooked:
        return f"a backward hook at {_named(hooked)} changes gradients; unexplained=SHARE records that as a term"
    if all(_is_same(u, r * g) for r, (u, g, _) in zip(shares, off.values(), strict=True)):
        return f"the gradients of {names} alone were clipped or scaled (by {shares[0]:.6g}): clip all together"
    rates = observed.penalty.fitted(used, check.gradient, observed.start)
    penalty = None if rates is None else observed.penalty.gradient(observed.start, rates)
    if penalty is not None and _is_same(used, check.gradient + penalty):
        return "the factor of the loss's L2 penalty is not that of the steps checked before: check_every=1 records it"
    added, share = _added([*off.values()], len(model.names)), float(rest.norm() / used.norm())
    if not is_shown:
        return f"the gradient is not {through} on X[batch], y[batch]: {share:.2g} of it, in {names}. {_RECORDS}"
    text = f"the gradient that does not come through the outputs is {share:.2g} of the whole, in {names}: {added}"
    return f"{text}. unexplained=SHARE records it as a term of its own"


def _added(off: Sequence[tuple[Tensor, Tensor, Tensor]], num_parameters: int) -> str:
    """Say what was added to gradients, given as used, as they come through the outputs, and their weights."""
    rests = [u - g for u, g, _ in off]
    sizes = [float(d.square().mean().sqrt()) for d in rests if d.numel() > _FEW_ENTRIES]
    largest = max(float(d.abs().max()) for d in rests)
    if sum(int((d.abs() > _ROOM * largest).sum()) for d in rests) <= _FEW_ENTRIES:
        return "an edit of .grad"
    if all(_is_same(d, d.abs().mean() * w.sign()) for d, (_, _, w) in zip(rests, off, strict=True)):
        return f"an L1 penalty of factor {float(rests[0].abs().mean()):.3g} in the loop's loss"
    along = (d.flatten()[w.flatten().argsort()].diff() for d, (_, _, w) in zip(rests, off, strict=True))
    if all(bool((steps >= -_ROOM * largest).all()) for steps in along):
        return "a penalty on each weight in the loop's loss"
    if len(off) == num_parameters and sizes and max(sizes) < 3 * min(sizes):
        return f"gradient noise of deviation {max(sizes):.2g}"
    return "something else than the loss of the outputs adds to it"


def _sent(setup: TrainingSetup, check: StepCheck, passes: Sequence[CapturedForward]) -> Float[Tensor, " P"]:
    """Return what came into the weights through passes that no batch was announced for."""
    total, spec = torch.zeros_like(check.used), TensorSpec(check.state.dtype, check.state.device)
    for f in passes:

        def product(z: Tensor, _: Tensor, delta: Tensor | None = f.output_gradient) -> Tensor:
            return (z if delta is None else delta.to(z) * z).flatten(1).sum(dim=1)

        n, ones = len(f.inputs), torch.ones(len(f.inputs), device=check.used.device)
        random = f.random_state, f.device_random_state, f.statistics
        forward = ForwardPass(n, f.modes, None, None, *random, autocast=f.autocast, weights=f.weights)
        with suppress(RuntimeError, TypeError, ValueError):  # the loss took something else than the outputs
            data, replay = PassData(forward, ones.long(), f.inputs, ones, ones), TrainingReplay
            total += replay(setup.model, PerSampleLoss(product), spec).gradient(check.state, data).gradient
    return total


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients are the same up to what a guess may leave, relative to the largest entry."""
    return bool((a - b).abs().max() <= 4 * relative_rounding(a.dtype) * b.abs().max())


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _other(loss: Loss, stated: Loss) -> str:
    return f"the loop's loss is that of {_name(loss)}, not of the stated {_name(stated)}: state that one"


def _name(loss: Loss) -> str:
    return f"{loss.name}, reduction={loss.reduction!r}" if isinstance(loss, PerSampleLoss) else str(loss)
