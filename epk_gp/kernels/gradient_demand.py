"""Whether anything that a backward pass will run uses the gradient of some points.

GPyTorch joins fixed points with those that are optimised, training with test points or data with inducing points, and
hands over slices of the joint tensor. All of them require gradients then, although those of the fixed points are thrown
away: with BoTorch they would be most of the work, as every restart has its own copy of the training points.
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
    if _will_execute is None or torch.is_anomaly_enabled():
        return False
    arriving = [(node, torch.full_like(x, torch.nan))]
    while arriving:
        node, gradient = arriving.pop()
        if type(node).__name__ not in _MOVES or not _passes_on(node):
            return False
        found = node(gradient)
        parts = found if isinstance(found, tuple) else (found,)
        for (source, _), part in zip(node.next_functions, parts, strict=False):
            if source is not None and part is not None and bool(part.isnan().any()):
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
