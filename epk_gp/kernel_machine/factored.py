"""Contributions under plain gradient descent: layers stay factored, nothing of the size of the weights is kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, all_outputs, weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import LeftFactor
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, StepAverage, add_to_averages
from epk_gp.gram.tiles import MAX_RANGES, step_ranges
from epk_gp.kernel_machine.terms import (
    AttributionProblem,
    AttributionWork,
    IntegratedLine,
    StepResiduals,
    TermSums,
    integrate_stretch,
    leaves_residuals,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.paths import stretches_of
from epk_gp.work.sums import Sums


def vanilla_lr(trajectory: Trajectory, step: Step) -> float:
    """Return eps_s, where a plain step is -eps_s times the batch gradient; clipping and sign are part of it."""
    u = held_coefficients(trajectory, step.index)
    return float(u.lr[0]) * float(u.grad_scale[0])


def parts_of_layers(problem: AttributionProblem, parts: Int64[Tensor, " L"]) -> list[int] | None:
    """Return which part of the network each layer's Jacobian belongs to; None where one belongs to several.

    Args:
        problem: The predictions.
        parts: The part that each of L parameters belongs to.
    """
    model, plan = problem.net.model, problem.net.plan
    part = dict(zip(model.names, parts.tolist(), strict=True))
    layers: list[Sequence[str | None]] = [*plan.bias_of.items(), *([plan.dense_params] if plan.dense_params else [])]
    layers = [model.names] if problem.cost.all_dense else layers
    owners = [{part[name] for name in names if name is not None} for names in layers]
    return [min(own) for own in owners] if all(len(own) == 1 for own in owners) else None


def is_plain_descent(problem: AttributionProblem, parts: Int64[Tensor, " L"]) -> bool:
    """Return whether contributions can be computed from layers' factors: of plain steps, along steps or chords.

    What its integral leaves of a step in less than float64 belongs to no part of the network. A layerwise average is
    measured where it is written out.

    Args:
        problem: The predictions.
        parts: The part of the network that each of L parameters belongs to.
    """
    trajectory = problem.trajectory
    if parts_of_layers(problem, parts) is None or (parts.any() and leaves_residuals(problem)):
        return False
    is_plain = trajectory.is_vanilla_gd and trajectory.loss_takes_outputs and trajectory.unexplained is None
    return is_plain and not problem.is_layerwise and recomputation_of(trajectory) is None


class FactoredTerms(AttributionWork):
    """The terms of plain gradient descent: sample i adds -eps_s c_i <Phi_s, grad loss_i>.

    In less than float64 the rounding of a step is what its integral leaves over the samples' contributions; that of a
    chord belongs to its last step.
    """

    @property
    def outputs_per_row(self) -> int:
        """All that are asked for."""
        return self.problem.num_outputs

    @cached_property
    def rows_per_block(self) -> int:
        """Number of points that are computed together."""
        # an upper bound: all C outputs, also where one is asked for
        problem = self.problem
        every = Cotangents(all_outputs("logits").of_logits, are_constant=True)
        at = WeightLocation(flat_state(problem.trajectory, 0, problem.X))
        jacobians = layer_jacobians(problem.net, at, problem.X[:1], every, problem.cost)
        return problem.memory.vanilla_gd_points(sum(jacobian.nbytes for jacobian in jacobians))

    @cached_property
    def ranges(self) -> list[slice]:
        """Several ranges of steps where points make few blocks, so that workers share the steps.

        As many as keep the sums of all within the memory budget.
        """
        most = min(MAX_RANGES // len(self.blocks), self.memory_budget // (self.rows_per_block * self.num_bytes(1)))
        return step_ranges(self.kernel.trajectory.num_steps, most, self.kernel.path.every)

    @cached_property
    def residuals(self) -> StepResiduals:
        """Replay the run, and compare its steps with the recorded ones."""
        return StepResiduals(self.problem, keeps=False)

    def terms(
        self, problem: AttributionProblem, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through a range of steps, and add every term to the totals."""
        trajectory, layer_parts = problem.trajectory, parts_of_layers(problem, self.parts)
        layers_of_parts = [
            [layer for layer, part in enumerate(layer_parts or []) if part == own]
            for own in range(int(self.parts.max()) + 1)
        ]
        steps = range(trajectory.num_steps)[self.ranges[number]][sums.steps :]
        for stretch in stretches_of(self.kernel.path, trajectory.num_steps, slice(steps.start, steps.stop)):
            line = integrate_stretch(problem, stretch, self.rows_per_block)
            total = problem.select_outputs(line.integral.total)
            changes = total.new_zeros(len(stretch), *total.shape)
            for s, samples, values in _sample_terms(line, stretch, layers_of_parts, self.rows_per_block):
                totals.add_samples(s, samples, values)
                changes[s - stretch.start] += values.sum(dim=(2, 3))
            for s, change in zip(stretch, changes, strict=True):
                # the integral of a step is its change; of a chord it is that of all its steps
                totals.add_change(s, total if len(stretch) == 1 else change)
            if leaves_residuals(problem):
                totals.add_unexplained(stretch[-1], (total - changes.sum(dim=0)).unsqueeze(2))
            yield line.integral, len(stretch), None


