"""Batches of random permutations of the training points, whose place in a permutation can be stored."""

from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor


class EpochSampler:
    """Batches of one random permutation of the points after another; the last batch of each may be smaller.

    Its state is the state of the generator before the present permutation was drawn, and the number of batches used.
    """

    def __init__(self, num_points: int, batch_size: int, generator: torch.Generator | None) -> None:
        """Draw nothing yet; torch's global generator is used if none is given."""
        self.num_points, self.batch_size = num_points, batch_size
        self._generator = torch.default_generator if generator is None else generator
        self._state_before_epoch = self._generator.get_state()
        self._batches: tuple[Tensor, ...] = ()
        self._num_used = 0

    def next_batch(self) -> Int64[Tensor, " B"]:
        """Return the indices of the next batch."""
        if self._num_used == len(self._batches):
            self._state_before_epoch = self._generator.get_state()
            self._batches = torch.randperm(self.num_points, generator=self._generator).split(self.batch_size)
            self._num_used = 0
        self._num_used += 1
        return self._batches[self._num_used - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the keys that it has in a stored run."""
        epoch_ended = self._num_used == len(self._batches)
        return {
            "points": self.num_points,
            "batch_size": self.batch_size,
            "drawn_from": self._generator.get_state() if epoch_ended else self._state_before_epoch,
            "used": 0 if epoch_ended else self._num_used,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Draw the stored permutation again, and skip the batches that were used.

        Raises:
            ValueError: The stored batches have another size.
        """
        recorded = (state["points"], state["batch_size"])
        if recorded != (self.num_points, self.batch_size):
            raise ValueError(f"batch_size must be the recorded one, {recorded[1]}: got {self.batch_size}.")
        self._generator.set_state(state["drawn_from"])
        self._batches, self._num_used = (), 0
        for _ in range(state["used"]):
            self.next_batch()
