"""Weight states, moving statistics and coefficients of a run on disk, each read when it is indexed; kept states."""

import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.recomputation import recomputation_of, recomputed_run
from epk_gp.core.trajectory import Trajectory
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.storage.chunks import read_places, read_row, read_update
from epk_gp.storage.journal import Chunk, chunk_file, opened_chunk, read_journal
from epk_gp.storage.schema import ChunkSchema


@dataclass(frozen=True)
class _Stored:
    """Tensors of a run on disk, read from its chunks by several threads at once.

    Attributes:
        path: Folder of the run.
        schema: What its chunks hold.
        chunks: The committed chunks.
    """

    path: Path
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, which is found from any working directory."""
        return {**self.__dict__, "path": self.path.absolute()}

    def __len__(self) -> int:
        """Return the number of states, S + 1."""
        return self.chunks[-1].last + 1

    def _chunk(self, state: int) -> Chunk:
        return self.chunks[bisect_left(self.chunks, state, key=lambda chunk: chunk.last)]


@dataclass(frozen=True)
class StoredStates(_Stored):
    """The weights or the moving statistics of a run's states.

    Attributes:
        name: The tensor that is read: "states" for the weights, "statistics" for the moving statistics.
    """

    name: str = "states"

    def __getitem__(self, state: int) -> Float[Tensor, " _"]:
        """Read one state: P weights, or Q moving statistics.

        Raises:
            IndexError: The run has no such state.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened.
        """
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        chunk = self._chunk(state)
        with opened_chunk(self.path, chunk) as tensors:
            return read_row(tensors, self.name, state - chunk.first)


@dataclass(frozen=True)
class StoredKeptStates(_Stored):
    """The kept weight states of a run: every k-th one, and the last."""

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Which states are kept."""
        return tuple(self.schema.held_between(0, len(self) - 1))

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read a kept state.

        Raises:
            IndexError: The state is not kept.
        """
        if not 0 <= state < len(self) or (state % self.schema.keep_every and state < len(self) - 1):
            raise IndexError(f"state must be a kept one, a multiple of {self.schema.keep_every}: got {state}.")
        chunk = self._chunk(state)
        with opened_chunk(self.path, chunk) as tensors:
            return read_row(tensors, "states", self.schema.held_between(chunk.first, chunk.last).index(state))


@dataclass(frozen=True)
class StoredUpdates(_Stored):
    """The update coefficients of a run."""

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return self.chunks[-1].last

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read the coefficients of one step.

        Raises:
            IndexError: The run has no such step.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        chunk = self._chunk(step + 1)
        with opened_chunk(self.path, chunk) as tensors:
            return read_update(tensors, self.schema, step - chunk.first_step, chunk_file(self.path, chunk)[1])

    def places(self, step: int) -> Mapping[str, Int64[Tensor, " L"]]:
        """Read of which weight of each parameter a step holds the scaled coefficients (`CompactUpdate`)."""
        if not self.schema.thins:
            return {}
        chunk = self._chunk(step + 1)
        with opened_chunk(self.path, chunk) as tensors:
            return read_places(tensors, step - chunk.first_step)


def stored_run(
    path: str | os.PathLike[str], schema: ChunkSchema, chunks: tuple[Chunk, ...]
) -> tuple[StoredStates | StoredKeptStates, StoredUpdates]:
    """Return the states and coefficients of a run on disk, as far as they are held."""
    states = StoredKeptStates if schema.thins else StoredStates
    return states(Path(path), schema, chunks), StoredUpdates(Path(path), schema, chunks)


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
