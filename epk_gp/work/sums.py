"""What a computation in pieces is: its pieces, how one is computed, and sums that are joined, saved and resumed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from epk_gp.storage.partial_sums import PartialSums

Place = tuple[int, ...]

BEGUN = "-begun"  # ends the name of a piece's sums that are not whole yet
_LARGEST, _CARRIED = "max.", "carried."  # begin names of tensors in a file


@dataclass(frozen=True)
class Piece:
    """What is computed by itself.

    Attributes:
        name: Of its file.
        place: What is computed.
        steps: Steps that it goes through, which a progress bar counts.
        total: Name of the sum that it is a part of, with its neighbours of the same total; its own by default.
    """

    name: str
    place: Place
    steps: int = 1
    total: str = ""

    @property
    def is_total(self) -> bool:
        """Whether it is the whole sum."""
        return self.total in ("", self.name)


@dataclass(eq=False)
class Sums:
    """Named tensors, by how those of two pieces join.

    Attributes:
        added: By addition, in the memory of the first.
        largest: By the maximum; NaN stays.
        carried: What the rest of a piece needs of what is done, such as an adjoint; it is no part of the result.
        steps: Steps that are summed.
    """

    added: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def merge(self, other: "Sums") -> None:
        """Join the sums of a later piece."""
        for name, value in other.added.items():
            mine = self.added.get(name)
            self.added[name] = value if mine is None else mine.add_(value)
        for name, value in other.largest.items():
            mine = self.largest.get(name)
            self.largest[name] = value if mine is None else torch.maximum(mine, value)
        self.steps += other.steps

    def state(self, *, is_whole: bool = True) -> dict[str, Tensor]:
        """Return the tensors by their names in a file; with what is carried if the piece is not whole."""
        carried = {} if is_whole else self.carried
        return (
            dict(self.added)
            | {_LARGEST + name: value for name, value in self.largest.items()}
            | {_CARRIED + name: value for name, value in carried.items()}
        )

    @classmethod
    def load(cls, state: Mapping[str, Tensor], steps: int, device: torch.device) -> "Sums":
        """Take the tensors of a file."""
        sums = cls(steps=steps)
        for name, value in state.items():
            where = sums.added
            for prefix, others in ((_LARGEST, sums.largest), (_CARRIED, sums.carried)):
                if name.startswith(prefix):
                    name, where = name.removeprefix(prefix), others
            where[name] = value.to(device)
        return sums


@runtime_checkable
class Work(Protocol):
    """A computation in pieces. It is pickled once, and kept by each worker from one piece to the next."""

    @property
    def pieces(self) -> Iterable[Piece]:
        """The pieces in their order, those of one total beside each other; they follow from the problem alone."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""

    @property
    def device(self) -> torch.device:
        """Where sums are joined."""

    def identity(self) -> str:
        """Return the fingerprint of all that the sums depend on but the names of the pieces, which tell plans apart."""

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Compute a piece, and yield its sums whenever they could be saved; the last ones are those of the piece.

        Args:
            place: The piece; the result depends on nothing else.
            saved: Sums of an earlier call, which were not whole; empty ones to begin with.
        """

    def check(self) -> None:
        """Raise if a worker sees something else than the owner did: another copy of the run."""


def computed(work: Work, piece: Piece, stored: PartialSums | None) -> Iterator[Sums]:
    """Compute a piece from where a folder has it, and save it there now and then; the last sums are those of the piece.

    Args:
        work: The computation.
        piece: The piece.
        stored: The folder, if there is one.
    """
    begun = piece.name + BEGUN
    saved = Sums() if stored is None else Sums.load(*stored.load(begun), work.device)
    num_saved = saved.steps
    if saved.added:  # which may be all of the piece: an earlier call was killed before it said so
        yield saved
    for sums in work.compute(piece.place, saved):
        yield sums
        if stored is not None and sums.added and sums.steps > num_saved and stored.should_save:
            with suppress(OSError):  # a full disk ends the computation when the piece is whole, not here
                stored.save(begun, sums.state(is_whole=False), sums.steps)
                num_saved = sums.steps


def save_piece(stored: PartialSums, piece: Piece, sums: Sums) -> None:
    """Save the sums of a whole piece, and remove those that they grew from."""
    stored.save(piece.name, sums.state(), sums.steps)
    stored.remove([piece.name + BEGUN])
