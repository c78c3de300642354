"""Sums over the training side of chords, which all tiles with the same columns share."""

from collections.abc import Hashable

from epk_gp.autodiff.representations import LeftFactor

Sums = dict[int, LeftFactor]  # by number of the layer


class KeptSums:
    """Keeps sums while they fit into some memory; those that do not are computed again by each tile.

    Attributes:
        max_bytes: Limit of what is kept; 0, nothing, until a block with several tiles sets one.
    """

    def __init__(self) -> None:
        self.max_bytes = 0
        self._num_bytes = 0
        self._sums: dict[Hashable, Sums] = {}

    def get(self, key: Hashable) -> Sums | None:
        """Return the sums that are kept under a key, if there are any."""
        return self._sums.get(key)

    def put(self, key: Hashable, sums: Sums) -> None:
        """Keep sums if they fit."""
        num_bytes = sum(factor.nbytes for factor in sums.values())
        if self._num_bytes + num_bytes <= self.max_bytes:
            self._num_bytes += num_bytes
            self._sums[key] = sums
