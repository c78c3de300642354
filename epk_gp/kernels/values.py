"""Values of a GPyTorch kernel, as they are or as cosines, and their derivatives.

GPyTorch joins fixed points with those that are optimised, training with test points or data with inducing points, and
hands over slices of the joint tensor. All of them require gradients then, although those of the fixed points are thrown
away: with BoTorch they would be most of the work, as every restart has its own copy of the training points. So a
backward pass asks what of a gradient will be used: all of it, its sums, or nothing.

Inducing points that all classes share are expanded to a set for each class, and only the sum of these sets' gradients
is used. They are computed as one set then. Slices of a joint tensor that are both sides of a kernel have one gradient,
too; equal points of two tensors have two.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.kernels import blocks
from epk_gp.kernels.tagging import first_of, is_transformed, repeated_dims, requires_graph, same_points

_ROWS = 1024  # of a matrix that are multiplied at a time, so that no second matrix is made

# Backward functions of operations that move numbers, and do not change them.
_MOVES = {
    f"{name}Backward{version}"
    for name in (
        "Alias", "Cat", "Clone", "Expand", "Index", "IndexSelect", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for version in (0, 1)
}  # fmt: skip


def kernel_values(
    config: blocks.KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*k"],
    *,
    diag: bool = False,
) -> Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"]:
    """Evaluate a kernel, or its diagonal, with derivatives where a side asks for them.

    A kernel of cosines is divided by the square roots of its own diagonal at both points. Where both sides are the same
    points its diagonal is 1, exactly, and so is its derivative 0.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1).
        matrices: Which of the structure's K matrices, (*k); b, c and k broadcast to d.
        diag: Only the diagonal, for n = m.

    Raises:
        ValueError: A cosine is asked for at a point whose kernel with itself is zero.
    """
    evaluate = _diagonal if diag else _raw_values
    if not config.is_cosine:
        return evaluate(config, x, y, matrices)
    same = _are_same(x, y)
    if diag and same:
        ones = torch.ones_like(_inverse_norms(config, x.detach(), matrices))
        rows = (x * y)[..., 0] if requires_graph(x) or requires_graph(y) else None
        return ones if rows is None else ones + rows.repeat_interleave(config.structure.rows_per_point, -1) * 0
    has_graph = requires_graph(x) or requires_graph(y)
    if same and has_graph and is_gradient_joint(x, y):  # the matrix has the diagonal, and one gradient is enough
        values = _raw_values(config, x, y, matrices)
        norms = inverse_norms_of(values.diagonal(dim1=-2, dim2=-1), config.structure.rows_per_point)
        return cosine_of(values, norms, norms, same_points=True)
    left = _inverse_norms(config, x, matrices)
    right = left if same and not has_graph else _inverse_norms(config, y, matrices)
    values = evaluate(config, x, y, matrices)
    if diag:
        return values * left * right
    return cosine_of(values, left, right, same_points=same)


def cosine_of(
    values: Float[Tensor, "*d rows cols"],
    left: Float[Tensor, "*e rows"],
    right: Float[Tensor, "*f cols"],
    *,
    same_points: bool,
) -> Float[Tensor, "*d rows cols"]:
    """Multiply kernel values by the inverse norms of both sides, in their own memory if they have no graph.

    Args:
        values: Owned by the caller.
        left: 1 / sqrt(k(x, x)); e and f broadcast to d.
        right: 1 / sqrt(k(y, y)).
        same_points: Both sides are the same points, so that the diagonal is 1.
    """
    if values.requires_grad or left.requires_grad or right.requires_grad:
        cosine = values * (left[..., :, None] * right[..., None, :])
        ones = cosine.new_ones(cosine.shape[:-1])
        return cosine.diagonal_scatter(ones, dim1=-2, dim2=-1) if same_points else cosine
    values = values.contiguous()  # a batch that repeats itself is expanded
    for rows in torch.arange(values.shape[-2]).split(_ROWS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        # the factors are multiplied first, so that a symmetric matrix stays symmetric to the last bit
        values[..., part, :].mul_(left[..., part, None] * right[..., None, :])
    if same_points:
        values.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return values


def point_blocks(
    config: blocks.KernelConfig, x: Shaped[Tensor, "n columns"], *, first: int = 0
) -> tuple[Float[Tensor, "n K R R"], Float[Tensor, "K rows"] | None]:
    """Evaluate the R x R blocks of every point with itself in the K matrices, without a graph.

    Args:
        config: The kernel.
        x: (n, D + 1).
        first: Number of the first point in an error.

    Returns:
        The blocks; and, of a kernel of cosines, the inverse norms of the rows that they were multiplied by.

    Raises:
        ValueError: A cosine is asked for at a point whose kernel with itself is zero.
    """
    values = config.structure.reduce_blocks(blocks.diagonal_blocks(config, x))
    if not config.is_cosine:
        return values, None
    n, K, R, _ = values.shape
    norms = inverse_norms_of(values.diagonal(dim1=-2, dim2=-1).movedim(1, 0).flatten(1), R, first=first)
    of_points = norms.reshape(K, n, R).movedim(0, 1)
    return cosine_of(values.clone(), of_points, of_points, same_points=True), norms


def normalized_block(
    config: blocks.KernelConfig,
    x: Shaped[Tensor, "n columns"],
    y: Shaped[Tensor, "m columns"],
    norms: tuple[Float[Tensor, "K rows"] | None, Float[Tensor, "K cols"] | None],
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the K matrices between two sets of points without a graph.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1).
        norms: Inverse norms of both (`point_blocks`).

    Returns:
        (K, n * R, m * R), owned by the caller.
    """
    values, (left, right) = blocks.block(config, x, y), norms
    return values if left is None or right is None else cosine_of(values, left, right, same_points=_are_same(x, y))


