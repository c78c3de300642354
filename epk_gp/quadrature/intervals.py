"""Intervals of a step, nested rules of rising order, and a measure of the resolution of a function on an interval.

f' is smooth on an interval if its Legendre coefficients c_k fall geometrically. The first of them follow from known
values: df/dt at the nodes, and f at the nodes and ends. The errors of larger rules are predicted from them. A kink
makes the coefficients fall slowly, so that no rule is predicted to suffice.

An interval starts with few nodes; df/dt and f there show how fast f is resolved (`spectrum`). It then goes to the
smallest rule that is predicted to suffice, and keeps its nodes: the midpoint is a node of every Gauss-Legendre rule of
odd order, and other rules are extended by the nodes that give the highest degree (Kronrod 1965, Patterson 1968). So a
higher order costs only its new nodes.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, QuadratureStatus, gauss_legendre

# Number of coefficients in a predicted error, and the slowest decay that allows a prediction.
NUM_TERMS, _SLOWEST = 80, 0.95


def spectrum(nodes: tuple[float, ...], points: tuple[float, ...]) -> np.ndarray:
    """Return the matrix that maps data of f on [0, 1] to Legendre coefficients of f'.

    Args:
        nodes: The n positions at which f' is known.
        points: The m positions, in rising order, at which f is known in addition to the ends.

    Returns:
        The inverse of the collocation matrix, (K, K), K = n + m + 1: for f' at the nodes, then the differences of f
        between neighbouring points.
    """
    ends = 2 * np.array([0.0, *points, 1.0]) - 1
    K = len(nodes) + len(ends) - 1
    integrals = [np.polynomial.legendre.Legendre.basis(k).integ(lbnd=-1)(ends) / 2 for k in range(K)]
    values = np.polynomial.legendre.legvander(2 * np.array(nodes) - 1, K - 1)
    return np.linalg.inv(np.concatenate([values, np.diff(np.stack(integrals, axis=1), axis=0)]))


def legendre_errors(rule: QuadratureRule, degree: int) -> np.ndarray:
    """Return |rule(P_k) - integral of P_k| on [0, 1] for the first `NUM_TERMS` Legendre polynomials.

    Args:
        rule: The rule.
        degree: Degree of exactness of the rule: up to it, the errors are set to exactly zero.
    """
    sums = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, NUM_TERMS - 1).T @ np.array(rule.weights)
    return np.where(np.arange(NUM_TERMS) <= degree, 0.0, np.abs(sums))


def predicted_errors(coefficients: Float[Tensor, "E K C"], errors: Float[Tensor, "R J"]) -> Float[Tensor, "E R"]:
    """Predict the errors of rules from the first Legendre coefficients of a function.

    A line is fitted to log max_c |c_k|, k from 1 to K - 1. Later coefficients are assumed to fall like the line,
    starting at the larger one of the last two, because every other coefficient may vanish.

    Args:
        coefficients: The first K coefficients on each of the E intervals.
        errors: Errors of the R rules for each Legendre polynomial (`legendre_errors`).
    """
    K = coefficients.shape[1]
    size = coefficients.abs().amax(dim=2).clamp(min=torch.finfo(coefficients.dtype).tiny)
    k = torch.arange(1, K, dtype=size.dtype, device=size.device)
    k = k - k.mean()
    fall = ((size[:, 1:].log() * k).sum(dim=1) / (k * k).sum()).exp().clamp(max=_SLOWEST)
    terms = torch.arange(errors.shape[1], dtype=size.dtype, device=size.device) - (K - 1.5)
    following = torch.where(terms > -1, fall[:, None] ** terms, 0.0)
    return size[:, -2:].amax(dim=1)[:, None] * (following @ errors.T)


def extrapolated_errors(
    error: Float[Tensor, " E"],
    before: Float[Tensor, " E"],
    degree: Int64[Tensor, " E"],
    degree_before: Int64[Tensor, " E"],
    degree_after: Int64[Tensor, " E"],
) -> Float[Tensor, " E"]:
    """Predict errors from the errors of two rules: they fall geometrically with the degree of exactness."""
    tiny = torch.finfo(error.dtype).tiny
    fall = (error.clamp(min=tiny) / before.clamp(min=tiny)).log() / (degree - degree_before).clamp(min=1)
    return error * (fall * (degree_after - degree)).exp()


# The largest Gauss-Legendre rule to which a midpoint is raised; intervals that need more nodes are cut. Measured on six
# networks with LayerNorm, GroupNorm and attention at steps of size 1: with 13, 17, 21, 27 and 33 nodes a point and step
# took 47, 44, 41, 41 and 42 evaluations.
_MAX_RAISED_NODES = 21

# The largest rule that is extended, and the largest extension.
_MAX_EXTENDED_NODES, _MAX_NODES = 32, 43

# Additional positions at which f is evaluated, without a gradient, if the midpoint alone does not suffice. Three
# numbers do not show how fast f is resolved; five do: at small steps the chosen rules took 2 % more evaluations than
# the best choice.
_PROBES = (0.2, 0.8)


@dataclass(frozen=True)
class Stage:
    """One order of an interval.

    Attributes:
        rule: Its nodes; the first `num_known` are those of the previous stage, in the same order.
        num_known: Number of nodes from the previous stage.
        degree: Polynomials of this degree are integrated exactly.
        previous: Index of the previous stage; -1 for a first stage.
        options: Indices of the stages to which it can be raised, by their number of nodes.
        probes: Positions at which f is also evaluated, to measure how fast it is resolved.
    """

    rule: QuadratureRule
    num_known: int
    degree: int
    previous: int
    options: tuple[int, ...]
    probes: tuple[float, ...]


@cache
def rising_stages(order: int) -> tuple[tuple[Stage, ...], int]:
    """Return the orders of an adaptive rule whose half intervals start with `order` Gauss-Legendre nodes.

    Every option comes after the stage that it extends. The number is the index of the order with which halves start.
    """
    middle = _family(gauss_legendre(1), [_odd_gauss(n) for n in range(3, _MAX_RAISED_NODES + 1, 2)], 0, _PROBES)
    if order == 1:
        return middle, 0
    start = gauss_legendre(order)
    counts = range(order + 1, max(order + 2, _MAX_RAISED_NODES)) if order <= _MAX_EXTENDED_NODES else range(0)
    wider = [extend(start, count) for count in counts]
    halves = _family(start, [rule for rule in wider if rule is not None], len(middle), ())
    return (*middle, *halves), len(middle)


def _family(
    start: QuadratureRule, wider: list[QuadratureRule], offset: int, probes: tuple[float, ...]
) -> tuple[Stage, ...]:
    """List a rule, the rules to which it is raised, and the extension of each of these if there is one."""
    n = len(start)
    last = [extend(rule) if 2 * len(rule) + 1 <= _MAX_NODES else None for rule in wider]
    first_last = offset + 1 + len(wider)
    table = [Stage(start, 0, 2 * n - 1, -1, tuple(range(offset + 1, first_last)), probes)]
    ends = list[Stage]()
    for k, (rule, extension) in enumerate(zip(wider, last, strict=True)):
        options = () if extension is None else (first_last + len(ends),)
        table.append(Stage(rule, n, _degree(n, len(rule)), offset, options, ()))
        if extension is not None:
            ends.append(Stage(extension, len(rule), _degree(len(rule), len(extension)), offset + 1 + k, (), ()))
    return (*table, *ends)


def _degree(known: int, nodes: int) -> int:
    """Return the degree of exactness of an extended symmetric rule, an odd number."""
    degree = 2 * nodes - known - 1
    return degree + 1 - degree % 2


def _odd_gauss(n: int) -> QuadratureRule:
    """Return the Gauss-Legendre rule of an odd order, with its midpoint first."""
    rule = gauss_legendre(n)
    order = [n // 2, *range(n // 2), *range(n // 2 + 1, n)]
    nodes = [rule.nodes[k] for k in order]
    return QuadratureRule(rule.name, (0.5, *nodes[1:]), tuple(rule.weights[k] for k in order))


def extend(rule: QuadratureRule, number: int | None = None) -> QuadratureRule | None:
    """Add m nodes to n < m so that the degree of exactness is the highest possible, at least n + 2m - 1.

    With E(x) = prod (x - x_i) over the nodes on [-1, 1], the new ones are the roots of the polynomial F of degree m for
    which the integral of E F p is zero for every p of degree m - 1 at most. The weights follow from the degree of
    exactness of an interpolation, n + m - 1.

    Args:
        rule: The rule.
        number: m; n + 1 by default.

    Returns:
        The old nodes, then the new ones; None if there is no such rule with nodes in [0, 1] and positive weights.
    """
    n = len(rule)
    m = n + 1 if number is None else number
    known = 2 * np.array(rule.nodes) - 1
    x, w = np.polynomial.legendre.leggauss(n + m + 1)
    P = np.polynomial.legendre.legvander(x, m)
    products = P[:, :m].T @ (P * (w * np.prod(x[:, None] - known, axis=1))[:, None])
    scale = np.abs(products).max()
    # there is no such polynomial if the matrix is singular
    if np.linalg.cond(products[:, :m]) > 1e12:
        return None
    coefficients = np.linalg.solve(products[:, :m] / scale, -products[:, m] / scale)
    F = np.polynomial.legendre.Legendre([*coefficients, 1.0])
    new = F.roots()
    if np.iscomplexobj(new) and np.abs(new.imag).max() > 0:
        return None
    new = np.sort(np.real(new).astype(np.float64))
    new = new - F(new) / F.deriv()(new)
    nodes = np.concatenate([known, new])
    if np.abs(nodes).max() > 1 or np.diff(np.sort(nodes)).min() < 1e-6:
        return None
    moments = np.zeros(n + m)
    moments[0] = 1.0  # moment of the uniform distribution on [-1, 1]
    weights = np.linalg.solve(np.polynomial.legendre.legvander(nodes, n + m - 1).T, moments)
    if weights.min() <= 0:
        return None
    return QuadratureRule(
        f"{rule.name}, extended to {len(nodes)}",
        (*rule.nodes, *(0.5 + 0.5 * new).tolist()),
        tuple((weights / weights.sum()).tolist()),
    )


# A residual below this many eps of the outputs' size counts as rounding of its sums.
_ROUNDING = 16

# After every NOISE_LEVELS levels, a residual below _NOISE times that rounding is accepted if these levels, which made
# the interval 2^NOISE_LEVELS times shorter, did not make it 4 times smaller: it is rounding inside the network.
_NOISE, NOISE_LEVELS = 1024, 8

# The shortest interval that is still split, in eps.
_SHORTEST = 8

# Halving an interval shows that its quadrature has converged, but not to f(b) - f(a), if it changes the integral by at
# most this fraction of the residual, and either half keeps more than that fraction. After this many such generations
# the interval is accepted (docs/engine.md, section 8). A generation counts twice if either half keeps more than a
# quarter: the derivative is wrong all along the interval.
_CONVERGED_CHANGE, _GENERATIONS, _EVEN = 1e-2, 4, 2

# Where f is smooth, a higher order or half an interval has at most this fraction of the residual. Halving an interval
# divides the residual of Gauss-Legendre with n nodes by 2^(2n + 1), 512 for n = 4; extending the rule gains more.
SMOOTH_DECAY = 1e-2

# An integral has settled if this many higher orders in a row reduce its residual like that or, as the last one must,
# change it by at most _CONVERGED_CHANGE of the residual. The rest counts as rounding inside the network if it is at
# most SETTLED times the rounding above, which a certificate allows, or at the level of noise and this fraction of the
# integral: a kink that all of these orders miss lies that close to an end of the interval.
_RAISES, SETTLED, _SMALL_PART = 2, 4, 1e-6

OPEN = -1  # the interval will be refined

R = TypeVar("R", bound="_Rows")


@dataclass(frozen=True, eq=False)
class _Rows:
    """Tensors with one row for each of E intervals."""

    def __getitem__(self: R, rows: Shaped[Tensor, " _"]) -> R:
        """Return the rows of some of the intervals."""
        return replace(self, **{name: value[rows] for name, value in vars(self).items() if not isinstance(value, int)})


@dataclass(frozen=True, eq=False)
class Lineage(_Rows):
    """Number of generations for which E intervals' quadrature has converged, but not to f(b) - f(a).

    Attributes:
        raises: Number of consecutive higher orders that behaved as for a smooth f.
        has_settled: The last of at least `_RAISES` higher orders hardly changed the integral.
        generations: Number of consecutive halvings that did so, including the interval's parent.
        error: The residual of the ancestor at their start.
    """

    raises: Int64[Tensor, " E"]
    has_settled: Bool[Tensor, " E"]
    generations: Int64[Tensor, " E"]
    error: Float[Tensor, " E"]


@dataclass(frozen=True, eq=False)
class Parents:
    """F intervals from which the intervals of the next level are made.

    Attributes:
        residual: f(b) - f(a) - integral, (F, C).
        lineage: Their lineages.
        is_halved: Whether they were cut in the middle, and not at located kinks.
        is_raised: Whether they were not cut, but given a higher order.
    """

    residual: Float[Tensor, "F C"]
    lineage: Lineage
    is_halved: Bool[Tensor, " F"]
    is_raised: Bool[Tensor, " F"]


def rounding_of(
    start: Float[Tensor, "n C"], end: Float[Tensor, "n C"], dtype: torch.dtype, least: float
) -> Float[Tensor, " n"]:
    """Return the residual that counts as rounding of each point's outputs, in a dtype; `least` is their least size."""
    size = torch.maximum(start.abs(), end.abs()).amax(dim=1).clamp(min=least)
    return _ROUNDING * torch.finfo(dtype).eps * size


