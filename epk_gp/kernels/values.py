"""Values of a GPyTorch kernel, plain or as cosines, and their derivatives.

GPyTorch joins fixed points with optimised ones, such as training with test points or data with inducing points, and
passes slices of the joint tensor. All of them then require gradients, although the gradients of the fixed points are
discarded: with BoTorch they would be most of the work, because every restart has its own copy of the training points.
Measured, 50 training points and 10 restarts: 4 to 17 times the total. So a backward pass finds out which part of a
gradient is used.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.kernels.blocks import KernelConfig
from epk_gp.kernels.tagging import PointSets, is_transformed, requires_graph

_ROWS = 1024  # rows of a matrix that are multiplied at a time, so that no second matrix is needed

# Rounding errors up to which weights count as symmetric, relative to the largest one: weights that reach K(Z, Z)
# through GPyTorch's Cholesky factor differ from their transpose by 1 to 3 of them.
_SYMMETRIC = 16

# Backward functions of operations that move numbers without changing them.
_MOVES = {
    f"{name}Backward{version}"
    for name in (
        "Alias", "Cat", "Clone", "Expand", "Index", "IndexSelect", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for version in (0, 1)
}  # fmt: skip


def kernel_values(
    config: KernelConfig, x: PointSets, y: PointSets, matrices: Int64[Tensor, "*k"], *, diag: bool = False
) -> Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"]:
    """Evaluate a kernel, or its diagonal, with derivatives for the sides that require them.

    A kernel of cosines is divided by the square roots of its own diagonal at both points. If both sides are the same
    points, its diagonal is exactly 1, and the derivative of the diagonal is 0.

    Args:
        config: The kernel.
        x: Sets of n points, whose batch b broadcasts to d.
        y: Sets of m points, whose batch broadcasts to d.
        matrices: Indices into the structure's K matrices, (*k); they broadcast to d.
        diag: Whether to compute only the diagonal, for n = m.

    Raises:
        ValueError: A cosine is requested at a point whose kernel with itself is zero.
    """
    evaluate = _diagonal if diag else _raw_values
    if not config.is_cosine:
        return evaluate(config, x, y, matrices)
    R, same, has_graph = config.structure.rows_per_point, x.equals(y), requires_graph(x.rows) or requires_graph(y.rows)
    if x is y and has_graph and not diag:  # the matrix contains the diagonal, and one gradient is enough
        values = _raw_values(config, x, y, matrices)
        left = right = inverse_norms_of(values.diagonal(dim1=-2, dim2=-1), R)
        return cosine_of(values, left, right, same_points=True)
    with torch.set_grad_enabled(has_graph and not (diag and same)):
        left = inverse_norms_of(_diagonal(config, x, x, matrices), R)
        right = left if same and not torch.is_grad_enabled() else inverse_norms_of(_diagonal(config, y, y, matrices), R)
    if diag and same:
        ones = torch.ones_like(left)
        return ones + 0 * (x.rows + y.rows)[..., 0].repeat_interleave(R, -1) if has_graph else ones
    values = evaluate(config, x, y, matrices)
    return values * left * right if diag else cosine_of(values, left, right, same_points=same)


def cosine_of(
    values: Float[Tensor, "*d rows cols"],
    left: Float[Tensor, "*e rows"],
    right: Float[Tensor, "*f cols"],
    *,
    same_points: bool,
) -> Float[Tensor, "*d rows cols"]:
    """Multiply kernel values by the inverse norms of both sides, in their own memory if they have no graph.

    Args:
        values: Kernel values, owned by the caller.
        left: 1 / sqrt(k(x, x)); e and f broadcast to d.
        right: 1 / sqrt(k(y, y)).
        same_points: Whether both sides are the same points, so that the diagonal is 1.
    """
    if values.requires_grad or left.requires_grad or right.requires_grad:
        cosine = values * (left[..., :, None] * right[..., None, :])
        ones = cosine.new_ones(cosine.shape[:-1])
        return cosine.diagonal_scatter(ones, dim1=-2, dim2=-1) if same_points else cosine
    values = values.contiguous()  # a repeated batch is expanded
    for rows in torch.arange(values.shape[-2]).split(_ROWS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        # the factors are multiplied first, so that a symmetric matrix stays symmetric to the last bit
        values[..., part, :].mul_(left[..., part, None] * right[..., None, :])
    if same_points:
        values.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return values


def point_blocks(
    config: KernelConfig, x: PointSets, *, first: int = 0
) -> tuple[Float[Tensor, "n K R R"], Float[Tensor, "K rows"] | None]:
    """Evaluate the R x R blocks of every point with itself in the K matrices, without a graph.

    Args:
        config: The kernel.
        x: One set of n points.
        first: Number of the first point in an error.

    Returns:
        The blocks; and, for a kernel of cosines, the inverse norms of the rows by which they were multiplied.

    Raises:
        ValueError: A cosine is requested at a point whose kernel with itself is zero.
    """
    values = config.structure.reduce_blocks(config.diagonal_blocks(x))
    if not config.is_cosine:
        return values, None
    n, K, R, _ = values.shape
    norms = inverse_norms_of(values.diagonal(dim1=-2, dim2=-1).movedim(1, 0).flatten(1), R, first=first)
    of_points = norms.reshape(K, n, R).movedim(0, 1)
    return cosine_of(values.clone(), of_points, of_points, same_points=True), norms


def normalized_block(
    config: KernelConfig,
    x: PointSets,
    y: PointSets,
    norms: tuple[Float[Tensor, "K rows"] | None, Float[Tensor, "K cols"] | None],
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the K matrices between two sets of points without a graph.

    Args:
        config: The kernel.
        x: One set of n points.
        y: One set of m points.
        norms: Inverse norms of both sides (`point_blocks`).

    Returns:
        (K, n * R, m * R), owned by the caller.
    """
    values, (left, right) = config.block(x, y), norms
    return values if left is None or right is None else cosine_of(values, left, right, same_points=x.equals(y))


