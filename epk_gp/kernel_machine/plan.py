"""What a Gram block or an attribution costs before it is computed: its pieces and bytes, and seconds."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Unpack

from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.verification import planned
from epk_gp.core.checks import ComputeSettings, parse_options, validate_positive
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.scalars import Function
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import GramWork
from epk_gp.kernel_machine.attribute import attribution_work, parse_request
from epk_gp.kernel_machine.axes import Axis
from epk_gp.work.run import Piece, Sums, Work

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
        seconds: Time for measuring, which each kind of tiles may take once.
        options: `memory_budget` and `accumulate`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As of `gram_block`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")

    parsed = parse_options("plan_gram", ("checkpoint", "executor"), **options)
    kernel.validate_points(a, b, parsed)
    while True:
        with planned(kernel.trajectory, a.X) as net:
            work = GramWork(kernel.with_net(net, parsed), a, b, plan=net.plan)
            tiles = (work.tiles[piece.place[:-1]] for piece in work.pieces)
            kinds = [(t.x_is_train, t.y_is_train, t.is_symmetric, len(t.rows), len(t.columns)) for t in tiles]
            result_bytes = len(a) * len(b) * work.planned.num_sums * work.planned.sum_dtype.itemsize
            return _measured(work, kinds, result_bytes, seconds)


def plan_attribution(
    kernel: PathKernel,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    *,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    seconds: float = SECONDS,
    **options: Unpack[ComputeSettings],
) -> Plan:
    """Say what `attribute_many` costs with the kernel's run, head, rule and path.

    Args:
        kernel: The kernel. `attribute_many` has the rule `adaptive(tol=1e-12)` by default.
        X: n inputs, taken as test copies.
        groupings: As of `attribute_many`; `[[by_sample(run)]]` stands for `attribute`.
        classes: One output per input.
        function: As of `attribute`, in place of the kernel's head.
        seconds: Time for measuring. Of a block of points that takes longer, some steps are measured.
        options: `memory_budget`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As of `attribute_many`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")
    parsed = parse_options("plan_attribution", ("accumulate", "checkpoint", "executor"), **options)
    kernel, X, axes = parse_request(kernel, X, groupings, (classes, function))
    while True:
        with planned(kernel.trajectory.recorded, X) as recorded_net, planned(kernel.trajectory, X) as net:
            work = attribution_work(net, kernel, X, axes, classes, parsed, recorded_net=recorded_net)
            kinds = [len(work.blocks[piece.place[0]]) for piece in work.pieces]
            return _measured(work, kinds, work.num_bytes(work.num_rows), seconds)


def _measured(work: Work, kinds: Sequence[Hashable], result_bytes: int, seconds: float) -> Plan:
    """Compute pieces, one of every kind and more until the time is over, and extrapolate their seconds.

    Args:
        work: The computation.
        kinds: The kind of each piece: those of one kind differ in their steps only.
        result_bytes: Of the result.
        seconds: Time for measuring. A piece that takes longer is measured at its first steps.
    """
    begin, measured, queues = time.perf_counter(), dict[Hashable, tuple[float, int]](), dict[Hashable, list[Piece]]()
    for piece, kind in zip(work.pieces, kinds, strict=True):
        queues.setdefault(kind, []).append(piece)
    for number, pieces in enumerate(zip_longest(*queues.values())):
        for kind, piece in zip(queues, pieces, strict=True):
            if piece is None or (number and time.perf_counter() - begin > seconds):
                continue
            start, steps = time.perf_counter(), 0
            for sums in work.compute(piece.place, Sums()):
                steps = sums.steps
                if steps and time.perf_counter() - start > seconds:
                    break
            for total in sums.added.values():
                total.cpu()  # a GPU computes behind the calls
            spent, counted = measured.get(kind, (0.0, 0))
            measured[kind] = spent + time.perf_counter() - start, counted + steps
    return Plan(
        pieces=len(kinds),
        result_bytes=result_bytes,
        piece_bytes=work.piece_bytes,
        seconds=sum(
            spent * sum(piece.steps for piece in queues[kind]) / max(1, counted)
            for kind, (spent, counted) in measured.items()
        ),
    )
