"""Carry out a computation: pieces here or on workers, partial sums in a folder, progress, for every pass."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import DifferentiationPlan
from epk_gp.core.show import ProgressBar, progress_bar
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.chunks import require_same_run
from epk_gp.storage.files import checksum
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work.sums import BEGUN, Piece, Sums, Work, computed, save_piece
from epk_gp.work.workers import only_owner, pieces_of_workers, scratch_folder, threads_of_workers


def run(
    work: Work, options: ComputeOptions, what: str, *, advice: str | None = None
) -> Generator[tuple[Piece, Sums], None, None]:
    """Compute all pieces, here or by workers, and give every total with its last piece, in their order.

    With a checkpoint, pieces and totals are saved, and those that an earlier call saved are not computed again, whether
    it had workers or not. Without a checkpoint and an executor no file is written. The bytes are the same in any case
    with the same number of threads; workers have one.

    Args:
        work: What is computed.
        options: Whose workers compute, where sums are kept, and whether progress is shown.
        what: What a progress bar says.
        advice: How the call is made faster, for one that finds out that it will be long.

    Raises:
        BlockingIOError: Another job computes into the checkpoint.
        RuntimeError: Workers died again and again, or the executor is of no more use.
        ValueError: The checkpoint belongs to another computation, or a file in it is damaged.
    """
    executor = options.executor
    with nullcontext() if executor is None else threads_of_workers(executor), _folder(work, options) as stored:
        missing = (piece for pieces in _totals(work) for piece in pieces[_num_joined(stored, pieces) :])
        with _bar(work, stored, options, what, advice) as bar:
            if executor is None or stored is None:
                results = _computed_here(work, missing, stored, bar)
            else:
                results = pieces_of_workers(work, missing, executor, stored)
            with closing(results):
                for pieces in _totals(work):
                    done, used = _num_joined(stored, pieces), list[str]()
                    total = Sums() if stored is None or not done else _load(work, stored, pieces[0].total)
                    for number, piece in enumerate(pieces[done:], done + 1):
                        total.merge(next(results))
                        used += [piece.name, piece.name + BEGUN]
                        if executor is not None:
                            bar.update()
                        if stored is None:
                            continue
                        if options.checkpoint is None:
                            stored.remove(used)
                        elif not piece.is_total and (number == len(pieces) or stored.should_save):
                            stored.save(piece.total, total.state(), number)
                            stored.remove(used)
                        else:
                            continue
                        used.clear()
                    yield pieces[-1], total


@contextmanager
def _folder(work: Work, options: ComputeOptions) -> Iterator[PartialSums | None]:
    """Give the folder of the sums, of which this is the only owner; None where nothing is written."""
    if options.executor is None and options.checkpoint is None:
        yield None
        return
    with scratch_folder(options.checkpoint) as folder:
        stored = PartialSums(folder, work.identity(), is_durable=options.checkpoint is not None)
        with only_owner(folder):
            stored.remove_torn()
            yield stored


def _totals(work: Work) -> Iterator[list[Piece]]:
    """List the pieces of one total after another."""
    return (list(pieces) for _, pieces in groupby(work.pieces, key=lambda piece: piece.total or piece.name))


def _num_joined(stored: PartialSums | None, pieces: list[Piece]) -> int:
    """Count the pieces whose joined sums a folder has."""
    return 0 if stored is None or pieces[0].is_total else stored.count(pieces[0].total)


def _load(work: Work, stored: PartialSums, name: str) -> Sums:
    return Sums.load(*stored.load(name), work.device)


def _bar(work: Work, stored: PartialSums | None, options: ComputeOptions, what: str, advice: str | None) -> ProgressBar:
    """Return a progress bar: of steps, or of the pieces of workers."""
    is_here, size, done = options.executor is None, 0, 0
    for pieces in _totals(work):
        counts = [piece.steps if is_here else 1 for piece in pieces]
        size, done = size + sum(counts), done + sum(counts[: _num_joined(stored, pieces)])
    unit = "step" if is_here else "piece"
    return progress_bar(size, what, unit=unit, initial=done, shown=options.progress, advice=advice if is_here else None)


def _computed_here(
    work: Work, pieces: Iterable[Piece], stored: PartialSums | None, bar: ProgressBar
) -> Generator[Sums, None, None]:
    """Compute pieces one after another, but for those that an earlier call, or its workers, have saved."""
    for piece in pieces:
        if stored is not None and stored.has(piece.name):
            sums = _load(work, stored, piece.name)
            bar.update(piece.steps)
        else:
            sums, done = Sums(), 0
            for later in computed(work, piece, stored):
                bar.update(later.steps - done)
                sums, done = later, later.steps
            if stored is not None and piece.is_total:
                save_piece(stored, piece, sums)
        yield sums


@dataclass(frozen=True, eq=False, kw_only=True)
class RunWork(ABC):
    """A computation on a run (`Work`): what all of them have, whatever they compute.

    Attributes:
        plan: How to differentiate the network: made once, by the owner of the job.
    """

    plan: DifferentiationPlan

    @property
    @abstractmethod
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""

    def check(self) -> None:
        """Raise if the run on disk is not the one that the owner of the job opened."""
        require_same_run(self.run_and_inputs[0])

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, without what is found out again."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def net(self) -> PlannedModel:
        """The network of the run, with the plan."""
        trajectory, X = self.run_and_inputs
        return PlannedModel(trajectory.model_for(X), self.plan)

    @property
    def device(self) -> torch.device:
        """Where sums are joined."""
        return self.run_and_inputs[1].device

    def named(self, name: str) -> str:
        """Return the beginning of the names of pieces: those of another plan have other bytes.

        A call that needs a second plan half-way goes on in the same folder.
        """
        return f"{name}-{checksum(repr(self.plan).encode())}"
