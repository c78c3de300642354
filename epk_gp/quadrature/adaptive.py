"""Adaptive quadrature along a training step: the choice and refinement of intervals, with a certificate.

An interval [a, b] of a step is accepted for a point when |f(b) - f(a) - int_a^b <J, d> dt| is small enough; the test
needs forward passes only. A step on which a unit switches is cut at its kinks before any node is evaluated
(`kinks.values_at_ends`). Other intervals start with few nodes and go to the smallest rule that is predicted to suffice
(`intervals.predicted_errors`), which keeps these nodes (`intervals.rising_stages`). If there is none, the interval is
searched for kinks (`kinks.locate_kinks`), or otherwise halved. The residual only chooses nodes; it is never added to a
result. The rule ends for every integrand: evaluations are bounded, and a status gives the reason that it stopped
(`QuadratureStatus`).
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import WeightSegment, directional_derivatives, values
from epk_gp.core.checks import validate_finite
from epk_gp.quadrature import intervals as iv
from epk_gp.quadrature.kinks import locate_kinks, may_switch, values_at_ends
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, QuadratureStatus, gauss_legendre

# Predicted errors are cautious and may exceed the tolerance by this factor. With 1, small steps took 2 % more
# evaluations (7700 intervals of 19 networks); with 4, sums came close to their tolerance.
_TRUST = 2

# Cost of a search for kinks: one backward pass at each end of the interval. Forward passes show before whether any unit
# switches; they do not count.
_SEARCH_EVALUATIONS = 2


class _Refinement:
    """Pairs of a step and an input that are integrated by an adaptive rule: n points.

    Args:
        segment: The steps.
        X: The inputs.
        rule: The rule.
        num_steps: Number of steps that share its tolerance.
        table: The orders of intervals.

    Attributes:
        evaluations: Gradients evaluated per point, including the cost of searches for kinks.
    """

    def __init__(
        self, segment: WeightSegment, X: Tensor, rule: AdaptiveRule, num_steps: int, table: iv.StageTable
    ) -> None:
        self.segment, self.X, self.table, self.limit = segment, X, table, rule.max_evaluations
        self.tol, self.evaluations = rule.tol / num_steps, segment.w.new_zeros(segment.num_lines * len(X))

    def cut_at_kinks(self, whole: iv.Intervals, switches: Bool[Tensor, " n"]) -> iv.Intervals:
        """Cut whole steps at kinks if a unit switches between their ends, before anything is integrated."""
        if self.limit < _SEARCH_EVALUATIONS + 2 or not bool(switches.any()):
            return whole
        owner, cuts = self._located_cuts(whole, switches.nonzero().squeeze(1))
        parts = torch.ones_like(self.evaluations).index_add_(0, owner, torch.ones_like(cuts))
        kept = (self.evaluations + parts <= self.limit)[owner].nonzero().squeeze(1)
        owner, cuts = owner[kept], cuts[kept]
        is_whole = torch.ones_like(switches).index_fill_(0, owner, False)
        searched = replace(whole, is_searched=switches & is_whole)
        return iv.between_cuts(searched, owner, cuts, self._values(whole, owner, cuts), whole.parent)

    def refine(self, found: iv.Integrated, parents: iv.Parents) -> tuple[Tensor, iv.Intervals, iv.Parents]:
        """Refine the intervals that cannot be accepted, within the bound on evaluations.

        Args:
            found: The intervals of this level.
            parents: The intervals from which they were made.

        Returns:
            The reason that each interval is accepted, `OPEN` for refined ones; their parts; and the parents of these
            parts.
        """
        intervals, table = found.intervals, self.table
        reason = iv.residual_status(found.error, found.rounding, self.tol)
        failed = (reason == iv.OPEN).nonzero().squeeze(1)
        if not len(failed):
            return reason, intervals[failed], parents
        lineage = iv.trace_lineage(parents, intervals.parent, found.residual, reason == iv.OPEN)
        reason[failed] = iv.limit_status(found[failed], lineage[failed])
        # a midpoint can lie on the one point where the derivative is not finite
        at_middle = ~found.error.isfinite() & (intervals.stage == 0)
        reason = self._stop_points(torch.where(at_middle, iv.OPEN, reason), intervals.point)
        failed = (reason == iv.OPEN).nonzero().squeeze(1)
        rest = found[failed]
        option = self._raised_stage(rest, lineage[failed])
        # the least cost of a refinement: the next order, a search with two parts, or two halves
        plan = self.segment.net.plan
        searches = ~intervals.is_searched[failed] & (plan.supports_interpolation or plan.shares_pass)
        split = torch.where(searches, _SEARCH_EVALUATIONS + 2 * table.size[0], 2 * table.size[table.half])
        least = torch.where(option >= 0, (table.size - table.num_known)[option], split)
        fits = self._fits(intervals.point[failed], least)[intervals.point[failed]]
        reason[failed] = torch.where(fits, iv.OPEN, QuadratureStatus.EVALUATION_LIMIT)
        kept = fits.nonzero().squeeze(1)
        failed = failed[kept]
        parts, parents = self._parts(rest[kept], lineage[failed], option[kept])
        fits = self._fits(parts.point, (table.size - table.num_known)[parts.stage])
        reason[failed] = torch.where(fits[intervals.point[failed]], iv.OPEN, QuadratureStatus.EVALUATION_LIMIT)
        return reason, parts[fits[parts.point].nonzero().squeeze(1)], parents

    def _fits(self, point: Tensor, cost: Tensor) -> Bool[Tensor, " n"]:
        """Return whether the evaluations that intervals of each point need stay within the bound."""
        return self.evaluations.index_add(0, point, cost.to(self.evaluations)) <= self.limit

    def _stop_points(self, reason: Tensor, point: Tensor) -> Tensor:
        """Accept all open intervals of points with an inconsistent interval: no refinement makes these points exact."""
        inconsistent = (reason == QuadratureStatus.INCONSISTENT_DERIVATIVE).long()
        stops = torch.zeros_like(self.evaluations, dtype=torch.long).index_add_(0, point, inconsistent)
        return torch.where((stops[point] > 0) & (reason == iv.OPEN), QuadratureStatus.INCONSISTENT_DERIVATIVE, reason)

    def _raised_stage(self, found: iv.Integrated, lineage: iv.Lineage) -> Int64[Tensor, " F"]:
        """Choose the lowest order that is predicted to suffice for each failed interval; -1 if there is none.

        After the first order, the prediction uses the residuals of the last two orders. Possible rounding is raised
        without regard to the prediction: two orders that agree confirm it.
        """
        table, intervals, error = self.table, found.intervals, found.error
        stage, target = intervals.stage, found.rounding.clamp(min=self.tol)
        option = torch.full_like(stage, -1)
        for row in {0, table.half}:
            options = table.stages[row].options
            rows = (stage == row).nonzero().squeeze(1)
            if not options or not len(rows):
                continue
            ids = torch.tensor(options, device=stage.device)
            predicted = iv.predicted_errors(self._coefficients(found[rows], row), table.errors[ids])
            suffices = predicted <= _TRUST * target[rows, None]
            if row != 0:
                suffices &= (error <= iv.SMOOTH_DECAY * intervals.error_before)[rows, None]
            option[rows] = torch.where(suffices.any(dim=1), ids[suffices.int().argmax(dim=1)], -1)
        is_start = table.previous[stage] < 0
        later = (~is_start & (table.option[stage] >= 0)).nonzero().squeeze(1)
        now, following = stage[later], table.option[stage[later]]
        degrees = (table.degree[row] for row in (now, table.previous[now], following))
        predicted = iv.extrapolated_errors(error[later], intervals.error_before[later], *degrees)
        option[later] = torch.where(predicted <= target[later], following, -1)
        settles = ((lineage.raises > 0) | is_start) & iv.may_be_rounding(found)
        return torch.where((option < 0) & settles, table.option[stage], option)

    def _coefficients(self, found: iv.Integrated, stage: int) -> Float[Tensor, "E K C"]:
        """Return Legendre coefficients of df/dt on intervals of one first order, using f at its probes too."""
        intervals, first = found.intervals, self.table.stages[stage]
        n, width = len(first.rule), intervals.b - intervals.a
        inner, places = found.inner[:, :n], list(first.rule.nodes)
        if first.probes:
            at = intervals.a[:, None] + width[:, None] * width.new_tensor(first.probes)
            repeated = torch.arange(len(width), device=width.device).repeat_interleave(len(first.probes))
            f = self._values(intervals, repeated, at.flatten()).unflatten(0, at.shape)
            inner, places = torch.cat([inner, f], dim=1), [*places, *first.probes]
        order = sorted(range(len(places)), key=places.__getitem__)
        known = torch.cat([intervals.f_a[:, None], inner[:, order], intervals.f_b[:, None]], dim=1)
        data = torch.cat([found.slopes[:, :n] * width[:, None, None], known.diff(dim=1)], dim=1)
        return iv.spectrum_of(first, data.dtype, data.device) @ data

    def _parts(self, found: iv.Integrated, lineage: iv.Lineage, option: Tensor) -> tuple[iv.Intervals, iv.Parents]:
        """Raise the order of intervals if one is predicted to suffice; cut the others at kinks, or halve them.

        Args:
            found: The intervals that failed.
            lineage: Their lineages.
            option: The orders to which they are raised, or -1.
        """
        intervals, error, rises = found.intervals, found.error, option >= 0
        to_search = (~rises & ~intervals.is_searched).nonzero().squeeze(1)
        if not self.segment.net.plan.shares_pass:
            at = intervals[to_search]
            to_search = to_search[may_switch(self.segment, self.X, at.point, at.a, at.b)]
        owner, cuts = self._located_cuts(intervals, to_search)
        has_kinks = torch.zeros_like(rises).index_fill_(0, owner, True)
        is_halved = ~has_kinks & ~rises
        middle = (intervals.a + intervals.b) / 2
        owner = torch.cat([owner, is_halved.nonzero().squeeze(1)])
        cuts = torch.cat([cuts, middle[is_halved]])
        order = iv.lexicographic(owner, cuts)
        owner, cuts = owner[order], cuts[order]
        # neighbouring kinks can cancel in one residual: the largest of the last levels must fall
        ancestor = error if found.level % iv.NOISE_LEVELS == 0 else torch.maximum(error, intervals.parent_residual)
        # a midpoint's residual alone does not indicate rounding
        ancestor = torch.where(intervals.stage == 0, intervals.parent_residual, ancestor)
        to_cut, to_raise = (~rises).nonzero().squeeze(1), rises.nonzero().squeeze(1)
        split = replace(
            intervals,
            stage=torch.where(has_kinks, 0, self.table.half),
            error_before=torch.where(has_kinks, torch.inf, error),
            parent_residual=ancestor,
            is_searched=torch.zeros_like(rises),
        )
        split = iv.between_cuts(split, owner, cuts, self._values(intervals, owner, cuts), to_cut)
        raised = replace(intervals, stage=option, known=found.slopes, error_before=error)[to_raise]
        raised = replace(raised, parent=to_raise)
        joined = (torch.cat(pair) for pair in zip(vars(split).values(), vars(raised).values(), strict=True))
        return iv.Intervals(*joined), iv.Parents(found.residual, lineage, is_halved, rises)

    def _values(self, intervals: iv.Intervals, owner: Tensor, t: Tensor) -> Float[Tensor, "B C"]:
        """Evaluate f in some intervals."""
        return values(self.segment, self.X, t, intervals.point[owner]) if len(t) else intervals.f_a[:0]

    def _located_cuts(self, intervals: iv.Intervals, rows: Tensor) -> tuple[Tensor, Tensor]:
        """List the kinks in the searched intervals, in order: owner (B,), position (B,)."""
        point = intervals.point[rows]
        a, b = intervals.a[rows], intervals.b[rows]
        interval, cuts, is_searched = locate_kinks(self.segment, self.X, point, a, b)
        searched = point[is_searched]
        cost = torch.full_like(searched, _SEARCH_EVALUATIONS, dtype=self.evaluations.dtype)
        self.evaluations.index_add_(0, searched, cost)
        owner = rows[interval]
        gap = 64 * torch.finfo(intervals.a.dtype).eps
        inside = (cuts > intervals.a[owner] + gap) & (cuts < intervals.b[owner] - gap)
        owner, cuts = owner[inside], cuts[inside]
        order = iv.lexicographic(owner, cuts)
        owner, cuts = owner[order], cuts[order]
        is_new = torch.ones_like(owner, dtype=torch.bool)
        is_new[1:] = (owner[1:] != owner[:-1]) | (cuts[1:] - cuts[:-1] > gap)
        return owner[is_new], cuts[is_new]


# Closer breakpoints count as one.
_MERGE_DISTANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Integral:
    """int_0^1 <J_{w + t d}(x_n), d> dt for n points, with its nodes.

    For several steps together, each has an equal group of the points.

    Attributes:
        total: The integrals, (n, C).
        start: f at t = 0, (n, C).
        end: f at t = 1, (n, C).
        residual: Sum over a point's intervals of |f(b) - f(a) - integral|, largest output, (n,).
        evaluations: Gradients evaluated per point, including rejected intervals and 2 for each search for kinks, (n,).
            A step on which no unit switches is not searched. Forward passes do not count.
        point: The point to which each of the E accepted nodes belongs, (E,).
        t: Positions of the nodes, (E,).
        weight: Weights of the nodes, (E,); they sum to 1 for every point.
        breakpoints: Starts of the accepted intervals, (A,).
        ends: Ends of the accepted intervals, (A,).
        orders: Numbers of nodes of the accepted intervals, (A,).
        num_intervals: Number of accepted intervals of each point, (n,).
        status: Most severe reason for which a point's intervals were accepted, a `QuadratureStatus`, (n,).
        rounding: The residual of an interval that rounding explains, (n,): that of the outputs, in the coarsest dtype
            inside the network; for a layerwise average, which is not an integral, also that of a sum whose terms may be
            larger than the outputs.
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
    ends: Float[Tensor, " A"]
    orders: Int64[Tensor, " A"]
    num_intervals: Int64[Tensor, " n"]
    status: Int64[Tensor, " n"]
    rounding: Float[Tensor, " n"]


