"""Why a recorded step is not the one that was stated: guesses that are tested before one of them is named.

What a loop did shows in three places, which are looked at in the order in which it did it. The outputs of a pass are
those of the recorded network, or the network computed something else. The gradient in the outputs is that of the stated
loss, or another loss, other targets or a factor is at work. The optimizer's gradient is what comes through the outputs,
or something was added to it, left in it or done to it afterwards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call

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
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import ForwardPass, Step
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints
from epk_gp.optimizers.update_rules import predict_step, rounded_bound, step_tolerance
from epk_gp.recording.causes import changed_setting
from epk_gp.recording.observer import CapturedForward, ObservedStep
from epk_gp.recording.setup import TrainingSetup

# Differences of a gradient in the outputs that count as rounding, in units of its size, by the dtype of the outputs.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOW_PRECISION = 2e-2
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
        return self.is_like(self.delta, expected, float(self.factor.abs().max()) / len(self.factor))

    def is_like(self, seen: Float[Tensor, "n ..."], expected: Float[Tensor, "n ..."], size: float = 0.0) -> Tensor:
        """Return in which rows two numbers are the same up to the rounding of the outputs."""
        tolerance = (
            _LOW_PRECISION
            if self.captured.outputs is None
            else _TOLERANCE.get(self.captured.outputs.dtype, _LOW_PRECISION)
        )
        bound = tolerance * (size + float(expected.abs().max()))
        return (seen.double() - expected).abs().flatten(1).amax(dim=1) <= bound


_Targets = Callable[[SeenPass], Tensor]


def seen_passes(setup: TrainingSetup, observed: ObservedStep) -> list[SeenPass]:
    """Return the passes of a step as the hooks saw them; none if those of a batch were not seen."""
    announced, has_graph = observed.made.announced, setup.model.signature.graph is not None
    captured = [[f.of_nodes(b.samples) if has_graph else f for f in b.forwards] for b in announced]
    counts = [len(f.inputs) for of_batch in captured for f in of_batch]
    if not all(captured):
        return []
    step = observed.step
    step = step if step.passes else replace(step, passes=tuple(ForwardPass(n) for n in counts))
    passes, seen = iter(passes_of(step, setup.X, setup.y, setup.loss)), list[SeenPass]()
    for batch, of_batch in zip(announced, captured, strict=True):
        weight = torch.as_tensor(1.0 if batch.weight is None else batch.weight, dtype=torch.float64)
        factors = weight.expand(len(batch.samples)).split([len(f.inputs) for f in of_batch])
        for f, factor in zip(of_batch, factors, strict=True):
            seen.append(SeenPass(f, next(passes), factor, len(factor) / len(batch.samples)))
    return seen


def is_stated_loss(setup: TrainingSetup, seen: Sequence[SeenPass]) -> bool:
    """Return whether the loop's loss is the stated one as far as it was seen: its gradient in the outputs is."""
    if isinstance(setup.loss, UnstatedLoss):
        return True
    return all(bool(p.rows_like(p.recorded(setup.loss)).all()) for p in seen if p.shown)


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
    if observed.made.unseen is not None:
        return observed.made.unseen
    seen = seen_passes(setup, observed)
    cause = _network_cause(setup, check, seen)
    if cause is None and not is_stated_loss(setup, seen):
        cause = next(_loss_causes(setup, [p for p in seen if p.shown]))
    return cause or next(_gradient_causes(setup, observed, check))


def _move_cause(setup: TrainingSetup, observed: ObservedStep) -> str:
    """Say what moved the weights beside the optimizer's step on the gradient of the stated loss."""
    model, made, rule = setup.model, observed.made, setup.update_rule.name
    predicted, _ = predict_step(made.update, model.sizes, observed.start, made.gradient, observed.momentum)
    rest, known = observed.end - observed.start - predicted, "the gradient is that of the stated loss"
    rate = -float(rest @ made.gradient / (made.gradient @ made.gradient).clamp(min=1e-300))
    if allclose(rest, -rate * made.gradient):
        return (
            f"{known}, and another optimizer moved the weights by {rate:.3g} times it too: pass the recorder all "
            "optimizers that step, as a list"
        )
    allowed = step_tolerance(observed.start, predicted)
    moved = [name for name, part in model.unflatten(rest).items() if part.numel() and part.abs().max() > allowed]
    if len(moved) < len(model.names):
        return (
            f"{known}, and the weights of {_named(moved)} were changed between batch() and the end of the step: change "
            "weights through the optimizer alone"
        )
    return (
        f"{known}, but all weights moved otherwise than by {rule}'s update rule on it: another optimizer or option is "
        "at work"
    )


