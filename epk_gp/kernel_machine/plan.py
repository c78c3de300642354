"""What a Gram block or an attribution costs before it is computed: its pieces and bytes, and seconds."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Unpack

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import validate_positive
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.distributed.job import Place
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import WHOLE_TILES, GramPieces, block_tiles, ranges_of, sum_dtype
from epk_gp.kernel_machine.attribute import parse_groupings
from epk_gp.kernel_machine.attribution_pass import AttributionPass, AttributionPieces, TermSums
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.terms import make_problem, parse_problem

SECONDS = 10.0  # for measuring, by default


@dataclass(frozen=True)
class Plan:
    """How a computation is divided, and what it costs.

    Attributes:
        pieces: Number of pieces, which workers share: more workers than pieces are of no use.
        result_bytes: Of the result.
        piece_bytes: Of the largest piece.
        seconds: Of all pieces in one process, one after another, extrapolated from the first ones.
    """

    pieces: int
    result_bytes: int
    piece_bytes: int
    seconds: float


def plan_gram(
    kernel: PathKernel, a: Points, b: Points, *, seconds: float = SECONDS, **options: Unpack[ComputeSettings]
) -> Plan:
    """Say what `kernel.block(a, b)` costs, which is `gram_block` with the kernel's run, rule and path.

    Args:
        kernel: The kernel.
        a: N points, each a training or a test copy.
        b: M points.
        seconds: Time for measuring; exceeded where one piece of each kind of tiles takes longer.
        options: `memory_budget` and `accumulate`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As of `gram_block`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")

    def measured(context: ExecutionContext) -> Plan:
        tiles, ranges, pieces = block_tiles(context, a, b), ranges_of(context), GramPieces.of(context, a, b)
        kinds: dict[Hashable, list[tuple[Place, int]]] = {}
        for tile in tiles:
            kind = (tile.x_is_train, tile.y_is_train, tile.is_symmetric, len(tile.rows), len(tile.columns))
            steps = [((*tile.place, number), len(context.steps[steps])) for number, steps in enumerate(ranges)]
            kinds.setdefault(kind, []).extend(steps)
        itemsize, largest = context.num_sums * context.reference.itemsize, [len(t.rows) * len(t.columns) for t in tiles]
        return Plan(
            pieces=len(tiles) * (1 if len(tiles) >= WHOLE_TILES else len(ranges)),
            result_bytes=len(a) * len(b) * context.num_sums * sum_dtype(context).itemsize,
            piece_bytes=max(largest, default=0) * itemsize,
            seconds=_seconds_of_all(pieces.piece, kinds, seconds),
        )

    return kernel.with_context(a, b, parse_options("plan_gram", ("checkpoint", "executor"), **options), measured)


def plan_attribution(
    kernel: PathKernel,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    *,
    classes: Int64[Tensor, " n"] | None = None,
    seconds: float = SECONDS,
    **options: Unpack[ComputeSettings],
) -> Plan:
    """Say what `attribute_many` costs with the kernel's run, head, rule and path.

    Args:
        kernel: The kernel. `attribute_many` has the rule `adaptive(tol=1e-12)` by default.
        X: n inputs, taken as test copies.
        groupings: As of `attribute_many`; `[[by_sample(run)]]` stands for `attribute`.
        classes: One output per input.
        seconds: Time for measuring; exceeded where one block of points takes longer.
        options: `memory_budget`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As of `attribute_many`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")
    parsed = parse_options("plan_attribution", ("accumulate", "checkpoint", "executor"), **options)
    axes, packed = parse_groupings(kernel.trajectory, groupings), parse_problem(kernel, X, classes)

    def measured(net: PlannedModel) -> Plan:
        work = AttributionPass(make_problem(net, kernel, packed, classes, parsed), axes, splits_statistics=True)
        kinds: dict[Hashable, list[tuple[Place, int]]] = {}
        for block, rows in enumerate(work.blocks):
            steps = [
                ((block, number), len(range(kernel.trajectory.num_steps)[r])) for number, r in enumerate(work.ranges)
            ]
            kinds.setdefault(len(rows), []).extend(steps)

        def num_bytes(rows: int) -> int:
            like = torch.empty(rows, work.outputs_per_row, dtype=net.model.spec.dtype, device="meta")
            return sum(total.nbytes for total in TermSums.of(work.problem, axes, like).tensors)

        return Plan(
            pieces=len(work.blocks) * len(work.ranges),
            result_bytes=num_bytes(work.num_rows),
            piece_bytes=num_bytes(min(work.num_rows, work.rows_per_block)),
            seconds=_seconds_of_all(AttributionPieces.of(work).piece, kinds, seconds),
        )

    return with_plan(kernel.trajectory, kernel.trajectory.model_for(packed), measured)


def _seconds_of_all(
    compute: Callable[[Place], Mapping[str, Tensor]],
    kinds: Mapping[Hashable, Sequence[tuple[Place, int]]],
    seconds: float,
) -> float:
    """Compute pieces, each with its number of steps, one of every kind and more until the time is over; extrapolate."""
    begin, measured = time.perf_counter(), dict.fromkeys(kinds, (0.0, 0))
    for number, pieces in enumerate(zip_longest(*kinds.values())):
        for kind, piece in zip(kinds, pieces, strict=True):
            if piece is None or (number and time.perf_counter() - begin > seconds):
                continue
            start = time.perf_counter()
            for total in compute(piece[0]).values():
                total.cpu()  # a GPU computes behind the calls
            spent, steps = measured[kind]
            measured[kind] = spent + time.perf_counter() - start, steps + piece[1]
    return sum(
        spent * sum(steps for _, steps in kinds[kind]) / max(1, counted) for kind, (spent, counted) in measured.items()
    )
