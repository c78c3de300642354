"""A Gram block from its tiles, each summed over ranges of steps: here one after another, or by workers."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.options import SupportsSubmit
from epk_gp.core.step import fingerprint
from epk_gp.core.plans import empty_huge_pages
from epk_gp.core.inputs import Points
from epk_gp.core.show import progress_bar
from epk_gp.distributed.pieces import Piece, computed_pieces, scratch_folder, threads_of_workers
from epk_gp.gram.accumulator import scatter_block, transpose_block
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.tiles import (
    FEW_PIECES,
    MAX_RANGES,
    SMALL_TILE,
    WHOLE,
    GramPieces,
    Progress,
    Tile,
    add_range,
    block_tiles,
    keep_training_sums,
    ranges_of,
    require_total,
    sum_dtype,
    sum_range,
    tile_name,
    tile_points,
)
from epk_gp.quadrature.paths import path_identity
from epk_gp.storage.partial_sums import PartialSums

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
