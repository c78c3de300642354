"""Which steps of a run have their gradient recomputed while they are recorded."""

import hashlib
import time
from dataclasses import dataclass, field

import torch

# Share of the loop's own time that recomputing gradients may take, and the length of a step up to which a step is
# counted as that long: a check of a few milliseconds is worth its time in any loop.
_SHARE, _SHORTEST_STEP = 0.15, 0.02
_FIRST_STEPS = 3  # always checked; the cheapest of them tells what a check costs once everything is loaded
_MEMORY = 0.1  # weight of the last step in the mean length of a step


@dataclass(eq=False)
class CheckSchedule:
    """Chooses the steps that are checked: one in a fixed number, or as many as fit into a share of the loop's time.

    The last step of a recording is checked too, when it ends (`Recorder`).

    Attributes:
        every: One step of each block of so many consecutive ones is checked. None: the first three steps, and then as
            many as take 15 % of the loop's time, where a step counts as 20 ms at least.
        device: The device of the training. Time is the processor's on the CPU, so that other processes do not count.
        num_checked: Steps checked so far.
    """

    every: int | None
    device: torch.device
    num_checked: int = 0
    _first: int | None = None  # the first step of this recording
    _next: int = 0
    _costs: list[float] = field(default_factory=list)
    _mean_step: float = 0.0
    _left: float | None = None  # when the recorder was left last

    def begin(self) -> float:
        """Return the present time; a step was made since the recorder was left."""
        now = self.now()
        if self._left is not None:
            length = now - self._left
            self._mean_step += (_MEMORY if self._mean_step else 1.0) * (length - self._mean_step)
        return now

    def end(self) -> None:
        """Give the processor back to the loop."""
        self._left = self.now()

    def now(self) -> float:
        """Return the time in seconds that checks are measured by."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

    def is_due(self, index: int) -> bool:
        """Return whether the gradient of a step is recomputed."""
        if self._first is None:
            self._first = index
        if index == self._first:
            return True
        if self.every is not None:
            return is_recomputed(index, self.every)
        return index < self._first + _FIRST_STEPS or index >= self._next

    def add(self, index: int, seconds: float) -> None:
        """Count a check, and choose the next one.

        A hash chooses within a range whose mean is the number of steps that pay for a check, so that no loop can have a
        period that avoids all checks.
        """
        self.num_checked += 1
        if len(self._costs) < _FIRST_STEPS:
            self._costs.append(seconds)
        allowed = _SHARE * max(self._mean_step, _SHORTEST_STEP)
        steps = max(1, round(min(self._costs) / allowed + 0.5))
        self._next = index + 1 + _hash_of(index) % (2 * steps - 1)


def is_recomputed(index: int, every: int) -> bool:
    """Return whether the gradient of a step is recomputed: of one step in each block of `every` consecutive ones.

    In the first block it is the first step; in the others a hash of the block's number chooses, so that no loop can
    have a period that avoids all of them.
    """
    block, place = divmod(index, every)
    return place == (_hash_of(block) % every if block else 0)


def _hash_of(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest())
