"""Derivatives of kernel values with respect to the points: weights on a block in, gradients of rows out."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.tagged_points import as_points


def block_derivative(
    config: KernelConfig,
    x: Shaped[Tensor, "n columns"],
    y: Shaped[Tensor, "m columns"],
    weights: Float[Tensor, "K rows cols"],
) -> Float[Tensor, "n columns"]:
    """Differentiate sum(weights * block(x, y)) with respect to x alone.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1), held fixed, also where it is x.
        weights: One per entry of the block.
    """
    a, b = as_points(config.trajectory, x), as_points(config.trajectory, y)
    return _with_copy_column(config.structure.input_gradient(config.path_kernel, a, b, weights, config.options))


def diagonal_derivative(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], weights: Float[Tensor, "n C C"]
) -> Float[Tensor, "n columns"]:
    """Differentiate sum(weights * K(x_i, y_i)) with respect to x alone, at y = x.

    Args:
        config: The kernel.
        x: (n, D + 1).
        weights: One C x C block per point.
    """
    a = as_points(config.trajectory, x)
    return _with_copy_column(config.path_kernel.diagonal_input_gradient(a, weights, config.options))


def _with_copy_column(gradient: Tensor) -> Tensor:
    """Flatten the gradient to rows of points; the copy column is discrete, and its gradient is 0."""
    rows = gradient.flatten(1)
    return torch.cat([rows, rows.new_zeros(len(rows), 1)], dim=1)
