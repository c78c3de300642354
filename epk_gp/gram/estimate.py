"""What a Gram block costs before it is computed: time, memory and disk, from a few of its pieces."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.trajectory import Trajectory
from epk_gp.distributed.cost_estimate import (
    CostEstimate,
    DiskEstimate,
    estimate_costs,
    free_bytes,
    synchronise,
    validate_measuring,
)
from epk_gp.distributed.cost_sample import Clock, PieceKind, SampledCosts, Tick, sample_costs
from epk_gp.distributed.job import Place, pickled
from epk_gp.distributed.pieces import num_ahead
from epk_gp.gram.block_parts import PieceLayout, Share, StepInterval, piece_layout
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sums import Steps, step_batches
from epk_gp.gram.tiles import WHOLE, WHOLE_TILES, GramPieces, Tile, ranges_of, sum_dtype, sum_range, tile_points
from epk_gp.quadrature.paths import WeightPath, straight
from epk_gp.quadrature.rules import Rule, gauss_legendre

SECONDS = 10.0  # for measuring, by default

# Steps of a piece that are measured at a time, at least: the first of them is not counted.
_MIN_UNIT = 4


def estimate_gram(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head | None = None,
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    path: WeightPath = straight(),
    which: StepInterval | Share | None = None,
    workers: int | None = None,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
    **options: Unpack[ComputeSettings],
) -> CostEstimate:
    """Estimate what `gram_block` costs with the same arguments, or `gram_block_part` of one of its parts.

    Some steps of some pieces are computed, spread over the points and the run, and the sum over all pieces is
    extrapolated, with an interval. If all pieces can be computed in the time for measuring, they are. How the block is
    divided, and the bytes of the result and of each piece, are exact. Nothing is written.

    Args:
        trajectory: Training run with S steps.
        a: N points, each a training or a test copy.
        b: M points.
        head: As of `gram_block`.
        rule: As of `gram_block`.
        step_weights: As of `gram_block`.
        path: As of `gram_block`.
        which: The part that is computed; the whole block by default.
        workers: Number of processes of one thread each that will compute; by default this process with its threads.
        seconds: Time for measuring. It is exceeded where three parts of each kind of pieces take longer.
        clock: Gives the time in seconds: `time.process_time` counts this process's work only, on a busy machine.
        options: `memory_budget`, `accumulate`, `progress` and `checkpoint`; see `ComputeOptions`. The checkpoint is
            neither read nor written, but its files are counted.

    Raises:
        TypeError, ValueError: As of `gram_block`; or `workers` or `seconds` are not positive.
    """
    parsed = parse_options("estimate_gram", ("executor",), **options)
    validate_measuring(workers, seconds)
    kernel = PathKernel(trajectory, head, rule, step_weights=step_weights, path=path)
    start = clock()

    def measured(context: ExecutionContext) -> tuple[_BlockWork, float, SampledCosts]:
        work = _BlockWork.of(context, a, b, which, workers)
        setup = clock() - start
        return work, setup, sample_costs(work, seconds, clock=clock, progress=parsed.progress)

    return estimate_costs(lambda: kernel.with_context(a, b, parsed, measured), workers, parsed.memory_budget, clock)


@dataclass(frozen=True, eq=False)
class _BlockWork:
    """The pieces of a block, or of one of its parts.

    Attributes:
        pieces: The pieces, as workers get them.
        context: The kernel, with its plan.
        layout: How the block is divided.
        which: The part that is computed.
        places: The pieces that are computed.
    """

    pieces: GramPieces
    context: ExecutionContext
    layout: PieceLayout
    which: StepInterval | Share | None
    places: list[Place]

    @classmethod
    def of(
        cls, context: ExecutionContext, a: Points, b: Points, which: StepInterval | Share | None, workers: int | None
    ) -> "_BlockWork":
        """Divide a block.

        Raises:
            ValueError: There is no such part.
        """
        layout = piece_layout(context, a, b)
        places = layout.places if which is None else which.places(layout)
        if which is None and workers is not None and len(layout.tiles) >= WHOLE_TILES:
            places = [(*tile.place, WHOLE) for tile in layout.tiles]
        return cls(GramPieces.of(context, a, b), context, layout, which, places)

    @cached_property
    def tiles(self) -> dict[Place, Tile]:
        """The tiles by their places."""
        return {tile.place: tile for tile in self.layout.tiles}

    @cached_property
    def ranges(self) -> list[slice]:
        """Ranges of the steps."""
        return ranges_of(self.context)

    @cached_property
    def kinds(self) -> Sequence[PieceKind]:
        """The pieces, by copies, size, and whether both sides are the same points."""
        groups: dict[tuple[str, bool, int, int], list[Place]] = {}
        for place in self.places:
            tile = self.tiles[place[:-1]]
            key = (_copies(tile), tile.is_symmetric, len(tile.rows), len(tile.columns))
            groups.setdefault(key, []).append(place)
        return [self._kind(key, places) for key, places in groups.items()]

    def compute(self, place: Place, first: int, last: int, tick: Tick) -> None:
        """Sum some steps of a piece."""
        *of_tile, number = place
        steps = self._steps(number)[first:last]
        context = self.pieces.context()
        bar = _Ticks(context.reference, tick)
        sum_range(context, self.pieces.a, self.pieces.b, self.tiles[tuple(of_tile)], steps, bar)
        synchronise(context.reference)

    @property
    def description(self) -> str:
        """Return how the block is divided, in words."""
        N, M, size = len(self.pieces.a), len(self.pieces.b), tile_points(self.context)
        if self._is_whole:
            return (
                f"{len(self.places)} (tiles of up to {size} x {size} of {N} x {M} points, each through all "
                f"{len(self.context.steps)} steps)"
            )
        of = "" if self.which is None else f"{len(self.places)} of "
        return (
            f"{of}{len(self.layout.places)} = {len(self.layout.tiles)} (tiles of up to {size} x {size} of {N} x {M} "
            f"points) x {len(self.ranges)} (ranges of the {len(self.context.steps)} steps)"
        )

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""
        return max((self._tile_bytes(tile) for tile in self.layout.tiles), default=0)

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of the block; or of all sums of a part, which are kept apart."""
        if self.which is not None:
            return sum(self._tile_bytes(self.tiles[place[:-1]]) for place in self.places)
        pairs = len(self.pieces.a) * len(self.pieces.b)
        return pairs * self.context.num_sums * sum_dtype(self.context).itemsize

    def owner_bytes(self, workers: int | None) -> int:
        """Count the memory of the process that puts the block together, besides what computing takes.

        It holds the result; if workers compute, also the piece that it reads, twice, and the sum of a tile. The budget
        is none of these.
        """
        if workers is None:
            return self.result_bytes
        total = self._total_bytes(self.piece_bytes) if len(self.layout.tiles) > 1 and self.which is None else 0
        return self.result_bytes + 2 * self.piece_bytes + total

    def disk(self, workers: int | None) -> DiskEstimate:
        """Count the bytes of files."""
        keeps, count = self.context.options.checkpoint is not None, len(self.places)
        at_once, scratch = 0, 0
        if self.which is not None and keeps:
            at_once, scratch = count, self.result_bytes  # kept until the part is written
        elif workers is not None:
            # a checkpoint keeps the pieces of a tile until their sum is saved
            ahead = num_ahead(self.piece_bytes, free_bytes(self.context.options.checkpoint))
            if keeps:
                ahead = count if self._is_whole else ahead + len(self.ranges)
            at_once = min(count, ahead)
            growing = min(count, workers) if self._is_whole else 0  # what each worker has of a tile
            scratch = (at_once + growing) * self.piece_bytes
        if self.which is None and keeps and not self._is_whole:
            largest = self._total_bytes(self.piece_bytes)  # a file is replaced by the next one of its name
            scratch += sum(self._total_bytes(self._tile_bytes(tile)) for tile in self.layout.tiles) + largest
        if workers is not None:
            scratch += len(pickled(self.pieces))
        return DiskEstimate(self.result_bytes, self.piece_bytes, at_once, scratch)

    @property
    def _is_whole(self) -> bool:
        """Whether each piece is a tile through all steps."""
        return bool(self.places) and self.places[0][-1] == WHOLE

    def _steps(self, number: int) -> Steps:
        """Return the steps of a piece."""
        return self.context.steps if number == WHOLE else self.context.steps[self.ranges[number]]

    def _tile_bytes(self, tile: Tile) -> int:
        return len(tile.rows) * len(tile.columns) * self.context.num_sums * self.context.reference.itemsize

    def _total_bytes(self, num_bytes: int) -> int:
        """Return the bytes of a tile's sum over all ranges."""
        return num_bytes // self.context.reference.itemsize * sum_dtype(self.context).itemsize

    def _kind(self, key: tuple[str, bool, int, int], places: list[Place]) -> PieceKind:
        (copies, is_symmetric, n, m), steps = key, self.context.steps
        batches = step_batches(self.context, steps[self.ranges[0]], max(n, m))
        every = self.context.path.every  # chords are measured as a whole
        unit = every * -(-max(_MIN_UNIT, *(2 * len(batch) for batch in batches)) // every)
        family = f"{copies}, same points" if is_symmetric else copies
        sizes = (float(n if is_symmetric else n + m), float(n * m))
        pieces = [(place, len(self._steps(place[-1]))) for place in places]
        return PieceKind(f"{family}, {n} x {m}", family, sizes, unit, pieces, every)


@dataclass(frozen=True)
class _Ticks:
    """A clock that is read when steps were added."""

    reference: Tensor
    tick: Tick

    def update(self, n: int, /) -> None:
        synchronise(self.reference)
        self.tick(n)


def _copies(tile: Tile) -> str:
    left, right = ("training" if is_train else "test" for is_train in (tile.x_is_train, tile.y_is_train))
    if tile.is_turned:  # its transpose is computed
        left, right = right, left
    return f"{left} x {right} copies"
