"""A Gram block from its tiles, each summed over ranges of steps: here one after another, or by workers."""

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.executors import SupportsSubmit
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.points import Points
from epk_gp.distributed.pieces import Piece, computed_pieces, scratch_folder, threads_of_workers
from epk_gp.gram.accumulator import scatter_block, transpose_block
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.huge_pages import empty_huge_pages
from epk_gp.gram.tile_parts import GramPieces, Tile, step_ranges, sum_range, tile_points, tiles_of
from epk_gp.storage.partial_sums import PartialSums


def gram_tiles(context: ExecutionContext, a: Points, b: Points) -> Float[Tensor, "K N ..."]:
    """Fill a class-major block tile by tile (`ExecutionContext.block_shape`)."""
    tiles = tiles_of(a, b, tile_points(context))
    executor = context.options.executor
    totals = _totals_here(context, a, b, tiles) if executor is None else _by_workers(executor, context, a, b, tiles)
    reference = context.reference.new_empty(0, dtype=sum_dtype(context))
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


def sum_dtype(context: ExecutionContext) -> torch.dtype:
    """Return the dtype in which ranges of steps are summed."""
    return context.options.accumulate or context.reference.dtype


def _totals_here(context: ExecutionContext, a: Points, b: Points, tiles: Sequence[Tile]) -> Iterator[Tensor]:
    """Sum tile by tile, from where a checkpoint has it."""
    folder = context.options.checkpoint
    sums = None if folder is None else PartialSums(folder, _identity(context, a, b))
    steps, prefix = context.steps, _prefix(context)
    ranges = step_ranges(len(steps))
    for tile in tiles:
        name = _name(prefix, tile)
        total, done = _stored_total(context, sums, name)
        initial = min(len(steps), ranges[done].start) if done < len(ranges) else len(steps)
        used = list[str]()
        with tqdm(total=len(steps), initial=initial, desc="steps", disable=not context.options.progress) as bar:
            for number in range(done, len(ranges)):
                part = None if sums is None else _part_of_worker(context, sums, f"{name}-{number}")
                if part is None:
                    part = sum_range(context, a, b, tile, steps[ranges[number]], bar)
                else:
                    used.append(f"{name}-{number}")
                    bar.update(len(steps[ranges[number]]))
                total = _added(context, total, part)
                if sums is not None and (sums.should_save or number + 1 == len(ranges)):
                    sums.save(name, {"total": total}, number + 1)
                    sums.remove(used)
        yield _finished(tile, total)


def _by_workers(
    executor: SupportsSubmit, context: ExecutionContext, a: Points, b: Points, tiles: Sequence[Tile]
) -> Iterator[Tensor]:
    """Sum tile by tile what workers computed, in the order of `_totals_here`."""
    checkpoint = context.options.checkpoint
    with threads_of_workers(executor), scratch_folder(checkpoint) as folder:
        sums, prefix = PartialSums(folder, _identity(context, a, b)), _prefix(context)
        count = len(step_ranges(len(context.steps)))
        stored = [_stored_total(context, sums, _name(prefix, tile)) for tile in tiles]
        pieces = [
            Piece(f"{_name(prefix, tile)}-{number}", (*tile.place, number))
            for tile, (_, done) in zip(tiles, stored, strict=True)
            for number in range(done, count)
        ]
        largest = max(len(tile.rows) * len(tile.columns) for tile in tiles) if tiles else 0
        num_bytes = largest * context.num_sums * context.reference.itemsize
        results = computed_pieces(GramPieces.of(context, a, b), pieces, executor, sums, num_bytes)
        size, hidden = len(tiles) * count, not context.options.progress
        bar = tqdm(total=size, initial=size - len(pieces), desc="pieces", disable=hidden)
        with closing(results), bar:
            for tile, (total, done) in zip(tiles, stored, strict=True):
                name, used = _name(prefix, tile), list[str]()
                for number in range(done, count):
                    total = _added(context, total, _merged(context, next(results)))
                    used.append(f"{name}-{number}")
                    is_last = number + 1 == count
                    if checkpoint is None or is_last or sums.should_save:
                        if checkpoint is not None:
                            sums.save(name, {"total": total}, number + 1)
                        sums.remove(used)
                        used.clear()
                    bar.update()
                yield _finished(tile, total)


def _part_of_worker(context: ExecutionContext, sums: PartialSums, name: str) -> Tensor | None:
    """Return what a worker computed, which an earlier call had."""
    piece, _ = sums.load(name)
    return _merged(context, piece) if piece else None


def _merged(context: ExecutionContext, piece: dict[str, Tensor]) -> Tensor:
    """Return the sum of a piece, and count its integrals."""
    context.integrations.merge(piece)
    return piece["total"].to(context.reference.device)


def _added(context: ExecutionContext, total: Tensor | None, part: Tensor) -> Tensor:
    return part.to(sum_dtype(context)) if total is None else total.add_(part)


def _finished(tile: Tile, total: Tensor | None) -> Tensor:
    if total is None:
        raise ValueError(f"checkpoint must hold the sum of tile {tile.place}: it is empty. Delete its folder.")
    return transpose_block(total) if tile.is_turned else total


def _stored_total(context: ExecutionContext, sums: PartialSums | None, name: str) -> tuple[Tensor | None, int]:
    """Return what a checkpoint has of a tile, and how many ranges of steps that is."""
    stored, done = ({}, 0) if sums is None else sums.load(name)
    return (stored["total"].to(context.reference.device) if stored else None), done


def _prefix(context: ExecutionContext) -> str:
    return fingerprint(context.net.plan, tile_points(context))  # partial sums of another plan are other sums


def _name(prefix: str, tile: Tile) -> str:
    return f"{prefix}-{tile.x_is_train:d}{tile.y_is_train:d}-{tile.i}-{tile.j}"


def _identity(context: ExecutionContext, a: Points, b: Points) -> str:
    return fingerprint(
        context.trajectory.digest, context.head, context.rule, context.step_weights, context.is_per_class,
        context.options.memory_budget, sum_dtype(context), a is b, a.X, b.X, a.is_train, b.is_train,
        *(["trace"] if context.is_traced else []),
    )  # fmt: skip
