"""A filter for the warnings of one thread: `warnings.catch_warnings` changes those of the whole process."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, cast


class _ThreadCategory(type):
    """Kind of a warning category to which the warnings of one thread belong, as long as it is active."""

    thread: int
    kind: type[Warning]
    is_active: bool

    def __subclasscheck__(cls, category: Any) -> bool:
        return cls.is_active and threading.get_ident() == cls.thread and issubclass(category, cls.kind)


@contextmanager
def filter_own_warnings(action: Literal["error", "ignore"], kind: type[Warning]) -> Iterator[None]:
    """Turn this thread's warnings into errors, or ignore them, and leave those of other threads alone.

    `warnings.catch_warnings` replaces the process's list of filters: another thread would get errors in the middle of
    its work, and two threads that leave in the order in which they came would keep the filters of one for good. Here
    one more filter stands in that list for a while, which matches nothing in other threads, nor later, should another
    thread's `catch_warnings` have copied it.

    Args:
        action: "error" or "ignore".
        kind: Category of the warnings, with all its subclasses.
    """
    names = {"thread": threading.get_ident(), "kind": kind, "is_active": True}
    category = cast(Any, _ThreadCategory("OwnWarning", (Warning,), names))
    warnings.simplefilter(action, category)
    try:
        yield
    finally:
        category.is_active = False
        for entry in [entry for entry in warnings.filters if entry[2] is category]:
            with suppress(ValueError):  # another thread has replaced the list
                cast(Any, warnings.filters).remove(entry)
