"""Which intervals of a step are refined, and how: cut at kinks, halved, or given a higher order."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import WeightSegment, values
from epk_gp.quadrature.graph_kinks import locate_graph_kinks
from epk_gp.quadrature.kinks import locate_kinks
from epk_gp.quadrature.nested import Stages
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.quadrature.status import (
    NOISE_LEVELS,
    OPEN,
    SMOOTH_DECAY,
    Lineage,
    Parents,
    QuadratureStatus,
    limit_status,
    may_be_rounding,
    residual_status,
    trace_lineage,
)

# What a search for kinks counts as: one backward pass at each end of the interval.
_SEARCH_EVALUATIONS = 2


@dataclass(frozen=True, eq=False)
class Intervals:
    """E intervals [a, b] of points.

    Attributes:
        point: Whose they are.
        a: Their starts.
        b: Their ends.
        f_a: f at the starts.
        f_b: f at the ends.
        parent_residual: Largest residual of the last levels of intervals that they are parts of.
        stage: Index of their order.
        known: df/dt at the nodes that they have from the order before, (E, K, C).
        error_before: Residual of the order before, or of the interval that they are halves of; infinity if neither is
            known.
        parent: Which of the intervals that were refined last they are parts of.
    """

    point: Int64[Tensor, " E"]
    a: Float[Tensor, " E"]
    b: Float[Tensor, " E"]
    f_a: Float[Tensor, "E C"]
    f_b: Float[Tensor, "E C"]
    parent_residual: Float[Tensor, " E"]
    stage: Int64[Tensor, " E"]
    known: Float[Tensor, "E K C"]
    error_before: Float[Tensor, " E"]
    parent: Int64[Tensor, " E"]

    def __len__(self) -> int:
        """Count the intervals."""
        return len(self.point)

    def __getitem__(self, rows: Shaped[Tensor, " _"]) -> "Intervals":
        """Return some of them."""
        return Intervals(*(value[rows] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Integrated:
    """E intervals of one level, with what their nodes gave.

    Attributes:
        intervals: The intervals.
        parents: The intervals that they are parts of.
        integral: Their integrals.
        slopes: df/dt at their nodes, as many as are to be known to the next order, (E, K, C).
        residual: f(b) - f(a) - integral.
        error: Its largest output.
        rounding: Residual that is taken for rounding of the outputs.
        level: How often the intervals were refined.
        table: The orders that they pass through.
    """

    intervals: Intervals
    parents: Parents
    integral: Float[Tensor, "E C"]
    slopes: Float[Tensor, "E K C"]
    residual: Float[Tensor, "E C"]
    error: Float[Tensor, " E"]
    rounding: Float[Tensor, " E"]
    level: int
    table: "StageTable"


@dataclass(frozen=True, eq=False)
class StageTable:
    """The orders of intervals as tensors: row r belongs to the r-th order.

    Attributes:
        nodes: Padded with zeros, (R, Q).
        weights: Likewise, (R, Q).
        size: Number of nodes.
        num_known: Number of nodes that are those of the order before.
        next: Row of the next higher order, or -1.
        next_cost: Evaluations that the next order needs; 0 if there is none.
        is_low, searches: As in `nested.Stage`.
        first, low: As in `nested.Stages`.
        num_kept: K, the largest `num_known`.
    """

    nodes: Float[Tensor, "R Q"]
    weights: Float[Tensor, "R Q"]
    size: Int64[Tensor, " R"]
    num_known: Int64[Tensor, " R"]
    next: Int64[Tensor, " R"]
    next_cost: Int64[Tensor, " R"]
    is_low: Bool[Tensor, " R"]
    searches: Bool[Tensor, " R"]
    first: int
    low: int
    num_kept: int


def nodes_of(intervals: Intervals, table: StageTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List every interval's nodes: which interval they belong to, their number in it, places and weights."""
    counts = table.size[intervals.stage]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    row, width = intervals.stage[owner], (intervals.b - intervals.a)[owner]
    return owner, number, intervals.a[owner] + width * table.nodes[row, number], width * table.weights[row, number]


