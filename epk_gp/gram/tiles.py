"""A Gram block as tiles of points, each summed over ranges of steps: here, or by workers."""

import threading
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import MAX_STEP_BATCH, empty_huge_pages
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.gram.accumulator import GramAccumulator, scatter_block, transpose_block
from epk_gp.gram.context import ExecutionContext, warn_of_integrals
from epk_gp.gram.sums import CopyBatch, Steps, add_steps, feature_bytes, step_batches
from epk_gp.quadrature.rules import Rule, WeightPath, path_identity
from epk_gp.work.run import RunWork, run
from epk_gp.work.sums import Piece, Place, Sums

# Ranges of steps into which a tile's sum is divided, at most: they are what workers share where points are few.
MAX_RANGES = 64

# Pieces below which tiles are divided further, and points that a side of such a tile has at least. In 500 x 1000 points
# of an MLP with 256 hidden units, the gradients of the 1000 are 2 % of the work, and are computed once more.
FEW_PIECES, SMALL_TILE = 16, 500

# Tiles from which on each is one piece. The owner of a job reads all pieces, one by one; that takes 3 to 4 % of the
# time in which a worker computes a range of steps, so that 30 workers keep it busy. For 10^6 x 60,000 points and 1,000
# steps it takes 8 hours for sums of ranges, and 8 minutes for those of tiles (benchmarks/beyond_one_machine.py).
WHOLE_TILES = 64

