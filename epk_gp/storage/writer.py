"""Writing a run to disk, such that whatever stops the writer, what was committed stays.

The lock is the operating system's (`filelock` calls it), so it is released when the process ends, however it ends.

* On Linux and macOS it is a `flock` lock on the journal itself. Such a lock is advisory: readers do not notice it.
* On Windows a locked file cannot be read, so the lock is on a file of its own, `writer.lock`, which is removed at the
  end.
* On a file system without `flock` (some network drives, some Python builds) the existence of a file `writer.pid` is the
  lock. It holds the writer's process number and host. A warning says so, because a process that is killed leaves the
  file: a later writer on the same host removes it once that process has ended, but a writer on another host cannot
  know, and the file must then be removed by hand.
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout, lock_descriptor
from safetensors.torch import save
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_positive
from epk_gp.core.step import Step
from epk_gp.core.update_law import CompactUpdate
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.storage.chunks import chunk_tensors
from epk_gp.storage.files import (
    DAMAGED,
    atomic_write,
    checksum,
    checksummed_json,
    open_descriptor,
    regular_file_size,
    sync_folder,
)
from epk_gp.storage.journal import (
    FINISHED,
    JOURNAL,
    MAX_CHUNKS,
    Chunk,
    chain_hash,
    chunk_name,
    finished_content,
    read_journal,
    resume_name,
    to_json_line,
)
from epk_gp.storage.schema import (
    DATA,
    FORMAT,
    FORMAT_VERSION,
    HEADER,
    ChunkSchema,
    chunk_schema,
    complete_header,
    read_header,
)

MANIFEST_FILES = ("network.json", "held_out.safetensors")  # files of the command line, which may precede a run
RESUME = "Free space or give the right to write, then go on with resume=True."
_RESTORE = "Restore the folder and go on with resume=True, or record to another folder."
LOCK, MARKER = "writer.lock", "writer.pid"
_JOURNAL_CAN_BE_LOCKED = sys.platform != "win32"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Seconds. A virus scanner may hold a lock file open for a moment on Windows, and removing the marker of a process that
# was killed takes a second attempt; one attempt is made every 0.05 s.
_TIMEOUT = 0.5


def lock_writer(folder: Path, journal: int) -> BaseFileLock | None:
    """Lock a run's folder against other writers, without waiting for them.

    Args:
        folder: The folder.
        journal: Descriptor of the journal, open for writing.

    Returns:
        The lock on a file beside the journal, to be released; None if the lock is on the journal, which releases it
        when it is closed.

    Raises:
        BlockingIOError: Another writer holds the lock.
        OSError: The folder cannot be written.
    """
    if not _JOURNAL_CAN_BE_LOCKED:
        return _lock_file(FileLock(folder / LOCK, thread_local=False), folder)
    try:
        locked = lock_descriptor(journal, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the file system of {folder} has no locks: {MARKER} stands for one. If a recording is killed on another "
            f"computer, remove {MARKER} by hand.",
            RuntimeWarning,
            stacklevel=2,
        )
        return _lock_file(SoftFileLock(folder / MARKER, thread_local=False), folder)
    if not locked:
        raise _other_writer(folder)
    return None


def _lock_file(lock: BaseFileLock, folder: Path) -> BaseFileLock:
    try:
        lock.acquire(timeout=_TIMEOUT)
    except Timeout as error:
        raise _other_writer(folder) from error
    return lock


def _other_writer(folder: Path) -> BlockingIOError:
    return BlockingIOError(
        f"a run must have one writer at a time: another process records into {folder}. Wait for it to end, or "
        "choose another folder."
    )


@contextmanager
def explain_os_errors(path: Path, remains: Callable[[str], str]) -> Iterator[None]:
    """Turn an error of the system into our own: why a run cannot be written, what of it is kept, and what to do.

    Args:
        path: The run's folder, or a file that it is exported to.
        remains: Called after an error with its cause; returns what of the run is kept, and what to do.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by this package, with its own sentence
            raise
        cause = str(error.strerror)
        explained = type(error)(f"the run must be written to {path}: {cause}; {remains(cause)}")
        explained.errno = error.errno
        raise explained from error


def describe_remains(path: Path, journal: int, chunks: Sequence[Chunk], cause: str) -> str:
    """Return what of a run's committed steps can be read, and what to do. Sizes are checked, contents are not.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.
        chunks: The committed chunks.
        cause: What the message says already.
    """
    count = chunks[-1].last if chunks else 0
    damage = find_damage(path, journal, chunks)
    if damage is None:
        return f"its {count} committed steps stay readable. {RESUME}"
    because = "" if damage == cause else f": {damage}"
    return f"its {count} committed steps cannot be read from there any more{because}. {_RESTORE}"


