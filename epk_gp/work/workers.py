"""Pieces of a computation that an executor's workers compute: the job in a folder, its workers, and its owner.

The owner writes the computation into the folder once; each worker reads it, computes pieces and writes them there; the
owner reads them in their order.
"""

import json
import os
import pickle
import platform
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import epk_gp
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.core.options import SupportsSubmit
from epk_gp.core.show import write_line
from epk_gp.storage.files import atomic_write, checksum
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work.sums import BEGUN, Piece, Place, Sums, Work, save_begun, save_piece

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

JOB = "job.pickle"

# Computations by process and key, with their folder and the number of threads of their owner: threads of a pool find
# theirs here. A forked worker finds a copy of what its parent had, which is not its own.
_OWN: dict[tuple[int, str], tuple[Work, PartialSums, int]] = {}

_DEAD_POOL = (
    "a worker process died, and with it the pool: killed, or out of memory. Make a new pool, with fewer workers if "
    "memory was short, and call again with the same checkpoint."
)


@contextmanager
def scratch_folder(checkpoint: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Give the folder of the pieces: the checkpoint, or one of its own, which is removed when all is done.

    After an error the folder is kept, and the error says where it is.
    """
    folder, is_kept = Path(tempfile.mkdtemp(prefix="epk_gp-")) if checkpoint is None else Path(checkpoint), False
    try:
        yield folder
    except (UnsupportedParameterUseError, GeneratorExit):  # all begins anew with another plan; nobody wants the rest
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


def write_job(work: Work, stored: PartialSums) -> str:
    """Write what workers need into the folder of the pieces, and return the key by which they ask for it.

    Raises:
        TypeError: The computation cannot be sent to another process.
    """
    about = {"versions": _versions(), "identity": stored.identity, "is_durable": stored.is_durable}
    content = json.dumps(about).encode() + b"\n" + pickled(work)
    atomic_write(stored.folder / JOB, content, is_durable=stored.is_durable, is_private=True)
    key = checksum(content)
    _OWN[os.getpid(), key] = work, stored, torch.get_num_threads()
    return key


def forget_job(key: str) -> None:
    """Let go of a computation of this process."""
    _OWN.pop((os.getpid(), key), None)


def compute_piece(folder: str, key: str, name: str, place: Place) -> None:
    """Compute a piece of a job and write its file: what a worker does.

    A piece whose file is there already, because a worker died after it wrote it, is not computed again.

    Args:
        folder: Folder of the job.
        key: Which job the folder must hold (`write_job`).
        name: Name of the piece.
        place: What is computed.

    Raises:
        FileNotFoundError: The worker does not see the folder.
        OSError: The piece cannot be written.
        ValueError: The folder holds another job, or one of another version of a package.
    """
    if (own := _OWN.get((os.getpid(), key))) is None:
        work, stored = _opened(folder, key)
    else:
        work, stored, num_threads = own
        if torch.get_num_threads() != num_threads:  # a thread keeps what torch had when it first computed something
            torch.set_num_threads(num_threads)
    if stored.has(name):
        return
    piece = Piece(name, place)
    sums = Sums.load(stored, name + BEGUN, work.device)
    for sums in work.compute(place, sums):  # noqa: B020  the last ones are those of the piece
        save_begun(stored, piece, sums)
    try:
        save_piece(stored, piece, sums)
    except OSError as error:
        raise OSError(
            error.errno,
            f"piece {name} must be written to {folder} by {platform.node()}: {error.strerror or error}. Make room "
            "there, and call again with this folder as the checkpoint.",
        ) from error


@lru_cache(maxsize=2)
def _opened(folder: str, key: str) -> tuple[Work, PartialSums]:
    """Read a job in a worker, which computes with one thread from then on: bytes depend on the number."""
    torch.set_num_threads(1)
    file = Path(folder) / JOB
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"every worker must see the folder of the pieces: {file} does not exist on {platform.node()}. Pass "
            "checkpoint=, a folder on a file system that all workers share; where the call takes none, name one in the "
            "environment variable TMPDIR."
        ) from error
    if checksum(content) != key:
        raise ValueError(
            f"{file} must be what the job's owner wrote: it is damaged, or another job was started in this folder. "
            "Give each job a folder of its own."
        )
    header, _, rest = content.partition(b"\n")
    described = json.loads(header)
    if (own := _versions()) != (theirs := described["versions"]):
        unlike = ", ".join(f"{name} {own[name]}, not {theirs[name]}" for name in own if own[name] != theirs[name])
        raise ValueError(
            f"a worker must have the versions of the job's owner: on {platform.node()} it has {unlike}. Install the "
            "same versions on all workers."
        )
    work: Work = pickle.loads(rest)
    work.check()
    return work, PartialSums(folder, described["identity"], is_durable=described["is_durable"])


def _versions() -> dict[str, str]:
    """Return the versions on which bytes, and the pickled form, depend."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"epk_gp": epk_gp.__version__, "torch": torch.__version__, "python": python}


def pickled(value: object) -> bytes:
    """Return the pickled form of what workers compute, which cloudpickle makes where it is installed.

    Raises:
        TypeError: It cannot be sent to another process.
    """
    dumps: Callable[[Any], bytes] = pickle.dumps
    if find_spec("cloudpickle") is not None:
        import cloudpickle  # noqa: PLC0415  comes with the extra 'distributed'

        dumps = cloudpickle.dumps
    try:
        return dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"what workers compute must be picklable: {error}. Define the network's class and functions at the top "
            "level of a module, or install epk-gp[distributed], whose cloudpickle takes others too."
        ) from error


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
    key, rest = write_job(work, stored), iter(pieces)
    waiting: deque[tuple[Piece, Any]] = deque()  # what submit returned; None for a piece that is there
    try:
        ahead = num_ahead(work.piece_bytes, shutil.disk_usage(stored.folder).free)
        while True:
            while len(waiting) < ahead and (piece := next(rest, None)) is not None:
                waiting.append((piece, None if stored.has(piece.name) else _submit(executor, stored, key, piece)))
            if not waiting:
                return
            piece, pending = waiting.popleft()
            if pending is not None:
                _wait(executor, stored, key, piece, pending)
            pending = None  # let go of it: a scheduler computes results that are wanted, and lost, once more
            sums = Sums.load(stored, piece.name, work.device)
            if not sums.added:
                raise RuntimeError(
                    f"workers must write into the folder that this process reads: {stored.folder} has no piece "
                    f"{piece.name}, which a worker has computed. Pass checkpoint=, a folder that all share, or name "
                    "one in the environment variable TMPDIR."
                )
            yield sums
    except RuntimeError as error:
        if isinstance(error.__cause__, BrokenExecutor):
            waiting.clear()  # a pool that died ends its calls itself, in a thread that fails at one that was cancelled
        raise
    finally:
        for _, pending in waiting:
            if pending is not None:
                with suppress(Exception):  # a client that was closed cannot cancel: the error that ends the job counts
                    pending.cancel()
        forget_job(key)
        (stored.folder / JOB).unlink(missing_ok=True)  # who goes on writes it anew


