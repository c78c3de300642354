"""Copies of recorded runs that keep fewer weight states."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.checks import validate_count
from epk_gp.core.show import ProgressBar, progress_bar
from epk_gp.core.step import fingerprint_tensors
from epk_gp.core.update_law import CompactUpdate
from epk_gp.storage.atomic_files import checksum
from epk_gp.storage.chunk_verification import read_steps
from epk_gp.storage.chunks import STORED_FIELDS
from epk_gp.storage.index import Chunk, read_journal
from epk_gp.storage.kept import StoredKeptStates, read_chunks, stored_run
from epk_gp.storage.schema import STORED_DTYPES, ChunkSchema, chunk_schema, read_data, read_header
from epk_gp.storage.stored import StoredStates, StoredUpdates
from epk_gp.storage.training_state import WEIGHTS, read_training_state
from epk_gp.storage.writer import RunWriter, Storage, create_run_dir, thinning_header, write_header

# Entries of a header that the copy gets anew.
_OF_FILES = ("format", "version", "data_blake2b", "data_bytes", "blake2b", "compression", "keep_every", "weights_dtype")


@dataclass(frozen=True)
class ThinnedRun:
    """A copy of a run that keeps fewer states.

    Attributes:
        bytes: Size of its files.
        source_bytes: Size of the files of the run that it was made from.
        per_weight: Names on disk of the coefficients that stay one number per weight and step, because no gradient says
            them.
    """

    bytes: int
    source_bytes: int
    per_weight: tuple[str, ...]


def thin_run(
    run: str | os.PathLike[str], folder: str | os.PathLike[str], storage: Storage, *, progress: bool = False
) -> ThinnedRun:
    """Write a copy of a run, after checking it, that keeps every k-th weight state, the first and the last.

    The copy is opened, read and resumed as if it had been recorded so. Whether the steps between the kept states lead
    from one to the next is seen when they are computed: `epk_gp.reconstruct` of the copy says so.

    Args:
        run: The run's folder.
        folder: A new or empty folder.
        storage: `keep_every` and `weights_dtype` of the copy, and how much comes together in a chunk.
        progress: Show a progress bar.

    Raises:
        FileExistsError: The folder already holds something.
        FileNotFoundError, ValueError: The run is missing or damaged; or the states that are to be kept are not those
            that it holds.
        OSError: The folder cannot be written; nothing of the copy is left.
    """
    source = _open(run)
    target = _target_header(source, storage)
    existed = Path(folder).exists()
    writer, header = create_run_dir(folder, target, read_data(run, source.header))
    try:
        with progress_bar(source.num_steps + 1, "export", unit="state", shown=progress) as bar:
            per_weight = _copy(source, writer, storage, bar)
        write_header(writer, header)
        if source.finished:
            writer.mark_complete()
    except BaseException:
        writer.close()
        for file in list(Path(folder).iterdir()):
            file.unlink()
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    writer.close()
    sizes = [sum(file.stat().st_size for file in Path(each).iterdir()) for each in (folder, run)]
    return ThinnedRun(sizes[0], sizes[1], per_weight)


@dataclass(frozen=True, eq=False)
class _Source:
    """A run that is copied."""

    path: Path
    header: dict[str, Any]
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]
    states: StoredStates | StoredKeptStates
    updates: StoredUpdates
    finished: bool

    @property
    def num_steps(self) -> int:
        return self.chunks[-1].last

    def update(self, step: int) -> CompactUpdate | Any:
        update = self.updates[step]
        return CompactUpdate(update, self.updates.places(step)) if self.schema.thins else update


def _open(path: str | os.PathLike[str]) -> _Source:
    header = read_header(path)
    schema = chunk_schema(header)
    chunks, last = read_chunks(path, schema)
    states, updates = stored_run(path, schema, chunks, last)
    return _Source(Path(path), header, schema, chunks, states, updates, read_journal(path).finished)


def _target_header(source: _Source, storage: Storage) -> dict[str, Any]:
    validate_count(storage.keep_every, "keep_every")
    own, asked = source.schema, storage.weights_dtype
    if not storage.thins:
        raise ValueError("keep_every must be above 1, or weights_dtype be given, to thin a run: got neither.")
    if storage.keep_every % own.keep_every:
        raise ValueError(
            f"keep_every must be a multiple of {own.keep_every}, for the run at {source.path} keeps one state in as "
            f"many: got {storage.keep_every}."
        )
    if own.weights_dtype is not None and asked not in (None, own.weights_dtype):
        raise ValueError(f"weights_dtype must be {own.weights_dtype}, that of the run's kept states: got {asked}.")
    stored = asked or own.weights_dtype
    if stored is not None and stored not in STORED_DTYPES.values():
        raise ValueError(f"weights_dtype must be one of {', '.join(STORED_DTYPES)}: got {stored}.")
    header = {key: value for key, value in source.header.items() if key not in _OF_FILES}
    own_header = thinning_header(replace(storage, weights_dtype=stored), source.path)
    return header | own_header | {"compression": "none"}


def _copy(source: _Source, writer: RunWriter, storage: Storage, bar: ProgressBar) -> tuple[str, ...]:
    """Copy all steps and the states that are to be kept; return which coefficients stay per weight."""
    statistics = (
        StoredStates(source.path, source.schema, source.chunks, "statistics") if source.schema.num_statistics else None
    )
    per_weight: set[str] = set()
    training = read_training_state(source.path, len(source.chunks) - 1, source.chunks[-1])
    for chunks in _groups(source, writer.schema, storage.chunk_bytes):
        first, last = chunks[0].first, chunks[-1].last
        steps = [step for chunk in chunks for step in read_steps(source.path, source.schema, chunk)]
        updates = [source.update(step.index) for step in steps]
        states = [source.states[s] for s in writer.schema.kept_between(first, last)]
        moved = [] if statistics is None else [statistics[s] for s in range(first, last + 1)]
        is_last = chunks[-1] is source.chunks[-1]
        # only the last training state is held; of the others a copy that is interrupted has no use
        state = training | {WEIGHTS: source.states[last]} if is_last else {}
        digest = _digest(source, chunks[-1].digest, writer.schema)
        writer.append(states, steps, updates, digest, state, moved)
        with torch.no_grad():
            per_weight |= _held_per_weight(writer, len(steps))
        bar.update(len(steps) or 1)
    return tuple(sorted(per_weight))


def _digest(source: _Source, digest: str, schema: ChunkSchema) -> str:
    """Return the digest of the copy: of the same training, with what is kept of it."""
    kept = torch.tensor([schema.keep_every, schema.stored_dtype.itemsize])
    return checksum(digest.encode(), fingerprint_tensors(kept))


def _groups(source: _Source, schema: ChunkSchema, chunk_bytes: int) -> Iterator[list[Chunk]]:
    """Yield the chunks of a run that become one: the first, which holds state 0 alone, and as many as fill one."""
    yield [source.chunks[0]]
    waiting, num_bytes = list[Chunk](), 0
    for chunk in source.chunks[1:]:
        waiting.append(chunk)
        kept = len(schema.kept_between(chunk.first, chunk.last)) * schema.num_weights * schema.stored_dtype.itemsize
        num_bytes += kept if any(schema.scaled) else chunk.bytes  # coefficients per weight may stay
        if num_bytes >= chunk_bytes:
            yield waiting
            waiting, num_bytes = [], 0
    if waiting:
        yield waiting


def _held_per_weight(writer: RunWriter, num_steps: int) -> set[str]:
    updates = StoredUpdates(writer.path, writer.schema, tuple(writer.chunks))
    if not num_steps:
        return set()
    update: Iterator[Tensor] = iter(updates[len(updates) - 1])
    return {name for name, value in zip(STORED_FIELDS, update, strict=True) if len(value) != len(writer.schema.sizes)}
