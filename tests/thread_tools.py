"""Threads that start together, and what two results must share to be the same to the byte."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

import epk_gp as epk

T = TypeVar("T")
THREADS = 8
SECONDS = 120.0  # without a result, the threads wait for each other


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads change every 10 microseconds, where Python's default is 5 milliseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(tasks: Sequence[Callable[[], T]], seconds: float = SECONDS) -> list[T | BaseException]:
    """Do tasks in threads that start together, one each.

    Returns:
        The result of each, or the exception that it raised.

    Raises:
        TimeoutError: They did not end: a deadlock.
    """
    barrier = threading.Barrier(len(tasks))
    done: queue.Queue[tuple[int, T | BaseException]] = queue.Queue()

    def work(number: int) -> None:
        try:
            barrier.wait()
            result: T | BaseException = tasks[number]()
        except BaseException as error:  # handed to the caller, as every result
            result = error
        done.put((number, result))

    for number in range(len(tasks)):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    found: dict[int, T | BaseException] = {}
    while len(found) < len(tasks):
        try:
            number, result = done.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"{len(tasks) - len(found)} of {len(tasks)} threads did not end.") from None
        found[number] = result
    return [found[number] for number in range(len(tasks))]


def content(value: object) -> object:
    """Return what two results must have in common to be the same to the byte."""
    if isinstance(value, BaseException):
        return type(value), str(value)
    if isinstance(value, Tensor):
        value = value.detach()
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, epk.Trajectory):
        return value.digest, content(list(value.states)), repr(value.steps)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(content(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(content, value))
    if isinstance(value, dict):
        return tuple((key, content(value[key])) for key in sorted(value))
    return repr(value)
