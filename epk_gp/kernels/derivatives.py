"""Derivatives of kernel values with respect to the points: weights on a block in, gradients of rows out."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.compute_options import ComputeOptions
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.config import KernelConfig, as_points


def block_derivative(
    source: KernelConfig,
    x: Shaped[Tensor, "n columns"],
    y: Shaped[Tensor, "m columns"],
    weights: Float[Tensor, "K rows cols"],
) -> Float[Tensor, "n columns"]:
    """Differentiate sum(weights * block(x, y)) with respect to x alone.

    Args:
        source: Run, rule and reduction.
        x: (n, D + 1).
        y: (m, D + 1), held fixed, also where it is x.
        weights: As the block.
    """
    C, n, m = source.trajectory.num_outputs, len(x), len(y)
    if source.reduction == "full":
        weights = weights.reshape(n, C, m, C).permute(1, 0, 3, 2)  # class-major
    elif source.reduction == "sum":
        weights = weights.reshape(1, n, 1, m)
    elif source.reduction == "trace":
        weights = weights.expand(C, n, m)
    gradient = PathKernel(source.trajectory, source.head, source.rule).block_input_gradient(
        as_points(source.trajectory, x),
        as_points(source.trajectory, y),
        weights,
        ComputeOptions(source.memory_budget),
        summed=source.reduction == "sum",
    )
    return _with_copy_column(gradient)


def diagonal_derivative(
    source: KernelConfig, x: Shaped[Tensor, "n columns"], weights: Float[Tensor, "n C C"]
) -> Float[Tensor, "n columns"]:
    """Differentiate sum(weights * K(x_i, y_i)) with respect to x alone, at y = x.

    Args:
        source: Run and rule.
        x: (n, D + 1).
        weights: One C x C block per point.
    """
    gradient = PathKernel(source.trajectory, source.head, source.rule).diagonal_input_gradient(
        as_points(source.trajectory, x), weights, ComputeOptions(source.memory_budget)
    )
    return _with_copy_column(gradient)


def _with_copy_column(gradient: Tensor) -> Tensor:
    """Flatten to rows of points; which copy a point is does not move, so its column gets 0."""
    flat = gradient.flatten(1)
    return torch.cat([flat, flat.new_zeros(len(flat), 1)], dim=1)
