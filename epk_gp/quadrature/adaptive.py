"""Adaptive quadrature along a training step, steered by the free residual, with its certificate.

An interval [a, b] of a step is accepted for a point when |f(b) - f(a) - int_a^b <J, d> dt| is small enough: forward
passes are all that it takes to know. Otherwise it is split at its kinks (`kinks.locate_kinks`), or in the middle.
Between kinks f is nearly a polynomial: intervals that end at kinks get a low order first, and the rule's own order
before they are split again. The residual only chooses nodes; it is never added to anything. No integrand makes the rule
run without end: evaluations are bounded, and a status says why it stopped (`QuadratureStatus`).
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import WeightSegment, directional_derivatives, values
from epk_gp.core.validation import validate_finite
from epk_gp.quadrature.kinks import locate_kinks
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, gauss_legendre
from epk_gp.quadrature.status import (
    NOISE_LEVELS,
    OPEN,
    Lineage,
    Parents,
    QuadratureStatus,
    fixed_status,
    limit_status,
    residual_status,
    rounding_of,
    trace_lineage,
)

# Nodes of an interval between located kinks. The logits of an L-layer ReLU network are a polynomial of degree at most L
# there, for which ceil(L / 2) nodes are exact (docs/theory.md, section 3).
_LOW_ORDER = 2

# What a search for kinks counts as: one backward pass at each end of the interval.
_SEARCH_EVALUATIONS = 2

# Breakpoints closer than that are one.
_MERGE_DISTANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Integral:
    """int_0^1 <J_{w + t d}(x_n), d> dt for n points, with the nodes that it took.

    Attributes:
        total: The integrals, (n, C).
        start: f at t = 0, (n, C).
        end: f at t = 1, (n, C).
        residual: Sum over a point's intervals of |f(b) - f(a) - integral|, largest output, (n,).
        evaluations: Gradients evaluated per point, rejected intervals included, and 2 for each search for kinks, (n,).
        point: Which point each of the E accepted nodes belongs to, (E,).
        t: Their positions, (E,).
        weight: Their weights, (E,); for every point they sum to 1.
        breakpoints: Where the accepted intervals start, (A,).
        status: Most severe reason for which a point's intervals were accepted, a `QuadratureStatus`, (n,).
    """

    total: Float[Tensor, "n C"]
    start: Float[Tensor, "n C"]
    end: Float[Tensor, "n C"]
    residual: Float[Tensor, " n"]
    evaluations: Float[Tensor, " n"]
    point: Int64[Tensor, " E"]
    t: Float[Tensor, " E"]
    weight: Float[Tensor, " E"]
    breakpoints: Float[Tensor, " A"]
    status: Int64[Tensor, " n"]


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
        use_high_order: They get the rule's own order, the others `_LOW_ORDER`.
        parent: Which of the intervals that were refined last they are parts of.
    """

    point: Int64[Tensor, " E"]
    a: Float[Tensor, " E"]
    b: Float[Tensor, " E"]
    f_a: Float[Tensor, "E C"]
    f_b: Float[Tensor, "E C"]
    parent_residual: Float[Tensor, " E"]
    use_high_order: Bool[Tensor, " E"]
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
        residual: f(b) - f(a) - integral.
        error: Its largest output.
        rounding: Residual that is taken for rounding of the outputs.
        level: How often the intervals were refined.
    """

    intervals: Intervals
    parents: Parents
    integral: Float[Tensor, "E C"]
    residual: Float[Tensor, "E C"]
    error: Float[Tensor, " E"]
    rounding: Float[Tensor, " E"]
    level: int


def integrate(
    segment: WeightSegment, X: Shaped[Tensor, "n ..."], rule: QuadratureRule | AdaptiveRule, num_steps: int
) -> Integral:
    """Integrate the gradient's inner product with the step, for n points.

    Args:
        segment: The step.
        X: n inputs.
        rule: A fixed rule, used as it is, or an adaptive one.
        num_steps: Steps that share the adaptive rule's tolerance.

    Returns:
        Integrals and certificate.

    Raises:
        ValueError: The network's outputs at either end of the step hold NaN or infinity.
    """
    n = len(X)
    zeros, ones = segment.w.new_zeros(n), segment.w.new_ones(n)
    start, end = values(segment, X, zeros), values(segment, X, ones)
    validate_finite(start, "the network's outputs at the start of a step")
    validate_finite(end, "the network's outputs at the end of a step")
    total, residual, evaluations = torch.zeros_like(start), zeros.clone(), zeros.clone()
    every = torch.arange(n, device=X.device)
    status, all_high = torch.zeros_like(every), torch.ones_like(every, dtype=torch.bool)
    high = rule.interval_rule
    low = gauss_legendre(min(_LOW_ORDER, len(high)))
    accepted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    intervals = Intervals(every, zeros, ones, start, end, zeros, all_high, every)
    parents = Parents(torch.zeros_like(start), Lineage(torch.zeros_like(every), zeros), ~all_high)
    rounding = rounding_of(start, end)
    level = 0
    while len(intervals):
        owner, t, weight = _nodes(intervals, low, high)
        point = intervals.point[owner]
        slope = directional_derivatives(segment, X[point], t)[1]
        integral = torch.zeros_like(intervals.f_a).index_add_(0, owner, weight[:, None] * slope)
        evaluations.index_add_(0, point, torch.ones_like(t))
        difference = intervals.f_b - intervals.f_a - integral
        error = difference.abs().amax(dim=1)
        found = Integrated(intervals, parents, integral, difference, error, rounding[intervals.point], level)
        if isinstance(rule, QuadratureRule):
            reason, intervals = fixed_status(error), intervals[every[:0]]
        else:
            reason, intervals, parents = _refine(segment, X, rule, num_steps, found, evaluations)
        done = (reason != OPEN).nonzero().squeeze(1)
        finished = found.intervals[done]
        total.index_add_(0, finished.point, integral[done])
        residual.index_add_(0, finished.point, error[done])
        status.scatter_reduce_(0, finished.point, reason[done], "amax")
        kept = (reason != OPEN)[owner].nonzero().squeeze(1)
        accepted.append((point[kept], t[kept], weight[kept], finished.a))
        level += 1
    point, t, weight, breakpoints = (torch.cat(parts) for parts in zip(*accepted, strict=True))
    return Integral(total, start, end, residual, evaluations, point, t, weight, breakpoints, status)


def union_mesh(integral: Integral, rule: AdaptiveRule) -> list[tuple[float, float]]:
    """Choose one composite rule that is fine enough for all of an integral's points: the union of their breakpoints."""
    interval_rule, breakpoints = rule.interval_rule, integral.breakpoints
    edges = torch.cat([breakpoints, breakpoints.new_tensor([0.0, 1.0])]).unique().tolist()
    merged = [edges[0]]
    for edge in edges[1:]:
        if edge - merged[-1] > _MERGE_DISTANCE:
            merged.append(edge)
    merged[-1] = 1.0
    return [(a + (b - a) * t, (b - a) * weight) for a, b in pairwise(merged) for t, weight in interval_rule]