def stage_table(stages: Stages, reference: Tensor) -> StageTable:
    """Write the orders of intervals as tensors of a reference's dtype, on its device."""
    table = stages.table
    width = max(len(stage.rule) for stage in table)

    def padded(rows: list[tuple[float, ...]]) -> Tensor:
        return reference.new_tensor([[*row, *[0.0] * (width - len(row))] for row in rows])

    def integers(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=reference.device)

    following = [table[stage.next] if stage.next >= 0 else None for stage in table]
    return StageTable(
        nodes=padded([stage.rule.nodes for stage in table]),
        weights=padded([stage.rule.weights for stage in table]),
        size=integers([len(stage.rule) for stage in table]),
        num_known=integers([stage.num_known for stage in table]),
        next=integers([stage.next for stage in table]),
        next_cost=integers([len(stage.rule) - stage.num_known if stage else 0 for stage in following]),
        is_low=integers([stage.is_low for stage in table]).bool(),
        searches=integers([stage.searches for stage in table]).bool(),
        first=stages.first,
        low=stages.low,
        num_kept=max(stage.num_known for stage in table),
    )


def refine(
    segment: WeightSegment, X: Tensor, rule: AdaptiveRule, num_steps: int, found: Integrated, evaluations: Tensor
) -> tuple[Tensor, Intervals, Parents]:
    """Refine the intervals that cannot be accepted, as far as the bound on evaluations allows it.

    Args:
        segment: The step.
        X: n inputs.
        rule: The rule.
        num_steps: Steps that share its tolerance.
        found: The intervals of this level.
        evaluations: Gradients evaluated per point; searches for kinks are added.

    Returns:
        Why each interval is accepted, `OPEN` for those that are refined; their parts; and the intervals that these are
        the parts of.
    """
    intervals, table = found.intervals, found.table
    reason = residual_status(found.error, found.rounding, rule.tol / num_steps)
    failed = (reason == OPEN).nonzero().squeeze(1)
    if not len(failed):
        return reason, intervals[failed], found.parents
    lineage = trace_lineage(found.parents, intervals.parent, found.residual, reason == OPEN)
    reason[failed] = limit_status(
        found.error[failed],
        found.integral[failed],
        width=(intervals.b - intervals.a)[failed],
        rounding=found.rounding[failed],
        ancestor_error=intervals.parent_residual[failed],
        lineage=lineage[failed],
        level=found.level,
    )
    reason = _stop_points(reason, intervals.point, len(X))
    # the least that any refinement takes: a search with two low parts, or the next order
    plan = segment.net.plan
    searches = table.searches[intervals.stage] & (plan.supports_interpolation or plan.shares_pass)
    cheapest = 2 * table.size[table.low] + _SEARCH_EVALUATIONS * searches
    least = torch.where(table.is_low[intervals.stage], table.next_cost[intervals.stage], cheapest)
    least = torch.where(reason == OPEN, least, 0).to(evaluations)
    fits = evaluations.index_add(0, intervals.point, least) <= rule.max_evaluations
    reason = torch.where((reason == OPEN) & ~fits[intervals.point], QuadratureStatus.EVALUATION_LIMIT, reason)
    failed = (reason == OPEN).nonzero().squeeze(1)
    parts, parents = _parts(segment, X, found, failed, lineage[failed], evaluations)
    cost = (table.size - table.num_known)[parts.stage].to(evaluations)
    fits = evaluations.index_add(0, parts.point, cost) <= rule.max_evaluations
    reason[failed] = torch.where(fits[intervals.point[failed]], OPEN, QuadratureStatus.EVALUATION_LIMIT)
    return reason, parts[fits[parts.point].nonzero().squeeze(1)], parents


def _stop_points(reason: Tensor, point: Tensor, n: int) -> Tensor:
    """Accept all open intervals of points of which one was found inconsistent: no refinement makes these exact."""
    inconsistent = (reason == QuadratureStatus.INCONSISTENT_DERIVATIVE).long()
    stops = torch.zeros(n, dtype=torch.long, device=point.device).index_add_(0, point, inconsistent)[point] > 0
    return torch.where(stops & (reason == OPEN), QuadratureStatus.INCONSISTENT_DERIVATIVE, reason)


