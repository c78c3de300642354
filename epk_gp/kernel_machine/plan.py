"""Cost estimates of a Gram block or an attribution before it is computed: pieces, bytes, and seconds."""

import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any, Unpack

from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.scalars import Function
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import ComputeSettings, parse_options, validate_positive
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import Head
from epk_gp.core.replayed_steps import RunReplay, replayed_steps
from epk_gp.core.states import recomputation_of
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import GramWork
from epk_gp.kernel_machine.attribute import By, attribution_work, parse_request
from epk_gp.kernel_machine.terms import AttributionWork, leaves_residuals
from epk_gp.quadrature.rules import Rule, WeightPath, adaptive
from epk_gp.work.run import Piece, Sums, Work

SECONDS = 10.0  # default time for measuring


@dataclass(frozen=True)
class Plan:
    """The division of a computation into pieces, and its cost.

    Attributes:
        pieces: Number of pieces, which workers share: more workers than pieces do not help.
        result_bytes: Bytes of the result.
        piece_bytes: Bytes of the largest piece.
        seconds: Time of all pieces in one process, one after another, extrapolated from the first ones.
        disk_bytes: For an attribution, bytes of the run's chunks and, at most, of temporary files.
        memory_bytes: Bytes of the vectors of weights in memory: adjoints, residuals, states.
        trainings: Operations of its parts, as multiples of the run's training: "states" made again, "steps" compared
            with the recorded ones, the "test side", the "training side".
    """

    pieces: int
    result_bytes: int
    piece_bytes: int
    seconds: float
    disk_bytes: int = 0
    memory_bytes: int = 0
    trainings: Mapping[str, float] = field(default_factory=dict)


def plan_gram(
    kernel: PathKernel, a: Points, b: Points, *, seconds: float = SECONDS, **options: Unpack[ComputeSettings]
) -> Plan:
    """Estimate the cost of `kernel.block(a, b)`, which is `gram_block` with the kernel's run, rule and path.

    Args:
        kernel: The kernel.
        a: N points, each a training or a test copy.
        b: M points.
        seconds: Time for measuring; each kind of tiles may use it once.
        options: `memory_budget` and `accumulate`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `gram_block`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")

    parsed = parse_options("plan_gram", ("checkpoint", "executor"), **options)
    kernel.validate_points(a, b, parsed)

    def compute(net: PlannedModel) -> Plan:
        work = GramWork(kernel.with_net(net, parsed), a, b, plan=net.plan)
        tiles = (work.tiles[piece.place[:-1]] for piece in work.pieces)
        kinds = [(t.x_is_train, t.y_is_train, t.is_symmetric, len(t.rows), len(t.columns)) for t in tiles]
        result_bytes = len(a) * len(b) * work.planned.num_sums * work.planned.sum_dtype.itemsize
        return _measured(work, kinds, result_bytes, seconds)

    return with_plan(compute, a.X, kernel.trajectory)


def plan_attribution(
    trajectory: Trajectory,
    X: Inputs,
    *,
    by: By | None = None,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    seconds: float = SECONDS,
    **options: Unpack[ComputeSettings],
) -> Plan:
    """Estimate the cost of `attribute` with the same arguments.

    Args:
        trajectory: The run.
        X: n inputs, taken as test copies.
        by: The argument of `attribute`.
        head: The argument of `attribute`.
        rule: The argument of `attribute`.
        path: The argument of `attribute`.
        classes: The argument of `attribute`.
        function: The argument of `attribute`.
        seconds: Time for measuring. If a block of points takes longer, only some steps are measured.
        options: `memory_budget`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `attribute`; or `seconds` is not positive.
    """
    validate_positive(seconds, "seconds")
    parsed = parse_options("plan_attribution", ("accumulate", "checkpoint", "executor"), **options)
    kernel, X, groupings = parse_request(trajectory, X, by, (head, rule, path), (classes, function))
    run, request = kernel.trajectory, (kernel, X, groupings, classes, parsed)

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> Plan:
        work = attribution_work(net, *request, recorded_net=recorded_net, splits_statistics=by is not None)
        kinds = [len(work.blocks[piece.place[0]]) for piece in work.pieces]
        per_step = seconds_of_step(work.whole.recorded, work.X, seconds)
        vars(work)["residuals"] = defaultdict(lambda: None)  # residuals of the whole run are measured separately
        plan = _measured(work, kinds, work.num_bytes(work.num_rows), seconds)
        return replace(plan, seconds=plan.seconds + per_step * run.num_steps, **_cost(work))

    return with_plan(compute, X, run, run.recorded)


def seconds_of_step(trajectory: Trajectory, X: Tensor, seconds: float) -> float:
    """Return the seconds of one compared step, measured on the first steps, in the precision of X."""
    begin, count = time.perf_counter(), 0
    for _ in replayed_steps(RunReplay(trajectory, trajectory.model_for(X), X)):
        count += 1
        if time.perf_counter() - begin > seconds:
            break
    return (time.perf_counter() - begin) / max(1, count)


def _cost(work: AttributionWork) -> dict[str, Any]:
    """Return bytes and trainings of an attribution; docs/capabilities/long-runs.md derives the formulas."""
    whole, P, blocks = work.whole, work.whole.net.model.num_weights, len(work.blocks)
    run, itemsize, k = whole.recorded.trained, whole.net.itemsize, len(work.X) * whole.num_outputs
    S, kept, made, states = run.num_steps, run.states, 0, 0
    if (recomputation := recomputation_of(run)) is not None:
        kept, replay = recomputation.kept, recomputation.computation(0, whole.net.model.spec)
        made = (1 + (len(replay.bounds) > len(kept.numbers))) * (1 + blocks)
        states = 2 * replay.step_bytes * max((end - first for first, end in pairwise(replay.bounds)), default=0)
    adjoints = 3 * P * itemsize * min(k, work.rows_per_block * work.outputs_per_row)
    vectors = [adjoints, S * P * itemsize * leaves_residuals(whole)]
    B = sum(run.num_points if step.batch is None else len(step.batch) for step in run.steps) / max(1, S)
    T = run.targets[:1].numel() if run.targets.ndim > 1 and not run.targets.is_floating_point() else 1
    nodes = 2 if whole.is_layerwise else work.kernel.rule.typical_nodes
    test = k * nodes / max(1.0, B) * work.num_stretches / max(1, S)
    return {
        "disk_bytes": sum(chunk.bytes for chunk in getattr(kept, "chunks", ()))
        + sum(size for size in vectors if size > work.memory_budget),
        "memory_bytes": states + sum(size for size in vectors if size <= work.memory_budget),
        "trainings": {"states": made, "steps": 1, "test side": test, "training side": blocks + k / (3 * T)},
    }


def _measured(work: Work, kinds: Sequence[Hashable], result_bytes: int, seconds: float) -> Plan:
    """Compute one piece of every kind, and more until the time is over, and extrapolate their seconds.

    Args:
        work: The computation.
        kinds: The kind of each piece: pieces of one kind differ only in their steps.
        result_bytes: Bytes of the result.
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
                total.cpu()  # a GPU computes asynchronously
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
