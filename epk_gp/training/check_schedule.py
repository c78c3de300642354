"""Which steps of a run have their gradient recomputed while they are recorded."""

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# Share of the loop's own time that recording may take, and the length of a step up to which a step is counted as that
# long. Shorter ones pay for more than that: some milliseconds of checks are worth their time in any loop.
_SHARE, _SHORTEST_STEP, _OF_SHORT_STEPS = 0.15, 0.02, 0.005
_SMALLEST_SHARE = 0.01  # for checks, where recording without checks takes all the time that it may
_FIRST_STEPS = 3  # always checked; the cheapest one tells what a check costs once everything is loaded
_MEMORY = 0.1  # weight of the last step in the mean length of a step


@dataclass(eq=False)
class CheckSchedule:
    """Chooses the steps that are checked: one in a fixed number, or as many as fit into a share of the loop's time.

    The last step of a recording is checked too, when it ends (`Recorder`).

    Attributes:
        every: One step of each block of so many consecutive ones is checked. None: the first three steps, and then as
            many as keep recording as a whole within 15 % of the time of steps of 20 ms or more.
        device: The device of the training. Time is the thread's own on the CPU, so that nothing else counts.
        num_checked: Steps checked so far.
    """

    every: int | None
    device: torch.device
    num_checked: int = 0
    _first: int | None = None  # the first step of this recording
    _next: int = 0
    _costs: list[float] = field(default_factory=list)
    _debt: float = 0.0  # seconds of checks that the steps since have not paid for; below 0 if they paid for more
    _checked: float = 0.0  # seconds of checks in the present step
    _last_cost: float = 0.0  # seconds of the last check
    _loop: float = 0.0  # seconds of the present step outside of the recorder
    _own: float = 0.0  # and inside
    _mean_loop: float = 0.0
    _mean_own: float = 0.0
    _num_closed: int = 0
    _depth: int = 0
    _since: float | None = None  # when the recorder was entered or left last

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside as the recorder's, and the time outside as the loop's."""
        if not self._depth and self._since is not None:
            self._loop += self.now() - self._since
        began, self._depth = self.now(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._since = self.now()
                self._own += self._since - began

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count the time inside as that of a check, which the steps that follow pay for."""
        began = self.now()
        yield
        self._last_cost = self.now() - began
        self._checked += self._last_cost

    def now(self) -> float:
        """Return the time in seconds that checks are measured by."""
        return time.thread_time() if self.device.type == "cpu" else time.perf_counter()

    def begin_step(self) -> None:
        """Close the account of the step before.

        That of the first step is left out: it pays for all that is loaded and made once.
        """
        loop, own, checked = self._loop, self._own - self._checked, self._checked
        self._loop = self._own = self._checked = 0.0
        self._num_closed += 1
        if self._num_closed <= 3:  # nothing, the first step, the second step
            self._mean_loop, self._mean_own = loop, own if self._num_closed == 3 else 0.0
            return
        self._mean_loop += _MEMORY * (loop - self._mean_loop)
        self._mean_own += _MEMORY * (own - self._mean_own)
        self._debt = max(-min(self._costs, default=0.0), self._debt + checked - self._gain())

    def _gain(self) -> float:
        """Return the seconds of checks that a step pays for."""
        length = max(self._mean_loop, _SHORTEST_STEP)
        extra = _OF_SHORT_STEPS * (1 - self._mean_loop / length if self._mean_loop < length else 0.0)
        return max(_SHARE * length - self._mean_own, _SMALLEST_SHARE * length) + extra

    def is_due(self, index: int) -> bool:
        """Return whether the gradient of a step is recomputed."""
        if self._first is None:
            self._first = index
        if index == self._first:
            return True
        if self.every is not None:
            return is_recomputed(index, self.every)
        return index < self._first + _FIRST_STEPS or index >= self._next

    def steps_that_pay(self) -> int:
        """Return the number of steps that pay for a check like the last one; 0 where checks have fixed places."""
        return 0 if self.every is not None else math.ceil(self._last_cost / self._gain())

    def add(self, index: int) -> None:
        """Count the check of a step, and choose the next one.

        A hash chooses within a range whose mean is the number of steps that pay for the checks so far, so that no loop
        can have a period that avoids all checks.
        """
        self.num_checked += 1
        if len(self._costs) < _FIRST_STEPS:
            self._costs.append(self._checked)
        steps = max(1, math.ceil((min(self._costs) + self._debt) / self._gain()))
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
