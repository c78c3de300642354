"""Runs that keep every k-th weight state: what is read of them, and the states between."""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.recomputation import recomputation_of, recomputed_run
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.chunks import read_state
from epk_gp.storage.index import Chunk, read_journal, resume_name
from epk_gp.storage.schema import ChunkSchema
from epk_gp.storage.stored import StoredStates, StoredUpdates
from epk_gp.storage.training_state import WEIGHTS, read_training_state


@dataclass(frozen=True)
class StoredKeptStates:
    """The kept weight states of a run on disk: every k-th one from its chunks, and the last. Several threads may read.

    Attributes:
        path: Folder of the run.
        schema: What its chunks hold.
        chunks: The committed chunks.
        last: The last state, exactly.
    """

    path: Path
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]
    last: Float[Tensor, " P"]

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, which is found from any working directory."""
        return {**self.__dict__, "path": self.path.absolute()}

    def __len__(self) -> int:
        """Return the number of all states, S + 1."""
        return self.chunks[-1].last + 1

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Which states are kept."""
        S = len(self) - 1
        return tuple(sorted({*self.schema.kept_between(0, S), S}))

    @property
    def eps(self) -> float:
        """Relative rounding of the dtype in which states are kept; 0 where that is the dtype of the weights."""
        stored = self.schema.stored_dtype
        return 0.0 if stored == self.schema.dtype else float(torch.finfo(stored).eps)

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read a kept state, in the dtype of the weights.

        Raises:
            IndexError: The state is not kept.
        """
        if state == len(self) - 1:
            return self.last
        if not 0 <= state < len(self) or state not in self.schema.kept_between(state, state):
            raise IndexError(f"state must be a kept one, a multiple of {self.schema.keep_every}: got {state}.")
        chunk = self.chunks[bisect_left(self.chunks, state, key=lambda chunk: chunk.last)]
        return read_state(self.path, self.schema, chunk, state).to(self.schema.dtype)


def read_chunks(path: str | os.PathLike[str], schema: ChunkSchema) -> tuple[tuple[Chunk, ...], Tensor | None]:
    """Read the committed chunks of a run, and the last state where chunks do not hold it.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
    """
    while True:
        chunks = read_journal(path).chunks
        if not schema.thins:
            return chunks, None
        try:
            return chunks, _last_state(path, schema, chunks)
        except FileNotFoundError:
            if read_journal(path).chunks == chunks:  # else a writer has committed another chunk, and removed the file
                raise


def _last_state(path: str | os.PathLike[str], schema: ChunkSchema, chunks: Sequence[Chunk]) -> Float[Tensor, " P"]:
    number = len(chunks) - 1
    last = read_training_state(path, number, chunks[-1]).get(WEIGHTS)
    if last is None or last.shape != (schema.num_weights,) or last.dtype != schema.dtype or not is_finite(last):
        raise ValueError(
            f"{Path(path) / resume_name(number)} must hold the last state as {WEIGHTS!r}: {schema.num_weights} finite "
            f"numbers of {schema.dtype}. It does not."
        )
    return last


def stored_run(
    path: str | os.PathLike[str], schema: ChunkSchema, chunks: tuple[Chunk, ...], last: Tensor | None
) -> tuple[StoredStates | StoredKeptStates, StoredUpdates]:
    """Return the states and coefficients of a run on disk, as far as they are held."""
    folder, updates = Path(path), StoredUpdates(Path(path), schema, chunks)
    return (
        StoredStates(folder, schema, chunks) if last is None else StoredKeptStates(folder, schema, chunks, last)
    ), updates


def with_computed_states(trajectory: Trajectory) -> Trajectory:
    """Return a run whose states and coefficients are those of `stored_run`, with those that are not held computed."""
    kept, updates = trajectory.states, trajectory.updates
    if not isinstance(kept, StoredKeptStates) or not isinstance(updates, StoredUpdates):
        return trajectory
    return recomputed_run(trajectory, kept, updates)


def require_same_run(trajectory: Trajectory) -> None:
    """Raise if the folder of a run on disk does not hold what it held when the trajectory was loaded.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: It holds another run.
    """
    recomputation = recomputation_of(trajectory)
    states = trajectory.trained.states if recomputation is None else recomputation.kept
    if not isinstance(states, StoredStates | StoredKeptStates):
        return
    if read_journal(states.path).chunks[: len(states.chunks)] != states.chunks:
        raise ValueError(
            f"{states.path} must hold the run with digest {trajectory.digest[:12]}, here as where it was loaded: it "
            "holds another. Copy the run anew."
        )
