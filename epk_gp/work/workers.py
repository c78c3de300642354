"""Pieces of a computation, computed by an executor's workers and read in their order."""

import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.core.options import PendingResult, SupportsSubmit
from epk_gp.core.show import write_line
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work.job import JOB, Job, compute_piece, forget_job, write_job
from epk_gp.work.sums import Piece, Sums, Work

# Pieces that are submitted before the first of them is read, at most, and bytes that their files may take: so many, or
# the share of what is free in the folder if that is more. A piece takes none before a worker has computed it, so that
# few workers hold few. 1,000 workers need some 2,000 pieces, or they wait for each straggler.
AHEAD, AHEAD_BYTES, AHEAD_SHARE = 4096, 8 << 30, 0.25

# How often a piece is submitted again whose workers died. A scheduler tries it several times itself.
_ATTEMPTS = 5

# Seconds after which a piece that is waited for is looked after: whether there are workers at all.
_PATIENCE = 10.0

# Held by the owner of a job, and seconds until another gives up: a virus scanner may hold it for a moment on Windows.
_LOCK, _LOCK_SECONDS = "job.lock", 0.5


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
        error.add_note(
            f"What was computed is kept in {str(folder)!r}: pass it as checkpoint= to resume from there, where the "
            "call takes one; or delete it."
        )
        raise
    _remove(folder, checkpoint)


def _remove(folder: Path, checkpoint: Any) -> None:
    if checkpoint is None:
        shutil.rmtree(folder, ignore_errors=True)


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


def pieces_of_workers(
    work: Work, pieces: Iterable[Piece], executor: SupportsSubmit, stored: PartialSums
) -> Generator[Sums, None, None]:
    """Have workers compute pieces, and give their sums in the order of the pieces.

    Pieces whose files are in the folder are not computed again. The caller removes files that it needs no more.

    Args:
        work: What is computed.
        pieces: Its pieces, or those that are missing.
        executor: Who computes them.
        stored: Folder of the pieces, of which this process is the only owner (`only_owner`).

    Raises:
        RuntimeError: Workers died again and again over one piece, or the executor is of no more use.
    """
    key = write_job(stored.folder, stored.identity, Job(work, stored))
    try:
        yield from _computed(work, pieces, executor, stored, key)
    finally:
        forget_job(key)
        (stored.folder / JOB).unlink(missing_ok=True)  # who goes on writes it anew


def _computed(
    work: Work, pieces: Iterable[Piece], executor: SupportsSubmit, sums: PartialSums, key: str
) -> Generator[Sums, None, None]:
    waiting: deque[tuple[Piece, PendingResult | None]] = deque()
    rest, ahead = iter(pieces), num_ahead(work.piece_bytes, shutil.disk_usage(sums.folder).free)
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
            result, steps = sums.load(piece.name)
            if not result:
                raise RuntimeError(
                    f"workers must write into the folder that this process reads: {sums.folder} has no piece "
                    f"{piece.name}, which a worker has computed. Pass checkpoint=, a folder that all share, or name "
                    "one in the environment variable TMPDIR."
                )
            yield Sums.load(result, steps, work.device)
    except RuntimeError as error:
        if isinstance(error.__cause__, BrokenExecutor):
            waiting.clear()  # a pool that died ends its calls itself, in a thread that fails at one that was cancelled
        raise
    finally:
        for _, pending in waiting:
            if pending is not None:
                with suppress(Exception):  # a client that was closed cannot cancel: the error that ends the job counts
                    pending.cancel()


def num_ahead(num_bytes: int, free: int) -> int:
    """Count the pieces that are submitted before the first of them is read.

    Args:
        num_bytes: Of a piece.
        free: Bytes that are free in their folder.
    """
    return max(2, min(AHEAD, max(AHEAD_BYTES, int(AHEAD_SHARE * free)) // max(1, num_bytes)))


@contextmanager
def only_owner(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a folder, where its file system has locks.

    Raises:
        BlockingIOError: Another job computes into the folder.
    """
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
        if _is_dask(executor):  # the call has an effect
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
            _result(executor, pending)
        except BrokenExecutor as error:
            raise _dead_pool() from error
        except CancelledError as error:
            raise _gave_up(piece) from error
        except Exception as error:
            # Dask's errors, whose classes are not imported: it is gone; or several workers died over a piece
            if type(error).__name__ in ("CommClosedError", "ClosedClientError"):
                raise _gave_up(piece) from error
            if type(error).__name__ != "KilledWorker":
                raise
            if attempt == _ATTEMPTS - 1:
                raise RuntimeError(
                    f"workers must live through a piece: several died over {piece.name}, {_ATTEMPTS} times; killed, or "
                    "out of memory. Give workers more memory and call again with the same checkpoint, or pass a "
                    "smaller memory_budget and a new checkpoint."
                ) from error
            _say(f"workers died over piece {piece.name}: it is submitted again")
            pending = _submit(executor, sums, key, piece)
        else:
            return


def _result(executor: SupportsSubmit, pending: PendingResult) -> None:
    """Wait for a call to end; say so once if a scheduler has no workers, for which it would wait without a word."""
    if not _is_dask(executor):
        pending.result()
        return
    client: Any = executor
    future: Any = pending
    is_silent = True
    while True:
        try:
            error = future.exception(timeout=_PATIENCE)
            break
        except TimeoutError:
            if is_silent and not client.nthreads():
                _say("the scheduler has no workers: the job waits until it has some. Start workers, or stop the job.")
                is_silent = False
    # The piece lies in its folder: what the call returned is not fetched, from a worker that may have died since.
    if error is not None or future.cancelled():
        future.result()


def _is_dask(executor: SupportsSubmit) -> bool:
    return type(executor).__module__.partition(".")[0] == "distributed"


def _say(line: str) -> None:
    write_line(line)


def _gave_up(piece: Piece) -> RuntimeError:
    return RuntimeError(
        f"executor must finish the pieces that it took: it gave up piece {piece.name}. It was shut down, or its "
        "scheduler was closed or restarted. Make a new one, and call again with the same checkpoint."
    )
