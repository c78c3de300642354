"""Adaptive quadrature along a training step, steered by the free residual, with its certificate.

An interval [a, b] of a step is accepted for a point when |f(b) - f(a) - int_a^b <J, d> dt| is small enough: forward
passes are all that it takes to know. A step on which a unit switches is cut at its kinks before any node is evaluated
(`kinks.values_at_ends`). Other intervals start with few nodes and go to the smallest rule that promises to suffice
(`resolution.predicted_errors`), which keeps these nodes (`nested.rising_stages`). Where none does, the interval is
searched for kinks (`kinks.locate_kinks`), or else halved.
The residual only chooses nodes; it is never added to anything. No integrand makes the rule run without end: evaluations
are bounded, and a status says why it stopped (`QuadratureStatus`).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import WeightSegment, directional_derivatives, values
from epk_gp.core.checks import validate_finite
from epk_gp.quadrature.intervals import Integrated, Intervals, nodes_of, stage_table
from epk_gp.quadrature.kinks import values_at_ends
from epk_gp.quadrature.intervals import fixed_stages, rising_stages
from epk_gp.quadrature.adaptive import first_intervals, refine
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, gauss_legendre
from epk_gp.quadrature.status import OPEN, Lineage, Parents, fixed_status, rounding_of

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
            A step on which no unit switches is not searched. Forward passes do not count.
        point: Which point each of the E accepted nodes belongs to, (E,).
        t: Their positions, (E,).
        weight: Their weights, (E,); for every point they sum to 1.
        breakpoints: Where the accepted intervals start, (A,).
        ends: Where they end, (A,).
        orders: How many nodes they have, (A,).
        num_intervals: How many of them belong to each point, (n,).
        status: Most severe reason for which a point's intervals were accepted, a `QuadratureStatus`, (n,).
        rounding: Of what is no integral (a layerwise average), the residual that the rounding of a sum explains whose
            terms may be larger than the outputs, (n,).
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
    rounding: Float[Tensor, " n"] | None = None


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
    every = torch.arange(n, device=X.device)
    no = torch.zeros_like(every, dtype=torch.bool)
    if isinstance(rule, AdaptiveRule):
        start, end, switches = values_at_ends(segment, X)
    else:  # which unit switches is of no use to it
        start, end, switches = values(segment, X, zeros), values(segment, X, ones), no
    validate_finite(start, "the network's outputs at the start of a step")
    validate_finite(end, "the network's outputs at the end of a step")
    total, residual, evaluations = torch.zeros_like(start), zeros.clone(), zeros.clone()
    status, num_intervals = torch.zeros_like(every), torch.zeros_like(every)
    table = stage_table(
        fixed_stages(rule) if isinstance(rule, QuadratureRule) else rising_stages(rule.order), segment.w
    )
    accepted: list[tuple[Tensor, ...]] = []
    none_known = start.new_zeros(n, table.num_kept, start.shape[1])
    first = torch.full_like(every, table.first)
    intervals = Intervals(every, zeros, ones, start, end, zeros, first, none_known, ones * torch.inf, no, every)
    if isinstance(rule, AdaptiveRule):
        intervals = first_intervals(segment, X, (intervals, switches), table, evaluations, rule.max_evaluations)
    parents = Parents(torch.zeros_like(start), Lineage(every * 0, no, every * 0, zeros), no, no)
    rounding = rounding_of(start, end)
    level = 0
    while len(intervals):
        owner, number, t, weight = nodes_of(intervals, table)
        point = intervals.point[owner]
        is_new = (number >= table.num_known[intervals.stage][owner]).nonzero().squeeze(1)
        f, slope = start.new_zeros(len(t), start.shape[1]), start.new_empty(len(t), start.shape[1])
        f[is_new], slope[is_new] = directional_derivatives(segment, X[point[is_new]], t[is_new])
        if len(is_new) < len(t):
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
        found = Integrated(intervals, parents, integral, slopes, inner, difference, error, noise, level, table)
        if isinstance(rule, QuadratureRule):
            reason, intervals = fixed_status(error), intervals[every[:0]]
        else:
            reason, intervals, parents = refine(segment, X, rule, num_steps, found, evaluations)
        done = (reason != OPEN).nonzero().squeeze(1)
        finished = found.intervals[done]
        total.index_add_(0, finished.point, integral[done])
        residual.index_add_(0, finished.point, error[done])
        num_intervals.index_add_(0, finished.point, torch.ones_like(finished.point))
        status.scatter_reduce_(0, finished.point, reason[done], "amax")
        kept = (reason != OPEN)[owner].nonzero().squeeze(1)
        accepted.append((point[kept], t[kept], weight[kept], finished.a, finished.b, table.size[finished.stage]))
        level += 1
    point, t, weight, breakpoints, ends, orders = (torch.cat(columns) for columns in zip(*accepted, strict=True))
    return Integral(
        total, start, end, residual, evaluations, point, t, weight, breakpoints, ends, orders, num_intervals, status
    )


def union_mesh(integral: Integral, rule: AdaptiveRule) -> list[tuple[float, float]]:
    """Choose one composite rule that is fine enough for all of an integral's points.

    Its intervals lie between neighbouring ends of the points' intervals. Each has the highest order of the points'
    intervals that contain it, and the rule's own at least.
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