def fixed_status(error: Float[Tensor, " E"]) -> Int64[Tensor, " E"]:
    """Return the status of intervals under a fixed rule, from their residuals."""
    return torch.where(error.isfinite(), QuadratureStatus.FIXED, QuadratureStatus.NOT_FINITE)


def residual_status(error: Float[Tensor, " E"], rounding: Float[Tensor, " E"], tol: float) -> Int64[Tensor, " E"]:
    """Return the status of intervals whose residuals are small, and `OPEN` for the others.

    Args:
        error: Their residuals.
        rounding: Residual that counts as rounding of the outputs.
        tol: Tolerance of a step.
    """
    reason = torch.where(error <= rounding, QuadratureStatus.ROUNDING, OPEN)
    return torch.where(error <= tol, QuadratureStatus.CONVERGED, reason)


def trace_lineage(
    parents: Parents, parent: Int64[Tensor, " E"], residual: Float[Tensor, "E C"], is_open: Bool[Tensor, " E"]
) -> Lineage:
    """Continue the parents' lineages.

    A generation counts if halving an interval hardly changed its integral, and both halves keep a part of its residual.

    Args:
        parents: The intervals that were refined last.
        parent: Index of the parent of each of the E intervals.
        residual: The intervals' f(b) - f(a) - integral.
        is_open: Whether their residuals are not small.
    """
    # in the difference of residuals, f(b) - f(a) cancels: it is the sum of the parts' integrals minus the parent's
    change = parents.residual.index_add(0, parent, residual, alpha=-1).abs().amax(dim=1)
    error, before = parents.residual.abs().amax(dim=1), parents.lineage
    threshold = _CONVERGED_CHANGE * error
    is_left = is_open & (residual.abs().amax(dim=1) > threshold[parent])
    num_left = torch.zeros_like(before.generations).index_add_(0, parent, is_left.long())
    num_even = torch.zeros_like(num_left).index_add_(0, parent, (residual.abs().amax(dim=1) > error[parent] / 4).long())
    counts = parents.is_halved & (change <= threshold) & (num_left == 2)
    generations = torch.where(counts, before.generations + torch.where(num_even == 2, _EVEN, 1), 0)
    own = torch.zeros_like(error).index_add_(0, parent, residual.abs().amax(dim=1))  # of the only part, if raised
    is_smooth = (change <= threshold) | (own <= SMOOTH_DECAY * error)
    raises = torch.where(parents.is_raised & is_smooth, before.raises + 1, 0)
    has_settled = (raises >= _RAISES) & (change <= threshold)
    return Lineage(raises, has_settled, generations, torch.where(before.generations > 0, before.error, error))[parent]


