"""Whether torch can differentiate gradients once more: what it cannot is an error that says so."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node

# What torch says of operations whose derivative it cannot differentiate.
_MESSAGES = re.compile("twice|double backward|derivative for .* is not implemented")
_MARKED = "trying to differentiate twice a function that was marked with @once_differentiable"


@contextmanager
def needing_second_derivatives() -> Iterator[None]:
    """Say what to do where torch cannot differentiate a gradient.

    Raises:
        ValueError: It cannot.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # NotImplementedError among them
        if _MESSAGES.search(str(error)) is None:
            raise
        raise ValueError(_refusal(str(error))) from error


def require_second_derivatives(gradients: Sequence[Tensor], losses: Tensor) -> None:
    """Raise if a graph holds an operation that can be differentiated once only.

    torch puts an error in the place of its derivative, which leads to no weight: `torch.autograd.grad` does not meet
    it, and gives what is left of the derivative.

    Args:
        gradients: Gradients of the losses, with their graph.
        losses: The losses.

    Raises:
        ValueError: There is one.
    """
    if any(node.name().endswith("::Error") for node in _nodes(gradients)):
        # torch's own operations are no classes of Python
        own = {forward.__name__ for node in _nodes([losses]) if (forward := getattr(node, "_forward_cls", None))}
        raise ValueError(_refusal(f"{_MARKED} (operations of one's own here: {', '.join(sorted(own))})"))


def _refusal(message: str) -> str:
    return (
        f"the loss must have second derivatives in the weights: torch says {message!r}. Give the operation a backward "
        "pass that torch can differentiate, or use epk_gp.attribute, which takes first derivatives alone."
    )


def _nodes(tensors: Sequence[Tensor]) -> Iterator[Node]:
    """Yield the nodes of a graph."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {own for own, _ in node.next_functions if own is not None} - seen
        seen |= following
        waiting += following
