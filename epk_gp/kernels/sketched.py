"""Kernels of sketched features, as GPyTorch's low-rank operators: its inference is then linear in the points."""

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
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.gradient_demand import is_gradient_dropped, is_gradient_joint
from epk_gp.kernels.tagged_points import as_points, requires_graph, same_points, squeeze_repeated
from epk_gp.kernels.values import inverse_norms_of


def kernel_sketch(kernel: PathKernel, features: int | None, nodes: int, seed: int) -> PathSketch | None:
    """Return the sketch that a kernel's arguments ask for; its outputs are those of a structure.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is too small, the run is a path of averaged weights, or the kernel has a Manhattan path.
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
    features = _features(config, rows.detach().clone(), classes)
    if requires_graph(x):
        features = cast(Tensor, _DifferentiableFeatures.apply(rows, features, config, classes))  # type: ignore[no-untyped-call]
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


def _features(config: KernelConfig, x: Tensor, classes: Tensor) -> Tensor:
    """Compute the features of tagged points, or take them from the cache: (n, K, k)."""
    key = ("features", config.cache_key, content_key(x, classes))
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    with torch.no_grad():
        values = _sketch(config, classes).features(as_points(config.trajectory, x), config.options)
    config.cache.put(key, values)
    return values


def _sketch(config: KernelConfig, classes: Tensor) -> PathSketch:
    if config.sketch is None:
        raise TypeError("a kernel without features was asked for them: this is a bug in epk_gp.")
    run = config.sketch.run
    coefficients = config.structure.sketch_coefficients(run, classes, config.sketch.seed)
    return config.sketch.with_coefficients(coefficients)


class _DifferentiableFeatures(torch.autograd.Function):
    """Attach derivatives in the points to features; they are computed anew in every backward pass.

    The features are an argument: inside `forward` torch switches off the forward-mode derivatives by which a network is
    examined when it is first used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: Tensor, config: KernelConfig, classes: Tensor) -> Tensor:
        """Return the features."""
        ctx.save_for_backward(x)
        ctx.config, ctx.classes = config, classes
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None, None]:
        """Differentiate, at the points whose features are used only; a gradient that is thrown away is NaN."""
        (x,) = ctx.saved_tensors
        if is_gradient_dropped(ctx.next_functions[0][0], x):  # a slice of points that were joined with others
            return torch.full_like(x, torch.nan), None, None, None
        result = torch.zeros_like(x)
        rows = (weights != 0).flatten(1).any(1).nonzero().squeeze(1)
        if len(rows):
            points = as_points(ctx.config.trajectory, x[rows].detach())
            gradients = _sketch(ctx.config, ctx.classes).input_gradients(points, weights[rows])
            result[rows, :-1] = gradients.flatten(1)
        return result, None, None, None