def _parts(
    segment: WeightSegment, X: Tensor, found: Integrated, failed: Tensor, lineage: Lineage, evaluations: Tensor
) -> tuple[Intervals, Parents]:
    """Cut failed intervals at their kinks, raise the order of smooth ones, halve the others.

    Args:
        segment: The step.
        X: n inputs.
        found: The intervals of this level.
        failed: Which of them failed, (F,).
        lineage: The lineages of these.
        evaluations: Gradients evaluated per point; searches for kinks are added.
    """
    table, intervals, error = found.table, found.intervals[failed], found.error[failed]
    owner, cuts = _located_cuts(segment, X, intervals, table, evaluations)
    has_kinks = torch.zeros_like(intervals.point, dtype=torch.bool).index_fill_(0, owner, True)
    is_smooth = table.is_low[intervals.stage] | (error <= SMOOTH_DECAY * intervals.error_before)
    settles = (lineage.raises > 0) | (table.next[intervals.stage] == table.next[table.first])
    settles = settles & may_be_rounding(error, found.integral[failed], found.rounding[failed])
    rises = ~has_kinks & (is_smooth | settles) & (table.next[intervals.stage] >= 0)
    is_halved = ~has_kinks & ~rises
    middle = (intervals.a + intervals.b) / 2
    owner = torch.cat([owner, is_halved.nonzero().squeeze(1)])
    cuts = torch.cat([cuts, middle[is_halved]])
    order = _lexicographic(owner, cuts)
    owner, cuts = owner[order], cuts[order]
    f_cuts = values(segment, X[intervals.point[owner]], cuts) if len(cuts) else intervals.f_a[:0]
    # neighbouring kinks can cancel in one residual: the largest of the last levels is what must fall
    ancestor = error if found.level % NOISE_LEVELS == 0 else torch.maximum(error, intervals.parent_residual)
    to_cut, to_raise = (~rises).nonzero().squeeze(1), rises.nonzero().squeeze(1)
    stage = torch.where(has_kinks, table.low, table.first)
    before = torch.where(has_kinks, torch.inf, error)
    halves = replace(intervals, stage=stage, error_before=before, parent_residual=ancestor)
    split = _between_cuts(halves, owner, cuts, f_cuts, to_cut)
    raised = replace(intervals, stage=table.next[intervals.stage], known=found.slopes[failed], error_before=error)[
        to_raise
    ]
    raised = replace(raised, parent=to_raise)
    joined = (torch.cat(pair) for pair in zip(vars(split).values(), vars(raised).values(), strict=True))
    return Intervals(*joined), Parents(found.residual[failed], lineage, is_halved, rises)


def _located_cuts(
    segment: WeightSegment, X: Tensor, failed: Intervals, table: StageTable, evaluations: Tensor
) -> tuple[Tensor, Tensor]:
    """List the kinks inside of intervals that are searched for them: owner (B,) and position (B,), in order."""
    rows = table.searches[failed.stage].nonzero().squeeze(1)
    locate = locate_graph_kinks if segment.net.plan.shares_pass else locate_kinks
    kinks = locate(segment, X[failed.point[rows]], failed.a[rows], failed.b[rows])
    searched = failed.point[rows[kinks.is_searched]]
    evaluations.index_add_(0, searched, torch.full_like(searched, _SEARCH_EVALUATIONS, dtype=evaluations.dtype))
    owner, cuts = rows[kinks.interval], kinks.position
    gap = 64 * torch.finfo(failed.a.dtype).eps
    inside = (cuts > failed.a[owner] + gap) & (cuts < failed.b[owner] - gap)
    owner, cuts = owner[inside], cuts[inside]
    order = _lexicographic(owner, cuts)
    owner, cuts = owner[order], cuts[order]
    is_new = torch.ones_like(owner, dtype=torch.bool)
    is_new[1:] = (owner[1:] != owner[:-1]) | (cuts[1:] - cuts[:-1] > gap)
    return owner[is_new], cuts[is_new]


def _between_cuts(intervals: Intervals, owner: Tensor, cuts: Tensor, f_cuts: Tensor, to_cut: Tensor) -> Intervals:
    """Make the parts of cut intervals.

    For one interval with two cuts:

    left ends    a    c1   c2       sorted by owner, then position
    right ends   c1   c2   b        the next left end, or the interval's own end behind its last cut
    """
    owner = torch.cat([to_cut, owner])
    left, f_left = torch.cat([intervals.a[to_cut], cuts]), torch.cat([intervals.f_a[to_cut], f_cuts])
    order = _lexicographic(owner, left)
    owner, left, f_left = owner[order], left[order], f_left[order]
    is_last = torch.ones_like(owner, dtype=torch.bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    right = torch.where(is_last, intervals.b[owner], left.roll(-1))
    f_right = torch.where(is_last[:, None], intervals.f_b[owner], f_left.roll(-1, dims=0))
    return replace(intervals[owner], a=left, b=right, f_a=f_left, f_b=f_right, parent=owner)


def _lexicographic(first: Tensor, second: Tensor) -> Tensor:
    """Return the order by `first`, then by `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]
