"""Adaptive quadrature along a training step, steered by the free residual, with its certificate.

A segment [a, b] of a step is accepted for a point when |f(b) - f(a) - int_a^b <J, d> dt| is small enough: forward
passes are all that it takes to know. Otherwise it is split where units switch (`kinks.locate_kinks`), or in the middle.
Between switches f is nearly a polynomial: segments that are cut there get few nodes first, and the rule's own number
before they are split again. The residual only chooses nodes; it is never added to anything.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import Line, directional_derivatives, values
from epk_gp.core.validation import validate_finite
from epk_gp.quadrature.kinks import locate_kinks
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, gauss_legendre

_FEW = 2  # nodes of a segment between located kinks
_ROUNDING = 16  # a residual below this many eps of the outputs' size is rounding
_NOISE = 1024
_NOISE_LEVELS = 8
_MAX_LEVELS = 60
_MAX_SEGMENTS = 4096  # open segments of one point; what is then accepted shows in the certificate


@dataclass(frozen=True, eq=False)
class Integral:
    """int_0^1 <J_{w + t d}(x_n), d> dt for n points, with the nodes that it took.

    Attributes:
        total: The integrals, (n, C).
        start: f at t = 0, (n, C).
        end: f at t = 1, (n, C).
        residual: Sum over a point's segments of |f(b) - f(a) - integral|, largest output, (n,).
        evaluations: Gradients evaluated per point, rejected segments included, (n,).
        point: Which point each of the E accepted nodes belongs to, (E,).
        t: Their places, (E,).
        weight: Their weights, (E,); for every point they sum to 1.
        cuts: Where the accepted segments start, (A,).
    """

    total: Float[Tensor, "n C"]
    start: Float[Tensor, "n C"]
    end: Float[Tensor, "n C"]
    residual: Float[Tensor, " n"]
    evaluations: Float[Tensor, " n"]
    point: Int64[Tensor, " E"]
    t: Float[Tensor, " E"]
    weight: Float[Tensor, " E"]
    cuts: Float[Tensor, " A"]


@dataclass(frozen=True, eq=False)
class Segments:
    """E segments [a, b] of points, with f at both ends and the largest residual of the last levels above.

    `fine` ones get all of the rule's nodes, others a few.
    """

    point: Int64[Tensor, " E"]
    a: Float[Tensor, " E"]
    b: Float[Tensor, " E"]
    at_a: Float[Tensor, "E C"]
    at_b: Float[Tensor, "E C"]
    reference: Float[Tensor, " E"]
    fine: Bool[Tensor, " E"]

    def __getitem__(self, rows: Shaped[Tensor, " _"]) -> "Segments":
        """Pick some."""
        return Segments(*(value[rows] for value in vars(self).values()))


def integrate(line: Line, X: Shaped[Tensor, "n ..."], rule: QuadratureRule | AdaptiveRule, num_steps: int) -> Integral:
    """Integrate the gradient's inner product with the step, for n points.

    Args:
        line: The step.
        X: n inputs.
        rule: A fixed rule, used as it is, or an adaptive one.
        num_steps: Steps that share the adaptive rule's tolerance.

    Returns:
        Integrals and certificate.

    Raises:
        ValueError: The network's outputs at either end of the step hold NaN or infinity.
    """
    n = len(X)
    zeros, ones = line.w.new_zeros(n), line.w.new_ones(n)
    start, end = values(line, X, zeros), values(line, X, ones)
    validate_finite(start, "the network's outputs at the start of a step")
    validate_finite(end, "the network's outputs at the end of a step")
    total, residual, evaluations = torch.zeros_like(start), zeros.clone(), zeros.clone()
    every = torch.arange(n, device=X.device)
    base = gauss_legendre(rule.order) if isinstance(rule, AdaptiveRule) else rule
    few = gauss_legendre(min(_FEW, len(base)))
    accepted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    todo = Segments(every, zeros, ones, start, end, zeros, torch.ones_like(every, dtype=torch.bool))
    level = 0
    while len(todo.point):
        owner, t, weight = _nodes(todo, few, base)
        point = todo.point[owner]
        slope = directional_derivatives(line, X[point], t)[1]
        integral = torch.zeros_like(todo.at_a).index_add_(0, owner, weight[:, None] * slope)
        error = (todo.at_b - todo.at_a - integral).abs().amax(dim=1)
        evaluations.index_add_(0, point, torch.ones_like(t))
        done = _acceptable(rule, error, todo, start, end, num_steps, level)
        total.index_add_(0, todo.point[done], integral[done])
        residual.index_add_(0, todo.point[done], error[done])
        kept = done[owner]
        accepted.append((point[kept], t[kept], weight[kept], todo.a[done]))
        todo, located = _refine(line, X, todo[~done], error[~done], level)
        evaluations.index_add_(0, located, torch.full_like(located, 2, dtype=evaluations.dtype))
        level += 1
    point, t, weight, cuts = (torch.cat(parts) for parts in zip(*accepted, strict=True))
    return Integral(total, start, end, residual, evaluations, point, t, weight, cuts)


def union_mesh(line: Line, X: Shaped[Tensor, "n ..."], rule: AdaptiveRule, num_steps: int) -> list[tuple[float, float]]:
    """Choose one composite rule that is fine enough for all n points: segment ends are the union of every point's."""
    base, cuts = gauss_legendre(rule.order), integrate(line, X, rule, num_steps).cuts
    edges = torch.cat([cuts, cuts.new_tensor([0.0, 1.0])]).unique().tolist()
    merged = [edges[0]]
    for edge in edges[1:]:
        if edge - merged[-1] > 1e-12:
            merged.append(edge)
    merged[-1] = 1.0
    return [(a + (b - a) * t, (b - a) * weight) for a, b in pairwise(merged) for t, weight in base]


