"""A run's weight states in the order of its steps, each read once, and from disk ahead of its use."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.trajectory import Trajectory, flat_weights
from epk_gp.storage.stored import StoredStates

_AHEAD = 2


class WeightPrefetcher:
    """Flat weights of a run, for a pass from its first step to its last.

    States in memory are given as they are. Others, on disk (packed ones are differences: to read one again is to unpack
    all before it) or bound for another device, are fetched by a thread of their own, `_AHEAD` before they are asked
    for, and kept a while.
    """

    def __init__(self, trajectory: Trajectory, like: Shaped[Tensor, "..."]) -> None:
        """Read nothing yet.

        Args:
            trajectory: The run.
            like: Gives dtype and device.
        """
        self.trajectory, self.like = trajectory, like
        far = isinstance(trajectory.states, StoredStates) or like.device != trajectory.device
        self._reader = ThreadPoolExecutor(1) if far else None
        self._stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        self._found: dict[int, Future[Tensor]] = {}

    def get(self, state: int, keep: int) -> Float[Tensor, " P"]:
        """Give a state.

        Args:
            state: s in 0 .. S.
            keep: How many states before it may be asked for again.
        """
        if self._reader is None:
            return flat_weights(self.trajectory, state, self.like)
        if state not in self._found and self._found and state < min(self._found):
            self._found.clear()  # another pass
        for number in range(state, min(state + _AHEAD, self.trajectory.num_steps) + 1):
            if number not in self._found:
                self._found[number] = self._reader.submit(self._fetch, number)
        for number in [number for number in self._found if number < state - keep]:
            del self._found[number]
        return self._found[state].result()

    def _fetch(self, state: int) -> Tensor:
        """Read a state; copy it to a GPU behind the work that is queued there, without waiting for that."""
        if self._stream is None or self.trajectory.device.type != "cpu":
            return flat_weights(self.trajectory, state, self.like)
        row = self.trajectory.states[state].to(self.trajectory.model.spec_for(self.like).dtype)
        with torch.cuda.stream(self._stream):
            return row.pin_memory().to(self.like.device, non_blocking=True)
