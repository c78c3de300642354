"""What an attribution costs before it is computed: time, memory and disk, from a few of its pieces."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.gradients import replayed_steps
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.plans import weight_rows
from epk_gp.core.trajectory import Trajectory
from epk_gp.distributed.cost_estimate import (
    CostEstimate,
    DiskEstimate,
    estimate_costs,
    free_bytes,
    synchronise,
    validate_measuring,
)
from epk_gp.distributed.cost_sample import Clock, PieceKind, SampledCosts, Tick, sample_costs
from epk_gp.distributed.job import Place, pickled
from epk_gp.distributed.pieces import num_ahead
from epk_gp.gram.estimate import SECONDS
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.attribute import parse_groupings
from epk_gp.kernel_machine.attribution_pass import AttributionPass, AttributionPieces, TermSums
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.certification import IntegrationRecord, PassProgress, StepMismatches, coarsest_dtype
from epk_gp.kernel_machine.terms import StepResiduals, leaves_residuals, make_problem, parse_problem
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.paths import WeightPath, straight
from epk_gp.quadrature.rules import Rule, adaptive

# Steps of a block that are measured at a time: the first of them is not counted.
_UNIT = 4

# Share of the time for measuring in which the run is replayed, and steps that are replayed at least.
_REPLAY_SHARE, _LEAST_REPLAYED = 0.1, 3


def estimate_attribution(
    trajectory: Trajectory,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    classes: Int64[Tensor, " n"] | None = None,
    workers: int | None = None,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
    **options: Unpack[ComputeSettings],
) -> CostEstimate:
    """Estimate what `attribute_many` costs with the same arguments.

    The pieces are blocks of points, each carried through the whole run. Some steps of some blocks are computed, spread
    over the run, and the sum over all is extrapolated, with an interval. Adjoints run backwards: where a measured part
    begins, those of later steps are taken to be zero, which costs the same. What each process does once, a replay of
    the run's own steps, is extrapolated from a few of them. Nothing is written.

    Args:
        trajectory: Training run with S steps.
        X: n inputs, taken as test copies.
        groupings: As of `attribute_many`. `[[by_sample(trajectory)]]` stands for `attribute`, which costs less where
            the network has moving statistics.
        head: As of `attribute_many`.
        rule: As of `attribute_many`.
        path: As of `attribute_many`.
        classes: As of `attribute_many`.
        workers: As of `estimate_gram`.
        seconds: As of `estimate_gram`.
        clock: As of `estimate_gram`.
        options: `memory_budget`, `progress` and `checkpoint`; see `ComputeOptions`. The checkpoint is neither read nor
            written, but its files are counted.

    Raises:
        TypeError, ValueError: As of `attribute_many`; or `workers` or `seconds` are not positive.
    """
    parsed = parse_options("estimate_attribution", ("accumulate", "executor"), **options)
    validate_measuring(workers, seconds)
    by = parse_groupings(trajectory, groupings)
    kernel = PathKernel(trajectory, head, rule, path=path)
    packed = parse_problem(kernel, X, classes)
    start = clock()

    def measured(net: PlannedModel) -> tuple[_PassWork, float, SampledCosts]:
        problem = make_problem(net, kernel, packed, classes, parsed)
        work = _PassWork(AttributionPieces.of(AttributionPass(problem, by, True)), parsed.checkpoint)
        setup = clock() - start
        replay = work.replay_seconds(_REPLAY_SHARE * seconds, clock)
        costs = sample_costs(work, (1 - _REPLAY_SHARE) * seconds, clock=clock, progress=parsed.progress)
        # the owner replays the run behind the last piece; and so do workers before their first ones, if they need it
        again = workers is not None and not work.pieces.whole.is_factored
        return work, setup + replay * (2 if again else 1), costs

    model = trajectory.model_for(packed)
    return estimate_costs(lambda: with_plan(trajectory, model, measured), workers, parsed.memory_budget, clock)


class _MeasuredError(Exception):
    """The steps that were to be measured are done."""


@dataclass(frozen=True, eq=False)
class _PassWork:
    """The blocks of points of an attribution.

    Attributes:
        pieces: The pieces, as workers get them.
        checkpoint: Folder of partial sums, if there is to be one.
    """

    pieces: AttributionPieces
    checkpoint: str | os.PathLike[str] | None

    @cached_property
    def kinds(self) -> Sequence[PieceKind]:
        """The blocks, by size."""
        groups: dict[int, list[tuple[Place, int]]] = {}
        for block, number in self.places:
            rows, steps = self.pieces.whole.blocks[block], self._steps(number)
            groups.setdefault(len(rows), []).append(((block, number), len(steps)))
        every = self.pieces.kernel.path.every  # the first chord is not counted, nor is the first step
        unit = _UNIT if every == 1 else every * max(2, -(-_UNIT // every))
        return [
            PieceKind(f"{n} points", "points", (1.0, float(n)), unit, pieces, every)
            for n, pieces in groups.items()
            if n
        ]

    def compute(self, place: Place, first: int, last: int, tick: Tick) -> None:
        """Add the terms of some steps of a piece, counted from where it begins."""
        whole, (block, number) = self.pieces.whole, place
        problem, sums = whole.of_block(block)
        ticks = _StretchTicks(tick, 1 if whole.is_factored else problem.kernel.path.every, self._num_steps - first)
        progress = _PartOfPass(sums.tensors, whole.new_record, (first, last), ticks)
        with suppress(_MeasuredError):
            if whole.is_factored:
                steps, every = self._steps(number)[:last], problem.kernel.path.every
                progress.done, progress.last = first // every, -(-last // every)  # whose work items are stretches
                whole.pass_factors(problem, sums, progress, slice(steps.start, steps.stop))
            else:
                whole.pass_adjoints(problem, sums, progress, _AnyResiduals(self._residual))
        synchronise(self.pieces.X)

    def replay_seconds(self, seconds: float, clock: Clock) -> float:
        """Extrapolate the seconds of a replay of the whole run."""
        problem = self.pieces.whole.problem
        trajectory, model = problem.trajectory, problem.net.model
        mismatches = StepMismatches(coarsest_dtype(trajectory, self._reference))
        times = [clock()]
        for replayed in replayed_steps(trajectory, model, problem.X):
            mismatches.add(trajectory, model, replayed)
            synchronise(problem.X)
            times.append(clock())
            if len(times) > _LEAST_REPLAYED and times[-1] - times[0] > seconds:
                break
        counted = times[1:] if 2 < len(times) <= self._num_steps else times  # the first step is slower
        return (counted[-1] - counted[0]) / max(1, len(counted) - 1) * self._num_steps

    @property
    def description(self) -> str:
        """Return how the attribution is divided, in words."""
        n, whole = len(self.pieces.X), self.pieces.whole
        size, count, ranges = whole.rows_per_block, len(whole.blocks), len(whole.ranges)
        blocks = f"(blocks of up to {size} of the {n} points, with {whole.problem.num_outputs} outputs each"
        if whole.splits_outputs:
            blocks = f"(blocks of up to {size} of the {whole.problem.num_outputs} outputs of each of {n} points"
        if ranges == 1:
            return f"{count} {blocks}, through all {self._num_steps} steps)"
        return f"{len(self.places)} = {count} {blocks}) x {ranges} (ranges of the {self._num_steps} steps)"

    @cached_property
    def places(self) -> list[Place]:
        """The pieces."""
        whole = self.pieces.whole
        return [(block, number) for block in range(len(whole.blocks)) for number in range(len(whole.ranges))]

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of the sums of all points."""
        return self._bytes_of(self.pieces.whole.num_rows)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a block."""
        return self._bytes_of(min(self.pieces.whole.num_rows, self.pieces.whole.rows_per_block))

    def owner_bytes(self, workers: int | None) -> int:
        """Count the memory of the process that adds the sums up: they, and the piece that it reads, twice."""
        return self.result_bytes + (0 if workers is None else 2 * self.piece_bytes)

    def disk(self, workers: int | None) -> DiskEstimate:
        """Count the bytes of files."""
        whole, keeps, at_once, scratch = self.pieces.whole, self.checkpoint is not None, 0, 0
        num_weights, itemsize = whole.problem.net.model.num_weights, self._reference.itemsize
        if workers is not None:
            count, ranges = len(self.places), len(whole.ranges)
            ahead = num_ahead(self.piece_bytes, free_bytes(self.checkpoint))
            at_once = count if keeps and ranges == 1 else min(count, ahead + (ranges if keeps else 0))
            scratch = at_once * self.piece_bytes + len(pickled(self.pieces))
            if keeps and ranges > 1:  # and the sums of blocks
                scratch += self.result_bytes + self.piece_bytes
        elif keeps:  # the sums, and the adjoints of the block in hand; a file is replaced by the next one of its name
            carried = 0 if whole.is_factored else whole.outputs_per_row * whole.rows_per_block * num_weights
            scratch = 2 * (self.result_bytes + carried * itemsize)
        in_memory = weight_rows(whole.problem.options.memory_budget, itemsize, num_weights)
        if self._residual is not None and self._num_steps > in_memory:  # a temporary file of each process
            scratch += self._num_steps * num_weights * itemsize * (1 if workers is None else workers + 1)
        return DiskEstimate(self.result_bytes, self.piece_bytes, at_once, scratch)

    @property
    def _num_steps(self) -> int:
        return self.pieces.kernel.trajectory.num_steps

    def _steps(self, number: int) -> range:
        """Return the steps of a range."""
        return range(self._num_steps)[self.pieces.whole.ranges[number]]

    @cached_property
    def _reference(self) -> Float[Tensor, "0 C"]:
        """No outputs, of the computation's dtype and device."""
        spec, C = self.pieces.whole.problem.net.model.spec, self.pieces.kernel.trajectory.num_outputs
        return torch.empty(0, C, dtype=spec.dtype, device=spec.device)

    @cached_property
    def _residual(self) -> Tensor | None:
        """What a step leaves unexplained, if that is multiplied with the adjoints; the numbers do not matter."""
        whole = self.pieces.whole
        if whole.is_factored or not leaves_residuals(whole.problem.trajectory, self._reference):
            return None
        return self._reference.new_zeros(whole.problem.net.model.num_weights)

    def _bytes_of(self, count: int) -> int:
        whole = self.pieces.whole
        initial = torch.empty(count, whole.outputs_per_row, dtype=self._reference.dtype, device="meta")
        return sum(total.nbytes for total in TermSums.of(whole.problem, self.pieces.groupings, initial).tensors)


