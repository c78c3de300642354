"""Derivatives of kernel values with respect to the points: weights on values in, gradients out.

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

from epk_gp.kernels.blocks import KernelConfig
from epk_gp.kernels.tagging import as_set_pairs, first_of, is_transformed, repeated_dims, same_points

# Backward functions of operations that move numbers, and do not change them.
_MOVES = {
    f"{name}Backward{version}"
    for name in (
        "Alias", "Cat", "Clone", "Expand", "Index", "IndexSelect", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for version in (0, 1)
}  # fmt: skip


def with_derivatives(
    values: Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"],
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    config: KernelConfig,
    matrices: Int64[Tensor, "*batch"],
    *,
    is_diagonal: bool,
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
        config: The kernel.
        matrices: Which of the structure's K matrices each pair of sets has, (*d).
        is_diagonal: The values are the diagonals of the matrices only.
    """
    return cast(Tensor, _Values.apply(x, y, values, config, matrices, is_diagonal))  # type: ignore[no-untyped-call]


class _Values(torch.autograd.Function):
    """Attach derivatives to values.

    The values are an argument, and not computed in `forward`: in there torch switches off the forward-mode derivatives
    that the path kernel uses.
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
        return *gradients, None, None, None, None


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


def _asked_gradients(ctx: Any, points: tuple[Tensor, Tensor], weights: Tensor) -> list[Tensor | None]:
    """Compute the gradients that a backward pass asks for; those that it throws away are NaN."""
    asked, nodes = ctx.needs_input_grad[:2], [node for node, _ in ctx.next_functions[:2]]
    sides = list(zip(asked, nodes, points, strict=True))
    wanted = [is_asked and not is_gradient_dropped(node, z) for is_asked, node, z in sides]
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
        config, matrices, is_diagonal = ctx.of
        found = _gradients(config, matrices, is_diagonal, once, weights, (wanted[0], wanted[1]))
    gradients = list[Tensor | None]()
    for (is_asked, _, z), gradient in zip(sides, found, strict=True):
        total = torch.full_like(z, torch.nan) if is_asked else None
        if gradient is not None:  # that of the first of equal sets, as only their sum is used
            total = torch.zeros_like(z)
            total[tuple(slice(size) for size in gradient.shape)] = gradient
        gradients.append(total)
    return gradients


def _gradients(
    config: KernelConfig,
    matrices: Tensor,
    is_diagonal: bool,
    points: Sequence[Tensor],
    weights: Tensor,
    wanted: tuple[bool, bool],
) -> list[Tensor | None]:
    """Differentiate sum(weights * values) with respect to the wanted sides."""
    x, y = points
    if is_diagonal:  # every point of a set is a set of its own
        weights = weights.unflatten(-1, (-1, config.structure.rows_per_point)).diag_embed()
        x, y, matrices = x.unsqueeze(-2), y.unsqueeze(-2), matrices[..., None].expand(weights.shape[:-2])
    pairs = as_set_pairs(config.trajectory, x, y, matrices.shape)
    of_pairs = weights.reshape(-1, *weights.shape[-2:])
    pairs, of_outputs = config.structure.weights_on_outputs(pairs, matrices.flatten(), of_pairs)
    found = config.path_kernel.pairs_input_gradients(pairs, of_outputs, wanted, config.options)
    return [
        None if gradient is None else torch.nn.functional.pad(gradient.flatten(2), (0, 1)).reshape(z.shape).to(z.dtype)
        for gradient, z in zip(found, points, strict=True)  # the copy column is discrete, and its gradient is 0
    ]


def is_gradient_dropped(node: Any, x: Shaped[Tensor, "..."]) -> bool:
    """Return whether a gradient is thrown away by the operations that made x out of other tensors.

    NaN is sent through the backward functions of these operations, as long as they only move numbers. If none arrives
    anywhere, nothing depends on the gradient. To be called in a backward pass.

    Args:
        node: The backward function that takes the gradient of x.
        x: Points that require a gradient.
    """
    return _vanishes(node, torch.full_like(x, torch.nan))


def is_gradient_summed(node: Any, x: Shaped[Tensor, "..."], dim: int) -> bool:
    """Return whether only the sum of a gradient over one dimension is used, as where the same points were expanded.

    Random whole numbers whose sum over the dimension is 0 are sent through the backward functions of the operations
    that made x, as in `is_gradient_dropped`. If nothing but 0 arrives anywhere, nothing depends on more than the sum.

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
