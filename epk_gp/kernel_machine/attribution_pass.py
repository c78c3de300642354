"""One pass over a run that splits predictions along several groupings at once: here, or by workers, block by block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import MAX_RANGES, step_ranges
from epk_gp.kernel_machine.adjoint import PassOptions, adjoint_pass
from epk_gp.kernel_machine.axes import Axis, parameter_parts
from epk_gp.kernel_machine.certification import integral_sums
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
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import ChordPath, StraightPath, path_identity, stretches_of
from epk_gp.work.run import RunWork
from epk_gp.work.sums import Piece, Place, Sums

Groupings = tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True, eq=False)
class AttributionWork(RunWork):
    """A pass over the run that adds up all terms, in pieces: a block of points, and a range of steps.

    Attributes:
        kernel: The run's path kernel.
        X: All inputs.
        classes: One output per input, or None for all.
        memory_budget: Bytes.
        groupings: The axes of each result.
        splits_statistics: Split what the moving statistics add over the samples.
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    memory_budget: int
    groupings: Groupings
    splits_statistics: bool

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.kernel.trajectory, self.X

    @cached_property
    def problem(self) -> AttributionProblem:
        """The predictions."""
        return make_problem(self.net, self.kernel, self.X, self.classes, self.memory_budget)

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
        steps, budget = self.problem.trajectory.num_steps, self.memory_budget
        if not self.is_factored:
            return [slice(0, steps)]
        one = TermSums.of(self.problem, self.groupings, self._outputs_of_one)
        num_bytes = self.rows_per_block * sum(total.nbytes for total in one.tensors)
        most = min(MAX_RANGES // len(self.blocks), budget // num_bytes)
        return step_ranges(steps, most, self.problem.kernel.path.every)

    @cached_property
    def residuals(self) -> StepResiduals:
        """Replay the run, and compare its steps with the recorded ones."""
        return StepResiduals(self.problem, self._outputs_of_one, keeps=not self.is_factored)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces, block by block."""
        of = (self.plan, self.is_factored, self.splits_outputs, self.rows_per_block)
        name, steps, is_one = f"sums-{fingerprint(*of)}", range(self.kernel.trajectory.num_steps), len(self.ranges) == 1
        return [
            Piece(f"{name}-{block}-{number}", (block, number), len(steps[r]), "" if is_one else f"{name}-{block}")
            for block in range(len(self.blocks))
            for number, r in enumerate(self.ranges)
        ]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a block."""
        return self.num_bytes(min(self.num_rows, self.rows_per_block))

    def num_bytes(self, num_rows: int) -> int:
        """Count the bytes of the sums of some rows."""
        like = self._outputs_of_one.new_empty(num_rows, self.outputs_per_row, device="meta")
        return sum(total.nbytes for total in TermSums.of(self.problem, self.groupings, like).tensors)

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        axes = [axis for grouping in self.groupings for axis in grouping]
        kinds: Sequence[Sequence[str]] = [[axis.kind for axis in grouping] for grouping in self.groupings]
        kernel = self.kernel
        return fingerprint(
            kernel.trajectory.digest, kernel.head, kernel.rule, self.memory_budget, kinds, self.X, self.classes,
            *(axis.group for axis in axes), [axis.names for axis in axes], self.splits_statistics,
            *path_identity(kernel.path),
        )  # fmt: skip

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum the terms of a range of steps at the points of a block."""
        problem, totals = self.of_block(place[0])
        sums = Sums(totals.named, saved.largest, saved.carried, saved.steps)
        for name, total in totals.named.items():
            if name in saved.added:
                total.copy_(saved.added[name])
        sums.added |= {name: saved.added[name] for name in saved.added if name not in totals.named}
        yield sums
        through = self._factored_terms if self.is_factored else self._adjoint_terms
        num_stretches = len(stretches_of(self.kernel.path, self.kernel.trajectory.num_steps))
        for integral, num_steps, adjoint in through(problem, totals, place[1], sums):
            if integral is not None:
                sums.merge(integral_sums(integral, self.kernel.rule, num_stretches))
            sums.carried = {} if adjoint is None else {"adjoint": adjoint}
            sums.steps += num_steps
            yield sums

    def _factored_terms(
        self, problem: AttributionProblem, totals: "TermSums", number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through steps of plain gradient descent, and add every term to the totals."""
        if self.layer_parts is None:
            raise TypeError("a layer's factors must belong to one part of the network: this is a bug in epk_gp.")
        steps = range(self.kernel.trajectory.num_steps)[self.ranges[number]][sums.steps :]
        rest = slice(steps.start, steps.stop)
        for integral, count in vanilla_gd_pass(problem, self.layer_parts, rest, totals.add, self.rows_per_block):
            yield integral, count, None

    def _adjoint_terms(
        self, problem: AttributionProblem, totals: "TermSums", number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through the run from its last step, and add every term to the totals."""
        splits = self.splits_statistics and any(collector.splits_samples for collector in totals.collectors)
        options = PassOptions(self.rows_per_block, self.residuals, splits)
        adjoint = sums.carried.get("adjoint")
        for integral, state in adjoint_pass(problem, self.parts, totals.add, options, sums.steps, adjoint):
            yield integral, 1, state

    def of_block(self, number: int) -> tuple[AttributionProblem, "TermSums"]:
        """Return the predictions at the points of a block, and their sums at zero."""
        whole, rows = self.problem, self.blocks[number]
        if self.splits_outputs:
            problem = whole.at(rows // whole.num_outputs, rows % whole.num_outputs)
        else:
            problem = whole.at(rows, None if whole.classes is None else whole.classes[rows])
        like = self._outputs_of_one.new_empty(len(rows), self.outputs_per_row)
        return problem, TermSums.of(problem, self.groupings, like)


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

    @property
    def named(self) -> dict[str, Tensor]:
        """The same, by names."""
        return {f"sum.{number}": total for number, total in enumerate(self.tensors)}

    def add(self, term: Contribution) -> None:
        """Add one term to every sum."""
        self.sizes.add(term)
        for collector in self.collectors:
            collector.add(term)
