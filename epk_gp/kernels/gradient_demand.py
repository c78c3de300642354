"""What a backward pass that is running will use of the gradient of some points: all of it, its sums, or nothing.

GPyTorch joins fixed points with those that are optimised, training with test points or data with inducing points, and
hands over slices of the joint tensor. All of them require gradients then, although those of the fixed points are thrown
away: with BoTorch they would be most of the work, as every restart has its own copy of the training points.

Inducing points that all classes share are expanded to a set for each class, and only the sum of these sets' gradients
is used. They are computed as one set then. Slices of a joint tensor that are both sides of a kernel have one gradient,
too; equal points of two tensors have two.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

# Backward functions of operations that move numbers, and do not change them.
_MOVES = {
    f"{name}Backward{version}"
    for name in (
        "Alias", "Cat", "Clone", "Expand", "Index", "IndexSelect", "Permute", "ReshapeAlias", "Select", "Slice",
        "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for version in (0, 1)
}  # fmt: skip

# of torch itself, which uses it for hooks; without it every gradient is computed
_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


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
    if type(node).__name__ not in _MOVES:
        return False
    draws = torch.Generator(x.device).manual_seed(0)
    probe = torch.randint(1, 1024, x.shape, generator=draws, device=x.device).to(x)
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
    if x is y:
        return True
    if not (x.requires_grad and y.requires_grad):
        return False
    draws = torch.Generator(x.device).manual_seed(0)
    probe = torch.randint(1, 1024, x.shape, generator=draws, device=x.device).to(x)
    left, right = _arrivals(x, probe), _arrivals(y, probe)
    return left.keys() == right.keys() and all(torch.equal(left[place], right[place]) for place in left)


def _arrivals(x: Tensor, gradient: Tensor) -> dict[tuple[Any, int], Tensor]:
    """Send a gradient through the operations that only moved numbers, and return what arrives where others begin."""
    start = torch.autograd.graph.get_gradient_edge(x)
    moving, arrived = [(start.node, start.output_nr, gradient)], dict[tuple[Any, int], Tensor]()
    while moving:
        node, number, gradient = moving.pop()
        if type(node).__name__ not in _MOVES:
            place = (node, number)
            arrived[place] = arrived[place] + gradient if place in arrived else gradient
            continue
        with torch.no_grad():
            found = node(gradient)  # type: ignore[operator]  # as the engine calls it
        parts = found if isinstance(found, tuple) else (found,)
        for (source, own), part in zip(node.next_functions, parts, strict=False):
            if source is not None and part is not None:
                moving.append((source, own, part))
    return arrived


def _vanishes(node: Any, gradient: Tensor) -> bool:
    """Return whether nothing of a gradient arrives anywhere but 0, behind operations that only move or add numbers."""
    if _will_execute is None or torch.is_anomaly_enabled():
        return False
    arriving = [(node, gradient)]
    while arriving:
        node, gradient = arriving.pop()
        if type(node).__name__ not in _MOVES or not _passes_on(node):
            return False
        found = node(gradient)
        parts = found if isinstance(found, tuple) else (found,)
        for (source, _), part in zip(node.next_functions, parts, strict=False):
            if source is not None and part is not None and bool((part != 0).any()):  # NaN is not 0
                arriving.append((source, part))
    return True


def _passes_on(node: Any) -> bool:
    """Return whether this backward pass goes on behind a node; if not, it was asked for the gradient there."""
    return _is_running(node) and any(source is not None and _is_running(source) for source, _ in node.next_functions)


def _is_running(node: Any) -> bool:
    try:
        return _will_execute is not None and _will_execute(node)
    except RuntimeError:  # "A leaf node was passed": the gradient of that leaf is what was asked for
        return True
