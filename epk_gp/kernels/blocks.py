"""Blocks of the kernel between sets of tagged points, reduced over classes as asked, each computed once."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from epk_gp.core.fingerprint import content_key
from epk_gp.core.points import Points
from epk_gp.gram.path_kernel import gram_block, gram_block_per_class, gram_diagonal_blocks
from epk_gp.kernels.config import KernelConfig, as_points, needs_graph, same_points
from epk_gp.kernels.derivatives import block_derivative, diagonal_derivative


def block(
    source: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points; differentiable, once, in both.

    Args:
        source: Run, rule and reduction.
        x: (n, D + 1).
        y: (m, D + 1).

    Returns:
        (K, n * R, m * R) with K matrices and R rows per point, point-major: row i * R + k is class k of point i.
    """
    if needs_graph(x) or needs_graph(y):
        values = block(source, x.detach(), x.detach() if x is y else y.detach())
        return cast(Tensor, _Block.apply(x, y, source, values))  # type: ignore[no-untyped-call]
    key = ("block", _identity(source), content_key(x, y))
    found = source.cache.get(key)
    if found is None:
        A = as_points(source.trajectory, x)
        B = A if x is y or same_points(x, y) else as_points(source.trajectory, y)
        found = _evaluate(source, A, B).to(source.trajectory.model.spec_for(x).dtype)
        source.cache.put(key, found)
    return found


def diagonal_matrices(
    source: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "n columns"] | None = None
) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the reduction; differentiable, once.

    Args:
        source: Run and rule.
        x: (n, D + 1).
        y: The same points, if derivatives go to each side's own; x by default.

    Returns:
        K(x_i, x_i); costs n blocks, not n^2.
    """
    y = x if y is None else y
    if needs_graph(x) or needs_graph(y):
        values = diagonal_matrices(source, x.detach())
        return cast(Tensor, _Diagonal.apply(x, y, source, values))  # type: ignore[no-untyped-call]
    key = ("diagonal", _identity(source), content_key(x))
    found = source.cache.get(key)
    if found is None:
        A = as_points(source.trajectory, x)
        with torch.no_grad():
            found = gram_diagonal_blocks(
                source.trajectory, A, head=source.head, rule=source.rule, memory_budget=source.memory_budget
            ).to(source.trajectory.model.spec_for(x).dtype)
        source.cache.put(key, found)
    return found


def reduce_diagonal(source: KernelConfig, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "K rows"]:
    """Reduce the blocks K(x_i, x_i) to the diagonal of the matrices that `block` returns.

    Args:
        source: Knows the reduction.
        blocks: One C x C block per point.

    Returns:
        (K, n * R).
    """
    own = blocks.diagonal(dim1=-2, dim2=-1)  # (n, C)
    if source.reduction == "full":
        return own.reshape(1, -1)
    if source.reduction == "per_class":
        return own.mT
    if source.reduction == "trace":
        return own.sum(-1)[None]
    return blocks.sum((-2, -1))[None]


class _Block(torch.autograd.Function):
    """Attach derivatives to values, computed step by step when they are asked for.

    The values come from outside: torch switches forward-mode derivatives, which the engine uses, off in here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, source: KernelConfig, values: Tensor) -> Tensor:
        ctx.source = source
        ctx.save_for_backward(x, y)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, y = ctx.saved_tensors
        to_x, to_y = ctx.needs_input_grad[:2]
        return (
            block_derivative(ctx.source, x, y, weights) if to_x else None,
            block_derivative(ctx.source, y, x, weights.mT) if to_y else None,
            None,
            None,
        )


class _Diagonal(torch.autograd.Function):
    """The same for the blocks of points with themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, source: KernelConfig, values: Tensor) -> Tensor:
        ctx.source = source
        ctx.save_for_backward(x)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        to_x, to_y = ctx.needs_input_grad[:2]
        return (
            diagonal_derivative(ctx.source, x, weights) if to_x else None,
            diagonal_derivative(ctx.source, x, weights.mT) if to_y else None,
            None,
            None,
        )


def _evaluate(source: KernelConfig, A: Points, B: Points) -> Tensor:
    trajectory, head, rule, budget = source.trajectory, source.head, source.rule, source.memory_budget
    with torch.no_grad():
        if source.reduction == "full":
            K = gram_block(trajectory, A, B, head=head, rule=rule, memory_budget=budget)
            return K.reshape(1, K.shape[0] * K.shape[1], K.shape[2] * K.shape[3])
        if source.reduction == "sum":
            C = trajectory.num_outputs
            size = max(1, budget // (2 * 8 * C * C * len(B)))  # a C x C block per pair is summed and dropped
            parts = [
                gram_block(trajectory, part, B, head=head, rule=rule, memory_budget=budget).sum((1, 3))
                for part in _split(A, size)
            ]
            return torch.cat(parts)[None]
        K = gram_block_per_class(trajectory, A, B, head=head, rule=rule, memory_budget=budget)
        return K if source.reduction == "per_class" else K.sum(0, keepdim=True)


def _split(A: Points, size: int) -> Iterator[Points]:
    if size >= len(A):
        yield A  # itself: the engine halves the work for a block of points with themselves
        return
    for start in range(0, len(A), size):
        rows = slice(start, start + size)
        yield Points(A.X[rows], A.is_train if isinstance(A.is_train, bool) else A.is_train[rows])


def _identity(source: KernelConfig) -> tuple[str, ...]:
    return source.trajectory.digest, source.reduction, source.head, repr(source.rule)