def integrate(
    segment: WeightSegment, X: Shaped[Tensor, "N ..."], rule: QuadratureRule | AdaptiveRule, num_steps: int
) -> Integral:
    """Integrate the gradient's inner product with each step, for n points: pairs of a step and an input.

    Args:
        segment: The steps.
        X: N inputs.
        rule: A fixed rule, used as it is, or an adaptive one.
        num_steps: Number of steps that share the adaptive rule's tolerance.

    Returns:
        Integrals and certificate.

    Raises:
        ValueError: The network's outputs at either end of the step hold NaN or infinity.
    """
    n = segment.num_lines * len(X)
    zeros, ones = segment.w.new_zeros(n), segment.w.new_ones(n)
    every = torch.arange(n, device=X.device)
    no = torch.zeros_like(every, dtype=torch.bool)
    if isinstance(rule, AdaptiveRule):
        start, end, switches = values_at_ends(segment, X)
    else:  # it does not use the switching units
        start, end, switches = values(segment, X, zeros, every), values(segment, X, ones, every), no
    validate_finite(start, "the network's outputs at the start of a step")
    validate_finite(end, "the network's outputs at the end of a step")
    total, residual, evaluations = torch.zeros_like(start), zeros.clone(), zeros.clone()
    status, num_intervals = torch.zeros_like(every), torch.zeros_like(every)
    table = iv.stage_table(rule, segment.w.dtype, segment.w.device)
    accepted: list[tuple[Tensor, ...]] = []
    none_known = start.new_zeros(n, table.num_kept, start.shape[1])
    intervals = iv.Intervals(every, zeros, ones, start, end, zeros, every * 0, none_known, ones * torch.inf, no, every)
    refinement = None
    if isinstance(rule, AdaptiveRule):
        refinement = _Refinement(segment, X, rule, num_steps, table)
        intervals, evaluations = refinement.cut_at_kinks(intervals, switches), refinement.evaluations
    parents = iv.Parents(torch.zeros_like(start), iv.Lineage(every * 0, no, every * 0, zeros), no, no)
    rounding = iv.rounding_of(start, end, segment.net.coarsest_dtype, segment.net.model.output_size)
    level = 0
    while len(intervals):
        owner, number, t, weight = iv.nodes_of(intervals, table)
        point = intervals.point[owner]
        is_new = (number >= table.num_known[intervals.stage][owner]).nonzero().squeeze(1)
        f, slope = start.new_zeros(len(t), start.shape[1]), start.new_empty(len(t), start.shape[1])
        f[is_new], slope[is_new] = directional_derivatives(segment, X, t[is_new], point[is_new])
        old = (number < table.num_known[intervals.stage][owner]).nonzero().squeeze(1)
        slope[old] = intervals.known[owner[old], number[old]]
        integral = torch.zeros_like(intervals.f_a).index_add_(0, owner, weight[:, None] * slope)
        evaluations.index_add_(0, point[is_new], torch.ones_like(t[is_new]))
        kept = (number < table.num_kept).nonzero().squeeze(1)
        place = (owner[kept], number[kept])
        slopes = torch.zeros_like(intervals.known).index_put_(place, slope[kept])
        inner = torch.zeros_like(intervals.known).index_put_(place, f[kept])
        difference = intervals.f_b - intervals.f_a - integral
        error = difference.abs().amax(dim=1)
        noise = rounding[intervals.point]
        found = iv.Integrated(intervals, integral, slopes, inner, difference, error, noise, level)
        if refinement is None:
            reason, intervals = iv.fixed_status(error), intervals[every[:0]]
        else:
            reason, intervals, parents = refinement.refine(found, parents)
        done = (reason != iv.OPEN).nonzero().squeeze(1)
        finished = found.intervals[done]
        total.index_add_(0, finished.point, integral[done])
        residual.index_add_(0, finished.point, error[done])
        num_intervals.index_add_(0, finished.point, torch.ones_like(finished.point))
        status.scatter_reduce_(0, finished.point, reason[done], "amax")
        kept = (reason != iv.OPEN)[owner].nonzero().squeeze(1)
        accepted.append((point[kept], t[kept], weight[kept], finished.a, finished.b, table.size[finished.stage]))
        level += 1
    nodes = [torch.cat(columns) for columns in zip(*accepted, strict=True)]
    certificate = {"num_intervals": num_intervals, "status": status, "rounding": iv.SETTLED * rounding}
    return Integral(total, start, end, residual, evaluations, *nodes, **certificate)


