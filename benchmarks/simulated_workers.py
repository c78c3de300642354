"""Simulated workers: a job's own code, with kernels and files replaced by what they were measured to cost."""

import heapq
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.storage.files import PartialSums

SLOW = 5.0  # how many times longer a straggler takes


@dataclass(frozen=True)
class Costs:
    """What one piece costs, in seconds.

    Attributes:
        kernels: Seconds of pieces on a worker, their files included, as measured one by one; by kind.
        door: Of the owner and its scheduler for any piece, however small.
        read: Of the owner for each byte of a piece: it is read, verified and added.
    """

    kernels: dict[Any, list[float]]
    door: float
    read: float


@dataclass(frozen=True)
class Work:
    """A piece as the simulation sees it.

    Attributes:
        kind: One of those that were measured.
        share: Its work, relative to the piece that was measured.
        num_bytes: Of its file.
    """

    kind: Any
    share: float
    num_bytes: int


@dataclass
class SimulatedWorkers:
    """An executor whose workers compute nothing, and need the time that was measured: the next free one takes a piece.

    The owner of the job is one more clock. It moves when a piece is submitted, is waited for, and is read.

    Attributes:
        costs: What was measured.
        work: What a place is.
        count: Number of workers.
        num_slow: How many of them are stragglers.
        now: The owner's clock.
        work_seconds: Of all pieces, on workers that are not slow.
        longest: Seconds of the longest of them.
        read_seconds: That the owner needed for pieces, apart from waiting.
        spent: Real seconds that the simulation itself needed.
        num_pieces: Submitted.
    """

    costs: Costs
    work: Callable[[tuple[int, ...]], Work]
    count: int
    num_slow: int = 0
    now: float = 0.0
    work_seconds: float = 0.0
    longest: float = 0.0
    read_seconds: float = 0.0
    spent: float = 0.0
    num_pieces: int = 0
    _ends: dict[str, tuple[float, int]] = field(default_factory=dict)
    _files: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with idle workers, slow ones anywhere among them."""
        self._draws = random.Random(0)
        self._slow = set(self._draws.sample(range(self.count), self.num_slow))
        self._free = [(0.0, number) for number in range(self.count)]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> "_Pending":
        """Give a piece to the worker that is free first."""
        begun = time.perf_counter()
        *_, name, place = args
        work = self.work(place)
        self._pass_time(self.costs.door)
        seconds = work.share * self._draws.choice(self.costs.kernels[work.kind])
        at, worker = heapq.heappop(self._free)
        end = max(at, self.now) + seconds * (SLOW if worker in self._slow else 1.0)
        heapq.heappush(self._free, (end, worker))
        self.work_seconds, self.longest = self.work_seconds + seconds, max(self.longest, seconds)
        self.num_pieces += 1
        self._ends[name] = end, work.num_bytes
        self._files.append((end, work.num_bytes))
        self.spent += time.perf_counter() - begun
        return _Pending(self, end)

    def sums(self, folder: Path, fingerprint: str, *, is_durable: bool) -> "SimulatedSums":
        """Stand in for `PartialSums`; whether files survive a power failure is not simulated."""
        return SimulatedSums(self, folder, fingerprint)

    def read(self, name: str) -> dict[str, Tensor]:
        """Return a tiny piece, after the time that the owner needs for a real one."""
        begun = time.perf_counter()
        _, num_bytes = self._ends[name]
        self._pass_time(num_bytes * self.costs.read)
        self.spent += time.perf_counter() - begun
        return {"total": torch.zeros(1, 1, 1)}

    def has(self, name: str) -> bool:
        """Return whether a piece was submitted."""
        return name in self._ends

    def remove(self, name: str) -> None:
        """Free the bytes of a piece."""
        begun = time.perf_counter()
        if name in self._ends:
            _, num_bytes = self._ends.pop(name)
            self._files.append((self.now, -num_bytes))
        self.spent += time.perf_counter() - begun

    def peak_bytes(self) -> int:
        """Return the bytes of all files that lay in the folder at once, at most."""
        held = peak = 0
        for _, change in sorted(self._files):
            held += change
            peak = max(peak, held)
        return peak

    @property
    def capacity(self) -> float:
        """Workers, of which a slow one counts for its share."""
        return self.count - self.num_slow + self.num_slow / SLOW

    @property
    def bounds(self) -> dict[str, float]:
        """What no order of pieces can beat: the workers' time, the owner's, and that of a single piece."""
        return {"workers": self.work_seconds / self.capacity, "owner": self.read_seconds, "one piece": self.longest}

    @property
    def critical_path(self) -> float:
        """Seconds of the job with as many workers as pieces."""
        return self.longest + self.read_seconds

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.read_seconds += seconds


@dataclass(frozen=True)
class _Pending:
    workers: SimulatedWorkers
    end: float

    def result(self) -> None:
        self.workers.now = max(self.workers.now, self.end)

    def cancel(self) -> bool:
        return True


class SimulatedSums(PartialSums):
    """The folder of a simulated job: files of which nothing is kept but the number of bytes."""

    should_save = False

    def __init__(self, workers: SimulatedWorkers, folder: str | os.PathLike[str], fingerprint: str) -> None:
        """Take a folder that exists, for the job itself.

        Args:
            workers: Who write the files.
            folder: The folder.
            fingerprint: As of `PartialSums`.
        """
        self.workers, self.folder, self.identity, self.is_durable = workers, Path(folder), fingerprint, False

    def has(self, name: str) -> bool:
        """Nothing is there when a job begins."""
        return False

    def count(self, name: str) -> int:
        """Nothing is there when a job begins."""
        return 0

    def load(self, name: str) -> tuple[dict[str, Tensor], int]:
        """Return a piece, or nothing of a tile that has not begun."""
        return (self.workers.read(name), 1) if self.workers.has(name) else ({}, 0)

    def remove(self, names: Iterable[str]) -> None:
        """Delete pieces."""
        for name in names:
            self.workers.remove(name)

    def remove_torn(self) -> None:
        """Nothing is torn."""