def _network_cause(setup: TrainingSetup, check: StepCheck, seen: Sequence[SeenPass]) -> str | None:
    """Say why the outputs of a pass are not those of the recorded network; None where they are."""
    model, net, loss, layout = setup.model, setup.net, setup.loss, setup.model.signature.layout
    replay = TrainingReplay(model, loss, TensorSpec(check.state.dtype, check.state.device))
    for p in (p for p in seen if p.shown):
        returned = _returned(replay, check.state, p.data)
        own = isinstance(loss, UnstatedLoss)
        again = rows_of(returned, len(p.data.X)) if own else loss_input(model.signature, loss, returned, p.data.y)
        if not isinstance(again, Tensor) or again.shape != p.z.shape or bool(p.is_like(again, p.z).all()):
            continue
        changed = changed_setting(net, model)
        is_compiled = hasattr(net, "_orig_mod") or getattr(net, "_compiled_call_impl", None) is not None
        recorded = dict(model.module.named_modules())
        hooked = [
            name
            for name, part in net.named_modules()
            if name and len(part._forward_hooks) > len(recorded[name]._forward_hooks)
        ]
        what = (
            f"the outputs that the loop saw are not the recorded network's (by up to {(again - p.z).abs().max():.2g})"
        )
        if changed is not None:
            return changed
        if is_compiled and not p.data.forward.is_deterministic:
            return (
                f"{what}: torch.compile makes random numbers that cannot be drawn again. Set "
                "torch._inductor.config.fallback_random = True, or do not compile the network"
            )
        if hooked:
            return f"{what}: a forward hook of module {_named(hooked)} changes them. Register it before recording"
        if p.captured.num_arguments > (1 if layout is None else len(layout.tensors)):
            return f"{what}: the network was called with further arguments. Pass all that it depends on as X"
        return (
            f"{what}, at the same weights, rows and random numbers: it computes with something else that changes in "
            "training. A number that moves must be a floating-point buffer"
        )
    return None


def _returned(replay: TrainingReplay, state: Float[Tensor, " PQ"], data: PassData) -> Any:
    """Replay a forward pass in the precision of the training, and return what the network returns."""
    module, autocast = replay.module_in_modes(data), data.forward.autocast
    named = {n: value.clone() for n, value in module.named_buffers()} | replay.params(state, data)
    mixed = torch.autocast(replay.spec.device.type, autocast, enabled=autocast is not None)
    with torch.no_grad(), disable_fused_attention(), quiet_checkpoints(), replay.random_numbers(data), mixed:
        return replay.model.signature.call(
            lambda *args, **kwargs: functional_call(module, named, args, kwargs), replay.rows(data), replay.spec
        )