# Place of a piece that is a whole tile, in place of the number of a range of steps.
WHOLE = -1


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile of a block: some points of one copy on either side.

    Attributes:
        x_is_train: Whether the points on the left are training copies.
        y_is_train: The same of the right.
        i: Number of the part on the left.
        j: Number of the part on the right.
        rows: Indices of the points on the left.
        columns: Indices of the points on the right.
        is_symmetric: Both sides are the same points.
        is_mirrored: Its transpose is another tile of the block, which is not listed.
    """

    x_is_train: bool
    y_is_train: bool
    i: int
    j: int
    rows: Int64[Tensor, " n"]
    columns: Int64[Tensor, " m"]
    is_symmetric: bool
    is_mirrored: bool

    @property
    def place(self) -> Place:
        """Return what tells the tile from others of the block."""
        return int(self.x_is_train), int(self.y_is_train), self.i, self.j

    @property
    def is_turned(self) -> bool:
        """Whether its transpose is computed, which has the training side on the right."""
        return self.x_is_train and not self.y_is_train


def tile_points(context: ExecutionContext) -> int:
    """Count the points on each side of a tile."""
    return context.memory.tile_points(context.num_sums, feature_bytes(context))


def keep_training_sums(context: ExecutionContext, tiles: Sequence[Tile]) -> None:
    """Let sums of the training side over chords be kept, if several tiles of a block are computed with a context."""
    if context.path.every > 1 and len(tiles) > 1:
        sizes = {(len(tile.rows), len(tile.columns)) for tile in tiles}
        of_point = feature_bytes(context)
        context.training_sums.max_bytes = min(
            context.memory.kept_bytes(context.num_sums, of_point, *size) for size in sizes
        )


def tiles_of(a: Points, b: Points, size: int, num_ranges: int) -> list[Tile]:
    """Divide a block into tiles, copy by copy.

    Where points and ranges of steps make few pieces, tiles are smaller than they may be, so that workers share them.
    Between different copies only the test points are divided further: the others cost less at each step, one node.

    Args:
        a: The points on the left.
        b: Those on the right; the same object as a for a symmetric block.
        size: Points on each side of a tile, at most.
        num_ranges: Ranges of steps of each tile.
    """
    wanted = FEW_PIECES // num_ranges
    same, tiles = a is b, []
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
                tiles.append(Tile(x_is_train, y_is_train, i, j, n, m, is_symmetric, same and not is_symmetric))
    return tiles


def _split(indices: Int64[Tensor, " n"], size: int, wanted: int) -> list[Tensor]:
    """Divide points into parts of at most some size, and into as many as are wanted if these are large enough."""
    n = len(indices)
    most, parts = min(wanted, n // SMALL_TILE), 1
    while 2 * parts <= most:  # 2, 4, 8, ... of them are shared equally by so many workers
        parts *= 2
    return list(indices.split(min(size, max(1, -(-n // parts)))))


def sum_dtype(context: ExecutionContext) -> torch.dtype:
    """Return the dtype in which ranges of steps are summed."""
    return context.options.accumulate or context.reference.dtype


def step_ranges(num_steps: int, most: int = MAX_RANGES, every: int = 1) -> list[slice]:
    """Divide steps into ranges of equal length, which are summed one by one: at least one, and not many.

    Args:
        num_steps: Number of steps.
        most: Largest number of ranges.
        every: Steps of a chord, which is not divided.
    """
    length = MAX_STEP_BATCH * max(1, -(-num_steps // (MAX_STEP_BATCH * max(1, most))))
    length = every * -(-length // every)
    return [slice(first, first + length) for first in range(0, max(1, num_steps), length)]


def ranges_of(context: ExecutionContext) -> list[slice]:
    """Divide the steps that count into ranges, as `step_ranges` does, which begin where stretches of the path do."""
    steps = context.steps
    ranges = step_ranges(len(steps))
    if context.path.every == 1:
        return ranges
    length, bounds, end = ranges[0].stop, [0], 0
    for _, own in context.stretches(steps):
        end += len(own)
        if end - bounds[-1] >= length:
            bounds.append(end)
    if bounds[-1] < end or not end:
        bounds.append(max(end, length))
    return [slice(first, last) for first, last in pairwise(bounds)]


def sum_range(context: ExecutionContext, a: Points, b: Points, tile: Tile, steps: Steps) -> Float[Tensor, "K n ..."]:
    """Sum some steps of a tile, class-major, with the training side on the right (`Tile.is_turned`)."""
    x = _batch(a, tile.rows, tile.x_is_train, ("rows", tile.i))
    y = _batch(b, tile.columns, tile.y_is_train, ("columns", tile.j))
    if tile.is_turned:
        x, y = y, x
    num_traced = context.num_outputs if context.is_traced else 0
    total = GramAccumulator(context.block_shape(len(x), len(y)), context.reference, tile.is_symmetric, num_traced)
    are_training = x.is_train and y.is_train
    for batch in step_batches(context, steps, max(len(x), len(y)), are_training=are_training):
        add_steps(context, batch, total, x, y)
    return total.result()


def _batch(points: Points, indices: Tensor, is_train: bool, key: Hashable) -> CopyBatch:
    whole = len(indices) == len(points)  # in their order
    return CopyBatch(aligned(points.X) if whole else points.X[indices], is_train, key)


Kind = TypeVar("Kind", bound="GramWork")  # typing.Self is not checked at run time


@dataclass(frozen=True, eq=False)
class GramWork(RunWork):
    """A Gram block in pieces: a tile, and a range of its steps, or all of them (`WHOLE`) where there are many tiles.

    Attributes:
        trajectory: The run.
        head: Whether f is the logits or their log-softmax.
        rule: Quadrature rule.
        step_weights: eta_s of each of the S steps.
        is_per_class: Only pairs of equal classes are wanted.
        is_traced: Only their sum is wanted.
        path: Along which test copies move.
        options: How to compute, without an executor.
        a: The points on the left.
        b: Those on the right; the same object as a for a symmetric block.
    """

    trajectory: Trajectory
    head: Head
    rule: Rule
    step_weights: tuple[float, ...]
    is_per_class: bool
    is_traced: bool
    path: WeightPath
    options: ComputeOptions
    a: Points
    b: Points

    @classmethod
    def of(cls: type[Kind], context: ExecutionContext, a: Points, b: Points) -> Kind:
        """Return the pieces of a block, some of which this thread may compute with the kernel's context."""
        options = replace(context.options, executor=None, progress=False, checkpoint=None)
        work = cls(
            context.trajectory, context.head, context.rule, context.step_weights, context.is_per_class,
            context.is_traced, context.path, options, a, b, plan=context.net.plan,
        )  # fmt: skip
        work._of_thread.context = context
        return work

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.trajectory, self.a.X

    @cached_property
    def _of_thread(self) -> threading.local:
        return threading.local()

    @property
    def context(self) -> ExecutionContext:
        """The kernel in this thread, from one piece to the next."""
        if not hasattr(self._of_thread, "context"):
            self._of_thread.context = ExecutionContext(
                self.trajectory, self.net, self.head, self.rule, self.step_weights, self.is_per_class, self.options,
                self.is_traced, self.path,
            )  # fmt: skip
        context: ExecutionContext = self._of_thread.context
        return context

    @cached_property
    def ranges(self) -> list[slice]:
        """Ranges of the steps that count."""
        return ranges_of(self.context)

    @cached_property
    def tiles(self) -> dict[Place, Tile]:
        """The tiles by their places."""
        tiles = tiles_of(self.a, self.b, tile_points(self.context), len(self.ranges))
        return {tile.place: tile for tile in tiles}

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces, tile by tile, listed one by one: they may be millions."""
        num_steps = len(self.context.steps)
        # partial sums of another plan are other sums
        prefix = fingerprint(self.plan, tile_points(self.context), FEW_PIECES, SMALL_TILE, MAX_RANGES)
        for place in self.tiles:
            name = "-".join(map(str, (prefix, *place)))
            if len(self.tiles) >= WHOLE_TILES:
                yield Piece(name, (*place, WHOLE), num_steps)
                continue
            total = "" if len(self.ranges) == 1 else name
            for number, steps in enumerate(self.ranges):
                yield Piece(f"{name}-{number}", (*place, number), len(range(num_steps)[steps]), total)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest tile."""
        largest = max((len(tile.rows) * len(tile.columns) for tile in self.tiles.values()), default=0)
        return largest * self.context.num_sums * sum_dtype(self.context).itemsize

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        a, b = self.a, self.b
        return fingerprint(
            self.trajectory.digest, self.head, self.rule, self.step_weights, self.is_per_class,
            self.options.memory_budget, sum_dtype(self.context), a is b, a.X, b.X, a.is_train, b.is_train,
            *(["trace"] if self.is_traced else []), *path_identity(self.path),
        )  # fmt: skip

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum a range of the steps of a tile, or one range after another."""
        context, (*of_tile, number), sums, done = self.context, place, saved, 0
        tile, steps = self.tiles[tuple(of_tile)], context.steps
        for own in self.ranges if number == WHOLE else [self.ranges[number]]:
            done += len(steps[own])
            if sums.added and done <= sums.steps:
                continue
            context.take_integrations()  # those of a piece that was stopped
            total = sum_range(context, self.a, self.b, tile, steps[own]).to(sum_dtype(context))
            sums.merge(Sums({"total": total}, steps=len(steps[own])))
            sums.merge(context.take_integrations())
            yield sums


def gram_tiles(context: ExecutionContext, a: Points, b: Points) -> Float[Tensor, "K N ..."]:
    """Fill a class-major block tile by tile (`ExecutionContext.block_shape`)."""
    work, options = GramWork.of(context, a, b), context.options
    tiles, integrations = list(work.tiles.values()), Sums()
    if options.executor is None:
        keep_training_sums(context, tiles)

    def totals() -> Generator[Tensor, None, None]:
        with closing(run(work, options, "kernel")) as results:
            for tile, (_, sums) in zip(tiles, results, strict=True):
                total = sums.added.pop("total")
                integrations.merge(sums)
                yield transpose_block(total) if tile.is_turned else total

    with closing(totals()) as found:
        reference = context.reference.new_empty(0, dtype=sum_dtype(context))
        block = assembled(tiles, found, context.block_shape(len(a), len(b)), reference)
    warn_of_integrals(integrations)
    return block


def assembled(
    tiles: Sequence[Tile], totals: Iterator[Tensor], shape: tuple[int, ...], reference: Float[Tensor, " 0"]
) -> Float[Tensor, "K N ..."]:
    """Put a class-major block together from its tiles.

    Args:
        tiles: The tiles.
        totals: Their sums over all steps.
        shape: Shape of the block (`ExecutionContext.block_shape`).
        reference: An empty tensor of the block's dtype and device.
    """
    if len(tiles) == 1 and (len(tiles[0].rows), len(tiles[0].columns)) == (shape[1], shape[-1]):
        (total,) = totals
        return total
    result = empty_huge_pages(shape, reference)
    for tile, total in zip(tiles, totals, strict=True):
        scatter_block(total, result, tile.rows, tile.columns)
        if tile.is_mirrored:
            scatter_block(transpose_block(total), result, tile.columns, tile.rows)
    return result
