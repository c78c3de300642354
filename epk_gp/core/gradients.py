"""Gradients of the training loss, the steps they predict, and the rounding that separates those from recorded steps."""

from collections.abc import Iterator
from dataclasses import dataclass

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

# How many times larger than the rounding of a gradient its difference from another computation of it may be, where
# sums cancel. Measured in float32 on converged regressions whose gradients were accumulated over 2 to 200 batches
# (50 runs of 60 steps): at most 2.1 times. The rest is room for sums in another order, such as those of a GPU.
CANCELLATION_FACTOR = 32


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A step that was computed once more, from the training gradients.

    Attributes:
        step: Its learning rate and batch.
        w: The weights w_s before it.
        d: The update w_{s+1} - w_s that the update rule predicts.
        momentum: The momentum buffer before it.
    """

    step: Step
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    momentum: Float[Tensor, " P"]


def replayed_steps(trajectory: Trajectory, model: FunctionalModel, reference: Tensor) -> Iterator[ReplayedStep]:
    """Replay a run: yield each step with the update that the update rule predicts.

    The updates are computed from the training gradients, not from the difference of the recorded weights.

    Args:
        trajectory: The run; of an average the run that it is made of.
        model: Its network in the dtype of the computation.
        reference: Tensor whose dtype and device the computation has.
    """
    trajectory = trajectory.trained
    momentum = torch.zeros_like(flat_weights(trajectory, 0, reference))
    for step in trajectory.steps:
        w, before = flat_weights(trajectory, step.index, reference), momentum
        X, y, c = batch_of(trajectory, step, w)
        with disable_fused_attention():
            g = batch_gradient(model, w, X, y, trajectory.loss, c)
        d, momentum = predict_step(trajectory.updates[step.index], model.sizes, w, g, before)
        yield ReplayedStep(step, w, d, before)


def mismatch_tolerance(
    trajectory: Trajectory, model: FunctionalModel, replayed: ReplayedStep, mismatch: float, dtype: torch.dtype
) -> float:
    """Return the largest difference between a recorded and a replayed step that rounding can explain.

    It is the rounding of the weights and a small share of the step. Only if the mismatch is larger, the rounding of
    the step is measured: it is recomputed from the gradient of the rows in reverse order, at weights that are moved by
    their own rounding.

    Args:
        trajectory: The run.
        model: Its network in the dtype of the computation.
        replayed: The step.
        mismatch: Its largest difference from the recorded step.
        dtype: The coarser of the dtypes of run and computation.
    """
    w, d = replayed.w, replayed.d
    eps = torch.finfo(dtype).eps
    share = 2**16 * eps if dtype == torch.float64 else relative_rounding(dtype)
    tolerance = float(4 * eps * w.abs().max() + share * d.abs().max())
    if not mismatch > tolerance:
        return tolerance
    X, y, c = batch_of(trajectory, replayed.step, w)
    with disable_fused_attention():
        g = batch_gradient(model, move_by_rounding(w, eps), X.flip(0), y.flip(0), trajectory.loss, c.flip(0))
    again, _ = predict_step(trajectory.updates[replayed.step.index], model.sizes, w, g, replayed.momentum)
    return max(tolerance, CANCELLATION_FACTOR * float((again - d).abs().max()))


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


def move_by_rounding(w: Float[Tensor, " P"], eps: float) -> Float[Tensor, " P"]:
    """Return weights whose entries are moved by one eps of their size, up or down.

    What a computation gives at both weights differs by its rounding: the change of its inputs that rounding stands for.
    """
    index = torch.arange(w.numel(), device=w.device, dtype=torch.float64)
    signs = (index * index).sin().sign().to(w.dtype)
    return w * (1 + eps * signs)


def allclose(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients agree up to the square root of eps, relative to the largest entry of b."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())