def inverse_norms_of(diagonal: Float[Tensor, "*d rows"], per_point: int, *, first: int = 0) -> Float[Tensor, "*d rows"]:
    """Return what a cosine is multiplied by at each row.

    Args:
        diagonal: k(x, x) of every row.
        per_point: Rows that belong to one point.
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


def _inverse_norms(config: blocks.KernelConfig, x: Tensor, matrices: Tensor) -> Tensor:
    return inverse_norms_of(_diagonal(config, x, x, matrices), config.structure.rows_per_point)


def _diagonal(config: blocks.KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
    """Evaluate the diagonals of `_raw_values` only, (*d, n * R): every point is a set of its own."""
    sets = x.unsqueeze(-2)
    values = _raw_values(config, sets, sets if y is x else y.unsqueeze(-2), matrices[..., None])
    return values.diagonal(dim1=-2, dim2=-1).flatten(-2)


def _raw_values(config: blocks.KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
    """Evaluate the kernel without normalisation, with derivatives."""
    left = x.detach()
    values = blocks.batch_of_blocks(config, left, left if y is x else y.detach(), matrices)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)
    values = values.expand(*batch, *values.shape[-2:])
    if requires_graph(x) or requires_graph(y):
        return cast(Tensor, _Values.apply(x, y, values, config, matrices.expand(batch)))  # type: ignore[no-untyped-call]
    return values


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Return whether both sides have the same points, batches broadcast."""
    if x is y:
        return True
    return x.shape[-2:] == y.shape[-2:] and x.dtype == y.dtype and torch.equal(*torch.broadcast_tensors(x, y))


class _Values(torch.autograd.Function):
    """Attach derivatives to values; they are computed when a backward pass asks for them.

    They can be asked for with `create_graph=True`, but not be differentiated again: that raises a RuntimeError. The
    values are an argument, and not computed in `forward`: in there torch switches off the forward-mode derivatives that
    the path kernel uses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, values: Tensor, *of: Any) -> Tensor:
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
        x, y = ctx.saved_tensors
        with torch.no_grad():
            gradients = _asked_gradients(ctx, (x.detach(), y.detach()), weights.detach())
        if torch.is_grad_enabled():  # create_graph=True
            gradients = cast(Any, _DifferentiatedOnce.apply(x, y, weights, *gradients))  # type: ignore[no-untyped-call]
        return *gradients, None, None, None


class _DifferentiatedOnce(torch.autograd.Function):
    """Tie grads to all that they depend on; without it a second derivative would be 0, and nobody would see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weights: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> None:
        raise RuntimeError(
            "an EPKKernel must be differentiated at most once: got a second derivative, as a Hessian or a gradient "
            "penalty needs it. Take finite differences of the gradient, or detach the gradient if it is a constant."
        )


def _asked_gradients(ctx: Any, points: tuple[Tensor, Tensor], weights: Tensor) -> list[Tensor | None]:
    """Compute the gradients that a backward pass asks for; those that it throws away are NaN."""
    asked, nodes = ctx.needs_input_grad[:2], [node for node, _ in ctx.next_functions[:2]]
    sides = list(zip(asked, nodes, points, strict=True))
    # a gradient is thrown away if nothing arrives of NaN, which every sum and product keeps
    wanted = [is_asked and not _vanishes(node, torch.full_like(z, torch.nan)) for is_asked, node, z in sides]
    found: Sequence[Tensor | None] = (None, None)
    if any(wanted):
        # Batch dimensions whose sets are computed once: equal sets without gradients of their own. A set that nobody
        # wants a gradient of has none, nor has one of which only the sum with others is used.
        dims = [
            [dim for dim in repeated_dims(z) if not is_wanted or is_gradient_summed(node, z, dim)]
            for is_wanted, (_, node, z) in zip(wanted, sides, strict=True)
        ]
        if same_points(*points):  # they stay the same
            dims = [[dim for dim in dims[0] if dim in dims[1]]] * 2
        once = [first_of(z, own) for z, own in zip(points, dims, strict=True)]
        config, matrices = ctx.of
        found = _gradients(config, matrices, once, weights, (wanted[0], wanted[1]))
    gradients = list[Tensor | None]()
    for (is_asked, _, z), gradient in zip(sides, found, strict=True):
        total = torch.full_like(z, torch.nan) if is_asked else None
        if gradient is not None:  # that of the first of equal sets, as only their sum is used
            total = torch.zeros_like(z)
            total[tuple(slice(size) for size in gradient.shape)] = gradient
        gradients.append(total)
    return gradients


