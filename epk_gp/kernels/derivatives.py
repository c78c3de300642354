"""Derivatives of kernel values with respect to the points: values with a graph, weights on them in, gradients out."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.gradient_demand import is_gradient_dropped, is_gradient_summed
from epk_gp.kernels.output_structure import OutputStructure
from epk_gp.kernels.tagged_points import as_set_pairs, is_transformed, repeated_dims, same_points


@dataclass(frozen=True, eq=False)
class ValuesOfPairs:
    """What values between sets of points are: d pairs of sets, and a matrix of the structure for each.

    Attributes:
        config: The kernel.
        structure: What is made of the C x C block of two points.
        matrices: Which of the structure's K matrices each pair has, (*d).
        is_diagonal: The values are the diagonals of the matrices only.
    """

    config: KernelConfig
    structure: OutputStructure
    matrices: Int64[Tensor, "*d"]
    is_diagonal: bool = False


def with_derivatives(
    values: Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"],
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    of: ValuesOfPairs,
) -> Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"]:
    """Attach derivatives to kernel values; they are computed when a backward pass asks for them.

    They can be asked for with `create_graph=True`, but not be differentiated again: that raises a RuntimeError.

    The gradient of points that were joined with others, as GPyTorch joins training with test points, is not computed
    if no part of it is used: it is NaN then, and never seen (`is_gradient_dropped`). That of equal sets of which only
    the sum is used, as of inducing points that all classes share, is handed to the first of them
    (`is_gradient_summed`).

    Args:
        values: The values.
        x: The points on the left; b and c broadcast to d.
        y: The points on the right.
        of: What the values are.
    """
    return cast(Tensor, _Values.apply(x, y, of, values))  # type: ignore[no-untyped-call]


class _Values(torch.autograd.Function):
    """Attach derivatives to values.

    The values are an argument, and not computed in `forward`: in there torch switches off the forward-mode derivatives
    that the path kernel uses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, of: ValuesOfPairs, values: Tensor) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(x, y)
        return values

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if is_transformed(weights):
            raise TypeError(
                "a backward pass of an EPKKernel must have plain tensors as weights: got one inside a transformation, "
                "as vmap, is_grads_batched=True and vectorize=True make it. Call torch.autograd.grad for one at a time."
            )
        x, y = ctx.saved_tensors
        with torch.no_grad():
            gradients = _asked_gradients(ctx, x.detach(), y.detach(), weights.detach())
        if torch.is_grad_enabled():  # create_graph=True
            gradients = cast(Any, _DifferentiatedOnce.apply(x, y, weights, *gradients))  # type: ignore[no-untyped-call]
        return gradients[0], gradients[1], None, None


class _DifferentiatedOnce(torch.autograd.Function):
    """Tie gradients to all that they depend on; without it a second derivative would be 0, and nobody would see it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weights: Tensor, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> None:
        raise RuntimeError(
            "an EPKKernel must be differentiated at most once: got a second derivative, as a Hessian or a gradient "
            "penalty needs it. Take finite differences of the gradient, or detach the gradient if it is a constant."
        )


def _asked_gradients(ctx: Any, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients that a backward pass asks for; those that it throws away are NaN."""
    asked = ctx.needs_input_grad[:2]
    wanted = [
        is_asked and not is_gradient_dropped(edge[0], z)
        for is_asked, edge, z in zip(asked, ctx.next_functions[:2], (x, y), strict=True)
    ]
    if not any(wanted):
        found: tuple[Tensor | None, Tensor | None] = (None, None)
    else:
        dims = _dims_once(ctx, (x, y), wanted)
        once = [_first_of(z, own) for z, own in zip((x, y), dims, strict=True)]
        found = _gradients(ctx.of, once[0], once[1], weights, (wanted[0], wanted[1]))
    gradients = [
        torch.full_like(z, torch.nan) if is_asked and gradient is None else _as_first(gradient, z)
        for is_asked, gradient, z in zip(asked, found, (x, y), strict=True)
    ]
    return gradients[0], gradients[1]


def _dims_once(ctx: Any, points: tuple[Tensor, Tensor], wanted: list[bool]) -> list[list[int]]:
    """List the batch dimensions of both sides whose sets are computed once: equal sets without gradients of their own.

    A set that nobody wants a gradient of has none, nor has one of which only the sum with others is used.
    """
    dims = [
        [dim for dim in repeated_dims(z) if not is_wanted or is_gradient_summed(edge[0], z, dim)]
        for z, is_wanted, edge in zip(points, wanted, ctx.next_functions[:2], strict=True)
    ]
    if same_points(*points):  # they stay the same
        both = [dim for dim in dims[0] if dim in dims[1]]
        return [both, both]
    return dims


def _first_of(x: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


def _as_first(gradient: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the gradient of the first of equal sets as that of all: of theirs only the sum is used."""
    if gradient is None or gradient.shape == x.shape:
        return gradient
    total = torch.zeros_like(x)
    total[tuple(slice(size) for size in gradient.shape)] = gradient
    return total


def _gradients(
    of: ValuesOfPairs, x: Tensor, y: Tensor, weights: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Differentiate sum(weights * values) with respect to the wanted sides."""
    shapes, batch = (x.shape, y.shape), of.matrices.shape
    if of.is_diagonal:  # every point of a set is a set of its own
        R = of.structure.rows_per_point
        weights = weights.unflatten(-1, (-1, R)).diag_embed()
        x, y, batch = x.unsqueeze(-2), y.unsqueeze(-2), weights.shape[:-2]
        of_points = of.matrices[..., None]
    else:
        of_points = of.matrices
    pairs = as_set_pairs(of.config.trajectory, x, y, batch)
    matrices, of_pairs = of_points.expand(batch).flatten(), weights.flatten(0, -3) if batch else weights[None]
    pairs, of_outputs = of.structure.weights_on_outputs(pairs, matrices, of_pairs)
    config = of.config
    found = config.path_kernel.pairs_input_gradients(pairs, of_outputs, wanted, config.options)
    gradients = [
        None if gradient is None else _with_copy_column(gradient).reshape(shape).to(x.dtype)
        for gradient, shape in zip(found, shapes, strict=True)
    ]
    return gradients[0], gradients[1]


def _with_copy_column(gradient: Tensor) -> Tensor:
    """Flatten the gradient to rows of points; the copy column is discrete, and its gradient is 0."""
    rows = gradient.flatten(2)
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], 1)], dim=2)
