"""Contributions under plain gradient descent: layers stay factored, and no vector of all weights is kept."""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, all_outputs, weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import LeftFactor
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, add_to_averages
from epk_gp.gram.tiles import MAX_RANGES, step_ranges
from epk_gp.kernel_machine.terms import (
    AttributionWork,
    IntegratedLines,
    Predictions,
    TermSums,
    integrate_stretches,
    layers_of,
    leaves_residuals,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import stretches_of
from epk_gp.work.run import Sums


def vanilla_lr(trajectory: Trajectory, step: Step) -> float:
    """Return eps_s for plain steps of -eps_s times the batch gradient, including clipping and sign."""
    u = held_coefficients(trajectory, step.index)
    return float(u.lr[0]) * float(u.grad_scale[0])


def points_at_a_time(block: Predictions) -> int:
    """Count the points that are computed together: an upper bound, with all C outputs even if one is requested."""
    every = Cotangents(all_outputs("logits").of_logits, are_constant=True)
    at = WeightLocation(flat_state(block.trajectory, 0, block.X))
    jacobians = layer_jacobians(block.net, at, block.X[:1], every, block.cost)
    return block.memory.vanilla_gd_points(sum(jacobian.nbytes for jacobian in jacobians))


class FactoredTerms(AttributionWork):
    """The terms of plain gradient descent: sample i adds -eps_s c_i <Phi_s, grad loss_i>.

    In less than float64 the rounding of a step is the difference between its integral and the samples' contributions;
    the rounding of a chord belongs to its last step.
    """

    keeps_residuals = False

    @cached_property
    def ranges(self) -> list[slice]:
        """Several ranges of steps if points make few blocks, so that workers share the steps.

        The number of ranges keeps all sums within the memory budget.
        """
        most = min(MAX_RANGES // len(self.blocks), self.memory_budget // (self.rows_per_block * self.num_bytes(1)))
        return step_ranges(self.kernel.trajectory.num_steps, most, self.kernel.path.every)

    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, dict[str, Tensor]]]:
        """Go through a range of steps, and add every term to the totals."""
        trajectory, layers_of_parts = block.trajectory, layers_of(block, self.parts) or []
        steps = range(trajectory.num_steps)[self.ranges[number]][sums.steps :]
        for stretch in stretches_of(self.kernel.path, trajectory.num_steps, slice(steps.start, steps.stop)):
            line = integrate_stretches(block, [stretch], self.rows_per_block)
            total = block.select_outputs(line.integral.total)
            changes = total.new_zeros(len(stretch), *total.shape)
            for s, samples, values in _sample_terms(line, stretch, layers_of_parts, self.rows_per_block):
                totals.add_samples(s, samples, values)
                changes[s - stretch.start] += values.sum(dim=(2, 3))
            for change in changes:
                # the integral of a step is its change; the integral of a chord is the change over all its steps
                totals.add_change(total if len(stretch) == 1 else change)
            if leaves_residuals(block):
                totals.add("unexplained", stretch[-1], (total - changes.sum(dim=0)).unsqueeze(2))
            yield line.integral, len(stretch), {}


# Output gradients at some nodes of a stretch; averages of layers that commute with the average, by number of the layer,
# over these and all earlier nodes; and whether these are the last nodes.
LeftSide = tuple[list[NodeBatch], dict[int, LeftFactor], bool]


def _left_sides(line: IntegratedLines, num_bytes: int) -> Iterator[LeftSide]:
    """Compute the output gradients at as many nodes of a line at a time as fit."""
    averages: dict[int, LeftFactor] = {}
    batches, size = list[NodeBatch](), 0
    for batch in line.node_batches():
        own = sum(jacobian.nbytes for jacobian in batch.jacobians)
        if batches and size + own > num_bytes:
            yield batches, averages, False
            batches, size = [], 0
        add_to_averages(averages, batch)
        batches.append(batch)
        size += own
    yield batches, averages, True


def _sample_terms(
    line: IntegratedLines, stretch: range, layers_of_parts: Sequence[Sequence[int]], points_per_block: int
) -> Iterator[tuple[int, Int64[Tensor, " B"], Float[Tensor, "N K B G"]]]:
    """Yield the contributions of some samples at a time in the steps of a stretch: step, samples, contributions.

    Output gradients at all nodes are held if they fit. Otherwise they are computed again for as many samples as fit.
    """
    block, N, num_parts = line.block, len(line.block.X), len(layers_of_parts)
    trajectory, memory, K = block.trajectory, block.memory, block.num_outputs

    @lru_cache(maxsize=1)  # a step has many consecutive blocks
    def data_of(s: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = flat_state(trajectory, s, block.X)
        return w, *batch_of(trajectory, trajectory.steps[s], w)

    def contributions(s: int, rows: Tensor, left: LeftSide) -> Float[Tensor, "N K b G"]:
        """Return the contributions of some rows of a step at some nodes, by parts of the network."""
        (w, X, y, c), (batches, averages, is_last) = data_of(s), left
        cotangents = weighted_loss(trajectory.loss, y[rows], c[rows])
        right = layer_jacobians(block.net, WeightLocation(w), X[rows], cotangents, block.cost)
        eta, values = -vanilla_lr(trajectory, trajectory.steps[s]), w.new_empty(N, K, len(rows), num_parts)
        for part, layers in enumerate(layers_of_parts):
            tile = GramAccumulator((K, N, 1, len(rows)), w)
            for batch in batches:
                tile.add_nodes(batch, right, eta, averages, layers)
            for layer in [layer for layer in averages if is_last and layer in layers]:
                averages[layer].add_inner(right[layer], tile, eta, layer=layer, same_points=False)
            values[..., part] = tile.result()[:, :, 0].transpose(0, 1)
        return values

    size = num_samples = memory.vanilla_gd_samples(points_per_block, N, K, num_parts)
    waiting = _left_sides(line, memory.node_bytes)
    first = next(waiting)
    held = [first] if first[2] else []
    if not held:
        num_samples = memory.vanilla_gd_samples(trajectory.num_points, N, K, num_parts)
    lefts: Iterator[LeftSide] = chain([first], waiting)
    del first
    for blocks in _packed(block, stretch, size, num_samples):
        sums = dict[int, Tensor]()
        for left in held or lefts:
            for place, (s, rows) in enumerate(blocks):
                values = contributions(s, rows, left)
                sums[place] = sums[place].add_(values) if place in sums else values
        for place, total in sums.items():
            (s, rows), batch = blocks[place], trajectory.steps[blocks[place][0]].batch
            yield s, rows if batch is None else batch.to(rows.device)[rows], total
        lefts = _left_sides(line, memory.node_bytes)  # again for the next samples, if nothing is held


def _packed(block: Predictions, steps: range, size: int, most: int) -> Iterator[list[tuple[int, Int64[Tensor, " b"]]]]:
    """Divide the rows of each step into blocks of a given size, and group blocks up to a largest number of samples."""
    pack, count = list[tuple[int, Tensor]](), 0
    for s in steps:
        batch = block.trajectory.steps[s].batch
        num_rows = block.trajectory.num_points if batch is None else len(batch)
        for rows in torch.arange(num_rows, device=block.X.device).split(size):
            if pack and count + len(rows) > most:
                yield pack
                pack, count = [], 0
            pack.append((s, rows))
            count += len(rows)
    if pack:
        yield pack
