"""Activation checkpointing (torch.utils.checkpoint), made harmless where a network is called with given weights.

A checkpointed function is called again in the backward pass, and takes the weights that its module holds then. Those of
`torch.func.functional_call` are there during the forward pass only, so nothing may be left to be recomputed.
"""

import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode


@final
class KeptActivations(TorchFunctionMode):
    """Keep what a function saves for its backward pass, whatever hooks a checkpoint has set around it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        if not torch.is_grad_enabled():  # nothing is saved, and a checkpoint sets no hooks
            return func(*args, **(kwargs or {}))
        with saved_tensors_hooks(_pack, _unpack):  # the innermost hooks are those that are called
            return func(*args, **(kwargs or {}))


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # an output that held itself would never be freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:  # torch looks itself only where there are no hooks
        raise RuntimeError("a tensor that a gradient needs was changed in place after it had been used.")
    return x


class _User:
    """One use of `quiet_checkpoints`; it is gone with it, however that ends."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.users = weakref.WeakSet[_User]()


_THREAD = _Thread()


class _QuietCategory(type):
    """Kind of a warning category that holds the warnings of a thread while it is quiet."""

    def __subclasscheck__(cls, category: Any) -> bool:
        return bool(_THREAD.users)


# One entry in the process's list of filters that stays there: each change of the list would make Python forget which
# warnings it has shown, and show those of the user's own loop again.
_FILTER = (
    "ignore",
    re.compile("None of the inputs have requires_grad=True", re.IGNORECASE),
    cast(Any, _QuietCategory("QuietWarning", (Warning,), {})),
    None,
    0,
)


@contextmanager
def quiet_checkpoints() -> Iterator[None]:
    """Leave out what re-entrant checkpoints say in this thread of inputs without gradients."""
    if list(warnings.filters[:1]) != [_FILTER]:
        warnings.filterwarnings("ignore", _FILTER[1].pattern, _FILTER[2])
    user = _User()
    try:
        _THREAD.users.add(user)
        yield
    finally:
        _THREAD.users.discard(user)