@dataclass(eq=False)
class _StretchTicks:
    """Passes on how many steps are done when a stretch of the path is: its first step has the cost of all.

    Attributes:
        tick: Is told.
        every: Steps of a stretch; 1 where whole stretches are told of.
        left: Steps that are left, counted from the start of the run, as adjoints go backwards.
        waiting: Steps that are done and not passed on.
    """

    tick: Tick
    every: int
    left: int
    waiting: int = 0

    def __call__(self, num_steps: int) -> None:
        self.waiting += num_steps
        self.left -= num_steps
        if self.left % self.every == 0:
            self.tick(self.waiting)
            self.waiting = 0


class _PartOfPass(PassProgress):
    """Progress that begins at one step and ends the pass at another."""

    def __init__(self, sums: Sequence[Tensor], record: IntegrationRecord, steps: tuple[int, int], tick: Tick) -> None:
        super().__init__(None, sums, record)
        (self.done, self.last), self.tick = steps, tick

    def advance(
        self, integrals: Sequence[Integral], adjoint_state: Tensor | None, *, is_last: bool, num_steps: int = 1
    ) -> None:
        super().advance(integrals, adjoint_state, is_last=is_last, num_steps=num_steps)
        synchronise(self.sums[0])
        self.tick(num_steps)
        if self.done >= self.last:
            raise _MeasuredError


class _AnyResiduals(StepResiduals):
    """The same residual for every step, in place of a replay of the run."""

    def __init__(self, row: Tensor | None) -> None:
        self.row = row

    def __getitem__(self, s: int) -> Tensor | None:
        return self.row
