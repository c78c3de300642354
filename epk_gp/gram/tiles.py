"""A Gram block in tiles, and in pieces: ranges of the steps of a tile that are computed and added one by one.

With the steps s of a chord, and H the sum of their weights eta_s,

    sum_s eta_s Phi(x) J_s(y)^T = H Phi(x) (sum_s (eta_s / H) J_s(y))^T

so that a chord costs one product per layer, and the test side is evaluated once. Only layers that are too large for
dense gradients are multiplied for every node and step.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import DenseJacobian, LeftFactor, NodeWeights
from epk_gp.core.inputs import Points
from epk_gp.core.plans import MAX_STEP_BATCH, empty_huge_pages
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, add_to_averages, scatter_block, transpose_block
from epk_gp.gram.planned_kernel import MOST_STEPS, Averages, PlannedKernel, Steps, warn_of_integrals
from epk_gp.quadrature.rules import path_identity
from epk_gp.work.run import Piece, Place, RunWork, Sums, pieces_of_ranges, run

# Largest number of ranges of steps of a tile's sum: workers share ranges if there are few points.
MAX_RANGES = 64

# Number of pieces below which tiles are divided further, and least number of points on a side of such a tile. In 500 x
# 1000 points of an MLP with 256 hidden units, the gradients of the 1000 are 2 % of the work, and are computed once
# more.
FEW_PIECES, SMALL_TILE = 16, 500

# Number of tiles above which each tile is one piece. The owner of a job reads all pieces, one by one; this takes 3 to 4
# % of a worker's time for a range of steps, so that 30 workers keep it busy. For 10^6 x 60,000 points and 1,000 steps
# it takes 8 hours for sums of ranges, and 8 minutes for sums of tiles (benchmarks/beyond_one_machine.py).
WHOLE_TILES = 64

# Place of a piece that is a whole tile, instead of the number of a range of steps.
WHOLE = -1


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile of a block: some points of one copy on each side.

    Attributes:
        x_is_train: Whether the points on the left are training copies.
        y_is_train: Whether the points on the right are training copies.
        rows: Indices of the points on the left.
        columns: Indices of the points on the right.
        is_symmetric: Whether both sides are the same points.
        is_mirrored: Whether its transpose is another tile of the block, which is not listed.
    """

    x_is_train: bool
    y_is_train: bool
    rows: Int64[Tensor, " n"]
    columns: Int64[Tensor, " m"]
    is_symmetric: bool
    is_mirrored: bool

    @property
    def is_turned(self) -> bool:
        """Whether to compute its transpose, which has the training side on the right."""
        return self.x_is_train and not self.y_is_train


def tiles_of(a: Points, b: Points, size: int, num_ranges: int) -> dict[Place, Tile]:
    """Divide a block into tiles, copy by copy.

    If points and ranges of steps give few pieces, tiles are smaller than necessary, so that workers can share them.
    Between different copies only the test points are divided further: training points cost less per step, one node.

    Args:
        a: The points on the left.
        b: The points on the right; the same object as a for a symmetric block.
        size: Largest number of points on each side of a tile.
        num_ranges: Number of ranges of steps of each tile.

    Returns:
        The tiles, by their keys.
    """
    wanted = FEW_PIECES // num_ranges
    same, tiles = a is b, dict[Place, Tile]()
    for x_is_train, y_is_train in product((True, False), repeat=2):
        if same and y_is_train and not x_is_train:
            continue  # the mirror image of another combination
        mirrored = same and x_is_train == y_is_train
        divides_columns = mirrored or (x_is_train and not y_is_train)
        divides_rows = mirrored or not divides_columns
        rows = _split(a.copies(x_is_train), size, wanted if divides_rows else 1)
        columns = _split(b.copies(y_is_train), size, wanted if divides_columns else 1)
        for (i, n), (j, m) in product(enumerate(rows), enumerate(columns)):
            if len(n) and len(m) and not (mirrored and j < i):
                is_symmetric = mirrored and i == j
                tile = Tile(x_is_train, y_is_train, n, m, is_symmetric, same and not is_symmetric)
                tiles[int(x_is_train), int(y_is_train), i, j] = tile
    return tiles


