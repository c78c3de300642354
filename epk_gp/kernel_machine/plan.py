"""Cost of an attribution, counted before it is computed: pieces, bytes and trainings."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Unpack

from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.scalars import Function
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import ComputeSettings, parse_options
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.states import recomputation_of
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import By, attribution_work, parse_request
from epk_gp.kernel_machine.terms import AttributionWork, leaves_residuals
from epk_gp.quadrature.rules import Rule, WeightPath, adaptive


@dataclass(frozen=True)
class Plan:
    """The division of an attribution into pieces, and its cost.

    Attributes:
        pieces: Number of pieces, which workers share: more workers than pieces do not help.
        result_bytes: Bytes of the result.
        piece_bytes: Bytes of the largest piece.
        disk_bytes: Bytes of the run's chunks and, at most, of temporary files.
        memory_bytes: Bytes of the vectors of weights in memory: adjoints, residuals, states.
        trainings: Operations of its parts, as multiples of the run's training: "states" made again, "steps" compared
            with the recorded ones, the "test side", the "training side".
    """

    pieces: int
    result_bytes: int
    piece_bytes: int
    disk_bytes: int
    memory_bytes: int
    trainings: Mapping[str, float]


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
    **options: Unpack[ComputeSettings],
) -> Plan:
    """Count the cost of `attribute` with the same arguments, without computing it.

    Args:
        trajectory: The run.
        X: n inputs, taken as test copies.
        by: The argument of `attribute`.
        head: The argument of `attribute`.
        rule: The argument of `attribute`.
        path: The argument of `attribute`.
        classes: The argument of `attribute`.
        function: The argument of `attribute`.
        options: `memory_budget`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `attribute`.
    """
    parsed = parse_options("plan_attribution", ("accumulate", "checkpoint", "executor"), **options)
    kernel, X, groupings = parse_request(trajectory, X, by, (head, rule, path), (classes, function))
    run = kernel.trajectory

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> Plan:
        asked = (net, kernel, X, groupings, classes, parsed)
        return _counted(attribution_work(*asked, recorded_net=recorded_net, splits_statistics=by is not None))

    return with_plan(compute, X, run, run.recorded)


def _counted(work: AttributionWork) -> Plan:
    """Return the plan of an attribution; docs/capabilities/long-runs.md explains the letters."""
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
    return Plan(
        pieces=sum(1 for _ in work.pieces),
        result_bytes=work.num_bytes(work.num_rows),
        piece_bytes=work.piece_bytes,
        disk_bytes=sum(chunk.bytes for chunk in getattr(kept, "chunks", ()))
        + sum(size for size in vectors if size > work.memory_budget),
        memory_bytes=states + sum(size for size in vectors if size <= work.memory_budget),
        trainings={"states": float(made), "steps": 1.0, "test side": test, "training side": blocks + k / (3 * T)},
    )
