"""Attention that gives the same bytes in every thread and can be differentiated in every way."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(eq=False)
class _FusedAttention:
    """How many threads have fused attention switched off: torch's switches are the process's, not the thread's."""

    users: int = 0
    switched_off: ExitStack = field(default_factory=ExitStack)
    lock: Any = field(default_factory=threading.Lock)


_FUSED_ATTENTION = _FusedAttention()


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Keep torch to kernels that can be differentiated in every way, as long as any thread is in here."""
    state = _FUSED_ATTENTION
    with state.lock:
        if not state.users:
            before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            state.switched_off.callback(torch.backends.mha.set_fastpath_enabled, before)
            state.switched_off.enter_context(sdpa_kernel(SDPBackend.MATH))
        state.users += 1
    try:
        yield
    finally:
        with state.lock:
            state.users -= 1
            if not state.users:
                state.switched_off.close()
