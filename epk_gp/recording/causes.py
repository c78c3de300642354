"""Targets that do not fit a loss, and why a recorded step is not what the update rule predicts."""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.core.gradients import allclose, batch_gradient
from epk_gp.core.losses import (
    ELEMENTWISE,
    ClassLoss,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    PerSampleLoss,
    classes_second,
    ignored_class,
    loss_input,
    per_sample_losses,
    sample_weights,
    soft_targets,
)
from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import Step

_REGRESSION = "For regression, state loss=nn.MSELoss()."


def validate_targets(
    loss: Loss,
    targets: Shaped[Tensor, "..."],
    num_points: int,
    num_outputs: int,
    sample_shape: tuple[int, ...] | None = None,
) -> None:
    """Raise if targets do not fit the data, the network or the loss.

    Args:
        loss: The loss.
        targets: The targets of all samples.
        num_points: Number M of samples.
        num_outputs: Number C of outputs.
        sample_shape: Shape of what the loss takes of one sample; (C,) by default.

    Raises:
        TypeError: The targets have a dtype that the loss cannot take.
        ValueError: The targets have another shape, labels out of range, entries that are not finite, or rows that are
            not probability distributions.
    """
    if targets.ndim == 0 or targets.shape[0] != num_points:
        got = targets.shape[0] if targets.ndim else "a scalar"
        raise ValueError(f"targets must have one entry per point: got {got} for {num_points} points.")
    if targets.is_floating_point() and not torch.isfinite(targets).all():
        row = int((~torch.isfinite(targets.reshape(num_points, -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"targets must be finite: row {row} holds NaN or infinity.")
    sample_shape = (num_outputs,) if sample_shape is None else sample_shape
    is_elementwise = isinstance(loss, PerSampleLoss) and isinstance(loss.function, ELEMENTWISE)
    if isinstance(loss, MeanSquaredError) or is_elementwise:
        name, expected = getattr(loss, "name", type(loss).__name__), (num_points, *sample_shape)
        if expected not in (targets.shape, (*targets.shape, 1)) and (*expected, 1) != targets.shape:
            raise ValueError(f"{name} needs targets of the outputs' shape {expected}: got {tuple(targets.shape)}.")
    if isinstance(loss, MeanSquaredError) and not targets.is_floating_point():
        raise TypeError(f"MeanSquaredError needs floating-point targets: got {targets.dtype}.")
    if isinstance(loss, ClassLoss):
        _validate_classes(loss, targets, sample_shape)


def _validate_classes(loss: ClassLoss, targets: Tensor, sample_shape: tuple[int, ...]) -> None:
    """Raise if targets are neither labels of classes nor, for `CrossEntropy`, their probabilities."""
    num_points = len(targets)
    positions = sample_shape[1:] if targets.is_floating_point() or targets.shape[1:] == sample_shape[1:] else None
    num_classes = sample_shape[0] if positions is not None or len(sample_shape) == 1 else sample_shape[-1]
    if loss.class_weights is not None and len(loss.class_weights) != num_classes:
        raise ValueError(
            f"there must be one class weight per output: got {len(loss.class_weights)} for {num_classes} outputs."
        )
    if targets.is_floating_point() and isinstance(loss, CrossEntropy):
        if targets.shape != (num_points, *sample_shape):
            raise ValueError(
                f"class probabilities must have shape {(num_points, *sample_shape)}: got {tuple(targets.shape)}. "
                f"Class labels must be int64. {_REGRESSION}"
            )
        if (targets < 0).any() or (targets.sum(dim=1) - 1).abs().max() > 1e-4:
            raise ValueError(f"class probabilities must be non-negative and sum to 1 in every row. {_REGRESSION}")
        return
    if targets.dtype != torch.int64:
        raise TypeError(f"class labels must be int64: got {targets.dtype}. Convert them with .long().")
    if positions is None and targets.shape[1:] != sample_shape[:-1]:
        first, last = (num_points, *sample_shape[1:]), (num_points, *sample_shape[:-1])
        either = f"{first}" if first == last else f"{first}, or {last} where classes are last"
        hint = " Several need scores (n, T, V), alone or as `logits`, or a PerSampleLoss." if targets.ndim > 1 else ""
        raise ValueError(f"class labels must have shape {either}: got {tuple(targets.shape)}.{hint}")
    counted = targets[targets != ignored_class(loss)]
    if not len(counted):
        raise ValueError("at least one sample must not be ignored: all class labels are ignore_index.")
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"class labels must lie in 0..{num_classes - 1} (the network has {num_classes} outputs): got {low}..{high}."
        )


def validate_output_scale(
    loss: Loss, outputs: Float[Tensor, "n ..."], targets: Shaped[Tensor, "n ..."] | None = None
) -> None:
    """Raise if the loss takes log-probabilities and the outputs are not log-probabilities.

    Args:
        loss: The loss.
        outputs: What it takes, (n, C) or with several positions per sample.
        targets: Their targets, which say where the classes are if there are positions.

    Raises:
        ValueError: The exponentials of a row of outputs do not sum to 1.
    """
    if not isinstance(loss, NegativeLogLikelihood):
        return
    z = outputs.detach()
    totals = (z if targets is None else classes_second(z, targets)).logsumexp(dim=1).flatten()
    worst = float(totals[totals.abs().argmax()])
    if abs(worst) > torch.finfo(outputs.dtype).eps ** 0.5:
        raise ValueError(
            "NegativeLogLikelihood needs outputs that are log-probabilities: the exponentials of a row sum to "
            f"{math.exp(min(worst, 700.0)):.6g}, not to 1. End the network in LogSoftmax(dim=1), or use CrossEntropy."
        )


_SETTINGS = (bool, int, float, str)  # kinds of attributes of modules that are compared

_COMPILED = (
    "; or random numbers of a network that torch.compile compiled, which cannot be drawn again: set "
    "torch._inductor.config.fallback_random = True, or do not compile it"
)


class StepMismatchError(ValueError):
    """A recorded step is not the stated optimizer's step on the stated loss, data and network."""


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
        loss: The stated loss.
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
    loss: Loss
    statistics_error: float = 0.0
    without_gradient: Set[str] = frozenset()


def explain_mismatch(
    net: nn.Module, model: FunctionalModel, check: StepCheck, *, follows_rule: bool, unseen: str | None
) -> str:
    """Return the likeliest reason why a step is not the stated one, as a clause without a full stop.

    Args:
        net: The user's network, as it is right after the step.
        model: The recorded network.
        check: The step.
        follows_rule: Whether the step is the update rule's step on the gradient that the optimizer used.
        unseen: What calls of the network were seen, as a clause, if none was on the batch's rows.
    """
    used = check.used
    if not torch.isfinite(used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if not follows_rule and allclose(used, check.expected):
        return (
            "the gradient is that of the stated loss, but the weights did not move by the optimizer's update rule: "
            "another optimizer or option is at work, or the weights or options were changed between batch() and the "
            "step"
        )
    for cause, other in _likely_gradients(model, check):
        if bool(other.any()) and allclose(used, other):
            return cause
    known = unseen or changed_setting(net, model)
    compiled = _COMPILED if any(not part.is_deterministic for part in check.step.passes) else ""
    return known or (
        "the gradient is not that of the stated loss on X[batch], y[batch]: other indices than those given, augmented "
        "inputs, further arguments of the network's call, another loss, gradients of single parameters that were "
        f"clipped or scaled, gradients left over from an earlier backward() or of another batch{compiled}"
    )


def _likely_gradients(model: FunctionalModel, check: StepCheck) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients that loops use by mistake, each with a clause that says which one it is."""
    stated, y, used, own = check.loss, check.y, check.used, check.gradient
    yield "the gradient is that of the stated loss before clipping: state the loop's clipping, or none", own
    params, x = model.unflatten(check.state), check.X[:1]
    with torch.no_grad():
        returned, C = model.returned(params, x), model(params, x).shape[1]

    def sample_shape(loss: Loss, targets: Tensor) -> tuple[int, ...]:
        value = loss_input(model.signature, loss, returned, targets[:1])
        return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()

    def gradient(loss: Loss, targets: Tensor) -> Tensor:
        return batch_gradient(model, check.state, check.X, targets, loss, sample_weights(loss, targets))

    candidates: list[Loss] = [replace(stated, reduction="sum" if stated.reduction == "mean" else "mean")]
    kinds = (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
    candidates += [kind(reduction) for kind in kinds for reduction in ("mean", "sum")]
    for loss in candidates:
        is_one_hot = isinstance(stated, CrossEntropy) and not y.is_floating_point() and y.ndim == 1
        is_one_hot = is_one_hot and isinstance(loss, MeanSquaredError)
        targets = soft_targets(CrossEntropy(), y, check.state.new_empty(0, C)) if is_one_hot else y
        try:
            validate_targets(loss, targets, len(check.X), C, sample_shape(loss, targets))
        except (TypeError, ValueError):
            continue
        if loss != stated:
            yield f"the gradient is that of {loss}, not of the stated {stated}", gradient(loss, targets)
    is_elementwise = isinstance(stated, PerSampleLoss) and isinstance(stated.function, ELEMENTWISE)
    if (isinstance(stated, MeanSquaredError) or is_elementwise) and y.ndim == 1 and sample_shape(stated, y) == (1,):

        def against_all(z: Tensor, _: Tensor) -> Tensor:
            return per_sample_losses(stated, z.expand(-1, len(y)), y.to(z).expand(len(z), -1))

        yield (
            "the loop's loss broadcasts targets (n,) against outputs (n, 1) to (n, n), every output against every "
            "target: give both one shape, as in net(X).squeeze(1) or y[:, None]",
            batch_gradient(model, check.state, check.X, y, PerSampleLoss(against_all), check.c),
        )
    if isinstance(stated, ClassLoss) and not y.is_floating_point() and y.ndim == 2:
        yield (
            "the loop's loss compares the scores of each position with the label of the next one, as causal language "
            "models do: pass the recorder torch.cat([y[:, 1:], torch.full_like(y[:, :1], ignore_index)], dim=1) as y",
            gradient(stated, torch.cat([y[:, 1:], torch.full_like(y[:, :1], ignored_class(stated))], dim=1)),
        )
    ratio, bound = float(used @ own / (own @ own).clamp(min=1e-300)), float(used.abs().max())
    yield (
        f"the gradient is {ratio:.6g} times that of the stated loss: it was clipped or scaled (tell the recorder: "
        "clip=ClipNorm(...), or recorder.batch(indices, weight=...) for a scaled loss), or accumulated over several "
        "backward() calls (call recorder.batch() for each of their batches)",
        ratio * own,
    )
    clause = f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, clip=ClipValue(...)"
    yield clause, own.clamp(-bound, bound)


def changed_setting(net: nn.Module, model: FunctionalModel) -> str | None:
    """Return what of a network beside weights and moving statistics changes during a recording, as a clause."""
    recorded = dict(model.module.named_modules())
    for place, part in net.named_modules():
        before, now = _settings(recorded[place]) if place in recorded else {}, _settings(part)
        name = f"module {place!r} ({type(part).__name__})"
        if any(isinstance(value, torch.Generator) for value in vars(part).values()):
            return f"{name} draws from a torch.Generator of its own: let it draw from torch's default one"
        for key in before.keys() & now.keys():
            if before[key] != now[key]:
                return (
                    f"{name} has {key}={now[key]!r} and had {key}={before[key]!r} when recording began: such a setting "
                    "must stay as it is; a number that moves must be a floating-point buffer"
                )
    return None


def _settings(module: nn.Module) -> dict[str, object]:
    """Return the numbers and texts of a module that are neither weights nor moving statistics."""
    settings = {key: value for key, value in vars(module).items() if type(value) in _SETTINGS and key != "training"}
    buffers = {k: v for k, v in module.named_buffers(recurse=False) if v.numel() == 1 and not v.is_floating_point()}
    return settings | {key: value.item() for key, value in buffers.items() if key != "num_batches_tracked"}