def inverse_norms_of(diagonal: Float[Tensor, "*d rows"], per_point: int, *, first: int = 0) -> Float[Tensor, "*d rows"]:
    """Return the factor of a cosine at each row.

    Args:
        diagonal: k(x, x) of every row.
        per_point: Number of rows per point.
        first: Number of the first point in an error.

    Raises:
        ValueError: An entry is not positive: the point has no direction.
    """
    invalid = ~(diagonal.detach() > 0)
    if invalid.any():
        *batch, row = invalid.nonzero()[0].tolist()
        value = float(diagonal.detach()[(*batch, row)])
        point = f"point {first + row // per_point}" + (f" of set {tuple(batch)}" if any(batch) else "")
        output = f", output {row % per_point}" if per_point > 1 else ""
        raise ValueError(
            f"normalize='cosine' needs k(x, x) > 0 at every point: got {value:.3g} at {point}{output}, whose gradients "
            "vanish along the whole run. Leave that point out, or use normalize='mean_diagonal'."
        )
    return diagonal.rsqrt()


def _diagonal(config: KernelConfig, x: PointSets, y: PointSets, matrices: Tensor) -> Tensor:
    """Evaluate only the diagonals of `_raw_values`, (*d, n * R): every point is its own set."""
    single = x.singles()
    values = _raw_values(config, single, single if y is x else y.singles(), matrices[..., None])
    return values.diagonal(dim1=-2, dim2=-1).flatten(-2)


def _raw_values(config: KernelConfig, x: PointSets, y: PointSets, matrices: Tensor) -> Tensor:
    """Evaluate the kernel without normalisation, with derivatives: one matrix for each element of a batch.

    Repeated sets are computed once. One set against many sets is one block against one long set.
    """
    left, right = (z.is_train.shape[:-1] for z in (x, y))
    batch, (P, Q) = torch.broadcast_shapes(left, right), (left.numel(), right.numel())
    every = torch.broadcast_shapes(batch, matrices.shape)
    has_own_matrix = max(P, Q) > 1 and matrices.numel() > 1 and config.structure.kind == "independent"
    if x.count == 1 and x.equals(y):
        blocks = config.structure.reduce_blocks(config.diagonal_blocks(x))
        values = _select(blocks.reshape(*left, *blocks.shape[1:]), matrices)
    elif min(P, Q) > 1 or (has_own_matrix and batch.numel() == every.numel()):
        values = config.pairs_block(x, y, matrices.expand(every))
    else:
        by_sets = config.block(x, y).unflatten(1, (P, -1)).unflatten(3, (Q, -1)).permute(1, 3, 0, 2, 4)
        values = _select(by_sets.reshape(*batch, *by_sets.shape[2:]), matrices)
    of_all = torch.broadcast_shapes(x.batch, y.batch, matrices.shape)
    values = values.expand(*of_all, *values.shape[-2:])
    if requires_graph(x.rows) or requires_graph(y.rows):
        of = (config, x, y, matrices.expand(of_all))
        return cast(Tensor, _Values.apply(x.rows, y.rows, values, of))  # type: ignore[no-untyped-call]
    return values


def _select(values: Tensor, matrices: Tensor) -> Tensor:
    """Select a matrix for each element of a batch: (*d, K, rows, cols) becomes (*d, rows, cols)."""
    batch = values.shape[:-3]
    if values.shape[-3] == 1:  # no choice, and no copy
        return values.squeeze(-3)
    position = torch.arange(batch.numel(), device=values.device).view(batch)
    return values.reshape(-1, *values.shape[-3:])[position, matrices]


