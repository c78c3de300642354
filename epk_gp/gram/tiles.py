"""A Gram block as tiles of points, each summed over ranges of steps: here, or by workers."""

from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeOptions, SupportsSubmit
from epk_gp.core.plans import MAX_STEP_BATCH, empty_huge_pages
from epk_gp.core.show import progress_bar
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import Piece, computed_pieces, scratch_folder, threads_of_workers
from epk_gp.distributed.planned_pieces import PlannedPieces
from epk_gp.gram.accumulator import GramAccumulator, scatter_block, transpose_block
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.sums import CopyBatch, Steps, add_steps, feature_bytes, step_batches
from epk_gp.quadrature.paths import WeightPath, path_identity
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


# Tiles from which on each is one piece. The owner of a job reads all pieces, one by one; that takes 3 to 4 % of the
# time in which a worker computes a range of steps, so that 30 workers keep it busy. For 10^6 x 60,000 points and 1,000
# steps it takes 8 hours for sums of ranges, and 8 minutes for those of tiles (benchmarks/beyond_one_machine.py).
WHOLE_TILES = 64

OF_WORKER = "-whole"  # ends the name of a tile's sum that a worker has finished


def gram_tiles(context: ExecutionContext, a: Points, b: Points) -> Float[Tensor, "K N ..."]:
    """Fill a class-major block tile by tile (`ExecutionContext.block_shape`)."""
    tiles = block_tiles(context, a, b)
    executor = context.options.executor
    totals = _totals_here(context, a, b, tiles) if executor is None else _by_workers(executor, context, a, b, tiles)
    reference = context.reference.new_empty(0, dtype=sum_dtype(context))
    with closing(totals):
        return assembled(tiles, totals, context.block_shape(len(a), len(b)), reference)


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


def _totals_here(
    context: ExecutionContext, a: Points, b: Points, tiles: Sequence[Tile]
) -> Generator[Tensor, None, None]:
    """Sum tile by tile, from where a checkpoint has it."""
    folder = context.options.checkpoint
    sums = None if folder is None else PartialSums(folder, _identity(context, a, b))
    steps, prefix = context.steps, _prefix(context)
    ranges = ranges_of(context)
    keep_training_sums(context, tiles)
    for tile in tiles:
        name = tile_name(prefix, tile)
        total, done = _stored_total(context, sums, name)
        initial = min(len(steps), ranges[done].start) if done < len(ranges) else len(steps)
        used = list[str]()
        with progress_bar(len(steps), "kernel", unit="step", initial=initial, shown=context.options.progress) as bar:
            for number in range(done, len(ranges)):
                part = None if sums is None else _part_of_worker(context, sums, f"{name}-{number}")
                if part is None:
                    part = sum_range(context, a, b, tile, steps[ranges[number]], bar)
                else:
                    used.append(f"{name}-{number}")
                    bar.update(len(steps[ranges[number]]))
                total = add_range(context, total, part)
                if sums is not None and (sums.should_save or number + 1 == len(ranges)):
                    sums.save(name, {"total": total}, number + 1)
                    sums.remove(used)
                    used.clear()
        yield _finished(tile, total)


