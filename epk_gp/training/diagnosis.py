"""Why a recorded step is not what the update rule predicts: the causes that can be told apart."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.core.gradients import alike, batch_gradient, relative_rounding
from epk_gp.core.losses import (
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    sample_weights,
    soft_targets,
    validate_targets,
)
from epk_gp.core.model import FunctionalModel

CANCELLATION_FACTOR = 32  # how many times worse than our own float32 gradient the optimizer's may be


class StepMismatchError(ValueError):
    """A recorded step is not the stated optimizer's step on the stated loss, data and network."""


@dataclass(frozen=True, eq=False)
class StepCheck:
    """One step as it was, beside what was stated of it.

    Attributes:
        start: Weights before the step, (P,).
        used: The gradient that the optimizer used, (P,).
        gradient: Gradient of the stated loss on the stated batch at `start`, (P,), not clipped.
        clipped: The same after the stated clipping, (P,).
        X: The stated batch.
        y: Its targets.
        c: The weights of its samples, (B,).
        loss: The stated loss.
    """

    start: Float[Tensor, " P"]
    used: Float[Tensor, " P"]
    gradient: Float[Tensor, " P"]
    clipped: Float[Tensor, " P"]
    X: Shaped[Tensor, "B ..."]
    y: Shaped[Tensor, "B ..."]
    c: Float[Tensor, " B"]
    loss: Loss


def explain_mismatch(net: nn.Module, model: FunctionalModel, replay: StepCheck) -> str:
    """Name the likeliest reason why a step is not the stated one.

    Args:
        net: The user's network, as it is right after the step.
        model: The recorded network.
        replay: The step.

    Returns:
        A sentence without a full stop.
    """
    used, gradient, loss = replay.used, replay.gradient, replay.loss
    if not torch.isfinite(used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if alike(used, replay.clipped):
        return (
            "the gradient is that of the stated loss, but the weights did not move by the optimizer's update rule: "
            "another optimizer or option is at work, or the weights or options were changed between batch() and the "
            "step"
        )
    random = _forward_cause(net, model, replay.start, replay.X)
    if random is not None:
        return random
    if alike(used, gradient):
        return "the gradient is that of the stated loss before clipping: it was not clipped as the recorder was told"
    ratio = float(used @ gradient / (gradient @ gradient)) if gradient.any() else 0.0
    if ratio and alike(used, ratio * gradient):
        return _ratio_cause(ratio, len(replay.X), loss, _num_outputs(model, replay.start, replay.X))
    bound = float(used.abs().max())
    if alike(used, gradient.clamp(-bound, bound)):
        return (
            f"the gradient was clipped to +-{bound:.6g} entry by entry: tell the recorder, "
            "clip=ClipValue(...), or leave it out"
        )
    other = _other_loss(model, replay)
    if other is not None:
        return f"the gradient is that of {other}, not of the stated {loss}"
    return (
        "the gradient is not that of the stated loss on X[batch], y[batch]: other indices than those given, augmented "
        "inputs, another loss, gradients left over from an earlier backward() or of another batch"
    )


def consistent_up_to_rounding(model: FunctionalModel, replay: StepCheck) -> bool:
    """Whether the optimizer's gradient is the stated one, up to what its dtype can lose by cancellation."""
    if (replay.used - replay.clipped).abs().max() <= relative_rounding(replay.start.dtype) * replay.clipped.abs().max():
        return True
    if replay.start.dtype == torch.float64:
        return False
    wide = FunctionalModel(copy.deepcopy(model.module).double(), model.names, model.shapes)
    X = replay.X.double() if replay.X.is_floating_point() else replay.X
    exact = batch_gradient(wide, replay.start.double(), X, replay.y, replay.loss, replay.c)
    lost = (replay.gradient - exact).abs().max()
    return bool((replay.used - replay.clipped).abs().max() <= CANCELLATION_FACTOR * lost)


def _forward_cause(net: nn.Module, model: FunctionalModel, start: Tensor, X: Tensor) -> str | None:
    """Compare the user's network, as it stands, with the deterministic one, both at the step's start."""
    rows = X[: min(len(X), 64)]
    weights = model.unflatten(start)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng():
        outputs = [torch.func.functional_call(net, {**weights, **buffers}, (rows,)) for _ in range(2)]
        expected = model(weights, rows)
    if not all(isinstance(z, Tensor) for z in outputs):
        return "the network in training mode returns something else than one tensor: put it in evaluation mode"
    if not torch.equal(outputs[0], outputs[1]):
        return "the network's forward pass is random (dropout, or noise of its own): put it in evaluation mode"
    if not alike(outputs[0], expected):
        return (
            "the network in training mode differs from the network in evaluation mode (batch statistics, or a buffer "
            "that changed): freeze it before recording"
        )
    return None


def _num_outputs(model: FunctionalModel, start: Tensor, X: Tensor) -> int:
    with torch.no_grad():
        return model(model.unflatten(start), X[:1]).shape[1]


def _ratio_cause(ratio: float, batch_size: int, loss: Loss, num_outputs: int) -> str:
    count = batch_size * (num_outputs if isinstance(loss, MeanSquaredError) else 1)
    if abs(ratio * count - 1) < 1e-3 and loss.reduction == "sum":
        return f"the gradient is 1/{count} of the stated loss's: the loss was reduced by 'mean', not 'sum'"
    if abs(ratio / count - 1) < 1e-3 and loss.reduction == "mean":
        return f"the gradient is {count} times the stated loss's: the loss was reduced by 'sum', not 'mean'"
    told = f"the gradient is {ratio:.6g} times that of the stated loss"
    if abs(ratio) < 1:
        return (
            f"{told}: it was clipped or scaled down (tell the recorder: clip=ClipNorm(...), or "
            "recorder.batch(indices, weight=...) for a scaled loss)"
        )
    return (
        f"{told}: it was scaled up, or accumulated over several backward() calls (call recorder.batch() for each of "
        "their batches, with its weight)"
    )


def _other_loss(model: FunctionalModel, replay: StepCheck) -> str | None:
    stated, y = replay.loss, replay.y
    C = _num_outputs(model, replay.start, replay.X)
    labels = isinstance(stated, CrossEntropy) and not y.is_floating_point()
    kinds = (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
    candidates: list[Loss] = [kind(reduction) for kind in kinds for reduction in ("mean", "sum")]
    for candidate in candidates:
        targets = y
        if labels and isinstance(candidate, MeanSquaredError):
            targets = soft_targets(CrossEntropy(), y, replay.start.new_empty(0, C))
        try:
            validate_targets(candidate, targets, len(replay.X), C)
        except (TypeError, ValueError):
            continue
        c = sample_weights(candidate, targets)
        found = batch_gradient(model, replay.start, replay.X, targets, candidate, c)
        if candidate != stated and alike(replay.used, found):
            return str(candidate)
    return None
