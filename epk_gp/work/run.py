"""Carry out a computation: pieces here or on workers, partial sums in a folder, progress, for every pass."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
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
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work.sums import BEGUN, Piece, Sums, Work, save_begun, save_piece
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
        workers = None if executor is None or stored is None else pieces_of_workers(work, missing, executor, stored)
        with _bar(work, stored, options, what, advice) as bar, nullcontext() if workers is None else closing(workers):
            for pieces in _totals(work):
                done, used = _num_joined(stored, pieces), list[str]()
                total = Sums.load(stored, pieces[0].total, work.device) if done else Sums()
                for number, piece in enumerate(pieces[done:], done + 1):
                    if workers is not None:
                        sums = next(workers)
                        bar.update()
                    elif stored is not None and stored.has(piece.name):
                        sums = Sums.load(stored, piece.name, work.device)
                        bar.update(piece.steps)
                    else:
                        sums = Sums.load(stored, piece.name + BEGUN, work.device)
                        if counted := sums.steps:
                            bar.update(counted)
                        for sums in work.compute(piece.place, sums):  # noqa: B020  the last ones are whole
                            bar.update(sums.steps - counted)
                            if sums.steps > counted:
                                save_begun(stored, piece, sums)
                            counted = sums.steps
                        if stored is not None and piece.is_total:
                            save_piece(stored, piece, sums)
                    total.merge(sums)
                    used += [piece.name, piece.name + BEGUN]
                    if stored is None:
                        continue
                    if options.checkpoint is not None:
                        if piece.is_total or (number < len(pieces) and not stored.should_save):
                            continue
                        replace(total, steps=number).save(stored, piece.total)
                    stored.remove(used)
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


def _bar(work: Work, stored: PartialSums | None, options: ComputeOptions, what: str, advice: str | None) -> ProgressBar:
    """Return a progress bar: of steps, or of the pieces of workers."""
    is_here, size, done = options.executor is None, 0, 0
    for pieces in _totals(work):
        counts = [piece.steps if is_here else 1 for piece in pieces]
        size, done = size + sum(counts), done + sum(counts[: _num_joined(stored, pieces)])
    unit = "step" if is_here else "piece"
    return progress_bar(size, what, unit=unit, initial=done, shown=options.progress, advice=advice if is_here else None)


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
        return f"{name}-{zlib.crc32(repr(self.plan).encode()):08x}"