def find_damage(path: Path, journal: int, chunks: Sequence[Chunk]) -> str | None:
    """Return what of an open run is not as it was committed; None if the journal and all sizes are.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.
        chunks: The committed chunks.
    """
    try:
        require_same_journal(path, journal)
        if regular_file_size(path / DATA, str(path / DATA)) != read_header(path)["data_bytes"]:
            return f"{path / DATA} is missing or has another size"
        if read_journal(path).chunks[: len(chunks)] != tuple(chunks):
            return f"{path / JOURNAL} was changed"
        resume = path / resume_name(len(chunks) - 1)
        if chunks and regular_file_size(resume, str(resume)) != chunks[-1].resume_bytes:
            return f"{resume} is missing or has another size"
    except OSError as error:
        return (error.strerror or str(error)).removesuffix(".")
    except ValueError as error:
        return str(error).removesuffix(DAMAGED).rstrip(" .")
    return None


def require_same_journal(path: Path, journal: int) -> None:
    """Raise if the journal that lies in a folder is not the one that the writer has open.

    Whatever was written into a folder that was put in the place of the run's would be lost, or damage another run.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.

    Raises:
        OSError: The folder or the journal was deleted, renamed or replaced.
    """
    try:
        status = (path / JOURNAL).lstat()
    except FileNotFoundError as error:
        lost = f"{path / JOURNAL} was deleted or renamed" if path.is_dir() else f"{path} was deleted or renamed"
        raise FileNotFoundError(errno.ENOENT, f"{lost} while it was recorded", str(path)) from error
    except NotADirectoryError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file now", str(path)) from error
    if not os.path.samestat(status, os.fstat(journal)):
        raise FileNotFoundError(errno.ENOENT, f"{path / JOURNAL} was replaced while it was recorded", str(path))


@dataclass(frozen=True)
class Storage:
    """Options of a run on disk: which weight states it keeps and how, and how often steps are committed.

    A chunk is committed as soon as one of the three limits is reached; a crash loses at most the steps since then.

    Attributes:
        chunk_bytes: Bytes of weights, moving statistics and forward passes that are collected before they are
            committed.
        seconds: Time since the last commit after which the next step commits, by a clock that is never set back.
        steps: Number of steps after which they are committed; no limit by default.
        keep_every: Keep every so many-th weight state, the first and the last; the states between are computed again
            when they are read, by the update rule on exact gradients. What Adam and its relatives derive from the
            gradients is computed again too. By how much a kept state misses the computed one is a part of what results
            say is unexplained.
    """

    chunk_bytes: int = 16 << 20
    seconds: float = 60.0
    steps: int | None = None
    keep_every: int = 1

    def __post_init__(self) -> None:
        validate_count(self.chunk_bytes, "chunk_bytes")
        validate_positive(self.seconds, "seconds")
        if self.steps is not None:
            validate_count(self.steps, "steps")
        validate_count(self.keep_every, "keep_every")

    @property
    def thins(self) -> bool:
        """Whether the run does not hold every state exactly."""
        return self.keep_every > 1


