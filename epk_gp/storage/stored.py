"""Weight states, moving statistics and update coefficients of a run on disk, each read when it is indexed."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients
from epk_gp.storage.chunks import RowReader, read_places, read_state, read_update
from epk_gp.storage.index import Chunk, opened_chunk
from epk_gp.storage.pass_verification import read_tables
from epk_gp.storage.passes import ContentOnDisk, packed_steps
from epk_gp.storage.schema import ChunkSchema


@dataclass(frozen=True)
class StoredStates:
    """The weights or the moving statistics of a run's states, mapped from its chunks or unpacked.

    Several threads may read at once.

    Attributes:
        path: Folder of the run.
        schema: What its chunks hold.
        chunks: The committed chunks.
        name: The tensor that is read: "states" for the weights, "statistics" for the moving statistics.
        reader: Keeps what was unpacked last.
    """

    path: Path
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]
    name: str = "states"
    reader: RowReader = field(default_factory=RowReader, compare=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, which is found from any working directory."""
        return {**self.__dict__, "path": self.path.absolute()}

    def __len__(self) -> int:
        """Return the number of states, S + 1."""
        return self.chunks[-1].last + 1

    def __getitem__(self, state: int) -> Float[Tensor, " _"]:
        """Read one state: P weights, or Q moving statistics.

        Raises:
            IndexError: The run has no such state.
        """
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        chunk = self.chunks[bisect_left(self.chunks, state, key=lambda chunk: chunk.last)]
        return read_state(self.path, self.schema, chunk, state, self.reader, name=self.name)


def stored_steps(path: Path, chunk: Chunk, steps: Sequence[Step]) -> Sequence[Step]:
    """Return steps that were committed with a chunk, with their passes read from there; the others as they are."""
    if not any(step.passes for step in steps):
        return steps
    with opened_chunk(path, chunk) as tensors:
        tables, _ = read_tables(tensors)
    return packed_steps(steps, tables, ContentOnDisk(path, chunk))


@dataclass(frozen=True)
class StoredUpdates:
    """The update coefficients of a run, mapped from its chunks or unpacked. Several threads may read at once."""

    path: Path
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]
    readers: dict[str, RowReader] = field(
        default_factory=lambda: {name: RowReader() for name in FIELDS}, compare=False, repr=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, which is found from any working directory."""
        return {**self.__dict__, "path": self.path.absolute()}

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return self.chunks[-1].last

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read the coefficients of one step.

        Raises:
            IndexError: The run has no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        return read_update(self.path, self.schema, self._chunk(step), step, self.readers)

    def places(self, step: int) -> Mapping[str, Int64[Tensor, " L"]]:
        """Read of which weight of each parameter a step holds the scaled coefficients (`CompactUpdate`)."""
        return read_places(self.path, self._chunk(step), step) if self.schema.thins else {}

    def _chunk(self, step: int) -> Chunk:
        return self.chunks[bisect_left(self.chunks, step + 1, key=lambda chunk: chunk.last)]