def _loss_causes(setup: TrainingSetup, seen: Sequence[SeenPass]) -> Iterator[str]:
    """Yield what the loop's loss is, where its gradient in the outputs is not that of the stated loss."""
    stated, first = setup.loss, seen[0]

    def explains(gradient: Callable[[SeenPass], Tensor]) -> bool:
        with suppress(IndexError, RuntimeError, TypeError, ValueError):  # a loss that cannot take outputs or targets
            return all(bool(p.rows_like(gradient(p)).all()) for p in seen)
        return False

    def explaining(losses: Iterable[tuple[str, Loss, _Targets]]) -> Iterator[str]:
        for clause, loss, targets in losses:
            if explains(lambda p, loss=loss, targets=targets: p.expected(loss, targets(p))):  # type: ignore[misc]
                yield clause

    pairs = [(p.delta, p.expected(stated, p.data.y)) for p in seen]
    products, squares = (sum(float((x * e).sum()) for x, e in both) for both in (pairs, [(e, e) for _, e in pairs]))
    ratio, num_backwards = products / max(squares, 1e-300), first.captured.num_backwards
    is_scaled = explains(lambda p: ratio * p.expected(stated, p.data.y))
    if is_scaled and num_backwards > 1:
        yield (
            f"the loop's gradient in the outputs is {ratio:.6g} times that of the stated loss, because backward() went "
            f"through the pass {num_backwards} times: call it once"
        )
    yield from explaining(_options_of(stated, first))
    if is_scaled:
        yield (
            f"the loop's loss is {ratio:.6g} times that of the stated loss: tell the recorder by "
            f"recorder.batch(indices, weight={ratio:.6g}), or let it read the factor with weight=None"
        )
    yield from explaining(_other_losses(stated, first))
    yield from _weighted_rows(stated, seen)
    yield from _other_targets(setup, seen)
    if isinstance(stated, CrossEntropy) and first.z.ndim == 2 and first.z.shape[1] > 1:
        q = torch.cat([p.z.softmax(dim=1) - p.delta / p.weights(stated, p.data.y)[:, None] for p in seen])
        if bool((q >= -_ROOM).all()) and bool(((q.sum(dim=1) - 1).abs() <= _ROOM).all()):
            yield (
                "the loop's loss compares the outputs with probabilities that are not those of y, such as a teacher's "
                f"(distillation): pass them as y if they stay. {_RECORDS}"
            )
    row = int((~first.rows_like(pairs[0][1])).long().argmax())
    got, stated_values = ([float(f"{v:.3g}") for v in value[row].flatten()[:3]] for value in pairs[0])
    yield (
        f"the loop's loss is not {_name(stated)}: its gradient in the outputs of row {row} begins with {got}, that of "
        f"the stated loss with {stated_values}. {_RECORDS}"
    )


def _options_of(stated: Loss, first: SeenPass) -> Iterator[tuple[str, Loss, _Targets]]:
    """Yield the stated loss with another option, with a clause and its targets."""
    y, others = first.data.y, [replace(stated, reduction="sum" if stated.reduction == "mean" else "mean")]
    if isinstance(stated, CrossEntropy):
        c = first.weights(stated, y)
        z, delta = (classes_second(value, y) for value in (first.z, first.delta))
        q = z.softmax(dim=1) - delta / c.view(-1, *[1] * (z.ndim - 1))
        smoothing = rounded_bound(z.shape[1] * max(0.0, float(q.amin(dim=1).median())))
        others += [replace(stated, label_smoothing=min(smoothing if smoothing > _ROOM else 0.0, 1.0))]
    for loss in others:
        if loss != stated:
            yield _other(loss, stated), loss, lambda p: p.data.y


