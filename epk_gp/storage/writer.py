"""A run on disk, written: whatever stops the writer, what was committed stays."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.core.validation import validate_count, validate_positive
from epk_gp.storage import schema as store
from epk_gp.storage.atomic_files import atomic_write, checksum, checksummed_json, regular_file_size, sync_folder
from epk_gp.storage.chunks import STORED_FIELDS, ChunkSchema
from epk_gp.storage.codec import pack_rows
from epk_gp.storage.index import (
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

if sys.platform != "win32":
    import fcntl

MANIFEST_FILES = ("network.json", "held_out.safetensors")  # the command line's own files


@dataclass(frozen=True)
class Storage:
    """How a run is kept on disk.

    A chunk is committed as soon as one of the three limits is reached; a crash costs at most the steps since then.

    Attributes:
        chunk_bytes: Weights that come together before they are committed.
        seconds: Time after which a step commits what came together (by a clock that does not jump).
        steps: Steps after which they are committed; no limit by default.
        compression: "none": states are mapped from the files. "deltas": each state is stored as its difference in bits
            from the one before, deflated, without loss; smaller, and slower to write and read.
    """

    chunk_bytes: int = 16 << 20
    seconds: float = 60.0
    steps: int | None = None
    compression: str = "none"

    def __post_init__(self) -> None:
        validate_count(self.chunk_bytes, "chunk_bytes")
        validate_positive(self.seconds, "seconds")
        if self.steps is not None:
            validate_count(self.steps, "steps")
        if self.compression not in store.COMPRESSIONS:
            raise ValueError(f"compression must be one of {list(store.COMPRESSIONS)}: got {self.compression!r}.")


@dataclass
class RunWriter:
    """An open run folder, locked against other writers; `append` commits.

    Attributes:
        path: The folder.
        layout: What its chunks look like.
        journal: Descriptor of the journal; the lock is on it.
        chunks: What is committed.
        bytes: Length of the journal.
        failed: Whether the last commit failed; the next one would most likely, too.
    """

    path: Path
    layout: ChunkSchema
    journal: int
    chunks: list[Chunk] = field(default_factory=list)
    bytes: int = 0
    failed: bool = False

    @property
    def committed(self) -> int:
        """Number of states on disk."""
        return self.chunks[-1].last + 1 if self.chunks else 0

    def append(
        self,
        states: Sequence[Tensor],
        steps: Sequence[Step],
        updates: Sequence[UpdateCoefficients],
        digest: str,
        resume: Mapping[str, Tensor],
    ) -> None:
        """Commit consecutive states, the steps that led to them, and what the run goes on from after them.

        Raises:
            OSError: It could not be written; what was committed before stays, and nothing else is.
            ValueError: As many chunks as a run can have.
        """
        number = len(self.chunks)
        if number >= MAX_CHUNKS:
            raise ValueError(f"a run must have at most {MAX_CHUNKS} chunks: let more steps come together in each.")
        content = save(chunk_tensors(states, steps, updates, self.layout))
        kept = save({name: value.detach().cpu().contiguous() for name, value in resume.items()})
        before = self.chunks[-1].line if self.chunks else ""
        size, first, start = len(content), self.committed, self.bytes
        hashes = checksum(content, digest), checksum(kept, digest)
        chunk = Chunk(chunk_name(number), first, len(states), size, hashes[0], digest, len(kept), hashes[1], "")
        chunk = Chunk(**{**vars(chunk), "line": chain_hash(before, chunk)})
        line = to_json_line(chunk)
        with _explained(self.path, first):
            try:
                self._reopen()
                atomic_write(self.path / chunk.file, content, sync=False)
                atomic_write(self.path / resume_name(number), kept)  # synchronises both names
                os.lseek(self.journal, self.bytes, os.SEEK_SET)
                _write_all(self.journal, line)
                os.fsync(self.journal)
                self.chunks.append(chunk)
                self.bytes += len(line)
            except BaseException as error:  # also Ctrl-C between two bytes
                self.failed = isinstance(error, OSError)
                self._undo(number, start)
                raise
        if number:
            with suppress(OSError):  # one file too many does no harm
                (self.path / resume_name(number - 1)).unlink()

    def finish(self) -> None:
        """Close the record: from now on a journal that lost its end is an error."""
        if (self.path / FINISHED).exists():
            return
        with _explained(self.path, self.committed):
            journal = (self.path / JOURNAL).read_bytes()
            atomic_write(self.path / FINISHED, finished_content(len(self.chunks), journal))

    def close(self) -> None:
        """Give the lock back."""
        if self.journal >= 0:
            os.close(self.journal)
            self.journal = -1

    def __del__(self) -> None:
        """Give the lock back if nobody did."""
        self.close()

    def clean(self) -> None:
        """Remove what a crash left half done.

        Raises:
            OSError: It cannot be removed.
        """
        kept = {resume_name(len(self.chunks) - 1), *(chunk.file for chunk in self.chunks)}
        with _explained(self.path, self.committed):
            if os.fstat(self.journal).st_size > self.bytes:
                os.ftruncate(self.journal, self.bytes)
                os.fsync(self.journal)
            for file in list(self.path.iterdir()):
                ours = file.name.startswith(("chunk-", "resume-")) and file.name not in kept
                if ours or file.name.endswith(".part"):
                    file.unlink()

    def _reopen(self) -> None:
        if (self.path / FINISHED).exists():
            (self.path / FINISHED).unlink()
            sync_folder(self.path)

    def _undo(self, number: int, start: int) -> None:
        """Take back a chunk that is not committed in full."""
        del self.chunks[number:]
        self.bytes = start
        with suppress(OSError):
            os.ftruncate(self.journal, start)
            os.fsync(self.journal)
        for name in (chunk_name(number), resume_name(number)):
            for file in (self.path / name, self.path / f"{name}.part"):
                with suppress(OSError):
                    file.unlink()


def create_run_dir(
    path: str | os.PathLike[str], header: Mapping[str, Any], data: Mapping[str, Tensor]
) -> tuple[RunWriter, dict[str, Any]]:
    """Start a run in a new or empty folder; it is one once `publish` was called.

    Returns:
        The writer, and the header in full.

    Raises:
        FileExistsError: The folder already holds a run or anything else.
        BlockingIOError: Another process starts one there.
        OSError: It cannot be written.
    """
    folder = Path(path)
    require_empty_dir(folder)
    content = save({name: value.detach().cpu().contiguous() for name, value in data.items()})
    full = {"format": store.FORMAT, "version": store.FORMAT_VERSION, "data_blake2b": checksum(content), **header}
    with _explained(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        writer = RunWriter(folder, store.schema_of(full), _lock(folder, os.O_CREAT))
        require_empty_dir(folder)  # by a process that held the lock until now
        os.ftruncate(writer.journal, 0)
        atomic_write(folder / store.DATA, content)
    return writer, full


def publish(writer: RunWriter, header: Mapping[str, Any]) -> None:
    """Make a run of a folder with its first chunk: write the header, the last file of all.

    Raises:
        OSError: It could not be written.
    """
    with _explained(writer.path, 0):
        atomic_write(writer.path / store.HEADER, checksummed_json(dict(header)))


def open_for_writing(path: str | os.PathLike[str], header: Mapping[str, Any]) -> RunWriter:
    """Take up a run where its last commit left it; nothing is changed yet.

    Raises:
        BlockingIOError: Another process writes to it.
        OSError: It cannot be written.
        ValueError: It is damaged.
    """
    folder = Path(path)
    with _explained(folder, None):
        writer = RunWriter(folder, store.schema_of(header), _lock(folder, 0))
        found = read_journal(folder)
    writer.chunks, writer.bytes = list(found.chunks), found.bytes
    return writer


def require_empty_dir(folder: Path) -> None:
    """Refuse a folder that holds anything but the start of a run that never became one.

    Raises:
        FileExistsError: It does.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or not all(_is_start(file) for file in folder.iterdir()):
        raise FileExistsError(
            f"path must be a new or empty folder: {folder} already holds something. Choose another path, or go on "
            "with the run that it holds by resume=True."
        )


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run, whole or not."""
    file = Path(path) / store.HEADER
    return regular_file_size(file, str(file)) is not None


def chunk_tensors(
    states: Sequence[Tensor], steps: Sequence[Step], updates: Sequence[UpdateCoefficients], layout: ChunkSchema
) -> dict[str, Tensor]:
    """Lay out a chunk."""
    batches = [step.batch.cpu() for step in steps if step.batch is not None]
    weights = [step.sample_weights.cpu() for step in steps if step.sample_weights is not None]
    rows = {"states": torch.stack([state.cpu() for state in states])}
    tensors = {
        "sizes": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights).double() if weights else torch.zeros(0, dtype=torch.float64),
    }
    columns = []
    for name, stored_name in zip(FIELDS, STORED_FIELDS, strict=True) if updates else ():
        values = [getattr(update, name).cpu() for update in updates]
        diagonals = [value for value in values if len(value) != len(layout.sizes)]
        if diagonals:
            rows[f"update.{stored_name}"] = torch.stack(
                [broadcast_to_params(value, layout.sizes, diagonals[0]) for value in values]
            )
            values = [torch.zeros(len(layout.sizes), dtype=torch.float64) for _ in updates]
        columns.append(torch.stack(values).double())
    if columns:
        tensors["update"] = torch.stack(columns, dim=1)
    for name, value in rows.items():
        if layout.compression == "none":
            tensors[name] = value
        else:
            tensors[f"{name}.packed"], tensors[f"{name}.lengths"] = pack_rows(value)
    return tensors


def _is_start(file: Path) -> bool:
    """Whether a crash between the first file and the header can have left this one."""
    names = {JOURNAL, store.DATA, chunk_name(0), resume_name(0)}
    return file.name in MANIFEST_FILES or (
        file.name.removesuffix(".part") in names | {store.HEADER} and not file.is_symlink()
    )


def _lock(folder: Path, flags: int) -> int:
    """Open the journal and lock it; the kernel gives the lock back when the process ends, however it ends."""
    if sys.platform == "win32":
        raise OSError("a run on disk must be locked by flock, which this system does not have: record in memory.")
    journal = os.open(folder / JOURNAL, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(journal)
        raise BlockingIOError(
            f"a run must have one writer at a time: another process records into {folder}. Wait for it to end, or "
            "choose another path."
        ) from error
    except BaseException:
        os.close(journal)
        raise
    return journal


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


@contextmanager
def _explained(path: Path, states: int | None) -> Iterator[None]:
    """Say in one sentence why a run cannot be written, and what is kept."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # already said
            raise
        kept = "it is unchanged" if states is None else f"its {max(states - 1, 0)} committed steps stay readable"
        said = type(error)(
            f"the run must be written to {path}: {error.strerror}; {kept}. Free space or give the right to write, "
            "then go on with resume=True."
        )
        said.errno = error.errno
        raise said from error
