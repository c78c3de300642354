"""What a computation costs before it starts: time with any number of workers, memory and disk."""

import heapq
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors.torch import save
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_positive
from epk_gp.core.step import fingerprint
from epk_gp.distributed.cost_sample import Clock, MeasurableWork, SampledCosts
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import Here, threads_of_workers

if sys.platform != "win32":
    import resource

# Pieces that are handed to workers one by one in a simulation; with more of them the last ones do not matter.
_SIMULATED = 1 << 15


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory.

    Attributes:
        limit: Of each process that computes: Python, PyTorch and the run as they are in this one, and the budget.
        measured: The largest memory of this process until the end of the sample, if the system tells it.
        owner: What the process that puts the result together holds beside that: the result, and what it reads.
    """

    limit: int
    measured: int | None
    owner: int


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes of files.

    Attributes:
        result: Of the result, without the header of its file.
        piece: Of the largest piece, without the header of its file.
        pieces_at_once: Pieces that exist at a time, at most.
        scratch: Of all files that exist until the result is there: pieces, partial sums, and what workers need.
    """

    result: int
    piece: int
    pieces_at_once: int
    scratch: int


@dataclass(frozen=True)
class CostEstimate:
    """What a computation costs.

    Attributes:
        description: What is computed, and how it is divided, in words.
        num_pieces: Pieces, which are what workers share: more workers than pieces are of no use.
        workers: Processes; None for this one alone.
        setup_seconds: What each process does before its first piece, without the start of Python.
        piece_seconds: What a worker does to write a piece besides computing it, and the owner to read it.
        costs: The pieces, and their time in one process.
        memory: Memory.
        disk: Disk.
    """

    description: str
    num_pieces: int
    workers: int | None
    setup_seconds: float
    piece_seconds: float
    costs: SampledCosts
    memory: MemoryEstimate
    disk: DiskEstimate

    @property
    def work_seconds(self) -> float:
        """Seconds of all pieces in one process."""
        return self.costs.seconds

    @property
    def work_interval(self) -> tuple[float, float]:
        """The interval that holds the work's seconds with a probability of 95 %."""
        return max(0.0, self.work_seconds - self.costs.error), self.work_seconds + self.costs.error

    @property
    def longest_piece(self) -> float:
        """Seconds of the longest piece: no number of workers is faster."""
        return max(self._piece_seconds(), default=0.0)

    @property
    def seconds(self) -> float:
        """Seconds with the workers, from the first piece to the last."""
        return self._with_workers(1.0)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the seconds."""
        if not self.work_seconds:
            return self.seconds, self.seconds
        low, high = (self._with_workers(bound / self.work_seconds) for bound in self.work_interval)
        return low, high

    def _with_workers(self, factor: float) -> float:
        """Return the seconds with the workers if every piece takes so many times what it is estimated to take."""
        if self.workers is None:
            return self.setup_seconds + factor * self.work_seconds
        by_owner = self.num_pieces * self.piece_seconds
        return self.setup_seconds + max(self._makespan(self.workers, factor), by_owner)

    def _makespan(self, workers: int, factor: float) -> float:
        """Return the seconds until workers have done all pieces, each of which goes to the first that is free."""
        workers = min(workers, self.num_pieces)
        total = factor * self.work_seconds + self.num_pieces * self.piece_seconds
        if workers <= 1 or self.num_pieces > _SIMULATED:
            longest = factor * self.longest_piece + self.piece_seconds
            return max(total / max(1, workers), longest)
        pieces = [factor * seconds + self.piece_seconds for seconds in self._piece_seconds()]
        # pieces that were measured are not all like the mean of their kind
        factor = total / sum(pieces) if sum(pieces) > 0 else 1.0
        free_at = [0.0] * workers
        for seconds in pieces:
            heapq.heapreplace(free_at, free_at[0] + factor * seconds)
        return max(free_at)

    def _piece_seconds(self) -> Iterator[float]:
        return (cost.of_piece(count) for cost in self.costs.kinds for _, count in cost.kind.pieces)


@runtime_checkable
class EstimatedWork(MeasurableWork, Protocol):
    """A computation whose pieces can be measured, and whose bytes are known."""

    @property
    def description(self) -> str:
        """How it is divided, in words."""

    @property
    def places(self) -> Sequence[Place]:
        """The pieces."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""

    def owner_bytes(self, workers: int | None) -> int:
        """Count the memory of the process that puts the result together, besides what computing takes."""

    def disk(self, workers: int | None) -> DiskEstimate:
        """Count the bytes of files."""


def validate_measuring(workers: int | None, seconds: float) -> None:
    """Raise if a computation cannot be measured for so many workers, in this time.

    Raises:
        TypeError: The number of workers is not a whole number.
        ValueError: The number of workers or the time is not positive.
    """
    if workers is not None:
        validate_count(workers, "workers")
    validate_positive(seconds, "seconds")


def estimate_costs(
    measure: Callable[[], tuple[EstimatedWork, float, SampledCosts]],
    workers: int | None,
    memory_budget: int,
    clock: Clock,
) -> CostEstimate:
    """Measure a computation, as its workers compute it.

    Args:
        measure: Gives the computation, what each process does before its first piece in seconds, and the sample.
        workers: Number of processes of one thread each; None for this one, with its threads.
        memory_budget: Bytes for the computation.
        clock: Gives the time in seconds.
    """
    before = peak_memory()
    with nullcontext() if workers is None else threads_of_workers(Here()):
        work, setup, costs = measure()
        piece_seconds = 0.0 if workers is None else seconds_to_hand_over(work.piece_bytes, clock)
    return CostEstimate(
        description=work.description,
        num_pieces=len(work.places),
        workers=workers,
        setup_seconds=setup,
        piece_seconds=piece_seconds,
        costs=costs,
        memory=MemoryEstimate((before or 0) + memory_budget, peak_memory(), work.owner_bytes(workers)),
        disk=work.disk(workers),
    )


def synchronise(reference: Tensor) -> None:
    """Wait for the GPU of a tensor, which computes behind the calls."""
    if reference.is_cuda:
        torch.cuda.synchronize(reference.device)


def seconds_to_hand_over(num_bytes: int, clock: Clock) -> float:
    """Measure what a worker does to write a piece, but for the disk; its owner does about as much to read it.

    Args:
        num_bytes: Of the piece.
        clock: Gives the time in seconds.
    """
    content = {"total": torch.zeros(max(1, num_bytes), dtype=torch.uint8)}
    start = clock()
    fingerprint("1", *content.values())
    save(content)
    return clock() - start


def free_bytes(checkpoint: str | os.PathLike[str] | None) -> int:
    """Count the bytes that are free where pieces will lie: on the disk of a checkpoint, or of temporary files."""
    folder = Path(tempfile.gettempdir() if checkpoint is None else checkpoint).absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def peak_memory() -> int | None:
    """Return the largest number of bytes of memory that this process has had; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