def _by_workers(
    executor: SupportsSubmit, context: ExecutionContext, a: Points, b: Points, tiles: Sequence[Tile]
) -> Generator[Tensor, None, None]:
    """Sum tile by tile what workers computed, in the order of `_totals_here`."""
    checkpoint = context.options.checkpoint
    with threads_of_workers(executor), scratch_folder(checkpoint) as folder:
        sums = PartialSums(folder, _identity(context, a, b), is_durable=checkpoint is not None)
        prefix = _prefix(context)
        pieces = TilePieces(prefix, len(ranges_of(context)), is_whole=len(tiles) >= WHOLE_TILES)
        done = [pieces.num_done(sums, tile) for tile in tiles]
        largest = max(len(tile.rows) * len(tile.columns) for tile in tiles) if tiles else 0
        num_bytes = largest * context.num_sums * context.reference.itemsize
        progress = (
            Progress(str(sums.folder.absolute()), sums.identity, prefix, sums.is_durable) if pieces.is_whole else None
        )
        # one by one: they are millions
        listed = (piece for tile, first in zip(tiles, done, strict=True) for piece in pieces.of(tile, first))
        results = computed_pieces(GramPieces.of(context, a, b, progress), listed, executor, sums, num_bytes)
        size, initial = len(tiles) * pieces.per_tile, sum(map(pieces.num_finished, done))
        with (
            closing(results),
            progress_bar(size, "kernel", unit="piece", initial=initial, shown=context.options.progress) as bar,
        ):
            for tile, first in zip(tiles, done, strict=True):
                name, used = tile_name(prefix, tile), list[str]()
                total, _ = _stored_total(context, sums, name) if pieces.num_finished(first) else (None, 0)
                for number, piece in enumerate(pieces.of(tile, first), first + 1):
                    total = add_range(context, total, _merged(context, next(results)))
                    used.append(piece.name)
                    if checkpoint is None:
                        sums.remove(used)
                        used.clear()
                    elif not pieces.is_whole and (number == pieces.count or sums.should_save):
                        sums.save(name, {"total": total}, number)
                        sums.remove(used)
                        used.clear()
                    bar.update()
                if pieces.is_whole and first < pieces.count:
                    sums.remove([name])  # what it grew from
                yield _finished(tile, total)


@dataclass(frozen=True)
class TilePieces:
    """The pieces of tiles.

    Attributes:
        prefix: Of their names.
        count: Number of ranges of steps.
        is_whole: Each tile is one piece.
    """

    prefix: str
    count: int
    is_whole: bool

    @property
    def per_tile(self) -> int:
        """Pieces of a tile."""
        return 1 if self.is_whole else self.count

    def num_done(self, sums: PartialSums, tile: Tile) -> int:
        """Count the ranges of steps of which a folder has the sum."""
        name = tile_name(self.prefix, tile)
        return self.count if sums.has(name + OF_WORKER) else sums.count(name)

    def num_finished(self, done: int) -> int:
        """Count the pieces of a tile that are finished when some ranges of its steps are."""
        return done // self.count if self.is_whole else done

    def of(self, tile: Tile, done: int) -> Iterator[Piece]:
        """List the pieces of a tile that are left when some ranges of its steps are done."""
        name = tile_name(self.prefix, tile)
        if not self.is_whole:
            yield from (Piece(f"{name}-{number}", (*tile.place, number)) for number in range(done, self.count))
        elif done < self.count:
            yield Piece(name + OF_WORKER, (*tile.place, WHOLE))


def _part_of_worker(context: ExecutionContext, sums: PartialSums, name: str) -> Tensor | None:
    """Return what a worker computed, which an earlier call had."""
    piece, _ = sums.load(name)
    return _merged(context, piece) if piece else None


def _merged(context: ExecutionContext, piece: dict[str, Tensor]) -> Tensor:
    """Return the sum of a piece, and count its integrals."""
    context.integrations.merge(piece)
    return piece["total"].to(context.reference.device)


def _finished(tile: Tile, total: Tensor | None) -> Tensor:
    total = require_total(tile, total)
    return transpose_block(total) if tile.is_turned else total


def _stored_total(context: ExecutionContext, sums: PartialSums | None, name: str) -> tuple[Tensor | None, int]:
    """Return what a checkpoint has of a tile, and how many ranges of steps that is."""
    if sums is not None and (whole := _part_of_worker(context, sums, name + OF_WORKER)) is not None:
        return whole, len(ranges_of(context))
    stored, done = ({}, 0) if sums is None else sums.load(name)
    if "integrals" in stored:  # of a worker
        context.integrations.merge(stored)
    return (stored["total"].to(context.reference.device) if stored else None), done


def _prefix(context: ExecutionContext) -> str:
    # partial sums of another plan are other sums
    return fingerprint(context.net.plan, tile_points(context), FEW_PIECES, SMALL_TILE, MAX_RANGES)


def _identity(context: ExecutionContext, a: Points, b: Points) -> str:
    return fingerprint(
        context.trajectory.digest, context.head, context.rule, context.step_weights, context.is_per_class,
        context.options.memory_budget, sum_dtype(context), a is b, a.X, b.X, a.is_train, b.is_train,
        *(["trace"] if context.is_traced else []), *path_identity(context.path),
    )  # fmt: skip