def _other_losses(stated: Loss, first: SeenPass) -> Iterator[tuple[str, Loss, _Targets]]:
    """Yield losses that loops use in the place of the stated one, with a clause and their targets."""

    def as_stated(p: SeenPass) -> Tensor:
        return p.data.y

    def one_hot(p: SeenPass) -> Tensor:
        return soft_targets(CrossEntropy(), p.data.y, p.z)

    y, kinds = first.data.y, (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
    others: list[Loss] = [kind(reduction) for kind in kinds for reduction in ("mean", "sum")]
    modules = (nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)
    others += [as_loss(kind(reduction=reduction)) for kind in modules for reduction in ("mean", "sum")]
    is_hard = isinstance(stated, ClassLoss) and not y.is_floating_point() and y.ndim == 1 and first.z.ndim == 2
    is_entry_by_entry = y.is_floating_point() and fit_targets(y, first.z).shape == first.z.shape
    for loss in others:
        if loss != stated and (isinstance(loss, ClassLoss) or is_hard or is_entry_by_entry):
            yield _other(loss, stated), loss, one_hot if is_hard and not isinstance(loss, ClassLoss) else as_stated
    is_elementwise = isinstance(stated, PerSampleLoss) and isinstance(stated.function, ELEMENTWISE)
    if (isinstance(stated, MeanSquaredError) or is_elementwise) and y.ndim == 1:

        def against_all(z: Tensor, y: Tensor) -> Tensor:
            return per_sample_losses(stated, z.expand(-1, len(y)), y.to(z).expand(len(z), -1))

        yield (
            "the loop's loss broadcasts targets (n,) against outputs (n, 1) to (n, n), every output against every "
            "target: give both one shape, as in net(X).squeeze(1) or y[:, None]",
            PerSampleLoss(against_all, stated.reduction),
            as_stated,
        )
    if isinstance(stated, ClassLoss) and not y.is_floating_point() and y.ndim == 2:
        ignored = ignored_class(stated)
        yield (
            "the loop's loss compares the scores of each position with the label of the next one, as causal language "
            "models do: pass the recorder torch.cat([y[:, 1:], torch.full_like(y[:, :1], ignore_index)], dim=1) as y",
            stated,
            lambda p: torch.cat([p.data.y[:, 1:], torch.full_like(p.data.y[:, :1], ignored)], dim=1),
        )


def _weighted_rows(stated: Loss, seen: Sequence[SeenPass]) -> Iterator[str]:
    """Yield by what the rows' gradients are multiplied, where each is a multiple of the stated loss's."""
    if not isinstance(stated, CrossEntropy) or any(p.data.y.ndim > 1 or p.z.ndim != 2 for p in seen):
        return
    plain = replace(stated, class_weights=None)
    D = torch.cat([p.expected(plain, p.data.y) for p in seen])
    delta, z, y = (torch.cat(values) for values in zip(*((p.delta, p.z, p.data.y) for p in seen), strict=True))
    r = (delta * D).sum(dim=1) / D.square().sum(dim=1).clamp(min=1e-300)
    if not bool(((delta - r[:, None] * D).abs() <= _ROOM * delta.abs().max()).all()):
        return
    classes, place, counts = y.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(classes), dtype=r.dtype).index_add_(0, place, r) / counts
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
    yield (
        f"the network saw {rows}, but the targets in the loop's loss are {order}, from row {row} of the batch on. Take "
        "rows, targets and indices from one data set, such as IndexedDataset"
    )


