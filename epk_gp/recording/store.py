"""A run on disk: safetensors chunks of weights, and a journal that says which of them are committed.

A folder holds `run.json` (format, network layout, loss, step law), `data.safetensors` (inputs, targets, constants,
probe outputs), `chunk-NNNNNN.safetensors` (consecutive weight states and the steps that led to them) and
`journal.jsonl`. A chunk counts once its line stands in the journal; lines are appended and synchronised after the
chunk's own file is.
Nothing is pickled, and opening a run executes nothing.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from epk_gp.recording.optimizers import FIELDS, Update, per_weight

FORMAT = "epk_gp run"
FORMAT_VERSION = 1
_HEADER, _DATA, _JOURNAL = "run.json", "data.safetensors", "journal.jsonl"


@dataclass(frozen=True, eq=False)
class Step:
    """How state s became state s + 1.

    Attributes:
        index: s, from 0.
        size: The learning rate eps_s (of the first parameter group).
        batch: Indices into the training data, or None for all of them in order.
        sample_weights: The weights c of the batch's samples in the loss, where they are not those that the loss gives
            to one batch (gradient accumulation).
    """

    index: int
    size: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None


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
    """

    file: str
    first: int
    states: int
    bytes: int
    blake2b: str
    digest: str


@dataclass
class RunWriter:
    """An open run folder; `append_chunk` commits."""

    path: Path
    sizes: tuple[int, ...]
    committed: int = 0
    chunks: list[Chunk] = field(default_factory=list)

    def append_chunk(
        self, states: Sequence[Tensor], steps: Sequence[Step], updates: Sequence[Update], digest: str
    ) -> None:
        """Write consecutive states and the steps that led to them, and commit them in the journal."""
        name = f"chunk-{len(self.chunks):06d}.safetensors"
        content = save(_chunk_tensors(states, steps, updates, self.sizes))
        _write_durably(self.path / name, content)
        chunk = Chunk(name, self.committed, len(states), len(content), _hash(content, digest), digest)
        with (self.path / _JOURNAL).open("ab") as journal:
            journal.write((json.dumps(chunk.__dict__) + "\n").encode())
            journal.flush()
            os.fsync(journal.fileno())
        self.chunks.append(chunk)
        self.committed += len(states)


def create_run(path: str | os.PathLike[str], header: Mapping[str, Any], data: Mapping[str, Tensor]) -> RunWriter:
    """Start a run in a new or empty folder.

    Raises:
        FileExistsError: The folder already holds a run or anything else.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"path must be a new or empty folder: {folder} already holds something. Choose another path."
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = save({name: value.detach().cpu().contiguous() for name, value in data.items()})
    _write_durably(folder / _DATA, content)
    full = {"format": FORMAT, "version": FORMAT_VERSION, "data_blake2b": _hash(content), **header}
    _write_durably(folder / _JOURNAL, b"")
    _write_durably(folder / _HEADER, json.dumps({**full, "blake2b": _hash_json(full)}, indent=1).encode())
    return RunWriter(folder, tuple(math.prod(shape) for shape in header["shapes"]))


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what a run says of itself.

    Raises:
        FileNotFoundError: No run there.
        ValueError: Not a run of this format and version.
    """
    folder = Path(path)
    if not (folder / _HEADER).is_file():
        raise FileNotFoundError(f"path must hold a recorded run: {folder / _HEADER} does not exist.")
    try:
        header = json.loads((folder / _HEADER).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / _HEADER} must be the JSON header of a run: {error}.") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{folder / _HEADER} must be the header of an epk_gp run: its 'format' is not {FORMAT!r}.")
    if header.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"run format version must be {FORMAT_VERSION}: {folder} has {header.get('version')!r}. Update epk_gp."
        )
    if header.pop("blake2b", None) != _hash_json(header):
        raise ValueError(
            f"{folder / _HEADER} must have the checksum it was written with: it is damaged. Restore it from a copy."
        )
    return header


def read_data(path: str | os.PathLike[str], header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read inputs, targets, constants and probe outputs, checked against the header's checksum."""
    return _load_checked(Path(path) / _DATA, header["data_blake2b"], None)


def read_journal(path: str | os.PathLike[str]) -> list[Chunk]:
    """List the committed chunks; a last line that a crash cut short is not committed.

    Raises:
        ValueError: A damaged journal, or a chunk file that is missing or has another size than committed.
    """
    folder = Path(path)
    if not (folder / _JOURNAL).is_file():
        raise FileNotFoundError(f"a run must have its journal: {folder / _JOURNAL} does not exist.")
    lines = (folder / _JOURNAL).read_bytes().split(b"\n")
    chunks: list[Chunk] = []
    for number, line in enumerate(lines[:-1]):  # what follows the last newline was never committed
        try:
            chunk = _chunk_from(line)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number + 1} of {folder / _JOURNAL} must describe a chunk: it is damaged."
            ) from error
        expected = chunks[-1].first + chunks[-1].states if chunks else 0
        if chunk.first != expected or chunk.file != f"chunk-{number:06d}.safetensors" or chunk.states < 1:
            raise ValueError(
                f"line {number + 1} of {folder / _JOURNAL} must continue at state {expected}: it does not."
            )
        file = folder / chunk.file
        size = file.stat().st_size if file.is_file() else None
        if size != chunk.bytes:
            got = "it is missing" if size is None else f"it has {size}"
            raise ValueError(
                f"{file} (states {chunk.first}..{chunk.first + chunk.states - 1}) must have {chunk.bytes} bytes: "
                f"{got}. The file is damaged; restore it from a copy."
            )
        chunks.append(chunk)
    if not chunks:
        raise ValueError(f"a run must hold at least its initial weights: {folder} has no committed chunk.")
    return chunks


