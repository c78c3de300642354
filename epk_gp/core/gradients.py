"""Gradients of the training loss, the steps they predict, and the rounding that separates those from recorded steps."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.attention import disable_fused_attention
from epk_gp.core.losses import Loss, per_sample_losses
from epk_gp.core.memory_plan import batch_gradient_rows
from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_weights
from epk_gp.core.update_rules import predict_step


def replayed_updates(
    trajectory: Trajectory, model: FunctionalModel, reference: Tensor
) -> Iterator[tuple[Step, Float[Tensor, " P"], Float[Tensor, " P"]]]:
    """Replay a run: yield each step s with the weights w_s and the update w_{s+1} - w_s that the update rule predicts.

    The updates are computed from the training gradients, not from the difference of the recorded weights.

    Args:
        trajectory: The run.
        model: Its network in the dtype of the computation.
        reference: Tensor whose dtype and device the computation has.
    """
    momentum = torch.zeros_like(flat_weights(trajectory, 0, reference))
    for step in trajectory.steps:
        w = flat_weights(trajectory, step.index, reference)
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
) -> Float[Tensor, " P"]:
    """Return the gradient of a batch's loss, sum_i c_i grad loss_i, at the weights w.

    Args:
        model: The network.
        w: Its weights.
        X: Inputs of the batch.
        y: Their targets.
        loss: The loss of a sample.
        c: Weight of each sample in the batch's loss.
    """
    weights = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
    leaves = [weights[name] for name in model.names]
    rows = batch_gradient_rows(X[0].numel())
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
    """Return the largest difference between a recorded and a predicted step that rounding can explain.

    A step is the difference of two weight vectors, so it carries the rounding of the weights (4 eps of the largest
    weight) beside the relative rounding of the gradient.
    """
    weight_rounding = 4 * torch.finfo(start.dtype).eps * start.abs().max()
    return float(relative_rounding(start.dtype) * predicted.abs().max() + float(weight_rounding))


def relative_rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding of a gradient or step that is accepted without a closer look.

    In float64 it is the square root of eps, 1.5e-8. In float32 that would be 3.5e-4 and hide a weight decay or a
    gradient scaled by 0.9998; it is 64 eps = 7.6e-6, and a larger difference is compared with the gradient in float64
    (`consistent_up_to_rounding` in `epk_gp.training.diagnosis`).
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**0.5 if dtype == torch.float64 else 64 * eps


def move_by_rounding(w: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return weights whose entries are moved by one eps of their size, up and down in turn, never twice the same way.

    What a computation gives at both weights differs by its rounding: the change of its inputs that rounding stands for.
    """
    index = torch.arange(w.numel(), device=w.device, dtype=torch.float64)
    signs = (index * index).sin().sign().to(w.dtype)
    return w * (1 + torch.finfo(w.dtype).eps * signs)


def allclose(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients agree up to the square root of eps, relative to the largest entry of b."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())