def union_mesh(integral: Integral, rule: AdaptiveRule) -> list[tuple[float, float]]:
    """Choose one composite rule that is fine enough for all points of an integral.

    Its intervals lie between neighbouring ends of the points' intervals. Each has the highest order of the points'
    intervals that contain it, and at least the rule's own.
    """
    ends = torch.cat([integral.breakpoints, integral.ends, integral.ends.new_tensor([0.0, 1.0])])
    edges = ends.unique().tolist()
    merged = [edges[0]]
    for edge in edges[1:]:
        if edge - merged[-1] > _MERGE_DISTANCE:
            merged.append(edge)
    merged[-1] = 1.0
    middles = ends.new_tensor([(a + b) / 2 for a, b in pairwise(merged)])
    orders = torch.full_like(middles, rule.order, dtype=torch.long)
    for order in sorted({*integral.orders.tolist()} - {*range(rule.order)}):
        has_order = integral.orders == order
        starts, stops = integral.breakpoints[has_order].sort().values, integral.ends[has_order].sort().values
        is_covered = torch.searchsorted(starts, middles, right=True) > torch.searchsorted(stops, middles, right=True)
        orders[is_covered] = order
    return [
        (a + (b - a) * t, (b - a) * weight)
        for (a, b), order in zip(pairwise(merged), orders.tolist(), strict=True)
        for t, weight in gauss_legendre(order)
    ]