def may_be_rounding(found: "Integrated") -> Bool[Tensor, " E"]:
    """Return whether residuals count as rounding inside the network once the integrals have settled."""
    error, rounding = found.error, found.rounding
    is_small_part = (error <= _NOISE * rounding) & (error <= _SMALL_PART * found.integral.abs().amax(dim=1))
    return (error <= SETTLED * rounding) | is_small_part


def limit_status(found: "Integrated", lineage: Lineage) -> Int64[Tensor, " E"]:
    """Return the status of intervals that are not refined although their residuals are not small; otherwise `OPEN`."""
    error, rounding, level = found.error, found.rounding, found.level
    width, ancestor_error = found.intervals.b - found.intervals.a, found.intervals.parent_residual
    is_noise = error <= _NOISE * rounding
    has_stalled = is_noise & (error > ancestor_error / 4) & (level > 0 and level % NOISE_LEVELS == 0)
    is_jump = error > _NOISE * found.integral.abs().amax(dim=1)
    at_limit = torch.where(is_jump, QuadratureStatus.INCONSISTENT_DERIVATIVE, QuadratureStatus.INTERVAL_LIMIT)
    at_limit = torch.where(is_noise, QuadratureStatus.ROUNDING, at_limit)
    reason = torch.where(width <= _SHORTEST * torch.finfo(error.dtype).eps, at_limit, OPEN)
    began_as_noise = lineage.error <= _NOISE * rounding
    converged = torch.where(began_as_noise, QuadratureStatus.ROUNDING, QuadratureStatus.INCONSISTENT_DERIVATIVE)
    reason = torch.where(lineage.generations >= _GENERATIONS, converged, reason)
    has_settled = lineage.has_settled & may_be_rounding(found)
    reason = torch.where(has_stalled | has_settled, QuadratureStatus.ROUNDING, reason)
    return torch.where(error.isfinite(), reason, QuadratureStatus.NOT_FINITE)