def thinning_header(storage: object, folder: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return what header and digest of a run hold of its options on disk; nothing where every state is kept.

    Raises:
        TypeError: These are no `Storage`.
        ValueError: States are left out of a run that is kept in memory.
    """
    if not isinstance(storage, Storage):
        raise TypeError(f"storage must be an epk_gp.Storage, such as Storage(keep_every=20): got {storage!r}.")
    if not storage.thins:
        return {}
    if folder is None:
        raise ValueError("keep_every must come with folder=, for a run in memory holds every state: got no folder.")
    return {"keep_every": storage.keep_every}


@dataclass
class RunWriter:
    """An open run folder, locked against other writers; each call of `append` is one commit.

    Attributes:
        path: The folder.
        schema: The schema of its chunks.
        journal: Descriptor of the journal; -1 once the writer is closed.
        lock: The lock on a file beside the journal; None if the lock is on the journal.
        chunks: The committed chunks.
        journal_bytes: Length of the journal up to the end of their lines.
        failed: Whether the last commit failed, so that another one most likely would fail too.
    """

    path: Path
    schema: ChunkSchema
    journal: int
    lock: BaseFileLock | None = None
    chunks: list[Chunk] = field(default_factory=list)
    journal_bytes: int = 0
    failed: bool = False

    @property
    def num_states(self) -> int:
        """Number of committed states."""
        return self.chunks[-1].last + 1 if self.chunks else 0

    def append(
        self,
        states: Sequence[Tensor],
        steps: Sequence[Step],
        updates: Sequence[UpdateCoefficients | CompactUpdate],
        digest: str,
        training_state: Mapping[str, Tensor],
        statistics: Sequence[Tensor] = (),
    ) -> None:
        """Commit consecutive states, the steps that led to them, and the training state after the last of them.

        Args:
            states: The states that follow the committed ones, as far as the run keeps them.
            steps: The steps that led to them, with their forward passes.
            updates: Coefficients of these steps.
            digest: Digest of the run up to the last of the states.
            training_state: Tensors from which the run can be resumed (`TrainingState.state_dict`); of a run that does
                not keep every state, with the last one.
            statistics: The moving statistics of the states, for a network that has any.

        Raises:
            OSError: The folder could not be written, and nothing is added; or it was deleted or replaced. The message
                says whether what was committed before can still be read.
            TypeError: A tensor of a pass has a dtype that cannot be stored.
            ValueError: The run has as many chunks as a run can have; or passes or statistics are not those of this run.
        """
        number, first, start = len(self.chunks), self.num_states, self.journal_bytes
        if number >= MAX_CHUNKS:
            raise ValueError(f"a run must have at most {MAX_CHUNKS} chunks: let more steps come together in each.")
        content = save(chunk_tensors(states, steps, updates, self.schema, statistics))
        resume = save({name: value.detach().cpu().contiguous() for name, value in training_state.items()})
        chunk = Chunk(
            file=chunk_name(number),
            first=first,
            states=(len(steps) or 1) if self.schema.thins else len(states),
            bytes=len(content),
            blake2b=checksum(content, digest),
            digest=digest,
            resume_bytes=len(resume),
            resume_blake2b=checksum(resume, digest),
            line="",
        )
        chunk = chunk.model_copy(update={"line": chain_hash(self.chunks[-1].line if self.chunks else "", chunk)})
        line = to_json_line(chunk)
        with explain_os_errors(self.path, self._remains):
            try:
                require_same_journal(self.path, self.journal)
                self._unmark_complete()
                atomic_write(self.path / chunk.file, content, sync=False)
                atomic_write(self.path / resume_name(number), resume)  # synchronises both names
                os.lseek(self.journal, self.journal_bytes, os.SEEK_SET)
                _write_all(self.journal, line)
                os.fsync(self.journal)
                self.chunks.append(chunk)
                self.journal_bytes += len(line)
            except BaseException as error:  # also Ctrl-C between two bytes
                self.failed = isinstance(error, OSError)
                self._rollback(number, start)
                raise
        if number:
            with suppress(OSError):  # a superfluous file does no harm
                (self.path / resume_name(number - 1)).unlink()

    def mark_complete(self) -> None:
        """Write the closing record of the run: from now on a journal that lost its end is an error.

        Raises:
            OSError: The record could not be written; or a file of the run was deleted or changed while it was recorded.
        """
        damage = find_damage(self.path, self.journal, self.chunks)
        if damage is not None:
            raise OSError(
                f"a run must keep all its files while it is recorded: {damage}. Restore it from a copy and go on with "
                "resume=True, or record to another folder."
            )
        if (self.path / FINISHED).exists():
            return
        with explain_os_errors(self.path, self._remains):
            journal = (self.path / JOURNAL).read_bytes()
            atomic_write(self.path / FINISHED, finished_content(len(self.chunks), journal))

    def close(self) -> None:
        """Close the journal and release the lock."""
        if self.journal >= 0:
            os.close(self.journal)
            self.journal = -1
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def __del__(self) -> None:
        """Release the lock of a writer that was not closed."""
        self.close()

    def remove_uncommitted(self) -> None:
        """Remove what a crash left of a commit that was not completed.

        Raises:
            OSError: A file cannot be removed.
        """
        committed = {resume_name(len(self.chunks) - 1), *(chunk.file for chunk in self.chunks)}
        with explain_os_errors(self.path, self._remains):
            if os.fstat(self.journal).st_size > self.journal_bytes:
                os.ftruncate(self.journal, self.journal_bytes)
                os.fsync(self.journal)
            for file in list(self.path.iterdir()):
                is_left_over = file.name.startswith(("chunk-", "resume-")) and file.name not in committed
                if is_left_over or file.name.endswith(".part"):
                    file.unlink()

    def _remains(self, cause: str) -> str:
        """Return what of the run can be read, for the message of an error with this cause."""
        return describe_remains(self.path, self.journal, self.chunks, cause)

    def _unmark_complete(self) -> None:
        if (self.path / FINISHED).exists():
            (self.path / FINISHED).unlink()
            sync_folder(self.path)

    def _rollback(self, number: int, journal_bytes: int) -> None:
        """Remove the files and the journal line of a chunk that was not committed in full."""
        del self.chunks[number:]
        self.journal_bytes = journal_bytes
        with suppress(OSError):
            os.ftruncate(self.journal, journal_bytes)
            os.fsync(self.journal)
        try:
            require_same_journal(self.path, self.journal)
        except OSError:  # another folder was put in the place of the run's: nothing in it is ours to remove
            return
        for name in (chunk_name(number), resume_name(number)):
            for file in (self.path / name, self.path / f"{name}.part"):
                with suppress(OSError):
                    file.unlink()


def create_run_dir(
    path: str | os.PathLike[str], header: Mapping[str, Any], data: Mapping[str, Tensor]
) -> tuple[RunWriter, dict[str, Any]]:
    """Start a run in a new or empty folder; the folder holds a run once `write_header` was called.

    Returns:
        The writer, and the header with what the format adds to it.

    Raises:
        FileExistsError: The folder already holds a run or anything else.
        BlockingIOError: Another process starts a run there.
        OSError: The folder cannot be written.
    """
    folder = Path(path)
    require_empty_dir(folder)
    content = save({name: value.detach().cpu().contiguous() for name, value in data.items()})
    own = {"format": FORMAT, "version": FORMAT_VERSION, "data_blake2b": checksum(content), "data_bytes": len(content)}
    full = complete_header(own | dict(header), str(folder / HEADER))
    with explain_os_errors(folder, lambda _: f"no step is recorded yet. {RESUME}"):
        folder.mkdir(parents=True, exist_ok=True)
        writer = _locked_writer(folder, chunk_schema(full), os.O_CREAT)
        try:
            require_empty_dir(folder)  # again: a writer that held the lock until now may have made a run of it
            os.ftruncate(writer.journal, 0)
            atomic_write(folder / DATA, content)
        except BaseException:
            writer.close()
            raise
    return writer, full


def write_header(writer: RunWriter, header: Mapping[str, Any]) -> None:
    """Write the header, the last file of a new run: the folder with its first chunk becomes a run by it.

    Raises:
        OSError: The header could not be written.
    """
    with explain_os_errors(writer.path, lambda _: f"no step is recorded yet. {RESUME}"):
        atomic_write(writer.path / HEADER, checksummed_json(dict(header)))


def open_for_writing(path: str | os.PathLike[str], header: Mapping[str, Any]) -> RunWriter:
    """Open a run where its last commit left it; no file is changed.

    Raises:
        BlockingIOError: Another process writes to the run.
        OSError: The folder cannot be written.
        ValueError: The journal is damaged.
    """
    folder = Path(path)
    with explain_os_errors(folder, lambda _: f"it is unchanged. {RESUME}"):
        writer = _locked_writer(folder, chunk_schema(header), 0)
        try:
            journal = read_journal(folder)
        except BaseException:
            writer.close()
            raise
    writer.chunks, writer.journal_bytes = list(journal.chunks), journal.bytes
    return writer


def require_empty_dir(folder: Path) -> None:
    """Raise if a folder holds anything but the first files of a run whose header was never written.

    Raises:
        FileExistsError: The folder holds another file, or the path is a file.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or not all(_precedes_header(file) for file in folder.iterdir()):
        raise FileExistsError(
            f"folder must be a new or empty folder: {folder} already holds something. Choose another folder, or resume "
            "the run that it holds with resume=True."
        )


def _precedes_header(file: Path) -> bool:
    """Return whether a crash before the header was written can have left this file."""
    names = {JOURNAL, LOCK, MARKER, DATA, chunk_name(0), resume_name(0)}
    return file.name in MANIFEST_FILES or (
        file.name.removesuffix(".part") in names | {HEADER, *MANIFEST_FILES} and not file.is_symlink()
    )


def _locked_writer(folder: Path, schema: ChunkSchema, flags: int) -> RunWriter:
    """Open and lock the journal of a folder; `flags` may hold `os.O_CREAT`."""
    journal = open_descriptor(folder / JOURNAL, os.O_RDWR | flags)
    try:
        return RunWriter(folder, schema, journal, lock_writer(folder, journal))
    except BaseException:
        os.close(journal)
        raise


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]
