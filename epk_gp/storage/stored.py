"""Weight states and update coefficients of a run on disk, read when they are asked for."""

from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.update_rules import FIELDS, UpdateCoefficients
from epk_gp.storage.chunks import ChunkSchema, RowReader, read_state, read_update
from epk_gp.storage.index import Chunk


@dataclass(frozen=True)
class StoredStates:
    """Weight states mapped from a run's chunks, or unpacked one after the other."""

    path: Path
    layout: ChunkSchema
    chunks: tuple[Chunk, ...]
    reader: RowReader = field(default_factory=RowReader, compare=False, repr=False)

    def __len__(self) -> int:
        """Count the states, S + 1."""
        return self.chunks[-1].last + 1

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read one state."""
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        chunk = self.chunks[bisect_left(self.chunks, state, key=lambda chunk: chunk.last)]
        return read_state(self.path, self.layout, chunk, state, self.reader)


@dataclass(frozen=True)
class StoredUpdates:
    """Steps' numbers mapped from a run's chunks, or unpacked one after the other."""

    path: Path
    layout: ChunkSchema
    chunks: tuple[Chunk, ...]
    readers: dict[str, RowReader] = field(
        default_factory=lambda: {name: RowReader() for name in FIELDS}, compare=False, repr=False
    )

    def __len__(self) -> int:
        """Count the steps, S."""
        return self.chunks[-1].last

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read one step's."""
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        chunk = self.chunks[bisect_left(self.chunks, step + 1, key=lambda chunk: chunk.last)]
        return read_update(self.path, self.layout, chunk, step, self.readers)
