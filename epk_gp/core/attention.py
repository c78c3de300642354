"""Attention that gives the same bytes in every thread, can be differentiated in every way, and is not autocast."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

# torch's switches: how each is read, how it is set, and what it must be so that attention is made of plain products.
_SWITCHES = (
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
)


class _User:
    """One use of `disable_fused_attention`; it is gone with it, however that ends."""


@dataclass(eq=False)
class _FusedAttention:
    """Who has fused attention switched off: torch's switches are the process's, not the thread's."""

    users: "weakref.WeakSet[_User]" = field(default_factory=weakref.WeakSet)
    before: tuple[bool, ...] | None = None  # what the switches were, while they are off
    lock: Any = field(default_factory=threading.RLock)

    def switch_off(self, user: _User) -> None:
        with self.lock:
            self.users.add(user)
            if self.before is None:
                self.before = tuple(read() for read, _, _ in _SWITCHES)
                for _, write, value in _SWITCHES:
                    write(value)

    def restore(self, user: _User) -> None:
        with self.lock:
            self.users.discard(user)
            if self.before is not None and not self.users:
                for (_, write, _), value in zip(_SWITCHES, self.before, strict=True):
                    write(value)
                self.before = None


_FUSED_ATTENTION = _FusedAttention()


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Compute in the precision of the tensors, whatever the caller's `torch.autocast`."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "xpu", "mps"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Keep torch to kernels that can be differentiated in every way, as long as any thread is in here; no autocast."""
    user = _User()
    try:
        _FUSED_ATTENTION.switch_off(user)
        with outside_autocast():
            yield
    finally:
        _FUSED_ATTENTION.restore(user)