@dataclass(frozen=True, eq=False)
class Intervals(_Rows):
    """E intervals [a, b] of points.

    Attributes:
        point: The point of each interval.
        a: Their starts.
        b: Their ends.
        f_a: f at the starts.
        f_b: f at the ends.
        parent_residual: Largest residual of their ancestors in the last levels.
        stage: Index of their order.
        known: df/dt at the nodes of the previous order, (E, K, C).
        error_before: Residual of the previous order, or of the halved parent; infinity if neither is known.
        is_searched: Whether they were searched for kinks.
        parent: Index of the parent among the intervals that were refined last.
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
    is_searched: Bool[Tensor, " E"]
    parent: Int64[Tensor, " E"]

    def __len__(self) -> int:
        """Count the intervals."""
        return len(self.point)


@dataclass(frozen=True, eq=False)
class Integrated(_Rows):
    """E intervals of one level, with the results at their nodes.

    Attributes:
        intervals: The intervals.
        integral: Their integrals.
        slopes: df/dt at those nodes that the next order keeps, (E, K, C).
        inner: f at the same nodes, (E, K, C); only at the new ones.
        residual: f(b) - f(a) - integral.
        error: The largest entry of the residual.
        rounding: Residual that counts as rounding of the outputs.
        level: Number of refinements of the intervals.
    """

    intervals: Intervals
    integral: Float[Tensor, "E C"]
    slopes: Float[Tensor, "E K C"]
    inner: Float[Tensor, "E K C"]
    residual: Float[Tensor, "E C"]
    error: Float[Tensor, " E"]
    rounding: Float[Tensor, " E"]
    level: int


class StageTable:
    """The orders of intervals as tensors: row r belongs to the r-th order.

    Args:
        stages: The orders.
        half: Row of the order with which half an interval starts; a step, or an interval between located kinks, starts
            with the first row.
        dtype: Dtype of the numbers.
        device: Device of the tensors.

    Attributes:
        nodes: Padded with zeros, (R, Q).
        weights: Likewise, (R, Q).
        size: Number of nodes.
        num_known: Number of nodes from the previous order.
        degree: Degree of exactness.
        previous: Row of the previous order, or -1 for a first order.
        option: Row of the lowest order to which it can be raised, or -1.
        errors: `legendre_errors`, (R, J).
        num_kept: K, the largest number of nodes that another order keeps.
    """

    def __init__(self, stages: tuple[Stage, ...], half: int, dtype: torch.dtype, device: torch.device) -> None:
        def integers(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device)

        def padded(rows: list[tuple[float, ...]]) -> Tensor:
            return pad_sequence([torch.tensor(row, dtype=dtype, device=device) for row in rows], batch_first=True)

        self.stages, self.half = stages, half
        self.nodes = padded([stage.rule.nodes for stage in stages])
        self.weights = padded([stage.rule.weights for stage in stages])
        self.size = integers([len(stage.rule) for stage in stages])
        self.num_known = integers([stage.num_known for stage in stages])
        self.degree = integers([stage.degree for stage in stages])
        self.previous = integers([stage.previous for stage in stages])
        self.option = integers([min(stage.options, default=-1) for stage in stages])
        self.errors = padded([tuple(legendre_errors(stage.rule, stage.degree)) for stage in stages])
        self.num_kept = max(stage.num_known for stage in stages)


@lru_cache(maxsize=16)
def stage_table(rule: QuadratureRule | AdaptiveRule, dtype: torch.dtype, device: torch.device) -> StageTable:
    """Return the orders of intervals under a rule as tensors."""
    if isinstance(rule, QuadratureRule):
        return StageTable((Stage(rule, 0, 0, -1, (), ()),), 0, dtype, device)
    return StageTable(*rising_stages(rule.order), dtype, device)


@lru_cache(maxsize=16)
def spectrum_of(stage: Stage, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "K K"]:
    """Return the matrix that maps the known values of an interval's first order to Legendre coefficients of f'."""
    points = tuple(sorted({*stage.rule.nodes, *stage.probes}))
    return torch.tensor(spectrum(stage.rule.nodes, points), dtype=dtype, device=device)


def nodes_of(intervals: Intervals, table: StageTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List every interval's nodes: their interval, their number in it, their positions and weights."""
    counts = table.size[intervals.stage]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    row, width = intervals.stage[owner], (intervals.b - intervals.a)[owner]
    return owner, number, intervals.a[owner] + width * table.nodes[row, number], width * table.weights[row, number]


