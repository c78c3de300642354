"""What one thread draws from torch's global generator, which all threads share: drawn elsewhere, or looked at."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# torch notes in a global variable that a mode is entered, and puts it back as it was: one thread at a time.
_ENTERED = threading.RLock()


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything random in this thread draw from a generator, and nothing from torch's global one.

    The numbers are those that the global generator would give with the same seed. Seeding that one instead would
    disturb every other thread that draws from it, and be disturbed by them.

    Args:
        generator: A generator on the CPU.
    """
    with _ENTERED, _Redirection(generator):
        yield


def draws_random_numbers(call: Callable[[], object]) -> bool:
    """Return whether a call draws random numbers of torch in this thread, whatever other threads draw meanwhile.

    It is stopped before it draws any. Where that cannot be seen, the answer is yes: for an operation that is none of
    torch's own, and for a call that fails.
    """
    observer = _Observer()
    try:
        with _ENTERED, observer:
            call()
    except Exception:
        return True
    return observer.has_drawn  # the call may have caught the error


class _DrawError(Exception):
    """Stops a call that is about to draw a random number."""


@final
class _Observer(TorchDispatchMode):
    """Stop at the first operation that draws a random number, or may do so."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, or stop."""
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            self.has_drawn = True
            raise _DrawError
        return func(*args, **(kwargs or {}))


@final
class _Redirection(TorchDispatchMode):
    """Pass a generator to every operation that takes one and got none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, by the form of the operation that takes a generator if there is one."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            form = _form_with_generator(func)
            if form is not None:
                return form(*args, **{**kwargs, "generator": self.generator})
            if not _has_argument_names(func):  # another torch, which finds the form itself, or says that there is none
                with suppress(RuntimeError, TypeError):
                    return func.overloadpacket(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def _form_with_generator(func: Any) -> Any:
    """Return an operation's form with the same arguments and a generator; None if there is none."""
    if not _has_argument_names(func):
        return None
    names = _argument_names(func) | {"generator"}
    own = getattr(func, "_overloadname", None)  # the first to try
    others = [name for name in func.overloadpacket.overloads() if name != own]
    forms = (getattr(func.overloadpacket, name) for name in ([] if own is None else [own]) + others)
    return next((form for form in forms if _argument_names(form) == names), None)


def _has_argument_names(func: Any) -> bool:
    return hasattr(func, "_schema")  # a private name of torch's


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}
