"""Blocks of a GPyTorch kernel between sets of tagged points: each is computed once, and can be differentiated once."""

from typing import Any, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from epk_gp.core.fingerprint import content_key
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.derivatives import block_derivative, diagonal_derivative
from epk_gp.kernels.tagged_points import as_points, requires_graph, same_points


def block(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points; differentiable, once, in both.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1).

    Returns:
        (K, n * R, m * R): K matrices with R rows per point, see `OutputStructure`.
    """
    if requires_graph(x) or requires_graph(y):
        values = block(config, x.detach(), x.detach() if x is y else y.detach())
        return cast(Tensor, _Block.apply(x, y, config, values))  # type: ignore[no-untyped-call]
    x, y = _snapshots(x, y)
    key = ("block", config.cache_key, content_key(x, y))
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    a = as_points(config.trajectory, x)
    b = a if x is y or same_points(x, y) else as_points(config.trajectory, y)
    with torch.no_grad():
        values = config.structure.evaluate(config.path_kernel, a, b, config.options)
    values = values.to(config.trajectory.model.spec_for(x).dtype)
    config.cache.put(key, values)
    return values


def diagonal_blocks(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "n columns"] | None = None
) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the structure; differentiable, once.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: The same points, if each side is to get its own derivatives; x by default.

    Returns:
        K(x_i, x_i), at the cost of n blocks, not n^2.
    """
    y = x if y is None else y
    if requires_graph(x) or requires_graph(y):
        values = diagonal_blocks(config, x.detach())
        return cast(Tensor, _DiagonalBlocks.apply(x, y, config, values))  # type: ignore[no-untyped-call]
    x, _ = _snapshots(x, x)
    key = ("diagonal", config.cache_key, content_key(x))
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    with torch.no_grad():
        values = config.path_kernel.diagonal_blocks(as_points(config.trajectory, x), config.options)
    values = values.to(config.trajectory.model.spec_for(x).dtype)
    config.cache.put(key, values)
    return values


def _snapshots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Copy points: should another thread edit them meanwhile, a block and its key still are of the same points."""
    own = x.detach().clone()
    return own, own if x is y else y.detach().clone()


class _Block(torch.autograd.Function):
    """Attach derivatives to the values of a block; they are computed when a backward pass asks for them.

    The values are an argument, and not computed in `forward`: in there torch switches off the forward-mode derivatives
    that the path kernel uses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, config: KernelConfig, values: Tensor) -> Tensor:
        ctx.config = config
        ctx.save_for_backward(x, y)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, y = ctx.saved_tensors
        x_requires_grad, y_requires_grad = ctx.needs_input_grad[:2]
        return (
            block_derivative(ctx.config, x, y, weights) if x_requires_grad else None,
            block_derivative(ctx.config, y, x, weights.mT) if y_requires_grad else None,
            None,
            None,
        )


class _DiagonalBlocks(torch.autograd.Function):
    """As `_Block`, for the blocks of points with themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, config: KernelConfig, values: Tensor) -> Tensor:
        ctx.config = config
        ctx.save_for_backward(x)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        x_requires_grad, y_requires_grad = ctx.needs_input_grad[:2]
        return (
            diagonal_derivative(ctx.config, x, weights) if x_requires_grad else None,
            diagonal_derivative(ctx.config, x, weights.mT) if y_requires_grad else None,
            None,
            None,
        )