def read_steps(path: str | os.PathLike[str], chunk: Chunk) -> list[Step]:
    """Read a chunk's steps, after checking the whole chunk against its checksum."""
    tensors = _load_checked(Path(path) / chunk.file, chunk.blake2b, chunk)
    lengths = tensors["lengths"].tolist()
    counts = [max(length, 0) for length in lengths]
    weighted = tensors["weighted"].tolist()
    batches = tensors["batches"].split(counts)
    weights = iter(tensors["sample_weights"].split([n for n, given in zip(counts, weighted, strict=True) if given]))
    first = max(chunk.first - 1, 0)
    return [
        Step(
            first + k,
            float(tensors["sizes"][k]),
            batches[k].clone() if lengths[k] >= 0 else None,
            next(weights).clone() if weighted[k] else None,
        )
        for k in range(len(lengths))
    ]


def read_state(path: str | os.PathLike[str], chunk: Chunk, state: int) -> Float[Tensor, " P"]:
    """Read one weight state, mapped from the file.

    Raises:
        FileNotFoundError: The file is gone.
    """
    with safe_open(_existing(path, chunk), framework="pt") as file:
        row: Tensor = file.get_slice("states")[state - chunk.first]
    return row


def read_update(path: str | os.PathLike[str], chunk: Chunk, step: int) -> Update:
    """Read one step's numbers, mapped from the file.

    Raises:
        FileNotFoundError: The file is gone.
    """
    row = step - max(chunk.first - 1, 0)
    values = {}
    with safe_open(_existing(path, chunk), framework="pt") as file:
        stored = set(file.keys())
        numbers = file.get_slice("update")[row]
        for number, name in enumerate(FIELDS):
            diagonal = f"update.{name}"
            values[name] = file.get_slice(diagonal)[row] if diagonal in stored else numbers[number]
    return Update(**values)


def _existing(path: str | os.PathLike[str], chunk: Chunk) -> Path:
    file = Path(path) / chunk.file
    if not file.is_file():
        raise FileNotFoundError(
            f"a run must keep all its files while it is used: {file} (states {chunk.first}.."
            f"{chunk.first + chunk.states - 1}) was removed or renamed. Restore it, or load the run from its new place."
        )
    return file


def _chunk_from(line: bytes) -> Chunk:
    chunk = Chunk(**json.loads(line))
    for name, kind in Chunk.__annotations__.items():
        if type(getattr(chunk, name)) is not kind:
            raise TypeError(f"{name} must be {kind}")
    return chunk


def _chunk_tensors(
    states: Sequence[Tensor], steps: Sequence[Step], updates: Sequence[Update], sizes: Sequence[int]
) -> dict[str, Tensor]:
    batches = [step.batch.cpu() for step in steps if step.batch is not None]
    weights = [step.sample_weights.cpu() for step in steps if step.sample_weights is not None]
    return {
        "states": torch.stack([state.cpu() for state in states]),
        "sizes": torch.tensor([step.size for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64),
        **_update_tensors(updates, sizes),
    }


def _update_tensors(updates: Sequence[Update], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Stack the steps' numbers: (S, 7, L), and (S, P) for a field that has one per weight (0 stands for it above)."""
    tensors, columns = {}, []
    for name in FIELDS if updates else ():
        values = [getattr(update, name).cpu() for update in updates]
        diagonals = [value for value in values if len(value) != len(sizes)]
        if diagonals:
            tensors[f"update.{name}"] = torch.stack([per_weight(value, sizes, diagonals[0]) for value in values])
            values = [torch.zeros(len(sizes), dtype=torch.float64) for _ in updates]
        columns.append(torch.stack(values).double())
    return {"update": torch.stack(columns, dim=1), **tensors} if updates else {}


def _load_checked(file: Path, checksum: str, chunk: Chunk | None) -> dict[str, Tensor]:
    where = str(file) if chunk is None else f"{file} (states {chunk.first}..{chunk.first + chunk.states - 1})"
    if not file.is_file():
        raise FileNotFoundError(f"a run must have all its files: {where} does not exist.")
    content = file.read_bytes()
    if _hash(content, "" if chunk is None else chunk.digest) != checksum:
        raise ValueError(
            f"{where} must have the checksum it was committed with: it is damaged. Restore it from a copy."
        )
    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError(f"{where} must be a safetensors file: {error}.") from error


def _hash(content: bytes, digest: str = "") -> str:
    hasher = hashlib.blake2b(content, digest_size=16)
    hasher.update(digest.encode())
    return hasher.hexdigest()


def _hash_json(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(value, sort_keys=True).encode())


def _write_durably(file: Path, content: bytes) -> None:
    partial = file.with_name(file.name + ".part")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
