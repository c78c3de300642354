"""Writing a run to disk so that committed steps survive any interruption of the writer.

The lock is the operating system's, on the file `writer.lock` (`filelock`), so it is released when the process ends in
any way. Readers need no lock.
"""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_positive
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.storage import files
from epk_gp.storage.chunks import chunk_tensors
from epk_gp.storage.files import atomic_write, checksum, checksummed_json, open_descriptor, regular_file_size
from epk_gp.storage.schema import (
    DATA,
    FINISHED,
    FORMAT,
    HEADER,
    JOURNAL,
    Chunk,
    ChunkSchema,
    RunHeader,
    chunk_name,
    chunk_schema,
    read_header,
    read_journal,
    resume_name,
    to_json_line,
    validated,
)
from epk_gp.storage.training_state import REPLAY, TrainingState

MANIFEST_FILES = ("network.json", "held_out.safetensors")  # files of the command line that may precede a run
_RESUME = "Free space or give the right to write, then go on with resume=True."
LOCK = "writer.lock"
_TIMEOUT = 0.5  # seconds: a virus scanner may hold a lock file open for a moment on Windows


@contextmanager
def explain_os_errors(path: Path, advice: str) -> Iterator[None]:
    """Turn a system error into our own: the reason that a run cannot be written, the committed part, and advice."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by this package, with its own sentence
            raise
        explained = type(error)(f"the run must be written to {path}: {error.strerror}; {advice}")
        explained.errno = error.errno
        raise explained from error


@dataclass(frozen=True)
class Storage:
    """Options of a run on disk: the weight states that it keeps, and when steps are committed.

    A chunk is committed as soon as one of the three limits is reached; a crash loses at most the steps since then.

    Attributes:
        chunk_bytes: Bytes of weights, moving statistics and forward passes that are collected before a commit.
        seconds: Time since the last commit after which the next step commits, by a monotonic clock.
        steps: Number of steps after which they are committed; no limit by default.
        keep_every: Keep every k-th weight state, the first and the last, with the optimizers' state. The states between
            them are computed again when they are read: by the loop's own steps, bit by bit; if that fails, by the
            update rule on exact gradients. The kept state then differs from the computed one by a jump, which results
            report as unexplained.
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


def thinning_header(storage: object, folder: str | os.PathLike[str] | None, momentum: Tensor | None) -> dict[str, Any]:
    """Return the entries of a run's header and digest about its options on disk; empty if every state is kept.

    Raises:
        TypeError: `storage` is not a `Storage`.
        ValueError: States are left out of a run in memory, or of one whose optimizer had momentum before it.
    """
    if not isinstance(storage, Storage):
        raise TypeError(f"storage must be an epk_gp.Storage, such as Storage(keep_every=20): got {storage!r}.")
    if storage.keep_every == 1:
        return {}
    if folder is None:
        raise ValueError("keep_every must come with folder=, for a run in memory holds every state: got no folder.")
    if momentum is not None:
        raise ValueError(
            "storage must keep every state where an optimizer has made steps before the recording, whose scales other "
            f"states would need: got keep_every={storage.keep_every}."
        )
    return {"keep_every": storage.keep_every}


