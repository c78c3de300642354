"""Forward-mode and second derivatives: one thread at a time, and an error where torch has none."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.autograd.graph import Node

# torch has one level of forward-mode derivatives in a process: a second thread would fail, or end the first one's.
_FORWARD_MODE = threading.RLock()
_interrupted = threading.Event()  # a computation may have left the level open; read and set under the lock
_in_this_thread = threading.local()  # how often this thread has the level


@contextmanager
def exclusive_forward_mode() -> Iterator[None]:
    """Let one thread at a time use torch's level of forward-mode derivatives, which it enters itself.

    A computation that is interrupted while torch enters or leaves the level can leave it open. The next one could not
    enter it then: it closes it first.
    """
    with _FORWARD_MODE:
        if _interrupted.is_set():
            _close_level()
        _interrupted.set()
        depth = getattr(_in_this_thread, "depth", 0)
        try:
            _in_this_thread.depth = depth + 1
            yield
        except Exception:
            _interrupted.clear()  # an error, and the level is closed
            raise
        finally:
            _in_this_thread.depth = depth
        _interrupted.clear()


@contextmanager
def forward_mode() -> Iterator[None]:
    """Enter torch's level of forward-mode derivatives, one thread at a time."""
    with exclusive_forward_mode(), fwAD.dual_level():
        yield


def _close_level() -> None:
    exit_level = getattr(torch._C, "_exit_dual_level", None)
    if exit_level is None or not hasattr(fwAD, "_current_level"):  # another torch: its own function does what it can
        with suppress(RuntimeError):
            fwAD.exit_dual_level()
        return
    with suppress(RuntimeError):  # no level is open, and only its number is left
        exit_level(level=0)
    cast(Any, fwAD)._current_level = -1


def split_dual(value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor's value and its tangent, None if it has none.

    While another thread is at torch's level, torch would make a view of a tensor that has no tangent. Gradients through
    the view are added up in another order, and would have other bytes than alone.
    """
    if not getattr(_in_this_thread, "depth", 0):
        return value, None
    primal, tangent = fwAD.unpack_dual(value)
    return primal, tangent


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
    if any(node.name().endswith("::Error") for node in graph_nodes(gradients)):
        # torch's own operations are no classes of Python
        own = {forward.__name__ for node in graph_nodes([losses]) if (forward := getattr(node, "_forward_cls", None))}
        raise ValueError(_refusal(f"{_MARKED} (operations of one's own here: {', '.join(sorted(own))})"))


def _refusal(message: str) -> str:
    return (
        f"the loss must have second derivatives in the weights: torch says {message!r}. Give the operation a backward "
        "pass that torch can differentiate, or use epk_gp.attribute, which takes first derivatives alone."
    )


def graph_nodes(tensors: Sequence[Tensor]) -> Iterator[Node]:
    """Yield the nodes of a graph."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {own for own, _ in node.next_functions if own is not None} - seen
        seen |= following
        waiting += following
