"""How a Gram block is divided: into tiles of points, and each tile's sum into ranges of steps."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.trajectory import aligned
from epk_gp.core.options import ComputeOptions
from epk_gp.core.losses import Head
from epk_gp.core.plans import MAX_STEP_BATCH
from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.distributed.job import Place
from epk_gp.distributed.planned_pieces import PlannedPieces
from epk_gp.gram.sums import CopyBatch, add_steps, step_batches
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.sums import Steps
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.sums import feature_bytes
from epk_gp.quadrature.paths import WeightPath
from epk_gp.quadrature.rules import Rule
from epk_gp.storage.partial_sums import PartialSums

# Ranges of steps into which a tile's sum is divided, at most: they are what workers share where points are few.
MAX_RANGES = 64

# Pieces below which tiles are divided further, and points that a side of such a tile has at least. In 500 x 1000 points
# of an MLP with 256 hidden units, the gradients of the 1000 are 2 % of the work, and are computed once more.
FEW_PIECES, SMALL_TILE = 16, 500

# Place of a piece that is a whole tile, in place of the number of a range of steps.
WHOLE = -1


@runtime_checkable
class StepCounter(Protocol):
    """What is told how many steps were added: a progress bar, or a clock."""

    def update(self, n: int, /) -> object:
        """Count n more steps."""


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


def block_tiles(context: ExecutionContext, a: Points, b: Points) -> list[Tile]:
    """Divide a block into the tiles in which it is computed."""
    return tiles_of(a, b, tile_points(context), len(ranges_of(context)))


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


def tile_name(prefix: str, tile: Tile) -> str:
    """Name the partial sum of a tile.

    Args:
        prefix: Of all tiles of a block.
        tile: The tile.
    """
    return f"{prefix}-{tile.x_is_train:d}{tile.y_is_train:d}-{tile.i}-{tile.j}"


def sum_dtype(context: ExecutionContext) -> torch.dtype:
    """Return the dtype in which ranges of steps are summed."""
    return context.options.accumulate or context.reference.dtype


def add_range(
    context: ExecutionContext, total: Float[Tensor, "K n ..."] | None, part: Float[Tensor, "K n ..."]
) -> Float[Tensor, "K n ..."]:
    """Add the sum of a range of steps to that of all ranges before it, in its memory; None before the first one."""
    return part.to(sum_dtype(context)) if total is None else total.add_(part)


def require_total(tile: Tile, total: Float[Tensor, "K n ..."] | None) -> Float[Tensor, "K n ..."]:
    """Return the sum of a tile over all steps.

    Raises:
        ValueError: There is none.
    """
    if total is None:
        raise ValueError(f"checkpoint must hold the sum of tile {tile.place}: it is empty. Delete its folder.")
    return total


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


def sum_range(
    context: ExecutionContext, a: Points, b: Points, tile: Tile, steps: Steps, bar: StepCounter | None = None
) -> Float[Tensor, "K n ..."]:
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
        if bar is not None:
            bar.update(len(batch))
    return total.result()


def _batch(points: Points, indices: Tensor, is_train: bool, key: Hashable) -> CopyBatch:
    whole = len(indices) == len(points)  # in their order
    return CopyBatch(aligned(points.X) if whole else points.X[indices], is_train, key)


@dataclass(frozen=True)
class Progress:
    """Where workers keep what they have of a tile before it is whole: another one resumes from there.

    Attributes:
        folder: Folder of partial sums.
        identity: Their identity.
        prefix: Of their names.
        is_durable: Whether they survive a power failure.
    """

    folder: str
    identity: str
    prefix: str
    is_durable: bool = True


@dataclass(frozen=True, eq=False)
class GramPieces(PlannedPieces):
    """A Gram block as pieces for workers: a tile, and a range of its steps, or all of them (`WHOLE`).

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
        b: Those on the right.
        progress: Where whole tiles grow; None if each piece is a range of steps.
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
    progress: Progress | None = None

    @classmethod
    def of(cls, context: ExecutionContext, a: Points, b: Points, progress: Progress | None = None) -> "GramPieces":
        """Return the pieces of a block."""
        options = replace(context.options, executor=None, progress=False, checkpoint=None)
        return cls(
            context.trajectory, context.head, context.rule, context.step_weights, context.is_per_class,
            context.is_traced, context.path, options, a, b, progress, plan=context.net.plan,
        )  # fmt: skip

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.trajectory, self.a.X

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Sum a range of the steps of a tile, or all of them."""
        context = self.context()
        *of_tile, number = place
        tile, steps = self._tiles[tuple(of_tile)], context.steps
        if number == WHOLE:
            total = self._whole(context, tile)
        else:
            total = sum_range(context, self.a, self.b, tile, steps[ranges_of(context)[number]])
        return {"total": total, **context.integrations.state()}

    def _whole(self, context: ExecutionContext, tile: Tile) -> Tensor:
        """Sum range by range, from where another worker was."""
        if self.progress is None:
            raise ValueError("whole tiles must have a folder in which they grow: progress is None.")
        own, name = self.progress, tile_name(self.progress.prefix, tile)
        sums = PartialSums(own.folder, own.identity, is_durable=own.is_durable)
        stored, done = sums.load(name)
        total = stored["total"].to(context.reference.device) if stored else None
        if "integrals" in stored:
            context.integrations.merge(stored)
        steps = context.steps
        ranges = ranges_of(context)
        for number in range(done, len(ranges)):
            total = add_range(context, total, sum_range(context, self.a, self.b, tile, steps[ranges[number]]))
            if sums.should_save and number + 1 < len(ranges):
                with suppress(OSError):  # a full disk ends the job when the piece is written, not here
                    sums.save(name, {"total": total, **context.integrations.state()}, number + 1)
        return require_total(tile, total)

    @cached_property
    def _tiles(self) -> dict[Place, Tile]:
        return {tile.place: tile for tile in block_tiles(self.context(), self.a, self.b)}

    def context(self) -> ExecutionContext:
        """Return the kernel while a piece is computed."""
        return ExecutionContext(
            self.trajectory, self.net, self.head, self.rule, self.step_weights, self.is_per_class, self.options,
            self.is_traced, self.path,
        )  # fmt: skip