def _split(indices: Int64[Tensor, " n"], size: int, wanted: int) -> Sequence[Tensor]:
    """Divide points into tiles of limited size, and into at least the wanted number if these are large enough."""
    most, count = min(wanted, len(indices) // SMALL_TILE), 1
    while 2 * count <= most:  # 2, 4, 8, ... tiles can be shared equally by as many workers
        count *= 2
    return list(indices.split(min(size, max(1, math.ceil(len(indices) / count)))))


def step_ranges(num_steps: int, most: int = MAX_RANGES, every: int = 1, together: int = MAX_STEP_BATCH) -> list[slice]:
    """Divide steps into ranges of equal length, which are summed one by one: at least one range, and at most `most`.

    Args:
        num_steps: Number of steps.
        most: Largest number of ranges.
        every: Number of steps of a chord, which is not divided.
        together: Number of steps that are computed at once.
    """
    length = together * max(1, math.ceil(num_steps / (together * max(1, most))))
    length = every * math.ceil(length / every)
    return [slice(first, first + length) for first in range(0, max(1, num_steps), length)]


@dataclass(frozen=True, eq=False)
class GramWork(RunWork):
    """A Gram block in pieces: a tile and a range of its steps, or all of its steps (`WHOLE`) if there are many tiles.

    Attributes:
        planned: The owner's kernel.
        a: The points on the left.
        b: The points on the right; the same object as a for a symmetric block.
    """

    planned: PlannedKernel
    a: Points
    b: Points

    def __post_init__(self) -> None:
        """Let the owner's thread use the owner's kernel, which has already read states."""
        self._of_thread.kernel = self.planned

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs for its network."""
        return self.planned.trajectory, self.a.X

    @cached_property
    def _of_thread(self) -> threading.local:
        return threading.local()

    @property
    def kernel(self) -> PlannedKernel:
        """The kernel of this thread, reused from piece to piece."""
        if not hasattr(self._of_thread, "kernel"):
            self._of_thread.kernel = replace(self.planned)
        kernel: PlannedKernel = self._of_thread.kernel
        return kernel

    @cached_property
    def ranges(self) -> list[slice]:
        """Ranges of the steps with positive weight (`step_ranges`); they start at starts of stretches."""
        steps, is_small = self.planned.steps, self.planned.steps_together(len(self.a), len(self.b)) > 1
        ranges = step_ranges(len(steps), together=MOST_STEPS if is_small else MAX_STEP_BATCH)
        if self.planned.path.every == 1:
            return ranges
        length, bounds, end = ranges[0].stop, [0], 0
        for _, own in self.planned.stretches(steps):
            end += len(own)
            if end - bounds[-1] >= length:
                bounds.append(end)
        if bounds[-1] < end or not end:
            bounds.append(max(end, length))
        return [slice(first, last) for first, last in pairwise(bounds)]

    @cached_property
    def tiles(self) -> dict[Place, Tile]:
        """The tiles by their places."""
        return tiles_of(self.a, self.b, self.planned.tile_points, len(self.ranges))

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces, tile by tile, generated one by one, because there may be millions."""
        num_steps, prefix = len(self.planned.steps), self.named("tile")
        for place in self.tiles:
            name = "-".join(map(str, (prefix, *place)))
            if len(self.tiles) >= WHOLE_TILES:
                yield Piece(name, (*place, WHOLE), num_steps)
            else:
                yield from pieces_of_ranges(name, place, self.ranges, num_steps)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest tile."""
        largest = max((len(tile.rows) * len(tile.columns) for tile in self.tiles.values()), default=0)
        return largest * self.planned.num_sums * self.planned.sum_dtype.itemsize

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        kernel, a, b = self.planned, self.a, self.b
        return fingerprint(
            kernel.trajectory.digest, kernel.head, kernel.rule, kernel.step_weights, kernel.is_per_class,
            kernel.options.memory_budget, kernel.sum_dtype, a is b, a.X, b.X, a.is_train, b.is_train,
            *(["trace"] if kernel.is_traced else []), *path_identity(kernel.path), FEW_PIECES, SMALL_TILE, MAX_RANGES,
        )  # fmt: skip

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum one range of steps of a tile, or one range after another; the training side is on the right."""
        kernel, (*of_tile, number), done = self.kernel, place, 0
        tile = self.tiles[tuple(of_tile)]
        X, Y = _rows(self.a, tile.rows), _rows(self.b, tile.columns)
        if tile.is_turned:
            X, Y = Y, X
        are_training = tile.x_is_train and tile.y_is_train
        for own in self.ranges if number == WHOLE else [self.ranges[number]]:
            steps = kernel.steps[own]
            done += len(steps)
            if saved.added and done <= saved.steps:
                continue
            kernel.take_integrations()  # drop the counts of a stopped piece
            num_traced = kernel.trajectory.num_outputs if kernel.is_traced else 0
            shape = kernel.block_shape(len(X), len(Y))
            total = GramAccumulator(shape, kernel.reference, tile.is_symmetric, num_traced)
            is_mixed = tile.x_is_train != tile.y_is_train
            together = kernel.steps_together(len(X), len(Y)) if is_mixed else 1
            batches = kernel.step_batches(steps, max(len(X), len(Y)), are_training=are_training)
            if together > 1:
                batches = (steps[first : first + together] for first in range(0, len(steps), together))
            for batch in batches:
                if together > 1:
                    add_together(kernel, batch, total, X, Y)
                elif not is_mixed:
                    add_shared_nodes(kernel, batch, total, X, Y, are_training=are_training)
                elif kernel.path.every > 1:
                    add_chords(kernel, batch, total, X, Y)
                else:
                    add_test_train(kernel, batch, total, X, Y)
            saved.merge(Sums({"total": total.result().to(kernel.sum_dtype)}, steps=len(steps)))
            saved.merge(kernel.take_integrations())
            yield saved


def _rows(points: Points, indices: Tensor) -> Tensor:
    return aligned(points.X) if len(indices) == len(points) else points.X[indices]  # all points, in order


def assemble(work: GramWork) -> Float[Tensor, "K N ..."]:
    """Compute all tiles, and assemble a class-major block (`PlannedKernel.block_shape`)."""
    kernel, tiles, integrations = work.planned, list(work.tiles.values()), Sums()
    size, reference = (len(work.a), len(work.b)), kernel.reference.to(kernel.sum_dtype)
    is_whole = [(len(tile.rows), len(tile.columns)) for tile in tiles] == [size]
    block = reference if is_whole else empty_huge_pages(kernel.block_shape(*size), reference)
    with closing(run(work, kernel.options, "kernel")) as results:
        for tile, (_, found) in zip(tiles, results, strict=True):
            total = found.added.pop("total")
            integrations.merge(found)
            if tile.is_turned:
                total = transpose_block(total)
            if is_whole:
                block = total
                continue
            scatter_block(total, block, tile.rows, tile.columns)
            if tile.is_mirrored:
                scatter_block(transpose_block(total), block, tile.columns, tile.rows)
    warn_of_integrals(integrations)
    return block


class DiagonalWork(GramWork):
    """The kernel of points with themselves in pieces: some points of one copy, and a range of steps."""

    @cached_property
    def rows(self) -> dict[Place, Int64[Tensor, " rows"]]:
        """The points that are computed together, by copy."""
        return {
            (int(is_train), number): rows
            for is_train in (True, False)
            for number, rows in enumerate(self.a.copies(is_train).split(self.planned.tile_points))
            if len(rows)
        }

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces, group after group of points."""
        prefix = self.named("diagonal")
        for place in self.rows:
            name = "-".join(map(str, (prefix, *place)))
            yield from pieces_of_ranges(name, place, self.ranges, len(self.planned.steps))

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""
        of_point = self.planned.trajectory.num_outputs**2 * self.planned.reference.itemsize
        return max(map(len, self.rows.values()), default=0) * of_point

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return fingerprint("diagonal", super().identity())

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum a range of the steps of some points."""
        kernel, (is_train, part, number) = self.kernel, place
        steps, X = kernel.steps[self.ranges[number]], self.a.X[self.rows[is_train, part]]
        kernel.take_integrations()  # drop the counts of a stopped piece
        C = kernel.trajectory.num_outputs
        total = kernel.reference.new_zeros(len(X), C, C)
        for batch in kernel.step_batches(steps, len(X), are_training=bool(is_train)):
            nodes = kernel.shared_nodes(batch, X, are_training=bool(is_train))
            weights = iter(kernel.reference.new_tensor([weight for *_, weight in nodes]).split(1))
            for count, jacobians in kernel.joined_jacobians([(s, t) for s, t, _ in nodes], X, kernel.cost()):
                first, *others = (jacobian.pointwise_products(jacobian) for jacobian in jacobians)
                for products in others:
                    first = first.add_(products)
                own = torch.cat([next(weights) for _ in range(count)])
                total += torch.tensordot(own, first.unflatten(0, (count, -1)), 1)
        sums = Sums({"total": total}, steps=len(steps))
        sums.merge(kernel.take_integrations())
        yield sums


def add_shared_nodes(
    kernel: PlannedKernel, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor, *, are_training: bool
) -> None:
    """Add sum_q w_q J_sq(x) J_sq(y)^T for each step, between copies of one kind: one product per node."""
    points = X if tile.is_symmetric else torch.cat([X, Y])
    nodes = kernel.shared_nodes(steps, points, are_training=are_training)
    together = kernel.steps_together(len(X), len(Y))
    size = together * kernel.rule.num_contractions if together > 1 else kernel.batch_size(len(X) + len(Y))
    for batch in (nodes[first : first + size] for first in range(0, len(nodes), size)):
        at_nodes = [(s, t) for s, t, _ in batch]
        if together > 1:
            cost = replace(kernel.cost(), joins_states=True)
            weights = kernel.reference.new_tensor([w for *_, w in batch])
            of_x = kernel.jacobians_together(at_nodes, X, cost)
            of_y = of_x if tile.is_symmetric else kernel.jacobians_together(at_nodes, Y, cost)
            pair = torch.arange(len(batch) * len(X), device=X.device)
            each = NodeWeights(torch.ones_like(pair, dtype=weights.dtype), pair, len(pair))
            tile.add_states(NodeBatch(of_x, each), of_y, weights)
            continue
        left = list(kernel.jacobians(at_nodes, X))
        right = left if tile.is_symmetric else list(kernel.jacobians(at_nodes, Y))
        tile.add_steps(left, right, [weight for *_, weight in batch])


def add_test_train(kernel: PlannedKernel, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add (sum_q w_q J_sq(x)) J_s(y)^T for each step.

    The left side is averaged over nodes before any product; layers without an average are multiplied node by node.
    """
    right = list(kernel.jacobians([(s, 0.0) for s, _ in steps], Y))
    averages = list[Averages]()
    at_nodes = kernel.node_batches([s for s, _ in steps], X, kernel.cost())
    for (_, eta), other, nodes in zip(steps, right, at_nodes, strict=True):
        averages.append(Averages())
        for batch in nodes:
            add_to_averages(averages[-1], batch)
            tile.add_nodes(batch, other, eta, averages[-1])
    layers = sorted(averages[0])
    tile.add_steps(
        [[of_step[layer] for layer in layers] for of_step in averages],
        [[of_step[layer] for layer in layers] for of_step in right],
        [eta for _, eta in steps],
    )


def add_together(kernel: PlannedKernel, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add the same sum for a small tile: the products of all steps at once."""
    numbers, cost = [s for s, _ in steps], replace(kernel.cost(), joins_states=True)
    right = kernel.jacobians_together([(s, 0.0) for s in numbers], Y, cost)
    etas = kernel.reference.new_tensor([eta for _, eta in steps])
    tile.add_states(kernel.nodes_together(numbers, X, cost), right, etas)


def add_chords(kernel: PlannedKernel, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add the products of test copies with training copies for each step.

    Args:
        kernel: The kernel.
        steps: (s, eta_s) of each step, all that count of each chord.
        tile: The tile.
        X: The test copies, on the left.
        Y: The training copies.
    """
    chords = kernel.stretches(steps)
    left, right, weights = list[list[LeftFactor]](), list[list[LeftFactor]](), list[float]()
    at_nodes = kernel.node_batches([first for first, _ in chords], X, kernel.cost(1))
    for (_, own), nodes in zip(chords, at_nodes, strict=True):
        batches, length = list(nodes), sum(eta for _, eta in own)
        averages, sums = _test_side(kernel, batches), Averages()
        for part in (own[n : n + MAX_STEP_BATCH] for n in range(0, len(own), MAX_STEP_BATCH)):
            jacobians = list(kernel.jacobians([(s, 0.0) for s, _ in part], Y, kernel.cost(1)))
            for layer in averages:
                one, *others = (of_step[layer] for of_step in jacobians)
                sums[layer] = one.add_states(sums.get(layer), others, [eta / length for _, eta in part])
            for (_, eta), of_step in zip(part, jacobians, strict=True):
                for batch in batches:
                    tile.add_nodes(batch, of_step, eta, averages)
        left.append([*averages.values()])
        right.append([*sums.values()])
        weights.append(length)
    tile.add_steps(left, right, weights)


def _test_side(kernel: PlannedKernel, batches: Sequence[NodeBatch]) -> Averages:
    """Average test copies over the nodes of a chord, except for layers that are multiplied node by node."""
    averages = Averages()
    for layer, one in enumerate(batches[0].jacobians):
        if one.multiplies_nodes(kernel.mixed_cost):
            continue
        of_nodes = [batch.jacobians[layer] for batch in batches]
        shared = [batch.nodes.weights for batch in batches if isinstance(batch.nodes.weights, float)]
        if len(shared) == len(batches):
            averages[layer] = one.add_states(None, of_nodes[1:], shared)
            continue
        for jacobian, batch in zip(of_nodes, batches, strict=True):  # each point has its own nodes
            term = jacobian if jacobian.commutes_with_average else DenseJacobian(jacobian.to_dense())
            averages[layer] = term.average(averages.get(layer), batch.nodes)
    return averages
