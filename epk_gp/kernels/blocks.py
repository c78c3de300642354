"""Blocks of the kernel between sets of tagged points, reduced over classes as asked, each computed once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.engine.gram import Points, gram_block, gram_block_per_class, gram_diagonal_blocks
from epk_gp.engine.quadrature import QuadratureRule
from epk_gp.kernels.cache import BlockCache, content_key
from epk_gp.kernels.copies import split_copy
from epk_gp.recording.networks import Head
from epk_gp.recording.trajectory import Trajectory, compute_dtype

Reduction = Literal["full", "per_class", "trace", "sum"]


@dataclass(frozen=True, eq=False)
class Source:
    """Where blocks come from. All copies of a kernel share it: it is never changed, and the cache only saves time.

    Attributes:
        trajectory: The run.
        reduction: What to do with the C x C block of two points: keep it ("full"), keep its diagonal ("per_class"), or
            add up its diagonal ("trace") or all of it ("sum").
        head: "logits" or "log_softmax".
        rule: Quadrature rule.
        memory_budget: Bytes that a computation may use beside its result.
        cache: Blocks computed so far.
    """

    trajectory: Trajectory
    reduction: Reduction
    head: Head
    rule: QuadratureRule
    memory_budget: int
    cache: BlockCache

    def __deepcopy__(self, memo: dict[int, object]) -> "Source":
        return self

    @property
    def num_rows(self) -> int:
        """Rows of a matrix per point: C for "full", else 1."""
        return self.trajectory.num_outputs if self.reduction == "full" else 1

    @property
    def num_matrices(self) -> int:
        """Matrices per block: C for "per_class", else 1."""
        return self.trajectory.num_outputs if self.reduction == "per_class" else 1


def check_points(trajectory: Trajectory, x: Shaped[Tensor, "*n columns"]) -> None:
    """Refuse points that the kernel cannot take.

    Raises:
        TypeError: Complex or Boolean entries.
        ValueError: Wrong width, a copy column that is not 0 or 1, a value that is not finite, or a gradient is asked
            for.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"points must be a torch.Tensor: got {type(x).__name__}. Make them with train_copy or test_copy."
        )
    width = torch.Size(trajectory.input_shape).numel() + 1
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(
            f"points must have shape (..., n, {width}), flattened inputs {trajectory.input_shape} and the copy column: "
            f"got {tuple(x.shape)}. Make them with train_copy or test_copy."
        )
    if not x.shape[-2]:
        raise ValueError(f"there must be at least one point: got shape {tuple(x.shape)}.")
    if x.requires_grad and torch.is_grad_enabled():
        # The one seam for derivatives with respect to x: a differentiable engine starts by lifting this refusal.
        raise ValueError(
            "points must not require gradients: got requires_grad=True, and derivatives of the kernel with respect to "
            "its inputs are not offered. Pass x.detach(), or work under torch.no_grad()."
        )
    split_copy(x)


def as_points(trajectory: Trajectory, x: Shaped[Tensor, "n columns"]) -> Points:
    """Translate GPyTorch's rows into the engine's points.

    Args:
        trajectory: The run, which knows the shape and the kind of its inputs.
        x: (n, D + 1).

    Raises:
        ValueError: A fraction where the network takes integers.
    """
    X, is_train = split_copy(x)
    X = X.reshape(-1, *trajectory.input_shape)
    if not trajectory.inputs.is_floating_point() and X.is_floating_point():
        whole = X.to(trajectory.inputs.dtype)
        if not torch.equal(whole.to(X.dtype), X):
            raise ValueError(
                f"inputs must be whole numbers, as the run was trained on {trajectory.inputs.dtype}: got a fraction. "
                "Round them."
            )
        X = whole
    same = bool((is_train == is_train[:1]).all())
    return Points(X, bool(is_train[0]) if same and len(is_train) else is_train)


def block(
    source: Source, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points.

    Args:
        source: Run, rule and reduction.
        x: (n, D + 1).
        y: (m, D + 1).

    Returns:
        (K, n * R, m * R) with K matrices and R rows per point, point-major: row i * R + k is class k of point i.
    """
    key = ("block", _identity(source), content_key(x, y))
    found = source.cache.get(key)
    if found is None:
        A = as_points(source.trajectory, x)
        B = A if x is y or same_points(x, y) else as_points(source.trajectory, y)
        found = _evaluate(source, A, B).to(compute_dtype(source.trajectory, x))
        source.cache.put(key, found)
    return found


def diagonal_matrices(source: Source, x: Shaped[Tensor, "n columns"]) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the reduction.

    Args:
        source: Run and rule.
        x: (n, D + 1).

    Returns:
        K(x_i, x_i); costs n blocks, not n^2.
    """
    key = ("diagonal", _identity(source), content_key(x))
    found = source.cache.get(key)
    if found is None:
        A = as_points(source.trajectory, x)
        with torch.no_grad():
            found = gram_diagonal_blocks(
                source.trajectory, A, head=source.head, rule=source.rule, memory_budget=source.memory_budget
            ).to(compute_dtype(source.trajectory, x))
        source.cache.put(key, found)
    return found


def reduce_diagonal(source: Source, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "K rows"]:
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


def same_points(x: Shaped[Tensor, "*n"], y: Shaped[Tensor, "*m"]) -> bool:
    """Say whether two sets of points are equal in value and shape."""
    return x is y or (x.dtype == y.dtype and torch.equal(x, y))


def _evaluate(source: Source, A: Points, B: Points) -> Tensor:
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


def _identity(source: Source) -> tuple[str, ...]:
    return source.trajectory.digest, source.reduction, source.head, repr(source.rule)
