"""One pass over a run that splits predictions along several groupings at once: here, or by workers, block by block."""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.options import ComputeOptions, SupportsSubmit
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.show import ProgressBar, progress_bar
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import Here, Piece, results_of, threads_of_workers
from epk_gp.distributed.planned_pieces import PlannedPieces
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import MAX_RANGES, step_ranges
from epk_gp.kernel_machine.adjoint import PassOptions, adjoint_pass
from epk_gp.kernel_machine.axes import Axis, parameter_parts
from epk_gp.kernel_machine.certification import IntegrationRecord, PassProgress
from epk_gp.kernel_machine.terms import (
    AttributionProblem,
    Collector,
    Contribution,
    StepResiduals,
    TermSizes,
    leaves_residuals,
    make_problem,
)
from epk_gp.kernel_machine.vanilla_gd import parts_of_layers, vanilla_gd_pass, vanilla_gd_points
from epk_gp.quadrature.paths import ChordPath, StraightPath, num_segments, path_identity
from epk_gp.storage.partial_sums import PartialSums

_BEGUN = "-begun"  # ends the name of a sum that is not whole yet

Groupings = tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True, eq=False)
class AttributionPass:
    """What a pass adds up, and how it divides its work.

    Attributes:
        problem: The predictions.
        groupings: The axes of each result.
        splits_statistics: Split what the moving statistics add over the samples.
    """

    problem: AttributionProblem
    groupings: Groupings
    splits_statistics: bool

    @cached_property
    def parts(self) -> Int64[Tensor, " L"]:
        """The part of the network that each parameter belongs to: those that no grouping tells apart are one."""
        return parameter_parts(self.groupings, len(self.problem.trajectory.model.names))

    @cached_property
    def layer_parts(self) -> list[int] | None:
        """The part of the network that each layer's Jacobian belongs to; None where one is of several."""
        return parts_of_layers(self.problem, self.parts)

    @cached_property
    def is_factored(self) -> bool:
        """Whether contributions are computed from layers' factors: of plain gradient descent, along steps or chords.

        What its integral leaves of a step in less than float64 belongs to no part of the network. A layerwise average
        is measured where it is written out.
        """
        trajectory = self.problem.trajectory
        if self.layer_parts is None or (self.parts.any() and leaves_residuals(trajectory, self._outputs_of_one)):
            return False
        is_plain = trajectory.is_vanilla_gd and trajectory.loss_takes_outputs
        is_along_steps = (
            isinstance(self.problem.kernel.path, StraightPath | ChordPath) and recomputation_of(trajectory) is None
        )
        return is_plain and is_along_steps and trajectory.unexplained is None

    @cached_property
    def splits_outputs(self) -> bool:
        """Whether each output of a point is a row of its own: where the adjoints of all of them do not fit."""
        problem = self.problem
        if self.is_factored or problem.num_outputs == 1:
            return False
        return problem.memory.adjoint_points(problem.num_outputs) < 1

    @property
    def outputs_per_row(self) -> int:
        """Number of outputs of a row of the sums, which is a point, or an output of it."""
        return 1 if self.splits_outputs else self.problem.num_outputs

    @property
    def num_rows(self) -> int:
        """Number of rows of the sums."""
        return len(self.problem.X) * self.problem.num_outputs // self.outputs_per_row

    def as_rows(self, f: Float[Tensor, "n K"]) -> Float[Tensor, "N R"]:
        """Arrange outputs of all points as the sums are."""
        return f.reshape(-1, self.outputs_per_row)

    @property
    def _outputs_of_one(self) -> Float[Tensor, "1 K"]:
        """What stands for the outputs of one point; inputs may have another dtype."""
        spec = self.problem.net.model.spec
        return torch.empty(1, self.problem.num_outputs, dtype=spec.dtype, device=spec.device)

    @cached_property
    def rows_per_block(self) -> int:
        """Number of rows that go through the run together."""
        if self.is_factored:
            return vanilla_gd_points(self.problem)
        return max(1, self.problem.memory.adjoint_points(self.outputs_per_row))

    @cached_property
    def blocks(self) -> list[Int64[Tensor, " rows"]]:
        """The rows of each block."""
        return list(torch.arange(self.num_rows, device=self.problem.X.device).split(self.rows_per_block))

    @cached_property
    def ranges(self) -> list[slice]:
        """The steps of each range that is summed by itself.

        Adjoints go through the whole run. Without them, points that make few blocks are given several ranges, so that
        workers share the steps; as many as keep the sums of all within the memory budget.
        """
        steps, budget = self.problem.trajectory.num_steps, self.problem.options.memory_budget
        if not self.is_factored:
            return [slice(0, steps)]
        one = TermSums.of(self.problem, self.groupings, self._outputs_of_one)
        num_bytes = self.rows_per_block * sum(total.nbytes for total in one.tensors)
        most = min(MAX_RANGES // len(self.blocks), budget // num_bytes)
        return step_ranges(steps, most, self.problem.kernel.path.every)

    @property
    def new_record(self) -> IntegrationRecord:
        """Where the integrals are counted."""
        kernel, steps = self.problem.kernel, self.problem.trajectory.num_steps
        return IntegrationRecord(kernel.rule, num_segments(kernel.path, self.problem.net.model, steps))

    def residuals(self, initial: Float[Tensor, "n K"]) -> StepResiduals:
        """Replay the run, and compare its steps with the recorded ones."""
        return StepResiduals(self.problem, initial, keeps=not self.is_factored)

    def part(
        self,
        place: Place,
        residuals: StepResiduals | None,
        bar: ProgressBar | None = None,
        begun: tuple[PartialSums | None, str] = (None, ""),
    ) -> PassProgress:
        """Sum the terms of a range of steps at the points of a block.

        Args:
            place: Which block, and which range.
            residuals: What the steps leave unexplained; None where contributions are factored.
            bar: A progress bar of steps.
            begun: Where the sums are kept before they are whole, and their name there.
        """
        number, of_steps = place
        problem, sums = self.of_block(number)
        progress = PassProgress(begun[0], sums.tensors, self.new_record, begun[1], bar)
        if self.is_factored:
            self.pass_factors(problem, sums, progress, self.ranges[of_steps])
        elif residuals is not None:
            self.pass_adjoints(problem, sums, progress, residuals)
        return progress

    def of_block(self, number: int) -> tuple[AttributionProblem, "TermSums"]:
        """Return the predictions at the points of a block, and their sums at zero."""
        whole, rows = self.problem, self.blocks[number]
        if self.splits_outputs:
            problem = whole.at(rows // whole.num_outputs, rows % whole.num_outputs)
        else:
            problem = whole.at(rows, None if whole.classes is None else whole.classes[rows])
        like = self._outputs_of_one.new_empty(len(rows), self.outputs_per_row)
        return problem, TermSums.of(problem, self.groupings, like)

    def pass_factors(self, problem: AttributionProblem, sums: "TermSums", progress: PassProgress, steps: slice) -> None:
        """Go through steps of plain gradient descent, and add every term to the sums."""
        if self.layer_parts is None:
            raise TypeError("a layer's factors must belong to one part of the network: this is a bug in epk_gp.")
        vanilla_gd_pass(problem, self.layer_parts, steps, sums.add, progress, self.rows_per_block)

    def pass_adjoints(
        self, problem: AttributionProblem, sums: "TermSums", progress: PassProgress, residuals: StepResiduals
    ) -> None:
        """Go through the run from its last step, block by block, and add every term to the sums."""
        splits = self.splits_statistics and any(collector.splits_samples for collector in sums.collectors)
        adjoint_pass(problem, self.parts, sums.add, progress, PassOptions(self.rows_per_block, residuals, splits))


@dataclass(frozen=True, eq=False)
class TermSums:
    """The sums of all groupings, and the sizes of their terms."""

    collectors: list[Collector]
    sizes: TermSizes

    @classmethod
    def of(cls, problem: AttributionProblem, groupings: Groupings, like: Float[Tensor, "n K"]) -> "TermSums":
        """Start sums at zero, for outputs of this shape, dtype and device."""
        parts = parameter_parts(groupings, len(problem.trajectory.model.names))
        return cls([Collector(problem, axes, parts, like) for axes in groupings], TermSizes(like))

    @property
    def tensors(self) -> list[Float[Tensor, "n K ..."]]:
        """What terms are added to, in a fixed order."""
        return [total for collector in self.collectors for total in collector.sums] + self.sizes.sums

    def add(self, term: Contribution) -> None:
        """Add one term to every sum."""
        self.sizes.add(term)
        for collector in self.collectors:
            collector.add(term)


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a pass has found.

    Attributes:
        sums: The sums.
        progress: Its certificate and number of evaluations.
        residuals: The comparison of replayed with recorded steps.
        is_factored: As `AttributionPass.is_factored`.
    """

    sums: TermSums
    progress: PassProgress
    residuals: StepResiduals
    is_factored: bool


def run_pass(work: AttributionPass, initial: Float[Tensor, "n K"]) -> PassResult:
    """Go through the run, here or by the workers of an executor.

    Args:
        work: What is to be done.
        initial: The predictions at the initial weights.
    """
    options, sums = work.problem.options, TermSums.of(work.problem, work.groupings, work.as_rows(initial))
    with nullcontext() if options.executor is None else threads_of_workers(options.executor):
        # partial sums of another plan are other sums
        name = f"sums-{fingerprint(work.problem.net.plan, work.is_factored, work.splits_outputs, work.rows_per_block)}"
        identity = _identity(work)
    stored = None if options.checkpoint is None else PartialSums(options.checkpoint, identity)
    is_by_blocks = work.is_factored or work.splits_outputs
    executor = options.executor if stored is None or is_by_blocks else _who_goes_on(work, stored, name)
    residuals = None if work.is_factored or executor is not None else work.residuals(initial)
    if residuals is None or work.splits_outputs:
        progress = PassProgress(None, sums.tensors, work.new_record)
        _add_blocks(work, progress, stored, executor, (name, identity), residuals)
        residuals = work.residuals(initial) if residuals is None else residuals
    else:
        progress = PassProgress(stored, sums.tensors, work.new_record, name)
        progress.advice = work.problem.advice
        work.pass_adjoints(work.problem, sums, progress, residuals)
    return PassResult(sums, progress, residuals, work.is_factored)


def _who_goes_on(work: AttributionPass, stored: PartialSums, name: str) -> SupportsSubmit | None:
    """Return who computes what a checkpoint lacks: block by block where workers have begun, else as was asked."""
    work_items = len(work.blocks) * work.problem.trajectory.num_steps
    if stored.has(name) and stored.load(name)[1] == work_items:
        return None  # all is there, from a call without workers
    has_pieces = any(stored.has(f"{name}-{number}") for number in range(len(work.blocks)))
    return Here() if has_pieces and work.problem.options.executor is None else work.problem.options.executor


def _add_blocks(
    work: AttributionPass,
    progress: PassProgress,
    stored: PartialSums | None,
    executor: SupportsSubmit | None,
    names: tuple[str, str],
    residuals: StepResiduals | None = None,
) -> None:
    """Add the sums of all blocks of rows, range by range: of workers, or from where a checkpoint has them, or here.

    Args:
        work: What is to be done.
        progress: The sums of all points.
        stored: The checkpoint.
        executor: Whose workers compute; None for none.
        names: The name of the sums on disk, and their identity.
        residuals: What the steps leave unexplained, for adjoints that are computed here.
    """
    options, count, (name, identity) = work.problem.options, len(work.ranges), names
    done = [0 if stored is None else stored.count(f"{name}-{block}") for block in range(len(work.blocks))]
    # a piece that is all of a block has the block's name, and is its sum on disk
    pieces = [
        Piece(f"{name}-{block}" if count == 1 else f"{name}-{block}-{number}", (block, number))
        for block, first in enumerate(done)
        for number in range(first, count)
    ]
    if executor is None:
        parts = _parts_here(work, pieces, stored, residuals)
    else:
        num_bytes = sum(total[: work.rows_per_block].nbytes for total in progress.sums)
        own = replace(options, executor=executor)
        parts = results_of(AttributionPieces.of(work), pieces, own, lambda: identity, num_bytes)
    waiting, is_hidden = deque(pieces), executor is None or not options.progress
    with closing(parts), progress_bar(len(pieces), "attribution", unit="piece", shown=not is_hidden) as bar:
        for block, rows in enumerate(work.blocks):
            span, used = slice(int(rows[0]), int(rows[-1]) + 1), list[str]()
            total = PassProgress(None, [x[span] for x in progress.sums], work.new_record)
            if stored is not None and done[block]:
                total.add(stored.load(f"{name}-{block}")[0])
            for number in range(done[block] + 1, count + 1):
                total.add(next(parts))
                used.append(waiting.popleft().name)
                bar.update()
                is_kept = count == 1 and executor is not None
                if stored is not None and not is_kept and (number == count or stored.should_save):
                    stored.save(f"{name}-{block}", total.state(), number)
                    stored.remove([*(used if count > 1 else []), *(name + _BEGUN for name in used)])
                    used.clear()
            progress.merge(total.state())


def _parts_here(
    work: AttributionPass, pieces: Sequence[Piece], stored: PartialSums | None, residuals: StepResiduals | None
) -> Generator[dict[str, Tensor], None, None]:
    """Compute pieces one after another, but for those that workers of an earlier call have computed."""
    S = work.problem.trajectory.num_steps
    left = sum(len(range(S)[work.ranges[piece.place[1]]]) for piece in pieces)
    shown = work.problem.options.progress
    with progress_bar(left, "attribution", unit="step", shown=shown, advice=work.problem.advice) as bar:
        for piece in pieces:
            found = {} if stored is None else stored.load(piece.name)[0]
            yield found or work.part(piece.place, residuals, bar, (stored, piece.name + _BEGUN)).state()


@dataclass(frozen=True, eq=False)
class AttributionPieces(PlannedPieces):
    """An attribution as pieces for workers: a block of points, and a range of steps.

    Attributes:
        kernel: The run's path kernel.
        X: All inputs.
        classes: One output per input, or None for all.
        options: How to compute, without an executor.
        groupings: The axes of each result.
        splits_statistics: Split what the moving statistics add over the samples.
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    options: ComputeOptions
    groupings: Groupings
    splits_statistics: bool

    @classmethod
    def of(cls, work: AttributionPass) -> "AttributionPieces":
        """Return the pieces of a pass."""
        problem = work.problem
        options = replace(problem.options, executor=None, progress=False, checkpoint=None)
        return cls(
            problem.kernel, problem.X, problem.classes, options, work.groupings, work.splits_statistics,
            plan=problem.net.plan,
        )  # fmt: skip

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.kernel.trajectory, self.X

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Sum the terms of a range of steps at the points of a block."""
        return self.whole.part(place, None if self.whole.is_factored else self._residuals).state()

    @cached_property
    def whole(self) -> AttributionPass:
        """The pass of all points."""
        problem = make_problem(self.net, self.kernel, self.X, self.classes, self.options)
        return AttributionPass(problem, self.groupings, self.splits_statistics)

    @cached_property
    def _residuals(self) -> StepResiduals:
        problem = self.whole.problem
        outputs = network_outputs(problem.trajectory, self.X[:1], state=0, head=self.kernel.head)
        return self.whole.residuals(outputs)


def _identity(work: AttributionPass) -> str:
    axes = [axis for grouping in work.groupings for axis in grouping]
    kinds: Sequence[Sequence[str]] = [[axis.kind for axis in grouping] for grouping in work.groupings]
    problem = work.problem
    return fingerprint(
        problem.trajectory.digest, problem.kernel.head, problem.kernel.rule, problem.options.memory_budget, kinds,
        problem.X, problem.classes, *(axis.group for axis in axes), [axis.names for axis in axes],
        work.splits_statistics, *path_identity(problem.kernel.path),
    )  # fmt: skip
