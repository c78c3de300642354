"""What a computation in pieces is: its pieces, how one is computed, and sums that are joined, saved and resumed."""

from collections.abc import Iterable, Iterator
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

    def save(self, stored: PartialSums, name: str, *, is_whole: bool = True) -> None:
        """Write the tensors into a folder; with what is carried if the piece is not whole."""
        tensors = dict(self.added) | {_LARGEST + key: value for key, value in self.largest.items()}
        carried = {} if is_whole else {_CARRIED + key: value for key, value in self.carried.items()}
        stored.save(name, tensors | carried, self.steps)

    @classmethod
    def load(cls, stored: PartialSums | None, name: str, device: torch.device) -> "Sums":
        """Read what a folder has under a name: nothing if it was never saved."""
        state, steps = ({}, 0) if stored is None else stored.load(name)
        sums = cls(steps=steps)
        for key, value in state.items():
            where = sums.added
            for prefix, others in ((_LARGEST, sums.largest), (_CARRIED, sums.carried)):
                if key.startswith(prefix):
                    key, where = key.removeprefix(prefix), others
            where[key] = value.to(device)
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


def save_begun(stored: PartialSums | None, piece: Piece, sums: Sums) -> None:
    """Save the sums of a piece that is not whole yet, now and then.

    They may be all of it: a call that was killed before it said so finds them, and has nothing left to compute.
    """
    if stored is not None and sums.added and stored.should_save:
        with suppress(OSError):  # a full disk ends the computation when the piece is whole, not here
            sums.save(stored, piece.name + BEGUN, is_whole=False)


def save_piece(stored: PartialSums, piece: Piece, sums: Sums) -> None:
    """Save the sums of a whole piece, and remove those that they grew from."""
    sums.save(stored, piece.name)
    stored.remove([piece.name + BEGUN])