def _nodes(todo: Segments, few: QuadratureRule, base: QuadratureRule) -> tuple[Tensor, Tensor, Tensor]:
    """List every segment's nodes: whose they are, where, and with which weights."""
    rules = [few, base]
    counts = torch.tensor([len(rule) for rule in rules], device=todo.point.device)[todo.fine.long()]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    filled = [[*values, *[0.0] * (len(base) - len(values))] for rule in rules for values in (rule.nodes, rule.weights)]
    table = todo.a.new_tensor(filled).view(2, 2, -1)[todo.fine.long()[owner], :, number]
    width = (todo.b - todo.a)[owner]
    return owner, todo.a[owner] + width * table[:, 0], width * table[:, 1]


def _acceptable(
    rule: QuadratureRule | AdaptiveRule,
    error: Tensor,
    todo: Segments,
    start: Tensor,
    end: Tensor,
    num_steps: int,
    level: int,
) -> Tensor:
    if isinstance(rule, QuadratureRule) or level >= _MAX_LEVELS:
        return torch.ones_like(error, dtype=torch.bool)
    size = torch.maximum(start.abs(), end.abs()).amax(dim=1).clamp(min=1.0)
    rounding = (_ROUNDING * torch.finfo(error.dtype).eps * size)[todo.point]
    fine = error <= torch.clamp(rounding, min=rule.tol / num_steps)
    # small and no longer falling with the width: rounding of the network's own, more than assumed
    noise = (error > todo.reference / 4) & (error <= _NOISE * rounding)
    noise &= level > 0 and level % _NOISE_LEVELS == 0
    crowded = torch.bincount(todo.point)[todo.point] > _MAX_SEGMENTS
    tiny = todo.b - todo.a <= 8 * torch.finfo(error.dtype).eps
    return fine | noise | crowded | tiny | error.isnan()  # NaN stays, and shows in the certificate


def _refine(line: Line, X: Tensor, failed: Segments, error: Tensor, level: int) -> tuple[Segments, Tensor]:
    """Give segments of few nodes all of them, split the others; also list the points whose kinks were looked for."""
    split, looked = _split(line, X, failed[failed.fine], error[failed.fine], level)
    again = replace(failed, fine=torch.ones_like(failed.fine))[~failed.fine]
    both = (torch.cat(pair) for pair in zip(vars(split).values(), vars(again).values(), strict=True))
    return Segments(*both), looked


def _split(line: Line, X: Tensor, failed: Segments, error: Tensor, level: int) -> tuple[Segments, Tensor]:
    """Cut segments at their located kinks, else in the middle; also list the points whose kinks were looked for."""
    if not len(failed.point):
        return failed, failed.point
    found, places = locate_kinks(line, X[failed.point], failed.a, failed.b)
    gap = 64 * torch.finfo(failed.a.dtype).eps
    inside = (places > failed.a[found] + gap) & (places < failed.b[found] - gap)
    found, places = found[inside], places[inside]
    halved = torch.ones_like(failed.point, dtype=torch.bool)
    halved[found] = False
    middle = (failed.a + failed.b) / 2
    segment = torch.cat([found, halved.nonzero().squeeze(1)])
    cuts = torch.cat([places, middle[halved]])
    order = cuts.argsort(stable=True)
    order = order[segment[order].argsort(stable=True)]
    segment, cuts = segment[order], cuts[order]
    new = torch.ones_like(segment, dtype=torch.bool)
    new[1:] = (segment[1:] != segment[:-1]) | (cuts[1:] - cuts[:-1] > gap)
    segment, cuts = segment[new], cuts[new]
    at_cuts = values(line, X[failed.point[segment]], cuts)
    looked = failed.point if line.plan.supports_interpolation else failed.point[:0]
    # chain: start of each segment, its cuts, its end
    every = torch.arange(len(failed.point), device=X.device)
    owner = torch.cat([every, segment])
    left = torch.cat([failed.a, cuts])
    at_left = torch.cat([failed.at_a, at_cuts])
    order = left.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    owner, left, at_left = owner[order], left[order], at_left[order]
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    right = torch.where(last, failed.b[owner], left.roll(-1))
    at_right = torch.where(last[:, None], failed.at_b[owner], at_left.roll(-1, dims=0))
    # neighbouring kinks can cancel in one residual: the largest of the last levels is what must fall
    reference = (error if level % _NOISE_LEVELS == 0 else torch.maximum(error, failed.reference))[owner]
    return Segments(failed.point[owner], left, right, at_left, at_right, reference, halved[owner]), looked
