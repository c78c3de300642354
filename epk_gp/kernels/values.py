"""Values of a GPyTorch kernel: exact or from sketched features, as they are or as cosines."""

from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, Shaped
from linear_operator import LinearOperator
from linear_operator.operators import LowRankRootLinearOperator, MatmulLinearOperator, RootLinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import PathSketch, validate_path_of_nodes
from epk_gp.kernels.blocks import KernelConfig, batch_of_blocks, batch_of_diagonals, block, diagonal_blocks
from epk_gp.kernels.derivatives import is_gradient_dropped, is_gradient_joint, with_derivatives
from epk_gp.kernels.output_structure import diagonals
from epk_gp.kernels.tagging import as_points, requires_graph, same_points, squeeze_repeated

_ROWS = 1024  # of a matrix that are multiplied at a time, so that no second matrix is made


def kernel_values(
    config: KernelConfig,
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
    if not config.is_cosine:
        return _raw_values(config, x, y, matrices, diag=diag)
    same = _are_same(x, y)
    if diag and same:
        ones = torch.ones_like(_inverse_norms(config, x.detach(), matrices))
        rows = (x * y)[..., 0] if requires_graph(x) or requires_graph(y) else None
        return ones if rows is None else ones + rows.repeat_interleave(config.structure.rows_per_point, -1) * 0
    has_graph = requires_graph(x) or requires_graph(y)
    if same and has_graph and is_gradient_joint(x, y):  # the matrix has the diagonal, and one gradient is enough
        values = _raw_values(config, x, y, matrices, diag=False)
        norms = inverse_norms_of(values.diagonal(dim1=-2, dim2=-1), config.structure.rows_per_point)
        return cosine_of(values, norms, norms, same_points=True)
    left = _inverse_norms(config, x, matrices)
    right = left if same and not has_graph else _inverse_norms(config, y, matrices)
    values = _raw_values(config, x, y, matrices, diag=diag)
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
    config: KernelConfig, x: Shaped[Tensor, "n columns"], *, first: int = 0
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
    blocks = config.structure.reduce_blocks(diagonal_blocks(config, x))
    if not config.is_cosine:
        return blocks, None
    n, K, R, _ = blocks.shape
    norms = inverse_norms_of(diagonals(blocks), R, first=first)
    of_points = norms.reshape(K, n, R).movedim(0, 1)
    return cosine_of(blocks.clone(), of_points, of_points, same_points=True), norms


def normalized_block(
    config: KernelConfig,
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
    values, (left, right) = block(config, x, y), norms
    return values if left is None or right is None else cosine_of(values, left, right, same_points=_are_same(x, y))


def inverse_norms_of(
    diagonal: Float[Tensor, "*d rows"], rows_per_point: int, *, first: int = 0
) -> Float[Tensor, "*d rows"]:
    """Return what a cosine is multiplied by at each row.

    Args:
        diagonal: k(x, x) of every row.
        rows_per_point: Rows that belong to one point.
        first: Number of the first point in an error.

    Raises:
        ValueError: An entry is not positive: the point has no direction.
    """
    invalid = ~(diagonal.detach() > 0)
    if invalid.any():
        *batch, row = invalid.nonzero()[0].tolist()
        value = float(diagonal.detach()[(*batch, row)])
        point = f"point {first + row // rows_per_point}" + (f" of set {tuple(batch)}" if any(batch) else "")
        output = f", output {row % rows_per_point}" if rows_per_point > 1 else ""
        raise ValueError(
            f"normalize='cosine' needs k(x, x) > 0 at every point: got {value:.3g} at {point}{output}, whose gradients "
            "vanish along the whole run. Leave that point out, or use normalize='mean_diagonal'."
        )
    return diagonal.rsqrt()


def _inverse_norms(config: KernelConfig, x: Tensor, matrices: Tensor) -> Tensor:
    diagonal = _raw_values(config, x, x, matrices, diag=True)
    return inverse_norms_of(diagonal, config.structure.rows_per_point)


def _raw_values(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor, *, diag: bool) -> Tensor:
    """Evaluate the kernel without normalisation, with derivatives."""
    evaluate, value_ndim = (batch_of_diagonals, 1) if diag else (batch_of_blocks, 2)
    left = x.detach()
    values = evaluate(config, left, left if y is x else y.detach(), matrices)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)
    values = values.expand(*batch, *values.shape[-value_ndim:])
    if requires_graph(x) or requires_graph(y):
        return with_derivatives(values, x, y, config, matrices.expand(batch), is_diagonal=diag)
    return values


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Return whether both sides have the same points, batches broadcast."""
    if x is y:
        return True
    return x.shape[-2:] == y.shape[-2:] and x.dtype == y.dtype and torch.equal(*torch.broadcast_tensors(x, y))


def kernel_sketch(kernel: PathKernel, features: int | None, nodes: int, seed: int) -> PathSketch | None:
    """Return the sketch that a kernel's arguments ask for; its outputs are those of a structure.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is too small, or the run is a path of averaged weights.
    """
    if features is None:
        return None
    validate_count(features, "features")
    validate_count(nodes, "nodes")
    validate_integer(seed, "seed")
    validate_path_of_nodes(kernel.path)
    trajectory: Trajectory = kernel.trajectory
    every = torch.eye(trajectory.num_outputs, dtype=torch.float64).expand(nodes, -1, -1)
    return PathSketch(trajectory, int(nodes), kernel.head, every, int(features), int(seed), kernel.path)


def sketched_values(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*k"],
    scale: float,
    *,
    diag: bool = False,
) -> Float[Tensor, "*d rows"] | LinearOperator:
    """Return products of sketched features as a low-rank operator, or their diagonal.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1).
        matrices: Which of the structure's K matrices, (*k); b, c and k broadcast to d.
        scale: What values are divided by.
        diag: Only the diagonal, for n = m.

    Raises:
        ValueError: A cosine is asked for at a point whose features are zero.
    """
    same = y is x or (x.shape == y.shape and same_points(x, y))
    if same and (requires_graph(x) or requires_graph(y)):  # equal points of two tensors have two gradients
        same = is_gradient_joint(x, y)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)
    left = _roots(config, x, matrices, batch, scale)
    right = left if same else _roots(config, y, matrices, batch, scale)
    if diag:
        return (left * right).sum(-1)
    if not same:
        return MatmulLinearOperator(left, right.mT)
    return LowRankRootLinearOperator(left) if left.shape[-1] < left.shape[-2] else RootLinearOperator(left)


def mean_square_length(config: KernelConfig, x: Shaped[Tensor, "n columns"], matrices: Int64[Tensor, "*k"]) -> float:
    """Return the mean diagonal of sketched matrices at some points, in float64."""
    roots = _roots(replace(config, is_cosine=False), x, matrices, matrices.shape, 1.0)
    return float(roots.double().square().sum(-1).mean())


def _roots(config: KernelConfig, x: Tensor, matrices: Tensor, batch: torch.Size, scale: float) -> Tensor:
    """Compute the features of each row of a batch of matrices, (*d, rows, k)."""
    classes, own = matrices.unique(return_inverse=True)
    single = x if requires_graph(x) else squeeze_repeated(x)  # each copy has a gradient of its own
    rows = single.reshape(-1, single.shape[-1])
    copies, whole = rows.detach().clone(), cast(PathSketch, config.sketch)
    sketch = whole.with_coefficients(config.structure.sketch_coefficients(whole.run, classes, whole.seed))

    def compute() -> Tensor:
        with torch.no_grad():
            return sketch.features(as_points(config.trajectory, copies), config.options)

    features = config.cache.computed(("features", config.cache_key, content_key(copies, classes)), compute)  # (n, K, k)
    if requires_graph(x):
        features = cast(Tensor, _DifferentiableFeatures.apply(rows, features, sketch))  # type: ignore[no-untyped-call]
    (K, k), R = features.shape[1:], config.structure.rows_per_point
    if R > 1:  # point-major rows: point i, output c
        roots = features.reshape(*single.shape[:-2], 1, single.shape[-2] * R, k)
    else:
        roots = features.reshape(*single.shape[:-1], K, k).transpose(-3, -2)
    if config.is_cosine:
        roots = roots * inverse_norms_of(roots.square().sum(-1), R)[..., None]
    elif scale != 1:
        roots = roots / scale**0.5
    every = roots.expand(*batch, *roots.shape[-3:])
    if roots.shape[-3] == 1:
        return every.squeeze(-3)
    index = own.expand(batch)[..., None, None, None].expand(*batch, 1, *roots.shape[-2:])
    return every.gather(-3, index).squeeze(-3)


class _DifferentiableFeatures(torch.autograd.Function):
    """Attach derivatives in the points to features; they are computed anew in every backward pass.

    The features are an argument: inside `forward` torch switches off the forward-mode derivatives by which a network is
    examined when it is first used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: Tensor, sketch: PathSketch) -> Tensor:
        """Return the features."""
        ctx.save_for_backward(x)
        ctx.sketch = sketch
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        """Differentiate, at the points whose features are used only; a gradient that is thrown away is NaN."""
        (x,) = ctx.saved_tensors
        if is_gradient_dropped(ctx.next_functions[0][0], x):  # a slice of points that were joined with others
            return torch.full_like(x, torch.nan), None, None
        result = torch.zeros_like(x)
        rows = (weights != 0).flatten(1).any(1).nonzero().squeeze(1)
        if len(rows):
            points = as_points(ctx.sketch.run, x[rows].detach())
            result[rows, :-1] = ctx.sketch.input_gradients(points, weights[rows]).flatten(1)
        return result, None, None