def _gradients(
    config: blocks.KernelConfig, matrices: Tensor, points: Sequence[Tensor], weights: Tensor, wanted: tuple[bool, bool]
) -> list[Tensor | None]:
    """Differentiate sum(weights * values) with respect to the wanted sides."""
    R, of_pairs = config.structure.rows_per_point, weights.reshape(-1, *weights.shape[-2:])
    of_outputs = of_pairs.unflatten(-1, (-1, R)).unflatten(1, (-1, R)).permute(0, 2, 1, 4, 3)
    pairs = blocks.set_pairs(config, points[0], points[1], matrices)
    found = config.path_kernel.pairs_input_gradients(pairs, of_outputs, wanted, config.options)
    return [
        None if gradient is None else torch.nn.functional.pad(gradient.flatten(2), (0, 1)).reshape(z.shape).to(z.dtype)
        for gradient, z in zip(found, points, strict=True)  # the copy column is discrete, and its gradient is 0
    ]


def is_gradient_summed(node: Any, x: Shaped[Tensor, "..."], dim: int) -> bool:
    """Return whether only the sum of a gradient over one dimension is used, as where the same points were expanded.

    Random whole numbers whose sum over the dimension is 0 are sent through the backward functions of the operations
    that made x. If nothing but 0 arrives anywhere, nothing depends on more than the sum.

    Args:
        node: The backward function that takes the gradient of x.
        x: Points that require a gradient.
        dim: The dimension.
    """
    probe = _random_numbers(x)
    probe.select(dim, 0).sub_(probe.sum(dim))
    return _vanishes(node, probe)


def is_gradient_joint(x: Shaped[Tensor, "..."], y: Shaped[Tensor, "..."]) -> bool:
    """Return whether only the sum of the gradients of two tensors is used: the same numbers of the same tensors.

    Random whole numbers are sent from both through the backward functions of the operations that made them. If they
    arrive at the same places, whatever depends on one of the gradients depends on their sum.

    Args:
        x: Points.
        y: Points of the same shape.
    """
    if x is y or not (x.requires_grad and y.requires_grad):
        return x is y
    edges = [torch.autograd.graph.get_gradient_edge(z) for z in (x, y)]
    left, right = (_arrivals(edge.node, edge.output_nr, _random_numbers(x)) for edge in edges)
    return left.keys() == right.keys() and all(torch.equal(left[place], right[place]) for place in left)


def _random_numbers(x: Tensor) -> Tensor:
    draws = torch.Generator(x.device).manual_seed(0)
    return torch.randint(1, 1024, x.shape, generator=draws, device=x.device).to(x)


def _vanishes(node: Any, gradient: Tensor) -> bool:
    """Return whether nothing of a gradient arrives anywhere but 0, behind operations that only move or add numbers."""
    if torch.is_anomaly_enabled():
        return False
    arrived = _arrivals(node, 0, gradient, moves=_passes_on)
    return not any(bool((part != 0).any()) for part in arrived.values())  # NaN is not 0


def _arrivals(
    node: Any, number: int, gradient: Tensor, moves: Callable[[Any], bool] = lambda node: True
) -> dict[tuple[Any, int], Tensor]:
    """Send a gradient through the operations that only moved numbers, and return what arrives where others begin."""
    moving, arrived = [(node, number, gradient)], dict[tuple[Any, int], Tensor]()
    while moving:
        node, number, gradient = moving.pop()
        if type(node).__name__ not in _MOVES or not moves(node):
            place = (node, number)
            arrived[place] = arrived[place] + gradient if place in arrived else gradient
            continue
        with torch.no_grad():
            found = node(gradient)  # as the engine calls it
        parts = found if isinstance(found, tuple) else (found,)
        for (source, own), part in zip(node.next_functions, parts, strict=False):
            if source is not None and part is not None:
                moving.append((source, own, part))
    return arrived


def _passes_on(node: Any) -> bool:
    """Return whether this backward pass goes on behind a node; if not, it was asked for the gradient there."""
    return _is_running(node) and any(source is not None and _is_running(source) for source, _ in node.next_functions)


def _is_running(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "A leaf node was passed": the gradient of that leaf is what was asked for
        return True
