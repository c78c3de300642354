"""Executors, which carry pieces of a computation to workers: a process pool, a Dask client, or others like them."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class PendingResult(Protocol):
    """What `submit` returns: `concurrent.futures.Future`, or the future of another library."""

    def result(self) -> Any:
        """Wait for the result; raise what the call raised."""

    def cancel(self) -> Any:
        """Give the call up, if it has not begun."""


@runtime_checkable
class SupportsSubmit(Protocol):
    """An executor: `concurrent.futures.Executor`, `dask.distributed.Client`, `mpi4py.futures.MPIPoolExecutor`."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> PendingResult:
        """Have a worker call a function."""


def validate_executor(executor: object) -> None:
    """Raise if an object is no executor.

    Raises:
        TypeError: It is a class, or it has no method `submit`.
    """
    if isinstance(executor, type) or not isinstance(executor, SupportsSubmit):
        got = executor.__name__ if isinstance(executor, type) else f"an object of type {type(executor).__name__}"
        raise TypeError(
            f"executor must have a method submit(function, *args), as a concurrent.futures.Executor and a "
            f"dask.distributed.Client have: got {got}. Make one with ProcessPoolExecutor(2)."
        )
