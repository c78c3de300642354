"""Why a recorded step is not what the step law predicts: the causes that can be told apart."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.recording.losses import (
    CrossEntropy,
    Loss,
    MeanSquaredError,
    check_targets,
    per_sample_losses,
    sample_weight,
    soft_targets,
)
from epk_gp.recording.networks import Skeleton, call, flatten, unflatten


class UnexplainedStepError(ValueError):
    """A recorded step is not the stated optimizer's step on the stated loss, data and network."""


def batch_gradient(
    skeleton: Skeleton, w: Float[Tensor, " P"], X: Tensor, y: Tensor, loss: Loss, *, block_elements: int = 1 << 22
) -> Float[Tensor, " P"]:
    """Compute the gradient of a batch's joined loss at weights w, in blocks of bounded size."""
    weights = {name: value.detach().requires_grad_() for name, value in unflatten(skeleton, w).items()}
    leaves = [weights[name] for name in skeleton.names]
    rows = max(1, block_elements // max(1, X[0].numel()))
    c = sample_weight(loss, X.shape[0])
    total = torch.zeros_like(w)
    with torch.enable_grad():
        for X_block, y_block in zip(X.split(rows), y.split(rows), strict=True):
            value = c * per_sample_losses(loss, call(skeleton, weights, X_block), y_block).sum()
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            total += torch.cat(
                [
                    (torch.zeros_like(leaf) if g is None else g).reshape(-1)
                    for leaf, g in zip(leaves, gradients, strict=True)
                ]
            )
    return total


def explain_mismatch(
    net: nn.Module,
    skeleton: Skeleton,
    start: Tensor,
    gradient: Tensor,
    X: Tensor,
    y: Tensor,
    loss: Loss,
) -> str:
    """Name the likeliest reason why a step from `start` is not along the given gradient.

    Args:
        net: The user's network, whose `.grad` fields are those that the optimizer has just used.
        skeleton: The recorded structure.
        start: Weights before the step, (P,).
        gradient: Gradient of the stated loss on the stated batch at `start`, (P,).
        X: The stated batch.
        y: Its targets.
        loss: The stated loss.

    Returns:
        A sentence without a full stop.
    """
    parameters = dict(net.named_parameters())
    gradients = {name: parameters[name].grad for name in skeleton.names}
    used = flatten(
        skeleton, {name: torch.zeros_like(parameters[name]) if g is None else g for name, g in gradients.items()}
    )
    if not torch.isfinite(used).all():
        return "the gradient holds NaN or infinity: training diverged"
    if _alike(used, gradient):
        return (
            "the gradient is that of the stated loss, but the weights did not move by -lr times it: another optimizer "
            "or option is at work, or the weights or the learning rate were changed between batch() and the step"
        )
    random = _forward_cause(net, skeleton, start, X)
    if random is not None:
        return random
    ratio = float(used @ gradient / (gradient @ gradient)) if gradient.any() else 0.0
    if ratio and _alike(used, ratio * gradient):
        return _ratio_cause(ratio, len(X), loss, outputs_per_sample=_num_outputs(skeleton, start, X))
    other = _other_loss(skeleton, start, used, X, y, loss)
    if other is not None:
        return f"the gradient is that of {other}, not of the stated {loss}"
    return (
        "the gradient is not that of the stated loss on X[batch], y[batch]: other indices than those given, augmented "
        "inputs, another loss, gradients left over from an earlier backward(), or clipping by value"
    )


def step_tolerance(start: Tensor, predicted: Tensor) -> float:
    """Bound on the difference between a recorded and a predicted step that rounding can explain."""
    eps = torch.finfo(start.dtype).eps
    return float(eps**0.5 * predicted.abs().max() + _rounding(start))


def _rounding(w: Tensor) -> float:
    return float(4 * torch.finfo(w.dtype).eps * w.abs().max())


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())


def _forward_cause(net: nn.Module, skeleton: Skeleton, start: Tensor, X: Tensor) -> str | None:
    """Compare the user's network, as it stands, with the deterministic one, both at the step's start."""
    rows = X[: min(len(X), 64)]
    weights = unflatten(skeleton, start)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng():
        outputs = [torch.func.functional_call(net, {**weights, **buffers}, (rows,)) for _ in range(2)]
        expected = call(skeleton, weights, rows)
    if not all(isinstance(z, Tensor) for z in outputs):
        return "the network in training mode returns something else than one tensor: put it in evaluation mode"
    if not torch.equal(outputs[0], outputs[1]):
        return "the network's forward pass is random (dropout, or noise of its own): put it in evaluation mode"
    if not _alike(outputs[0], expected):
        return (
            "the network in training mode differs from the network in evaluation mode (batch statistics, or a buffer "
            "that changed): freeze it before recording"
        )
    return None


def _num_outputs(skeleton: Skeleton, start: Tensor, X: Tensor) -> int:
    with torch.no_grad():
        return call(skeleton, unflatten(skeleton, start), X[:1]).shape[1]


def _ratio_cause(ratio: float, batch_size: int, loss: Loss, *, outputs_per_sample: int) -> str:
    count = batch_size * (outputs_per_sample if isinstance(loss, MeanSquaredError) else 1)
    if abs(ratio * count - 1) < 1e-3 and loss.reduction == "sum":
        return f"the gradient is 1/{count} of the stated loss's: the loss was reduced by 'mean', not 'sum'"
    if abs(ratio / count - 1) < 1e-3 and loss.reduction == "mean":
        return f"the gradient is {count} times the stated loss's: the loss was reduced by 'sum', not 'mean'"
    kind = "clipped or scaled down" if abs(ratio) < 1 else "scaled up, or accumulated over several backward() calls"
    return f"the gradient is {ratio:.6g} times that of the stated loss: it was {kind}"


def _other_loss(skeleton: Skeleton, start: Tensor, used: Tensor, X: Tensor, y: Tensor, stated: Loss) -> str | None:
    C = _num_outputs(skeleton, start, X)
    labels = isinstance(stated, CrossEntropy) and not y.is_floating_point()
    for candidate in (CrossEntropy("mean"), CrossEntropy("sum"), MeanSquaredError("mean"), MeanSquaredError("sum")):
        targets = soft_targets(y, C, start.dtype) if labels and isinstance(candidate, MeanSquaredError) else y
        try:
            check_targets(candidate, targets, len(X), C)
        except (TypeError, ValueError):
            continue
        if candidate != stated and _alike(used, batch_gradient(skeleton, start, X, targets, candidate)):
            return str(candidate)
    return None