class RunWriter:
    """An open run folder, locked against other writers; each call of `append` is one commit.

    Attributes:
        path: The folder.
        schema: The schema of its chunks.
        chunks: The committed chunks.
        failed: Whether the last commit failed, so that another one would probably fail too.
    """

    def __init__(self, path: Path, schema: ChunkSchema, flags: int = 0) -> None:
        """Open and lock the journal of a folder; `flags` may contain `os.O_CREAT`.

        Raises:
            BlockingIOError: Another writer holds the lock.
            OSError: The folder cannot be written.
        """
        self.path, self.schema, self.chunks, self.failed = path, schema, list[Chunk](), False
        self._journal, self._lock = -1, FileLock(path / LOCK, thread_local=False)
        self._journal_bytes = 0  # length up to the end of the committed lines
        self._journal = open_descriptor(path / JOURNAL, os.O_RDWR | flags)
        try:
            self._lock.acquire(timeout=_TIMEOUT)
        except Timeout as error:
            self.close()
            raise BlockingIOError(f"a run must have one writer at a time: another one records into {path}.") from error

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Release the folder if an error leaves the `with` statement."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def append(
        self,
        states: Sequence[Tensor],
        steps: Sequence[Step],
        updates: Sequence[UpdateCoefficients],
        digests: Sequence[str],
        training_state: Mapping[str, Tensor],
        statistics: Sequence[Tensor] = (),
        *,
        rows: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Commit consecutive states, the steps that led to them, and the training state after the last of them.

        Args:
            states: The states after the committed ones, if the run keeps them, and the last one.
            steps: The steps that led to them, with their forward passes.
            updates: Coefficients of these steps.
            digests: Digests of the run up to each of the steps, or of a run without steps.
            training_state: Tensors from which the run can be resumed (`TrainingState.state_dict`).
            statistics: The moving statistics of the states, for a network that has any.
            rows: New inputs and targets of a stream, and the replay data of steps, by their names on disk.

        Raises:
            OSError: The folder could not be written, and nothing was added; or it was deleted or replaced.
            TypeError: A tensor of a pass has a dtype that cannot be stored.
            ValueError: The run has the largest number of chunks; or passes or statistics do not fit this run.
        """
        number, start, digest = len(self.chunks), self._journal_bytes, digests[-1]
        content = save(chunk_tensors(states, steps, updates, self.schema, statistics, digests=digests) | dict(rows))
        resume = save({name: value.detach().cpu().contiguous() for name, value in training_state.items()})
        chunk = Chunk(
            file=chunk_name(number),
            first=self.chunks[-1].last + 1 if self.chunks else 0,
            states=len(steps) or 1,
            bytes=len(content),
            blake2b=checksum(content, digest),
            digest=digest,
            resume_bytes=len(resume),
            resume_blake2b=checksum(resume, digest),
            line="",
        )
        chunk = chunk.model_copy(update={"line": chunk.line_after(self.chunks[-1].line if self.chunks else "")})
        line = to_json_line(chunk)
        with explain_os_errors(self.path, self._advice):
            try:
                self._require_same_journal()
                (self.path / FINISHED).unlink(missing_ok=True)
                atomic_write(self.path / chunk.file, content, sync=False)
                atomic_write(self.path / resume_name(number), resume)  # this synchronises all three names
                os.lseek(self._journal, self._journal_bytes, os.SEEK_SET)
                _write_all(self._journal, line)
                os.fsync(self._journal)
                self.chunks.append(chunk)
                self._journal_bytes += len(line)
            except BaseException as error:  # including Ctrl-C between two bytes
                self.failed = isinstance(error, OSError)
                del self.chunks[number:]
                self._journal_bytes = start
                with suppress(OSError):  # the next commit overwrites the remaining files
                    os.ftruncate(self._journal, start)
                    os.fsync(self._journal)
                raise
        if number:
            with suppress(OSError):  # a superfluous file does no harm
                (self.path / resume_name(number - 1)).unlink()

    def mark_complete(self) -> None:
        """Write the closing record of the run: from now on a shortened journal is an error.

        Raises:
            OSError: The record could not be written; or a file of the run was deleted or changed during the recording.
        """
        try:
            self._require_same_journal()
            sizes = {DATA: read_header(self.path)["data_bytes"]}
            sizes[resume_name(len(self.chunks) - 1)] = self.chunks[-1].resume_bytes
            lost = [name for name, size in sizes.items() if regular_file_size(self.path / name, name) != size]
            if lost or read_journal(self.path).chunks != tuple(self.chunks):
                raise ValueError(f"{self.path / min(lost, default=JOURNAL)} is missing or was changed.")
        except (OSError, ValueError) as error:
            raise OSError(f"a run must keep all its files while it is recorded: {error} Restore it.") from error
        if (self.path / FINISHED).exists():
            return
        with explain_os_errors(self.path, self._advice):
            atomic_write(self.path / FINISHED, checksummed_json({"chunks": len(self.chunks)}))

    def close(self) -> None:
        """Close the journal and release the lock."""
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1
        self._lock.release()

    def __del__(self) -> None:
        """Release the lock of a writer that was not closed."""
        self.close()

    def remove_uncommitted(self) -> None:
        """Remove the files of a commit that a crash left incomplete.

        Raises:
            OSError: A file cannot be removed.
        """
        committed = {resume_name(len(self.chunks) - 1), *(chunk.file for chunk in self.chunks)}
        with explain_os_errors(self.path, self._advice):
            if os.fstat(self._journal).st_size > self._journal_bytes:
                os.ftruncate(self._journal, self._journal_bytes)
                os.fsync(self._journal)
            for file in list(self.path.iterdir()):
                is_left_over = file.name.startswith(("chunk-", "resume-")) and file.name not in committed
                if is_left_over or file.name.endswith(".part"):
                    file.unlink()

    @property
    def _advice(self) -> str:
        count = self.chunks[-1].last if self.chunks else 0
        return f"check with epk-gp verify that its {count} committed steps are there. {_RESUME}"

    def _require_same_journal(self) -> None:
        """Raise if the journal in the folder is not the open one: anything written there would be lost.

        Raises:
            OSError: The folder or the journal was deleted, renamed or replaced.
        """
        if not os.path.samestat((self.path / JOURNAL).lstat(), os.fstat(self._journal)):
            raise FileNotFoundError(errno.ENOENT, f"{JOURNAL} was replaced while it was recorded", str(self.path))


def create_run(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    data: Mapping[str, Tensor],
    training: TrainingState,
    weights: Float[Tensor, " P"],
    digest: str,
    *,
    statistics: Float[Tensor, " Q"] | None,
) -> RunWriter:
    """Create a run without steps in a new or empty folder. The header is written last: with it the folder is a run.

    Args:
        path: The folder.
        header: Description of the run (`schema.run_header`), with `check_every` and `modules`.
        data: Tensors `inputs`, `targets`, `probe` (the fingerprint outputs), `constant.NAME` for the frozen state, and
            `graph.KEY` for the tensors of a graph.
        training: The optimizers and other objects.
        weights: The initial weights.
        digest: Digest of the run.
        statistics: The initial moving statistics; None for a network without them.

    Raises:
        FileExistsError: The folder already holds something.
        BlockingIOError: Another process creates a run there.
        OSError: The folder cannot be written.
        TypeError: The training state contains an object that only pickle could store.
    """
    folder, tensors, advice = Path(path), training.state_dict(), f"no step is recorded yet. {_RESUME}"
    require_empty_dir(folder)
    hasher, size = hashlib.blake2b(digest_size=16), 0
    for part in files.tensor_file(data, {}):  # block by block, because the inputs may not fit into memory
        hasher.update(part)
        size += len(part)
    of_data = {"data_blake2b": hasher.hexdigest(), "data_bytes": size}
    message = f"{folder / HEADER} must be the header of an epk_gp run of version 1"
    full = validated(RunHeader, FORMAT | of_data | dict(header) | training.header(), message).model_dump()
    with explain_os_errors(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
        writer = RunWriter(folder, chunk_schema(full), os.O_CREAT)
    with writer.closed_on_error():
        with explain_os_errors(folder, advice):
            require_empty_dir(folder)  # again, because a writer that held the lock until now may have created a run
            os.ftruncate(writer._journal, 0)
            atomic_write(folder / DATA, files.tensor_file(data, {}))
        rows = files.pack(REPLAY, [training.replay_row((), is_kept=True)]) if writer.schema.thins else {}
        writer.append([weights], [], [], [digest], tensors, () if statistics is None else (statistics,), rows=rows)
        with explain_os_errors(folder, advice):
            atomic_write(folder / HEADER, checksummed_json(full))
    return writer


def open_for_writing(path: str | os.PathLike[str], header: Mapping[str, Any]) -> RunWriter:
    """Open a run to continue it after its last commit. No file is changed yet.

    Raises:
        BlockingIOError: Another process writes to the run.
        OSError: The folder cannot be written.
        ValueError: The journal is damaged.
    """
    folder = Path(path)
    with explain_os_errors(folder, f"it is unchanged. {_RESUME}"):
        writer = RunWriter(folder, chunk_schema(header))
        with writer.closed_on_error():
            journal = read_journal(folder)
    writer.chunks, writer._journal_bytes = list(journal.chunks), journal.bytes
    return writer


def require_empty_dir(folder: Path) -> None:
    """Raise if a folder holds anything but the first files of a run whose header was never written.

    Raises:
        FileExistsError: The folder holds another file, or the path is a file.
    """
    if folder.exists() and not (folder.is_dir() and all(map(_precedes_header, folder.iterdir()))):
        raise FileExistsError(f"folder must be a new or empty folder: {folder} already holds something.")


def _precedes_header(file: Path) -> bool:
    """Return whether this file may remain from a crash before the header was written."""
    names = {JOURNAL, LOCK, DATA, HEADER, chunk_name(0), resume_name(0), *MANIFEST_FILES}
    return file.name in MANIFEST_FILES or (file.name.removesuffix(".part") in names and not file.is_symlink())


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]