def num_ahead(num_bytes: int, free: int) -> int:
    """Count the pieces that are submitted before the first of them is read.

    Args:
        num_bytes: Of a piece.
        free: Bytes that are free in their folder.
    """
    return max(2, min(AHEAD, max(AHEAD_BYTES, int(AHEAD_SHARE * free)) // max(1, num_bytes)))


def _is_dask(executor: SupportsSubmit) -> bool:
    return type(executor).__module__.partition(".")[0] == "distributed"


def _submit(executor: Any, stored: PartialSums, key: str, piece: Piece) -> Any:
    options = {"pure": False} if _is_dask(executor) else {}  # the call has an effect
    try:
        return executor.submit(compute_piece, str(stored.folder.absolute()), key, piece.name, piece.place, **options)
    except BrokenExecutor as error:
        raise RuntimeError(_DEAD_POOL) from error
    except Exception as error:
        raise RuntimeError(
            f"executor must take the pieces of a job: its submit raised {type(error).__name__}: {error}. Make a new "
            "one, and call again with the same checkpoint."
        ) from error


def _wait(executor: SupportsSubmit, stored: PartialSums, key: str, piece: Piece, pending: Any) -> None:
    """Wait for a piece; submit it again if the workers that computed it died."""
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
            kind = type(error).__name__  # Dask's errors, whose classes are not imported
            if isinstance(error, CancelledError) or kind in ("CommClosedError", "ClosedClientError"):
                raise RuntimeError(
                    f"executor must finish the pieces that it took: it gave up piece {piece.name}. It was shut down, "
                    "or its scheduler was closed or restarted. Make a new one, and call again with the same checkpoint."
                ) from error
            if kind != "KilledWorker":
                raise
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"workers must live through a piece: several died over {piece.name}, {_ATTEMPTS} times; killed, or "
                    "out of memory. Give workers more memory and call again with the same checkpoint, or pass a "
                    "smaller memory_budget and a new checkpoint."
                ) from error
            write_line(f"workers died over piece {piece.name}: it is submitted again")
            pending = _submit(executor, stored, key, piece)


def _wait_for_dask(client: Any, future: Any) -> None:
    """Wait for a call to end; say so once if a scheduler has no workers, for which it would wait without a word."""
    is_silent = True
    while True:
        try:
            error = future.exception(timeout=_PATIENCE)
            break
        except TimeoutError:
            if is_silent and not client.nthreads():
                write_line(
                    "the scheduler has no workers: the job waits until it has some. Start workers, or stop the job."
                )
                is_silent = False
    # The piece lies in its folder: what the call returned is not fetched, from a worker that may have died since.
    if error is not None or future.cancelled():
        future.result()
