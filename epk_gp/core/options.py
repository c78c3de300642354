"""Options of a long computation, apart from what is computed: memory, checkpoint, executor, progress."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import torch

from epk_gp.core.checks import validate_memory_budget, validate_new_folder


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


MEMORY_BUDGET = 1 << 30


@dataclass(frozen=True)
class ComputeOptions:
    """How a long computation is carried out.

    Only `accumulate` changes the numbers beyond rounding; budget and checkpoint change the order of sums.

    Every long call takes these fields as keyword arguments, `gram_block(..., memory_budget=1 << 28, progress=True)`;
    a `PathKernel` takes them as one value.

    Attributes:
        memory_budget: Bytes for everything but the inputs and the result.
        progress: Show a progress bar.
        checkpoint: Folder for partial sums. A call that was killed, made again with the same arguments and number of
            threads, resumes from there and returns the same bytes. Delete the folder when the result is safe.
        accumulate: `torch.float64` to sum steps in float64 where the points, and so all products, are float32.
        executor: Whose workers compute: a `concurrent.futures.Executor`, a `dask.distributed.Client`, or another with
            their `submit`. Pieces follow from the problem, never from the workers, so that any number of workers of one
            thread gives the bytes of None under one thread. They see the checkpoint's folder; without one, a temporary
            folder of this machine.
    """

    memory_budget: int = MEMORY_BUDGET
    progress: bool = False
    checkpoint: str | os.PathLike[str] | None = None
    accumulate: torch.dtype | None = None
    executor: SupportsSubmit | None = None

    def __post_init__(self) -> None:
        """Raise if a field cannot be used.

        Raises:
            TypeError: The memory budget is not a whole number, or the executor has no `submit`.
            ValueError: The memory budget is below 1 MiB, or `accumulate` is another dtype than float64; or the
                checkpoint is a file.
            PermissionError: The checkpoint cannot be written.
        """
        validate_memory_budget(self.memory_budget)
        if self.accumulate not in (None, torch.float32, torch.float64):
            raise ValueError(f"accumulate must be torch.float64 or None: got {self.accumulate}.")
        if self.executor is not None:
            validate_executor(self.executor)
        if self.checkpoint is not None:
            validate_new_folder(self.checkpoint, "checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ComputeOptions":
        """Return the options themselves, which do not change: kernels are copied, executors cannot be."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled form, without the executor, which belongs to this process."""
        return {**self.__dict__, "executor": None}

    def require_unset(self, call: str, *names: str) -> None:
        """Raise if a field is set that has no meaning for a call.

        Raises:
            ValueError: One of the named fields has another value than None.
        """
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f"{call} must be computed without {name}: got {getattr(self, name)!r}. Leave it out.")


class ComputeSettings(TypedDict, total=False):
    """The fields of `ComputeOptions` as keyword arguments."""

    memory_budget: int
    progress: bool
    checkpoint: str | os.PathLike[str] | None
    accumulate: torch.dtype | None
    executor: SupportsSubmit | None


def parse_options(call: str, unsupported: tuple[str, ...] = (), **settings: Unpack[ComputeSettings]) -> ComputeOptions:
    """Return the options that a call was given as keyword arguments.

    Args:
        call: Name of the function that was called.
        unsupported: Fields that have no meaning for it.
        settings: Its keyword arguments.

    Raises:
        TypeError: A keyword argument that the call does not have.
        ValueError: See `ComputeOptions`.
    """
    known = [field.name for field in fields(ComputeOptions) if field.name not in unsupported]
    for name in settings:
        if name not in known:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}. It takes {', '.join(known)} as well."
            )
    return ComputeOptions(**settings)