@dataclass(frozen=True, eq=False)
class LeftSide:
    """Output gradients at some nodes of a stretch, which are multiplied with the loss gradients of each of its steps.

    Attributes:
        batches: At the nodes.
        averages: Of layers that commute with the average, by number of the layer, over these nodes and all before.
        is_last: Whether no more nodes follow: the averages are over all nodes.
    """

    batches: list[NodeBatch]
    averages: dict[int, LeftFactor]
    is_last: bool


def _left_sides(line: IntegratedLine, num_bytes: int) -> Iterator[LeftSide]:
    """Compute the output gradients at as many nodes of a line at a time as fit."""
    averages: dict[int, LeftFactor] = {}
    batches, size = list[NodeBatch](), 0
    for batch in line.node_batches():
        own = sum(jacobian.nbytes for jacobian in batch.jacobians)
        if batches and size + own > num_bytes:
            yield LeftSide(batches, averages, is_last=False)
            batches, size = [], 0
        add_to_averages(averages, batch)
        batches.append(batch)
        size += own
    yield LeftSide(batches, averages, is_last=True)


def _sample_terms(
    line: IntegratedLine, stretch: range, layers_of_parts: Sequence[Sequence[int]], points_per_block: int
) -> Iterator[tuple[int, Int64[Tensor, " B"], Float[Tensor, "N K B G"]]]:
    """Yield the contributions of some samples at a time of the steps of a stretch: step, samples, and what they add.

    Output gradients at all nodes are held where they fit. Where they do not, they are computed again for as many
    samples as fit.
    """
    problem, N, num_parts = line.problem, len(line.problem.X), len(layers_of_parts)
    trajectory, memory, K = problem.trajectory, problem.memory, problem.num_outputs

    @lru_cache(maxsize=1)  # a step has many blocks, one after the other
    def data_of(s: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = flat_state(trajectory, s, problem.X)
        return w, *batch_of(trajectory, trajectory.steps[s], w)

    def contributions(s: int, rows: Tensor, left: LeftSide) -> Float[Tensor, "N K b G"]:
        """Return what some rows of a step add at some nodes, by parts of the network."""
        w, X, y, c = data_of(s)
        cotangents = weighted_loss(trajectory.loss, y[rows], c[rows])
        right = layer_jacobians(problem.net, WeightLocation(w), X[rows], cotangents, problem.cost)
        eta, values = -vanilla_lr(trajectory, trajectory.steps[s]), w.new_empty(N, K, len(rows), num_parts)
        for part, layers in enumerate(layers_of_parts):
            tile = GramAccumulator((K, N, 1, len(rows)), w)
            average = StepAverage(tile, right, eta, left.averages, layers)
            for batch in left.batches:
                average.accumulate(batch)
            if left.is_last:
                average.finalize()
            values[..., part] = tile.result()[:, :, 0].transpose(0, 1)
        return values

    size = num_samples = memory.vanilla_gd_samples(points_per_block, N, K, num_parts)
    waiting = _left_sides(line, memory.node_bytes)
    first = next(waiting)
    held = [first] if first.is_last else []
    if not held:
        num_samples = memory.vanilla_gd_samples(trajectory.num_points, N, K, num_parts)
    lefts: Iterator[LeftSide] = chain([first], waiting)
    del first
    for blocks in _packed_blocks(problem, stretch, size, num_samples):
        sums: list[Tensor | None] = [None] * len(blocks)
        for left in held or lefts:
            for number, (s, rows) in enumerate(blocks):
                values, before = contributions(s, rows, left), sums[number]
                sums[number] = values if before is None else before.add_(values)
        for (s, rows), total in zip(blocks, sums, strict=True):
            if total is not None:
                batch = trajectory.steps[s].batch
                yield s, rows if batch is None else batch.to(rows.device)[rows], total
        lefts = _left_sides(line, memory.node_bytes)  # for the next samples, if nothing is held


def _packed_blocks(
    problem: AttributionProblem, steps: range, size: int, num_samples: int
) -> Iterator[list[tuple[int, Int64[Tensor, " b"]]]]:
    """Divide the rows of each step into blocks of a size, and put blocks together, of so many samples at most."""
    pack, count = list[tuple[int, Tensor]](), 0
    for s in steps:
        batch = problem.trajectory.steps[s].batch
        num_rows = problem.trajectory.num_points if batch is None else len(batch)
        for rows in torch.arange(num_rows, device=problem.X.device).split(size):
            if pack and count + len(rows) > num_samples:
                yield pack
                pack, count = [], 0
            pack.append((s, rows))
            count += len(rows)
    if pack:
        yield pack
