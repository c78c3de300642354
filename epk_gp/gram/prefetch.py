"""A run's weight states in the order of its steps, each read once, and from disk ahead of its use."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.storage.stored import StoredStates

_PREFETCH = 2  # states read ahead: the two that the next step needs; a choice, other numbers were not timed


class WeightPrefetcher:
    """Flat weights of a run, and its moving statistics behind them, for a pass from its first step to its last.

    States in memory are returned as they are. Others are read by a thread of their own, two before they are asked for,
    and kept for a while: states on disk, and states that go to another device.

    Args:
        trajectory: The run.
        reference: Gives dtype and device.
    """

    def __init__(self, trajectory: Trajectory, reference: Float[Tensor, "..."]) -> None:
        self.trajectory, self.reference = trajectory, reference
        reads = isinstance(trajectory.states, StoredStates) or reference.device != trajectory.device
        self._reader = ThreadPoolExecutor(1) if reads else None
        self._stream = torch.cuda.current_stream(reference.device) if reference.is_cuda else None
        self._requested: dict[int, Future[Tensor]] = {}

    def get(self, state: int, keep: int) -> Float[Tensor, " PQ"]:
        """Return a state.

        Args:
            state: s in 0 .. S.
            keep: How many states before it may be asked for again.
        """
        if self._reader is None:
            return flat_state(self.trajectory, state, self.reference)
        if state not in self._requested and self._requested and state < min(self._requested):
            self._requested.clear()  # another pass
        for number in range(state, min(state + _PREFETCH, self.trajectory.num_steps) + 1):
            if number not in self._requested:
                self._requested[number] = self._reader.submit(self._fetch, number)
        for number in [number for number in self._requested if number < state - keep]:
            del self._requested[number]
        return self._requested[state].result()

    def _fetch(self, state: int) -> Tensor:
        """Read a state; copy it to a GPU behind the work that is queued there, without waiting for that."""
        if self._stream is None or self.trajectory.device.type != "cpu":
            return flat_state(self.trajectory, state, self.reference)
        row = flat_state(self.trajectory, state, self.reference.new_empty(0, device="cpu"))
        with torch.cuda.stream(self._stream):
            return row.pin_memory().to(self.reference.device, non_blocking=True)
