"""Diagnosis of a recorded step that is not what the update rule predicts: which known cause explains it."""

import math
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call

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
from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import quiet_checkpoints

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

_NUM_ROWS = 64  # inputs on which the user's network is compared with the deterministic one
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
    clip_factor: float | Float[Tensor, " P"]
    X: Shaped[Tensor, "B ..."]
    y: Shaped[Tensor, "B ..."]
    c: Float[Tensor, " B"]
    loss: Loss
    statistics_error: float = 0.0
    without_gradient: Set[str] = frozenset()

    @property
    def is_replayed(self) -> bool:
        """Whether the gradient is that of recorded forward passes, not of the network in evaluation mode."""
        return bool(self.step.passes)

    @cached_property
    def clipped(self) -> Float[Tensor, " P"]:
        """The recomputed gradient after the stated clipping."""
        return self.gradient * self.clip_factor


def explain_mismatch(
    net: nn.Module, model: FunctionalModel, check: StepCheck, *, follows_rule: bool, unseen: str | None = None
) -> str:
    """Return the likeliest reason why a step is not the stated one, as a clause without a full stop.

    Args:
        net: The user's network, as it is right after the step.
        model: The recorded network.
        check: The step.
        follows_rule: Whether the step is the update rule's step on the gradient that the optimizer used.
        unseen: Why no forward pass of the network was found for the step, as a clause, if that is known.
    """
    used, gradient = check.used, check.gradient
    if not torch.isfinite(used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if not follows_rule and allclose(used, check.clipped):
        return (
            "the gradient is that of the stated loss, but the weights did not move by the optimizer's update rule: "
            "another optimizer or option is at work, or the weights or options were changed between batch() and the "
            "step"
        )
    forward_cause = None if check.is_replayed else _explain_forward(net, model, check, unseen)
    if forward_cause is not None:
        return forward_cause
    if allclose(used, gradient):
        return "the gradient is that of the stated loss before clipping: it was not clipped as the recorder was told"
    ratio = float(used @ gradient / (gradient @ gradient)) if gradient.any() else 0.0
    if ratio and allclose(used, ratio * gradient):
        return _explain_ratio(ratio, check, torch.Size(_sample_shape(model, check, check.loss, check.y)).numel())
    bound = float(used.abs().max())
    if allclose(used, gradient.clamp(-bound, bound)):
        return (
            f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, clip=ClipValue(...), or "
            "do not clip"
        )
    factors = _factors_of_parameters(model, check)
    if factors is not None:
        name = max(factors, key=lambda name: abs(factors[name] - 1))
        return (
            "the gradients of the parameters are those of the stated loss, each times a factor of its own "
            f"({name}: {factors[name]:.3g}): they were clipped or scaled one by one, or some of them (a hook, "
            "clip_grad_norm_ of a part). Clip all parameters together, or use learning rates of their own"
        )
    other_loss = _matching_loss(model, check)
    if other_loss is not None:
        return f"the gradient is that of {other_loss}, not of the stated {check.loss}"
    if _broadcasts_targets(model, check):
        return (
            "the loop's loss broadcasts targets (n,) against outputs (n, 1) to (n, n), every output against every "
            "target: give both one shape, as in net(X).squeeze(1) or y[:, None]"
        )
    if _shifts_labels(model, check):
        return (
            "the loop's loss compares the scores of each position with the label of the next one, as causal language "
            "models do: pass the recorder torch.cat([y[:, 1:], torch.full_like(y[:, :1], ignore_index)], dim=1) as y"
        )
    return changed_setting(net, model) or (
        "the gradient is not that of the stated loss on X[batch], y[batch]: other indices than those given, augmented "
        "inputs, further arguments of the network's call, another loss, gradients left over from an earlier backward() "
        "or of another batch" + (_COMPILED if any(not part.is_deterministic for part in check.step.passes) else "")
    )


def _factors_of_parameters(model: FunctionalModel, check: StepCheck) -> dict[str, float] | None:
    """Return by which factor each parameter's gradient is the stated one's; None if one of them is no multiple."""
    factors = {}
    stated, used = model.unflatten(check.gradient), model.unflatten(check.used)
    rounding = torch.finfo(check.used.dtype).eps ** 0.5 * check.gradient.abs().max()
    for name in model.names:
        if bool((stated[name].abs() <= rounding).all()):
            continue
        factor = float((used[name] * stated[name]).sum() / stated[name].square().sum())
        if not allclose(used[name].reshape(-1), factor * stated[name].reshape(-1)):
            return None
        if stated[name].numel() > 1:  # one number is a multiple of any other
            factors[name] = factor
    return factors or None


def changed_setting(net: nn.Module, model: FunctionalModel) -> str | None:
    """Return what of a network beside weights and moving statistics changes during a recording, as a clause."""
    recorded = dict(model.module.named_modules())
    for place, part in net.named_modules():
        kept, name = recorded.get(place), f"module {place!r} ({type(part).__name__})"
        if any(isinstance(value, torch.Generator) for value in vars(part).values()):
            return f"{name} draws from a torch.Generator of its own: let it draw from torch's default one"
        if kept is None or type(kept) is not type(part):
            continue
        present = {key: value for key, value in vars(part).items() if type(value) in _SETTINGS and key != "training"}
        present |= {
            key: value.item()
            for key, value in part.named_buffers(recurse=False)
            if value.numel() == 1 and not value.is_floating_point() and key != "num_batches_tracked"
        }
        for key, value in present.items():
            before = getattr(kept, key, value)
            before = before.item() if isinstance(before, Tensor) and before.numel() == 1 else before
            if before != value:
                return (
                    f"{name} has {key}={value!r} and had {key}={before!r} when recording began: such a setting must "
                    "stay as it is; a number that moves must be a floating-point buffer"
                )
    return None


def _explain_forward(net: nn.Module, model: FunctionalModel, check: StepCheck, unseen: str | None) -> str | None:
    """Compare the user's network with the deterministic one, both with the weights before the step."""
    rows = check.X[:_NUM_ROWS]
    params = model.unflatten(check.state)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    signature = model.signature
    unseen = unseen or "no call of it was seen: call the network itself, net(X), not its parts or net.forward(X)"

    def call(*args: Tensor, **kwargs: Tensor) -> Any:
        return functional_call(net, {**params, **buffers}, args, kwargs)

    with torch.no_grad(), random_state_kept(check.state.device), quiet_checkpoints():
        returned = [signature.call(call, rows) for _ in range(2)]
        outputs, expected = [signature.outputs(value) for value in returned], model(params, rows)
    if not all(isinstance(z, Tensor) for z in outputs):
        return "the network in training mode returns something else than one tensor: put it in evaluation mode"
    if not torch.equal(outputs[0], outputs[1]):
        return f"the network's forward pass is random (dropout, or noise of its own), and {unseen}"
    if not allclose(outputs[0], expected):
        return (
            "the network in training mode differs from the network in evaluation mode (batch statistics, or a buffer "
            f"that changed), and {unseen}"
        )
    return None


def _sample_shape(model: FunctionalModel, check: StepCheck, loss: Loss, targets: Tensor) -> tuple[int, ...]:
    """Return the shape of what a loss takes of one sample; () if that is not one tensor."""
    with torch.no_grad():
        returned = model.returned(model.unflatten(check.state), check.X[:1])
        value = loss_input(model.signature, loss, returned, targets[:1])
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()


def _broadcasts_targets(model: FunctionalModel, check: StepCheck) -> bool:
    """Return whether the gradient is that of a loss that compares every output with every target."""
    loss, y = check.loss, check.y
    is_squared = isinstance(loss, MeanSquaredError)
    if not is_squared and not (isinstance(loss, PerSampleLoss) and isinstance(loss.function, ELEMENTWISE)):
        return False
    if y.ndim != 1 or _sample_shape(model, check, loss, y) != (1,):
        return False

    def against_all(z: Tensor, _: Tensor) -> Tensor:
        return per_sample_losses(loss, z.expand(-1, len(y)), y.to(z).expand(len(z), -1))

    gradient = batch_gradient(model, check.state, check.X, y, PerSampleLoss(against_all), check.c)
    return allclose(check.used, gradient)


def _shifts_labels(model: FunctionalModel, check: StepCheck) -> bool:
    """Return whether the gradient is a multiple of that of the stated loss with the labels of the next positions."""
    loss, y = check.loss, check.y
    if not isinstance(loss, ClassLoss) or y.is_floating_point() or y.ndim != 2:
        return False
    y = torch.cat([y[:, 1:], torch.full_like(y[:, :1], ignored_class(loss))], dim=1)
    gradient = batch_gradient(model, check.state, check.X, y, loss, check.c)
    return bool(gradient.any()) and allclose(check.used, gradient * (check.used @ gradient / (gradient @ gradient)))


def _explain_ratio(ratio: float, check: StepCheck, num_outputs: int) -> str:
    """Explain a gradient that is a multiple of the stated one."""
    loss = check.loss
    count = len(check.X) * (num_outputs if isinstance(loss, MeanSquaredError) else 1)
    if abs(ratio * count - 1) < 1e-3 and loss.reduction == "sum":
        return f"the gradient is 1/{count} of the stated loss's: the loss was reduced by 'mean', not 'sum'"
    if abs(ratio / count - 1) < 1e-3 and loss.reduction == "mean":
        return f"the gradient is {count} times the stated loss's: the loss was reduced by 'sum', not 'mean'"
    message = f"the gradient is {ratio:.6g} times that of the stated loss"
    if abs(ratio) < 1:
        return (
            f"{message}: it was clipped or scaled down (tell the recorder: clip=ClipNorm(...), or "
            "recorder.batch(indices, weight=...) for a scaled loss)"
        )
    return (
        f"{message}: it was scaled up, or accumulated over several backward() calls (call recorder.batch() for each of "
        "their batches, with its weight)"
    )


def _matching_loss(model: FunctionalModel, check: StepCheck) -> str | None:
    """Return the name of another loss whose gradient the optimizer used, if one of the common losses fits."""
    stated, y = check.loss, check.y
    with torch.no_grad():
        C = model(model.unflatten(check.state), check.X[:1]).shape[1]
    has_labels = isinstance(stated, CrossEntropy) and not y.is_floating_point()
    kinds = (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
    candidates: list[Loss] = [kind(reduction) for kind in kinds for reduction in ("mean", "sum")]
    for candidate in candidates:
        targets = y
        if has_labels and y.ndim == 1 and isinstance(candidate, MeanSquaredError):
            targets = soft_targets(CrossEntropy(), y, check.state.new_empty(0, C))
        try:
            validate_targets(candidate, targets, len(check.X), C, _sample_shape(model, check, candidate, targets))
        except (TypeError, ValueError):
            continue
        c = sample_weights(candidate, targets)
        gradient = batch_gradient(model, check.state, check.X, targets, candidate, c)
        if candidate != stated and allclose(check.used, gradient):
            return str(candidate)
    return None
