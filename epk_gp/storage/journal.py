"""The journal of a run: a log with one line per committed chunk, and the closing record of a finished run.

A chunk is committed once its line is in the journal. Each line holds a checksum of itself and, through the checksum of
the line before it, of all earlier lines.
"""

import fnmatch
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from epk_gp.storage import files
from epk_gp.storage.files import DAMAGED
from epk_gp.storage.schema import Count, Record, read_record, validated

JOURNAL, FINISHED = "journal.jsonl", "finished.json"
MAX_CHUNKS = 100_000  # a journal of at most 51 MB can be read at once
MAX_LINE_BYTES = 512  # a line with 19-digit numbers has 356 bytes
_FINISHED_BYTES = 1024  # the closing record has about 150 bytes

# The state of each chunk's file (`_stamp`) when this process last compared its content with its checksum.
_COMPARED: dict[tuple[str, str], tuple[int, ...]] = {}


Text = Annotated[str, StringConstraints(pattern="^[ -~]*$")]  # printable ASCII


class Chunk(Record):
    """One line of the journal: a chunk with the states `first` to `first + states - 1` and the steps that led to them.

    The attributes are the entries on disk. No step leads to state 0.

    Attributes:
        file: Name of the chunk's file.
        first: Number of its first state.
        states: Number of states in it.
        bytes: Size of the file.
        blake2b: Checksum of the file's content followed by `digest`.
        digest: Digest of the run up to the chunk's last state.
        resume_bytes: Size of the file with the training state after this chunk.
        resume_blake2b: Checksum of that file's content followed by `digest`.
        line: Checksum of this line and all lines before it.
    """

    file: Text
    first: Count
    states: Count
    bytes: Count
    blake2b: Text
    digest: Text
    resume_bytes: Count
    resume_blake2b: Text
    line: Text

    @property
    def last(self) -> int:
        """Number of the chunk's last state."""
        return self.first + self.states - 1

    @property
    def first_step(self) -> int:
        """Number of its first step; state 0 has none."""
        return max(self.first - 1, 0)

    def line_after(self, before: str) -> str:
        """Return the checksum of this line, chained to the checksum of the line before it."""
        return files.checksum(before.encode(), files.checksum_json(dict(self) | {"line": ""}))


class Finished(Record):
    """The closing record of a finished run: the number of its chunks."""

    chunks: Count


@dataclass(frozen=True)
class Journal:
    """The committed part of a run.

    Attributes:
        chunks: The committed chunks.
        bytes: Length of the journal up to the end of their lines; a crash may have left part of another line.
        finished: Whether the recording was finished.
    """

    chunks: tuple[Chunk, ...]
    bytes: int
    finished: bool


def chunk_name(number: int) -> str:
    """Return the name of a chunk's file.

    Raises:
        ValueError: The run already has the largest number of chunks.
    """
    if number >= MAX_CHUNKS:
        raise ValueError(f"a run must have at most {MAX_CHUNKS} chunks: let more steps come together in each.")
    return f"chunk-{number:06d}.safetensors"


def resume_name(number: int) -> str:
    """Return the name of the file with the training state after a chunk."""
    return f"resume-{number:06d}.safetensors"


