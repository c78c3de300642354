"""The training side of every step: what the training data and the update rule say the step is."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.attention import disable_fused_attention
from epk_gp.core.losses import Loss, per_sample_losses
from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_weights
from epk_gp.core.update_rules import predict_step


def replayed_updates(
    trajectory: Trajectory, model: FunctionalModel, like: Tensor
) -> Iterator[tuple[Step, Float[Tensor, " P"], Float[Tensor, " P"]]]:
    """Replay the run: each step with its weights w_s and its direction, recomputed from the training gradients.

    Args:
        trajectory: The run.
        model: Its network in the computation's dtype.
        like: Gives dtype and device.
    """
    momentum = torch.zeros_like(flat_weights(trajectory, 0, like))
    for step in trajectory.steps:
        w = flat_weights(trajectory, step.index, like)
        X, y, c = batch_of(trajectory, step, w)
        with disable_fused_attention():
            g = batch_gradient(model, w, X, y, trajectory.loss, c)
        d, momentum = predict_step(trajectory.updates[step.index], model.sizes, w, g, momentum)
        yield step, w, d


def batch_gradient(
    model: FunctionalModel,
    w: Float[Tensor, " P"],
    X: Shaped[Tensor, "B ..."],
    y: Shaped[Tensor, "B ..."],
    loss: Loss,
    c: Float[Tensor, " B"],
    *,
    block_elements: int = 1 << 22,
) -> Float[Tensor, " P"]:
    """Compute sum_i c_i grad loss_i at weights w, in blocks of bounded size."""
    weights = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
    leaves = [weights[name] for name in model.names]
    rows = max(1, block_elements // max(1, X[0].numel()))
    total = torch.zeros_like(w)
    with torch.enable_grad():
        for X_block, y_block, c_block in zip(X.split(rows), y.split(rows), c.to(w).split(rows), strict=True):
            value = c_block @ per_sample_losses(loss, model(weights, X_block), y_block)
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            total += torch.cat(
                [
                    (torch.zeros_like(leaf) if g is None else g).reshape(-1)
                    for leaf, g in zip(leaves, gradients, strict=True)
                ]
            )
    return total


def step_tolerance(start: Tensor, predicted: Tensor) -> float:
    """Bound on the difference between a recorded and a predicted step that rounding can explain."""
    return float(relative_rounding(start.dtype) * predicted.abs().max() + _rounding(start))


def relative_rounding(dtype: torch.dtype) -> float:
    """Relative rounding of a gradient or step that needs no closer look.

    The root of eps in float64. In float32 that would hide a weight decay or a factor of 0.9998; what is beyond a few
    eps there is compared with the gradient in float64, see `consistent_up_to_rounding`.
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**0.5 if dtype == torch.float64 else 64 * eps


def _rounding(w: Tensor) -> float:
    return float(4 * torch.finfo(w.dtype).eps * w.abs().max())


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two gradients are the same up to rounding."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())