def between_cuts(intervals: Intervals, owner: Tensor, cuts: Tensor, f_cuts: Tensor, to_cut: Tensor) -> Intervals:
    """Make the parts of cut intervals.

    For one interval with two cuts:

    left ends    a    c1   c2       sorted by owner, then position
    right ends   c1   c2   b        the next left end, or the interval's own end after its last cut

    Args:
        intervals: All intervals.
        owner: Index of the interval that contains each cut, (B,).
        cuts: The cuts, ordered by owner and by position, (B,).
        f_cuts: f at the cuts, (B, C).
        to_cut: The intervals that are cut; an interval without a cut is one part.
    """
    owner = torch.cat([to_cut, owner])
    left, f_left = torch.cat([intervals.a[to_cut], cuts]), torch.cat([intervals.f_a[to_cut], f_cuts])
    order = lexicographic(owner, left)
    owner, left, f_left = owner[order], left[order], f_left[order]
    is_last = torch.ones_like(owner, dtype=torch.bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    right = torch.where(is_last, intervals.b[owner], left.roll(-1))
    f_right = torch.where(is_last[:, None], intervals.f_b[owner], f_left.roll(-1, dims=0))
    return replace(intervals[owner], a=left, b=right, f_a=f_left, f_b=f_right, parent=owner)


def lexicographic(first: Tensor, second: Tensor) -> Tensor:
    """Return the order by `first`, then by `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]
