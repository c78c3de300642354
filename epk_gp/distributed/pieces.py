"""Pieces of a computation, computed by an executor's workers and read in their order."""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.core.executors import PendingResult, SupportsSubmit
from epk_gp.distributed.job import Computation, Job, Place, compute_piece, forget_job, write_job
from epk_gp.storage.partial_sums import PartialSums

# Pieces that are submitted before the first of them is read, and bytes that their files may take: enough for some
# hundred workers, or for a full disk to be rare.
AHEAD, AHEAD_BYTES = 512, 8 << 30

# How often a piece is submitted again whose workers died. A scheduler tries it several times itself.
_ATTEMPTS = 5

# Held by the owner of a job, and seconds until another gives up: a virus scanner may hold it for a moment on Windows.
_LOCK, _LOCK_SECONDS = "job.lock", 0.5


@dataclass(frozen=True)
class Piece:
    """A piece of a computation: its name as a file, and what is computed."""

    name: str
    place: Place


@contextmanager
def scratch_folder(checkpoint: Any) -> Iterator[Path]:
    """Give the folder of the pieces: the checkpoint, or one of its own, which is removed when all is done.

    After an error the folder is kept, and the error says where it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="epk_gp-")) if checkpoint is None else Path(checkpoint)
    try:
        yield folder
    except (UnsupportedParameterUseError, GeneratorExit):  # all begins anew with another plan; nobody wants the rest
        _remove(folder, checkpoint)
        raise
    except BaseException as error:
        error.add_note(f"What was computed is kept: pass checkpoint={str(folder)!r} to go on from there.")
        raise
    _remove(folder, checkpoint)


def _remove(folder: Path, checkpoint: Any) -> None:
    if checkpoint is None:
        shutil.rmtree(folder, ignore_errors=True)


class Here:
    """An executor without workers: a piece is computed when it is waited for."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> PendingResult:
        """Remember the call."""
        return _CallHere(function, args)


@dataclass(frozen=True)
class _CallHere:
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def result(self) -> Any:
        return self.function(*self.args)

    def cancel(self) -> Any:
        return True


@contextmanager
def threads_of_workers(executor: SupportsSubmit) -> Iterator[None]:
    """Compute here as workers do, with one thread; threads of this process compute as it does itself."""
    before = torch.get_num_threads()
    if not isinstance(executor, ThreadPoolExecutor):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computed_pieces(
    computation: Computation,
    pieces: Sequence[Piece],
    executor: SupportsSubmit,
    sums: PartialSums,
    num_bytes: int,
) -> Generator[dict[str, Tensor], None, None]:
    """Have workers compute pieces, and give their results in the order of the pieces.

    Pieces whose files are in the folder are not computed again. The caller removes files that it needs no more.

    Args:
        computation: What is computed.
        pieces: Its pieces.
        executor: Who computes them.
        sums: Folder of the pieces.
        num_bytes: Of a piece.

    Raises:
        BlockingIOError: Another job computes into the folder.
        RuntimeError: Workers died again and again over one piece, or the executor is of no more use.
    """
    with _only_owner(sums.folder):
        sums.remove_torn()
        key = write_job(sums.folder, sums.identity, Job(computation, sums))
        try:
            yield from _computed(pieces, executor, sums, key, num_bytes)
        finally:
            forget_job(key)


def pieces_ahead(num_bytes: int) -> int:
    """Count the pieces that are submitted before the first of them is read.

    Args:
        num_bytes: Of a piece.
    """
    return max(2, min(AHEAD, AHEAD_BYTES // max(1, num_bytes)))


def _computed(
    pieces: Sequence[Piece], executor: SupportsSubmit, sums: PartialSums, key: str, num_bytes: int
) -> Generator[dict[str, Tensor], None, None]:
    waiting: deque[tuple[Piece, PendingResult | None]] = deque()
    rest, ahead = iter(pieces), pieces_ahead(num_bytes)
    try:
        while True:
            while len(waiting) < ahead and (piece := next(rest, None)) is not None:
                is_there = sums.has(piece.name)
                waiting.append((piece, None if is_there else _submit(executor, sums, key, piece)))
            if not waiting:
                return
            piece, pending = waiting.popleft()
            if pending is not None:
                _wait(executor, sums, key, piece, pending)
            pending = None  # let go of it: a scheduler computes results that are wanted, and lost, once more
            result, _ = sums.load(piece.name)
            if not result:
                raise RuntimeError(
                    f"workers must write into the folder that this process reads: {sums.folder} has no piece "
                    f"{piece.name}, which a worker has computed. Pass checkpoint=, a folder that all share."
                )
            yield result
    finally:
        for _, pending in waiting:
            if pending is not None:
                with suppress(Exception):  # a client that was closed cannot cancel: the error that ends the job counts
                    pending.cancel()


@contextmanager
def _only_owner(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a folder, where its file system has locks."""
    lock = FileLock(folder / _LOCK, thread_local=False)
    with suppress(NotImplementedError):
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout as error:
            raise BlockingIOError(
                f"a checkpoint must serve one job at a time: another computes into {folder}. Wait for it to end, or "
                "choose another folder."
            ) from error
    try:
        yield
    finally:
        lock.release()


def _submit(executor: SupportsSubmit, sums: PartialSums, key: str, piece: Piece) -> PendingResult:
    arguments = (compute_piece, str(sums.folder.absolute()), key, piece.name, piece.place)
    try:
        if type(executor).__module__.partition(".")[0] == "distributed":  # a Dask client: the call has an effect
            return executor.submit(*arguments, pure=False)  # type: ignore[call-arg]
        return executor.submit(*arguments)
    except BrokenExecutor as error:
        raise _dead_pool() from error
    except Exception as error:
        raise RuntimeError(
            f"executor must take the pieces of a job: its submit raised {type(error).__name__}: {error}. Make a new "
            "one, and call again with the same checkpoint."
        ) from error


def _dead_pool() -> RuntimeError:
    return RuntimeError(
        "a worker process died, and with it the pool: killed, or out of memory. Make a new pool, with fewer workers if "
        "memory was short, and call again with the same checkpoint."
    )


def _wait(executor: SupportsSubmit, sums: PartialSums, key: str, piece: Piece, pending: PendingResult) -> None:
    """Wait for a piece; submit it again if the workers that computed it died."""
    for attempt in range(_ATTEMPTS):
        try:
            pending.result()
        except BrokenExecutor as error:
            raise _dead_pool() from error
        except CancelledError as error:
            raise _gave_up(piece) from error
        except Exception as error:
            # Dask's errors, whose classes are not imported: it is gone; or several workers died over a piece
            if type(error).__name__ in ("CommClosedError", "ClosedClientError"):
                raise _gave_up(piece) from error
            if type(error).__name__ != "KilledWorker" or attempt == _ATTEMPTS - 1:
                raise
            tqdm.write(f"workers died over piece {piece.name}: it is submitted again")
            pending = _submit(executor, sums, key, piece)
        else:
            return


def _gave_up(piece: Piece) -> RuntimeError:
    return RuntimeError(
        f"executor must finish the pieces that it took: it gave up piece {piece.name}. It was shut down, or its "
        "scheduler was closed or restarted. Make a new one, and call again with the same checkpoint."
    )