class _Values(torch.autograd.Function):
    """Attaches derivatives to values; they are computed when a backward pass requests them.

    They can be requested with `create_graph=True`, but not be differentiated again: that raises a RuntimeError. The
    values are an argument, not computed in `forward`: there, torch switches off the forward-mode derivatives that the
    path kernel uses.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, values: Tensor, of: tuple[KernelConfig, PointSets, PointSets, Tensor]
    ) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(x, y)
        return values

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        if is_transformed(weights):
            raise TypeError(
                "a backward pass of an EPKKernel must have plain tensors as weights: got one inside a transformation, "
                "as vmap, is_grads_batched=True and vectorize=True make it. Call torch.autograd.grad for one at a time."
            )
        with torch.no_grad():
            gradients: Sequence[Tensor | None] = _asked_gradients(ctx, weights.detach())
        if torch.is_grad_enabled():  # create_graph=True
            gradients = cast(
                Any,
                _DifferentiatedOnce.apply(*ctx.saved_tensors, weights, *gradients),  # type: ignore[no-untyped-call]
            )
        return *gradients, None, None


class _DifferentiatedOnce(torch.autograd.Function):
    """Connects gradients to everything they depend on; otherwise a second derivative would silently be 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weights: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> None:
        raise RuntimeError(
            "an EPKKernel must be differentiated at most once: got a second derivative, as a Hessian or a gradient "
            "penalty needs it. Take finite differences of the gradient, or detach the gradient if it is a constant."
        )


def _asked_gradients(ctx: Any, weights: Tensor) -> list[Tensor | None]:
    """Compute the gradients that a backward pass requests; discarded gradients are NaN.

    Equal sets whose gradients are only used as a sum, such as inducing points that all classes share, are computed as
    one set.
    """
    (config, *points, matrices), sides = ctx.of, list[tuple[bool, bool, bool]]()
    for z, is_asked, (node, _) in zip(points, ctx.needs_input_grad, ctx.next_functions, strict=False):
        is_wanted = is_asked and is_used(node, torch.ones_like(z.rows))
        has_own = is_wanted and any(is_used(node, _balanced(z.rows, dim)) for dim in z.repeated_dims)
        sides.append((is_asked, is_wanted, has_own))
    asked, wanted, own_sets = zip(*sides, strict=True)
    found: Sequence[Tensor | None] = (None, None)
    if any(wanted):
        R, of_pairs = config.structure.rows_per_point, weights.reshape(-1, *weights.shape[-2:])
        of_outputs = of_pairs.unflatten(-1, (-1, R)).unflatten(1, (-1, R)).permute(0, 2, 1, 4, 3)
        is_shared = all(wanted) and own_sets[0] == own_sets[1] and _is_symmetric(points[0], points[1], weights)
        pairs = config.set_pairs(points[0], points[0 if is_shared else 1], matrices, own_sets)
        gradients_of = config.path_kernel.pairs_input_gradients
        found = gradients_of(pairs, of_outputs, wanted, memory_budget=config.options.memory_budget)
        if is_shared and points[0] is not points[1] and found[0] is not None:
            found = (found[0] / 2,) * 2
    gradients = list[Tensor | None]()
    for number, (z, gradient) in enumerate(zip(points, found, strict=True)):
        total = torch.full_like(z.rows, torch.nan) if asked[number] and not wanted[number] else None
        if gradient is not None:  # of the first of equal sets, if only their sum is used; for the inputs
            own = gradient.reshape(*(z.batch if own_sets[number] else z.is_train.shape[:-1]), z.count, -1)
            total = torch.zeros_like(z.rows)
            total[tuple(slice(size) for size in own.shape)] = own.to(total)
        gradients.append(total)
    return gradients


def _is_symmetric(x: PointSets, y: PointSets, weights: Tensor) -> bool:
    """Return whether both sides are the same points with symmetric weights, so that each has half of the gradient."""
    if x.batch != y.batch or not x.equals(y):
        return False
    return bool((weights - weights.mT).abs().max() <= _SYMMETRIC * torch.finfo(weights.dtype).eps * weights.abs().max())


def _balanced(x: Tensor, dim: int) -> Tensor:
    """Return random integers, in the shape of points, whose sum over a dimension is 0."""
    numbers = torch.randint(1, 1024, x.shape, generator=torch.Generator(x.device).manual_seed(0), device=x.device).to(x)
    numbers.select(dim, 0).sub_(numbers.sum(dim))
    return numbers


def is_used(node: Any, gradient: Float[Tensor, "..."]) -> bool:
    """Return whether the running backward pass uses any part of a gradient, other than to move or add numbers.

    Args:
        node: The backward function that takes the gradient.
        gradient: Ones, to test for any use; or numbers that sum to 0, to test for more than the use of their sum.
    """
    goes_on = _is_running(node) and any(source is not None and _is_running(source) for source, _ in node.next_functions)
    if torch.is_anomaly_enabled() or type(node).__name__ not in _MOVES or not goes_on:
        return bool((gradient != 0).any())
    parts = node(gradient)  # as the engine calls it
    sources = zip(node.next_functions, parts if isinstance(parts, tuple) else (parts,), strict=False)
    return any(is_used(source, part) for (source, _), part in sources if source is not None and part is not None)


def _is_running(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "A leaf node was passed": the gradient of that leaf was requested
        return True