def _nodes(intervals: Intervals, low: QuadratureRule, high: QuadratureRule) -> tuple[Tensor, Tensor, Tensor]:
    """List every interval's nodes: which interval they belong to, where they are, and with which weights."""
    rules, chosen = [low, high], intervals.use_high_order.long()
    counts = torch.tensor([len(rule) for rule in rules], device=chosen.device)[chosen]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    filled = [[*row, *[0.0] * (len(high) - len(row))] for rule in rules for row in (rule.nodes, rule.weights)]
    table = intervals.a.new_tensor(filled).view(2, 2, -1)[chosen[owner], :, number]
    width = (intervals.b - intervals.a)[owner]
    return owner, intervals.a[owner] + width * table[:, 0], width * table[:, 1]


def _refine(
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
    intervals = found.intervals
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
    low, high = min(_LOW_ORDER, rule.order), rule.order
    searches = segment.net.plan.supports_interpolation
    least = torch.where(intervals.use_high_order, (_SEARCH_EVALUATIONS + 2 * low) if searches else 2 * high, high)
    least = torch.where(reason == OPEN, least, 0).to(evaluations)
    fits = evaluations.index_add(0, intervals.point, least) <= rule.max_evaluations
    reason = torch.where((reason == OPEN) & ~fits[intervals.point], QuadratureStatus.EVALUATION_LIMIT, reason)
    failed = (reason == OPEN).nonzero().squeeze(1)
    parts, is_halved, searched = _parts(segment, X, intervals[failed], found.error[failed], found.level)
    parents = Parents(found.residual[failed], lineage[failed], is_halved)
    evaluations.index_add_(0, searched, torch.full_like(searched, _SEARCH_EVALUATIONS, dtype=evaluations.dtype))
    cost = torch.where(parts.use_high_order, high, low).to(evaluations)
    fits = evaluations.index_add(0, parts.point, cost) <= rule.max_evaluations
    reason[failed] = torch.where(fits[intervals.point[failed]], OPEN, QuadratureStatus.EVALUATION_LIMIT)
    return reason, parts[fits[parts.point].nonzero().squeeze(1)], parents


def _stop_points(reason: Tensor, point: Tensor, n: int) -> Tensor:
    """Accept all open intervals of points of which one was found inconsistent: no refinement makes these exact."""
    inconsistent = (reason == QuadratureStatus.INCONSISTENT_DERIVATIVE).long()
    stops = torch.zeros(n, dtype=torch.long, device=point.device).index_add_(0, point, inconsistent)[point] > 0
    return torch.where(stops & (reason == OPEN), QuadratureStatus.INCONSISTENT_DERIVATIVE, reason)


def _parts(
    segment: WeightSegment, X: Tensor, failed: Intervals, error: Tensor, level: int
) -> tuple[Intervals, Tensor, Tensor]:
    """Raise the order of low-order intervals and split the others; also say which were halved, and list searches."""
    high = failed.use_high_order
    to_split, to_raise = high.nonzero().squeeze(1), (~high).nonzero().squeeze(1)
    split, halved, searched = _split(segment, X, failed[to_split], error[to_split], level)
    split = replace(split, parent=to_split[split.parent])
    raised = replace(failed[to_raise], use_high_order=~high[to_raise], parent=to_raise)
    joined = (torch.cat(pair) for pair in zip(vars(split).values(), vars(raised).values(), strict=True))
    is_halved = torch.zeros_like(high).index_copy_(0, to_split, halved)
    return Intervals(*joined), is_halved, searched


def _split(
    segment: WeightSegment, X: Tensor, failed: Intervals, error: Tensor, level: int
) -> tuple[Intervals, Tensor, Tensor]:
    """Cut intervals at their located kinks, else in the middle; also say which were halved, and list searches."""
    if not len(failed):
        return failed, failed.use_high_order, failed.point
    owner, cuts, is_halved = _cuts(segment, X, failed)
    f_cuts = values(segment, X[failed.point[owner]], cuts)
    # neighbouring kinks can cancel in one residual: the largest of the last levels is what must fall
    ancestor = error if level % NOISE_LEVELS == 0 else torch.maximum(error, failed.parent_residual)
    searched = failed.point if segment.net.plan.supports_interpolation else failed.point[:0]
    return _between_cuts(failed, owner, cuts, f_cuts, ancestor, is_halved), is_halved, searched


def _cuts(segment: WeightSegment, X: Tensor, failed: Intervals) -> tuple[Tensor, Tensor, Tensor]:
    """List where intervals are cut: owner (B,) and position (B,), in order; and which intervals are halved, (E,)."""
    owner, cuts = locate_kinks(segment, X[failed.point], failed.a, failed.b)
    gap = 64 * torch.finfo(failed.a.dtype).eps
    inside = (cuts > failed.a[owner] + gap) & (cuts < failed.b[owner] - gap)
    owner, cuts = owner[inside], cuts[inside]
    is_halved = torch.ones_like(failed.point, dtype=torch.bool)
    is_halved[owner] = False
    middle = (failed.a + failed.b) / 2
    owner = torch.cat([owner, is_halved.nonzero().squeeze(1)])
    cuts = torch.cat([cuts, middle[is_halved]])
    order = _lexicographic(owner, cuts)
    owner, cuts = owner[order], cuts[order]
    is_new = torch.ones_like(owner, dtype=torch.bool)
    is_new[1:] = (owner[1:] != owner[:-1]) | (cuts[1:] - cuts[:-1] > gap)
    return owner[is_new], cuts[is_new], is_halved


def _between_cuts(
    failed: Intervals, owner: Tensor, cuts: Tensor, f_cuts: Tensor, parent_residual: Tensor, is_halved: Tensor
) -> Intervals:
    """Make the parts of cut intervals.

    For one interval with two cuts:

    left ends    a    c1   c2       sorted by owner, then position
    right ends   c1   c2   b        the next left end, or the interval's own end behind its last cut
    """
    every = torch.arange(len(failed), device=owner.device)
    owner = torch.cat([every, owner])
    left, f_left = torch.cat([failed.a, cuts]), torch.cat([failed.f_a, f_cuts])
    order = _lexicographic(owner, left)
    owner, left, f_left = owner[order], left[order], f_left[order]
    is_last = torch.ones_like(owner, dtype=torch.bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    right = torch.where(is_last, failed.b[owner], left.roll(-1))
    f_right = torch.where(is_last[:, None], failed.f_b[owner], f_left.roll(-1, dims=0))
    point = failed.point[owner]
    return Intervals(point, left, right, f_left, f_right, parent_residual[owner], is_halved[owner], owner)


def _lexicographic(first: Tensor, second: Tensor) -> Tensor:
    """Return the order by `first`, then by `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]
