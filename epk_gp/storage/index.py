"""The journal of a run on disk: which chunks are committed, and whether the run was finished."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from epk_gp.storage.atomic_files import (
    checksum,
    checksum_json,
    checksummed_json,
    parse_json,
    read_bytes,
    read_checksummed_json,
    regular_file_size,
)

JOURNAL, FINISHED = "journal.jsonl", "finished.json"
MAX_CHUNKS = 100_000
MAX_LINE_BYTES = 512
_FINISHED_BYTES = 1024


@dataclass(frozen=True)
class Chunk:
    """One journal line: states `first` .. `first + states - 1` and the steps that led to them (none to state 0).

    Attributes:
        file: Its name.
        first: Its first state.
        states: How many it holds.
        bytes: Its size.
        blake2b: Checksum of its content and of `digest`.
        digest: The trajectory's digest up to its last state.
        resume_bytes: Size of the file that a run goes on from after this chunk.
        resume_blake2b: Checksum of that file's content and of `digest`.
        line: Checksum of this line and all before it.
    """

    file: str
    first: int
    states: int
    bytes: int
    blake2b: str
    digest: str
    resume_bytes: int
    resume_blake2b: str
    line: str

    @property
    def last(self) -> int:
        """Its last state."""
        return self.first + self.states - 1

    @property
    def content(self) -> str:
        """What it holds, in words."""
        return f"states {self.first}..{self.last}"


@dataclass(frozen=True)
class Journal:
    """What is committed.

    Attributes:
        chunks: The committed chunks.
        bytes: Length of the journal up to the last of them; what follows was cut short by a crash.
        finished: Whether recording came to its end.
    """

    chunks: tuple[Chunk, ...]
    bytes: int
    finished: bool


def chunk_name(number: int) -> str:
    """Name a chunk's file."""
    return f"chunk-{number:06d}.safetensors"


def resume_name(number: int) -> str:
    """Name the file that a run goes on from after a chunk."""
    return f"resume-{number:06d}.safetensors"


def to_json_line(chunk: Chunk) -> bytes:
    """Write a chunk's journal line."""
    return json.dumps(asdict(chunk)).encode() + b"\n"


def chain_hash(before: str, chunk: Chunk) -> str:
    """Hash a line and, through the checksum of the line before it, all earlier ones."""
    return checksum(before.encode(), checksum_json(asdict(chunk) | {"line": ""}))


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """List the committed chunks; a last line that a crash cut short is not committed.

    A run that is being written may be read: it is seen as it was at one moment.

    Raises:
        FileNotFoundError: No journal.
        ValueError: A damaged journal, lines that were lost, or a chunk that is missing or has another size.
    """
    folder = Path(path)
    numbers = _resume_numbers(folder)  # before the journal: a file that is here belongs to a line that is there
    finished = _read_finished(folder)
    where = f"{folder / JOURNAL}"
    limit = MAX_CHUNKS * MAX_LINE_BYTES
    content = read_bytes(folder / JOURNAL, limit, where)
    chunks, used = _parse(content, where)
    if not chunks:
        raise ValueError(f"a run must hold at least its initial weights: {folder / JOURNAL} has no committed chunk.")
    if finished is not None:
        _check_finished(folder, finished, content)
    elif numbers and len(chunks) <= max(numbers) and max(numbers) - 1 not in numbers:
        raise ValueError(
            f"{where} must have a line for each of {max(numbers) + 1} committed chunks: it ends after "
            f"{len(chunks)} (state {chunks[-1].last}). The file is damaged; restore it from a copy."
        )
    _check_sizes(folder, chunks)
    return Journal(tuple(chunks), used, finished is not None)


def finished_content(chunks: int, journal: bytes) -> bytes:
    """Write the closing record of a run that came to its end."""
    record = {"chunks": chunks, "journal_bytes": len(journal), "journal_blake2b": checksum(journal)}
    return checksummed_json(record)


def _parse(content: bytes, where: str) -> tuple[list[Chunk], int]:
    if (count := content.count(b"\n")) > MAX_CHUNKS:
        raise ValueError(f"{where} must have at most {MAX_CHUNKS} lines: it has {count}.")
    chunks: list[Chunk] = []
    used = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:used].split(b"\n")[:-1]):
        said = f"line {number + 1} of {where}"
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"it has {len(line)} bytes")
            chunk = _chunk_from(parse_json(line, said))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{said} must describe a chunk: it is damaged. Restore it from a copy.") from error
        if chunk.line != chain_hash(chunks[-1].line if chunks else "", chunk) or to_json_line(chunk) != line + b"\n":
            raise ValueError(f"{said} must have its checksum: it is damaged, or a line before it is lost.")
        expected = chunks[-1].last + 1 if chunks else 0
        if chunk.first != expected or chunk.file != chunk_name(number) or chunk.states < 1:
            raise ValueError(f"{said} must continue at state {expected}: it does not.")
        chunks.append(chunk)
    return chunks, used


def _chunk_from(value: object) -> Chunk:
    if not isinstance(value, dict):
        raise TypeError("a line must be a JSON object")
    chunk = Chunk(**value)
    for field in fields(Chunk):
        if type(getattr(chunk, field.name)) is not field.type:
            raise TypeError(f"{field.name} must be {field.type}")
    return chunk


def _resume_numbers(folder: Path) -> set[int]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith("resume-")]
    stems = [name.removeprefix("resume-").removesuffix(".safetensors") for name in names]
    return {int(stem) for stem, name in zip(stems, names, strict=True) if stem.isascii() and stem.isdecimal()}


def _read_finished(folder: Path) -> dict[str, object] | None:
    file = folder / FINISHED
    if regular_file_size(file, str(file)) is None:
        return None
    try:
        content = read_bytes(file, _FINISHED_BYTES, str(file))
    except FileNotFoundError:  # the run was taken up again just now
        return None
    record: dict[str, object] | None = read_checksummed_json(content, f"{file} must be JSON")
    if record is None:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    return record


def _check_finished(folder: Path, finished: dict[str, object], content: bytes) -> None:
    size = finished.get("journal_bytes")
    if size == len(content) and finished.get("journal_blake2b") == checksum(content):
        return
    if _read_finished(folder) is None:  # taken up again while it was read
        return
    raise ValueError(
        f"{folder / JOURNAL} must be as it was when the run was finished, with {size} bytes and "
        f"{finished.get('chunks')} chunks: it has {len(content)} bytes or others. Restore it from a copy."
    )


def _check_sizes(folder: Path, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        where = f"{folder / chunk.file} ({chunk.content})"
        size = regular_file_size(folder / chunk.file, where)
        if size != chunk.bytes:
            got = "it is missing" if size is None else f"it has {size}"
            raise ValueError(
                f"{where} must have {chunk.bytes} bytes: {got}. The file is damaged; restore it from a copy."
            )