def _gradient_causes(setup: TrainingSetup, observed: ObservedStep, check: StepCheck) -> Iterator[str]:
    """Yield what happened to the gradient after it came through the outputs."""
    model, net, made, w = setup.model, setup.net, observed.made, observed.start
    used, whole = check.used, check.expected / check.clip_factor
    rest, bound, norm = used - whole, float(used.abs().max()), float(used.norm())
    if setup.clip is not None and allclose(used, whole):
        yield "the gradient is that of the stated loss before clipping: state the loop's clipping, or none"
    ratio = float(used @ whole / (whole @ whole).clamp(min=1e-300))
    if allclose(used, ratio * whole):
        is_smaller = 0 < ratio < 1
        yield (
            f"the gradient is {ratio:.6g} times that which comes through the outputs: it was clipped or scaled after "
            f"backward(). Tell the recorder, clip=ClipNorm({norm:.6g}) if that is its bound"
            if is_smaller
            else f"the gradient is {ratio:.6g} times that which comes through the outputs: it was scaled after "
            "backward(). Scale the loss instead, and tell the recorder, recorder.batch(indices, weight=...)"
        )
    if allclose(used, whole.clamp(-bound, bound)):
        yield f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, clip=ClipValue(...)"
    for passes in ([made.others] if made.others else []) + [[p] for p in made.others]:
        if allclose(rest, _gradient_of_captured(setup, check, passes)):
            yield (
                f"the gradient holds that of a backward() of {sum(len(p.inputs) for p in passes)} other rows, which "
                "recorder.batch() did not get: call it for each batch whose gradients add up, or optimizer.zero_grad()"
            )
    if len(made.gradient_before) and allclose(rest, made.gradient_before):
        yield "the gradient of the step before was left over: call optimizer.zero_grad() before backward()"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            yield (
                f"the gradient was averaged over the {world} processes, and only the rows of this one were announced: "
                "record the rows of all (docs: distributed training)"
            )
    split = [model.unflatten(value) for value in (used, whole, w)]
    names = [
        n for n in model.names if bool((split[0][n] - split[1][n]).any()) and not allclose(split[0][n], split[1][n])
    ]
    off = [(split[0][n], split[1][n], split[2][n]) for n in names]
    if all(not bool(u.any()) for u, _, _ in off):
        yield (
            f"no gradient reached {_named(names)}, although the outputs depend on it: leave .grad as backward() left "
            "it, or freeze with requires_grad_(False)"
        )
    hooked = [n for n, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [n for n, part in net.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    if hooked:
        yield (
            f"a backward hook at {_named(hooked)} changes gradients: remove it, or accept what it adds as a term of "
            "its own with unexplained=SHARE"
        )
    ratios = [float((u * g).sum() / (g * g).sum().clamp(min=1e-300)) for u, g, _ in off]
    if all(allclose(u, r * g) for r, (u, g, _) in zip(ratios, off, strict=True)):
        yield (
            f"the gradients of {_named(names)} alone were clipped or scaled (by {ratios[0]:.6g}): clip all parameters "
            "together, or give groups of parameters other learning rates"
        )
    rates = observed.penalty.fitted(used, check.gradient, w)
    penalty = None if rates is None else observed.penalty.gradient(w, rates)
    if penalty is not None and allclose(used, check.gradient + penalty):
        yield (
            "the factor of the L2 penalty in the loop's loss is another one than in the checked steps before: "
            "check_every=1 records it as it moves"
        )
    added = "something else than the loss of the outputs adds to it"
    sizes = [float((u - g).square().mean().sqrt()) for u, g, _ in off if u.numel() > 3]
    along = [(u - g).flatten()[v.flatten().argsort()] for u, g, v in off]  # ordered by the weights
    if int((rest.abs() > _ROOM * rest.abs().max()).sum()) <= _FEW_ENTRIES:
        added = "an edit of .grad"
    elif all(allclose(u - g, (u - g).abs().mean() * v.sign()) for u, g, v in off):
        added = f"an L1 penalty of factor {float((off[0][0] - off[0][1]).abs().mean()):.3g} in the loop's loss"
    elif all(bool((d.diff() >= -_ROOM * d.abs().max()).all()) for d in along):
        added = "a penalty on each weight in the loop's loss"
    elif len(off) == len(model.names) and sizes and max(sizes) < 3 * min(sizes):
        added = f"gradient noise of deviation {max(sizes):.2g}"
    yield (
        f"the gradient that does not come through the outputs is {float(rest.norm() / used.norm()):.2g} of the whole, "
        f"in {_named(names)}: {added}. unexplained=SHARE records it as a term of its own"
    )


def _gradient_of_captured(
    setup: TrainingSetup, check: StepCheck, passes: Sequence[CapturedForward]
) -> Float[Tensor, " P"]:
    """Return what came into the weights through passes that no batch was announced for."""
    total = torch.zeros_like(check.used)
    for f in passes:
        delta = f.output_gradient
        if delta is None or setup.model.signature.output is not None:
            continue

        def product(z: Tensor, _: Tensor, delta: Tensor = delta) -> Tensor:
            return (delta.to(z) * z).flatten(1).sum(dim=1)

        n = len(f.inputs)
        forward = ForwardPass(
            n,
            f.modes,
            None,
            None,
            f.random_state,
            f.device_random_state,
            f.statistics,
            autocast=f.autocast,
            weights=f.weights,
        )
        ones = torch.ones(n, device=check.used.device)
        data = PassData(forward, torch.arange(n), f.inputs, ones, ones)
        spec = TensorSpec(check.state.dtype, check.state.device)
        total += TrainingReplay(setup.model, PerSampleLoss(product), spec).gradient(check.state, data).gradient
    return total


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _other(loss: Loss, stated: Loss) -> str:
    return f"the loop's loss is that of {_name(loss)}, not of the stated {_name(stated)}: state that one"


def _name(loss: Loss) -> str:
    return f"{loss.name}, reduction={loss.reduction!r}" if isinstance(loss, PerSampleLoss) else str(loss)
