"""A Gram block as tiles: their sizes follow from the memory budget, and each is summed over all steps in turn."""

from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.memory_plan import MAX_STEP_BATCH
from epk_gp.core.points import Points
from epk_gp.gram.accumulation import CopyBatch, add_steps, step_batches
from epk_gp.gram.accumulator import GramAccumulator, scatter_block, transpose_block
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.huge_pages import empty_huge_pages
from epk_gp.gram.nodes import feature_bytes, jacobians_at_nodes, shared_nodes
from epk_gp.storage.partial_sums import PartialSums


def gram_tiles(context: ExecutionContext, a: Points, b: Points) -> Float[Tensor, "K N ..."]:
    """Fill a class-major block copy by copy and tile by tile (`ExecutionContext.block_shape`)."""
    same = a is b
    size = tile_points(context)
    sums = _open_partial_sums(context, a, b)
    combinations = [
        (x_is_train, y_is_train)
        for x_is_train, y_is_train in product((True, False), repeat=2)
        if not (same and y_is_train and not x_is_train)  # the mirror image of another combination
        and len(a.copies(x_is_train))
        and len(b.copies(y_is_train))
    ]
    plan_fingerprint = fingerprint(context.net.plan, size)  # partial sums of another plan are other sums
    if len(combinations) == 1 and max(len(a), len(b)) <= size:
        ((x_is_train, y_is_train),) = combinations
        x, y = CopyBatch(a.X, x_is_train), CopyBatch(b.X, y_is_train)
        return _tile(context, sums, f"{plan_fingerprint}-{x_is_train:d}{y_is_train:d}-0-0", x, y, is_symmetric=same)
    shape = context.block_shape(len(a), len(b))
    result = empty_huge_pages(shape, context.reference.new_empty(0, dtype=sum_dtype(context)))
    for x_is_train, y_is_train in combinations:
        rows, columns = a.copies(x_is_train).split(size), b.copies(y_is_train).split(size)
        mirrored = same and x_is_train == y_is_train
        for (i, n), (j, m) in product(enumerate(rows), enumerate(columns)):
            if mirrored and j < i:
                continue
            name = f"{plan_fingerprint}-{x_is_train:d}{y_is_train:d}-{i}-{j}"
            x, y = CopyBatch(a.X[n], x_is_train), CopyBatch(b.X[m], y_is_train)
            tile = _tile(context, sums, name, x, y, is_symmetric=mirrored and i == j)
            scatter_block(tile, result, n, m)
            if same and (x_is_train != y_is_train or i != j):
                scatter_block(transpose_block(tile), result, m, n)
    return result


def gram_diagonal(context: ExecutionContext, a: Points) -> Float[Tensor, "N C C"]:
    """Compute the blocks of points with themselves."""
    C = context.num_outputs
    result = context.reference.new_zeros(len(a), C, C)
    for is_train in (True, False):
        for rows in a.copies(is_train).split(tile_points(context)):
            if not len(rows):
                continue
            X, total = a.X[rows], result.new_zeros(len(rows), C, C)
            with tqdm(total=len(context.steps), desc="steps", disable=not context.options.progress) as bar:
                for batch in step_batches(context, context.steps, len(rows)):
                    nodes = [
                        (s, t, eta * weight)
                        for s, eta in batch
                        for t, weight in ([(0.0, 1.0)] if is_train else shared_nodes(context, s, X))
                    ]
                    at_nodes = jacobians_at_nodes(context, [(s, t) for s, t, _ in nodes], X)
                    for jacobians, (*_, weight) in zip(at_nodes, nodes, strict=True):
                        total += weight * sum_over_layers([j.pointwise_products(j) for j in jacobians])
                    bar.update(len(batch))
            result[rows] = total
    return result


def tile_points(context: ExecutionContext) -> int:
    """Count the points on each side of a tile."""
    return context.memory.tile_points(context.num_sums, feature_bytes(context))


def sum_dtype(context: ExecutionContext) -> torch.dtype:
    """Return the dtype in which blocks of steps are summed."""
    return context.options.accumulate or context.reference.dtype


def sum_over_layers(parts: list[Tensor]) -> Tensor:
    """Add the shares of all layers, in the memory of the first."""
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _open_partial_sums(context: ExecutionContext, a: Points, b: Points) -> PartialSums | None:
    folder = context.options.checkpoint
    if folder is None:
        return None
    identity = fingerprint(
        context.trajectory.digest, context.head, context.rule, context.step_weights, context.is_per_class,
        context.options.memory_budget, sum_dtype(context), a is b, a.X, b.X, a.is_train, b.is_train,
        *(["trace"] if context.is_traced else []),
    )  # fmt: skip
    return PartialSums(folder, identity)


def _tile(
    context: ExecutionContext, sums: PartialSums | None, name: str, x: CopyBatch, y: CopyBatch, *, is_symmetric: bool
) -> Tensor:
    """Sum a tile, class-major, with the training side on the right."""
    if x.is_train and not y.is_train:
        return transpose_block(_sum_tile(context, sums, name, y, x, is_symmetric=False))
    return _sum_tile(context, sums, name, x, y, is_symmetric=is_symmetric)


def _sum_tile(
    context: ExecutionContext, sums: PartialSums | None, name: str, x: CopyBatch, y: CopyBatch, *, is_symmetric: bool
) -> Tensor:
    """Sum a tile over all steps, in blocks of steps from where a checkpoint has it."""
    stored, done = ({}, 0) if sums is None else sums.load(name)
    total = stored["total"].to(context.reference.device) if stored else None
    steps, dtype = context.steps, sum_dtype(context)
    sums_in_blocks = sums is not None or dtype is not context.reference.dtype
    size = MAX_STEP_BATCH if sums_in_blocks else max(1, len(steps))
    shape = context.block_shape(len(x), len(y))
    num_traced = context.num_outputs if context.is_traced else 0
    with tqdm(
        total=len(steps), initial=min(done, len(steps)), desc="steps", disable=not context.options.progress
    ) as bar:
        for first in range(done, max(1, len(steps)), size):
            tile = GramAccumulator(shape, context.reference, is_symmetric, num_traced)
            for batch in step_batches(context, steps[first : first + size], max(len(x), len(y))):
                add_steps(context, batch, tile, x, y)
                bar.update(len(batch))
            total = tile.result().to(dtype) if total is None else total.add_(tile.result())
            if sums is not None and (sums.should_save or first + size >= len(steps)):
                sums.save(name, {"total": total}, first + size)
    if total is None:
        raise ValueError(f"checkpoint must hold the sum of tile {name}: it is empty. Delete its folder.")
    return total