def to_json_line(chunk: Chunk) -> bytes:
    """Return the chunk's line in the journal."""
    return json.dumps(dict(chunk)).encode() + b"\n"


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Read the committed chunks of a run. A last line without its newline is not committed.

    A run may be read while it is written: the result is the committed part at one moment.

    Raises:
        FileNotFoundError: The journal is missing.
        ValueError: The journal is damaged or lost lines, or a chunk is missing or has another size.
    """
    folder = Path(path)
    # Listed before the journal is read, so that each listed file belongs to a line that is read. os.listdir, because
    # Path.glob treats an unreadable folder as empty.
    names = fnmatch.filter(os.listdir(folder), f"resume-{'[0-9]' * 6}.safetensors")
    numbers = [int(name[7:13]) for name in names]
    file = folder / FINISHED
    finished = read_record(Finished, file, f"{file} must be the closing record of a run", _FINISHED_BYTES)
    where = f"{folder / JOURNAL}"
    content = files.read_bytes(folder / JOURNAL, MAX_CHUNKS * MAX_LINE_BYTES, where)
    chunks, used = _parse_lines(content, where)
    if not chunks:
        raise ValueError(f"a run must hold at least its initial weights: {folder / JOURNAL} has no committed chunk.")
    if finished is not None and finished.chunks > len(chunks):  # fewer chunks: a writer has just resumed the run
        raise ValueError(f"{where} must be as when the run was finished, with {finished.chunks} chunks. {DAMAGED}")
    if numbers and len(chunks) <= max(numbers) and max(numbers) - 1 not in numbers:
        # A writer removes resume file N - 1 only after it committed line N.
        raise ValueError(f"{where} must have {max(numbers) + 1} lines: it ends after {len(chunks)}. {DAMAGED}")
    for chunk in chunks:
        name, chunk_where = chunk_file(folder, chunk)
        if (size := files.regular_file_size(name, chunk_where)) != chunk.bytes:
            got = "it is missing" if size is None else f"it has {size}"
            raise ValueError(f"{chunk_where} must have {chunk.bytes} bytes: {got}. {DAMAGED}")
    return Journal(tuple(chunks), used, finished == Finished(chunks=len(chunks)))


def chunk_file(path: str | os.PathLike[str], chunk: Chunk) -> tuple[Path, str]:
    """Return the file of a chunk, and its name in error messages."""
    file = Path(path) / chunk.file
    return file, f"{file} (states {chunk.first}..{chunk.last})"


def verify_chunk(path: str | os.PathLike[str], chunk: Chunk) -> None:
    """Compare the file of a chunk with its committed checksum.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a regular file, or has another size or checksum.
    """
    file, where = chunk_file(path, chunk)
    stamp = _stamp(file)  # taken before reading
    files.verify_file(file, chunk.bytes, chunk.blake2b, where, chunk.digest)
    _COMPARED[str(file), chunk.blake2b] = stamp


@contextmanager
def opened_chunk(path: str | os.PathLike[str], chunk: Chunk) -> Iterator[Any]:
    """Map the file of a chunk that was verified when the run was opened, and has not changed since.

    A file that this process has not compared with its checksum, or that changed since, is compared once.

    Raises:
        FileNotFoundError: The file was removed since the run was opened.
        ValueError: It was replaced or damaged since the run was opened.
    """
    _require_unchanged(path, chunk)
    with files.open_tensors(*chunk_file(path, chunk)) as tensors:
        _require_unchanged(path, chunk)  # again, because it may have been replaced before it was mapped
        yield tensors


def _require_unchanged(path: str | os.PathLike[str], chunk: Chunk) -> None:
    file = chunk_file(path, chunk)[0]
    if _COMPARED.get((str(file), chunk.blake2b)) == _stamp(file):
        return
    try:
        verify_chunk(path, chunk)
    except ValueError as error:
        raise ValueError(f"{error} Or another run was recorded there: load it again.") from error


def _stamp(file: Path) -> tuple[int, ...]:
    """Return numbers of which at least one changes when a file is replaced or written again."""
    with suppress(OSError):
        status = file.lstat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return ()


def _parse_lines(content: bytes, where: str) -> tuple[list[Chunk], int]:
    if (count := content.count(b"\n")) > MAX_CHUNKS:
        raise ValueError(f"{where} must have at most {MAX_CHUNKS} lines: it has {count}.")
    chunks: list[Chunk] = []
    used = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:used].split(b"\n")[:-1]):
        name = f"line {number + 1} of {where}"
        message = f"{name} must describe a chunk: it is damaged, restore it from a copy"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"{message}: it has {len(line)} bytes.")
        chunk = validated(Chunk, files.parse_json(line, message), message)
        if chunk.line != chunk.line_after(chunks[-1].line if chunks else "") or to_json_line(chunk) != line + b"\n":
            raise ValueError(f"{name} must have its checksum: it is damaged, or a line before it is lost.")
        expected = chunks[-1].last + 1 if chunks else 0
        if chunk.first != expected or chunk.file != chunk_name(number) or chunk.states < 1:
            raise ValueError(f"{name} must continue at state {expected}: it does not.")
        chunks.append(chunk)
    return chunks, used
