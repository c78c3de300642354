"""The executor of a computation, and its folder: ownership, and submitting and waiting for calls."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.core.checks import SupportsSubmit
from epk_gp.core.show import write_line

# Number of times that a piece is submitted again after its workers died. A scheduler retries several times itself.
_ATTEMPTS = 5

# Seconds between checks of a piece that is waited for: whether there are workers at all.
_PATIENCE = 10.0

# Lock of the owner of a job, and seconds until another gives up: a virus scanner may hold it for a moment on Windows.
_LOCK, _LOCK_SECONDS = "job.lock", 0.5

_DEAD_POOL = (
    "a worker process died, and with it the pool: killed, or out of memory. Make a new pool, with fewer workers if "
    "memory was short, and call again with the same checkpoint."
)


@contextmanager
def scratch_folder(checkpoint: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yield the folder of the pieces: the checkpoint, or a new one that is removed at the end.

    After an error the folder is kept, and the error names it.
    """
    folder, is_kept = Path(tempfile.mkdtemp(prefix="epk_gp-")) if checkpoint is None else Path(checkpoint), False
    try:
        yield folder
    except (UnsupportedParameterUseError, GeneratorExit):  # starts again with another plan; or nobody needs the rest
        raise
    except BaseException as error:
        is_kept = True
        error.add_note(
            f"What was computed is kept in {str(folder)!r}: pass it as checkpoint= to resume from there, where the "
            "call takes one; or delete it."
        )
        raise
    finally:
        if checkpoint is None and not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def only_owner(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a folder, if its file system has locks.

    Raises:
        BlockingIOError: Another job computes into the folder.
    """
    lock = FileLock(folder / _LOCK, thread_local=False)
    with suppress(NotImplementedError):
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout as error:
            raise BlockingIOError(f"a checkpoint must serve one job at a time: another is in {folder}.") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def threads_of_workers(executor: SupportsSubmit) -> Iterator[None]:
    """Compute here like workers, with one thread; threads of this process compute as it does itself."""
    before = torch.get_num_threads()
    if not isinstance(executor, ThreadPoolExecutor):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pickled(value: object) -> bytes:
    """Return the pickled form of a value for workers, by cloudpickle if it is installed.

    Raises:
        TypeError: The value cannot be sent to another process.
    """
    dumps: Callable[[Any], bytes] = pickle.dumps
    if find_spec("cloudpickle") is not None:
        import cloudpickle  # noqa: PLC0415  part of the extra 'distributed'

        dumps = cloudpickle.dumps
    try:
        return dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"what workers compute must be picklable: {error}. Define the network's class and functions at the top "
            "level of a module, or install epk-gp[distributed], whose cloudpickle takes others too."
        ) from error


def _is_dask(executor: SupportsSubmit) -> bool:
    return type(executor).__module__.partition(".")[0] == "distributed"


def submit(executor: Any, function: Callable[..., None], *args: object) -> Any:
    """Submit a call, and return an object to wait for.

    Raises:
        RuntimeError: The executor does not accept it.
    """
    options = {"pure": False} if _is_dask(executor) else {}  # the call has side effects
    try:
        return executor.submit(function, *args, **options)
    except BrokenExecutor as error:
        raise RuntimeError(_DEAD_POOL) from error
    except Exception as error:
        raise RuntimeError(
            f"executor must take the pieces of a job: its submit raised {type(error).__name__}: {error}. Make a new "
            "one, and call again with the same checkpoint."
        ) from error


def wait(executor: Any, pending: Any, name: str, function: Callable[..., None], *args: object) -> None:
    """Wait for the call that computes a named piece; submit it again if its workers died.

    Raises:
        RuntimeError: Workers died repeatedly, or the executor gave up the call.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if _is_dask(executor):
                _wait_for_dask(executor, pending)
            else:
                pending.result()
            return
        except BrokenExecutor as error:
            raise RuntimeError(_DEAD_POOL) from error
        except (Exception, CancelledError) as error:
            kind = type(error).__name__  # for Dask's errors, whose classes are not imported
            if isinstance(error, CancelledError) or kind in ("CommClosedError", "ClosedClientError"):
                raise RuntimeError(
                    f"executor must finish the pieces that it took: it gave up piece {name}. It was shut down, or its "
                    "scheduler was closed or restarted. Make a new one, and call again with the same checkpoint."
                ) from error
            if kind != "KilledWorker":
                raise
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"workers must live through a piece: several died over {name}, {_ATTEMPTS} times; killed, or out "
                    "of memory. Give workers more memory and call again with the same checkpoint, or pass a smaller "
                    "memory_budget and a new checkpoint."
                ) from error
            write_line(f"workers died over piece {name}: it is submitted again")
            pending = submit(executor, function, *args)


def _wait_for_dask(client: Any, future: Any) -> None:
    """Wait for a call to end; report once if a scheduler has no workers, because it would wait silently."""
    is_silent, is_over = True, False
    while not is_over:
        try:
            error, is_over = future.exception(timeout=_PATIENCE), True
        except TimeoutError:
            if is_silent and not client.nthreads():
                write_line("the scheduler has no workers: the job waits until it has some. Start workers, or stop it.")
                is_silent = False
    # The piece is in its folder: the call's result is not fetched, from a worker that may have died since.
    if error is not None or future.cancelled():
        future.result()
