"""Intervals of a step, nested rules of rising order, and how fast a function is resolved on an interval.

f' is smooth on an interval if its Legendre coefficients c_k fall geometrically. The first of them follow from what an
interval has anyway: df/dt at its nodes, and f at its nodes and ends. The errors of larger rules are predicted from
them. A kink makes the coefficients fall slowly, so that no rule promises to suffice.

An interval starts with few nodes, and df/dt and f there tell how fast f is resolved (`resolution.spectrum`). It then
goes to the smallest rule that promises to suffice and keeps the nodes that there are: the midpoint is a node of every
Gauss-Legendre rule of odd order, and other rules are extended by the nodes that give the highest degree (Kronrod 1965,
Patterson 1968). So a higher order costs its new nodes only.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre
from epk_gp.quadrature.status import Parents

# Coefficients that a predicted error is summed over, and the slowest fall that is predicted from.
NUM_TERMS, _SLOWEST = 80, 0.95


def spectrum(nodes: tuple[float, ...], points: tuple[float, ...]) -> np.ndarray:
    """Return the matrix that maps data of f on [0, 1] to Legendre coefficients of f'.

    Args:
        nodes: Where f' is known, n numbers.
        points: Where f is known besides the ends, m numbers in rising order.

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
        degree: Up to which it is exact: there the errors are zero, without rounding.
    """
    sums = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, NUM_TERMS - 1).T @ np.array(rule.weights)
    return np.where(np.arange(NUM_TERMS) <= degree, 0.0, np.abs(sums))


def predicted_errors(coefficients: Float[Tensor, "E K C"], errors: Float[Tensor, "R J"]) -> Float[Tensor, "E R"]:
    """Predict the errors of rules from the first Legendre coefficients of a function.

    A line is fitted to log max_c |c_k|, k from 1 to K - 1. The coefficients that follow are taken to fall like it, from
    the larger one of the last two: every other one may vanish.

    Args:
        coefficients: The first K coefficients on each of the E intervals.
        errors: Errors of the R rules for each Legendre polynomial, `legendre_errors`.
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
    """Predict errors from those of two rules: they fall geometrically with the degree of exactness."""
    tiny = torch.finfo(error.dtype).tiny
    fall = (error.clamp(min=tiny) / before.clamp(min=tiny)).log() / (degree - degree_before).clamp(min=1)
    return error * (fall * (degree_after - degree)).exp()


# The largest Gauss-Legendre rule to which a midpoint is raised; functions that need more are cut. Measured on six
# networks with LayerNorm, GroupNorm and attention at steps of size 1: with 13, 17, 21, 27 and 33 nodes a point and step
# took 47, 44, 41, 41 and 42 evaluations.
_MAX_RAISED_NODES = 21

# The largest rule that is extended, and the largest extension.
_MAX_EXTENDED_NODES, _MAX_NODES = 32, 43

# Where f is also evaluated, without a gradient, if the midpoint alone does not suffice. Three numbers do not tell how
# fast f is resolved; five do: at small steps the chosen rules took 2 % more evaluations than the best choice.
_PROBES = (0.2, 0.8)


@dataclass(frozen=True)
class Stage:
    """One order of an interval.

    Attributes:
        rule: Its nodes; the first `num_known` are those of the stage before, in their order.
        num_known: Number of them.
        degree: Polynomials of this degree are integrated exactly.
        previous: Index of the stage before; -1 for one with which intervals start.
        options: Indices of the stages that it can be raised to, by their number of nodes.
        probes: Where f is evaluated besides the nodes and the ends, to see how fast it is resolved.
    """

    rule: QuadratureRule
    num_known: int
    degree: int
    previous: int
    options: tuple[int, ...]
    probes: tuple[float, ...]


@dataclass(frozen=True)
class Stages:
    """The orders that intervals pass through.

    Attributes:
        table: All of them; every option stands behind what it is an option of.
        first: Index of the one with which a step, or an interval between located kinks, starts.
        half: Index of that with which a half of an interval starts.
    """

    table: tuple[Stage, ...]
    first: int
    half: int


def fixed_stages(rule: QuadratureRule) -> Stages:
    """Return a rule that is used as it is."""
    return Stages((Stage(rule, 0, 0, -1, (), ()),), 0, 0)


@cache
def rising_stages(order: int) -> Stages:
    """Return the orders of an adaptive rule, whose halves of intervals start with `order` Gauss-Legendre nodes."""
    middle = _family(gauss_legendre(1), [_odd_gauss(n) for n in range(3, _MAX_RAISED_NODES + 1, 2)], 0, _PROBES)
    if order == 1:
        return Stages(middle, 0, 0)
    start = gauss_legendre(order)
    counts = range(order + 1, max(order + 2, _MAX_RAISED_NODES)) if order <= _MAX_EXTENDED_NODES else range(0)
    wider = [extend(start, count) for count in counts]
    halves = _family(start, [rule for rule in wider if rule is not None], len(middle), ())
    return Stages((*middle, *halves), 0, len(middle))


def _family(
    start: QuadratureRule, wider: list[QuadratureRule], offset: int, probes: tuple[float, ...]
) -> tuple[Stage, ...]:
    """List a rule, the rules that it is raised to, and the extension of each of these where there is one."""
    n = len(start)
    last = [extend(rule) if 2 * len(rule) + 1 <= _MAX_NODES else None for rule in wider]
    first_last = offset + 1 + len(wider)
    table = [Stage(start, 0, 2 * n - 1, -1, tuple(range(offset + 1, first_last)), probes)]
    ends, following = list[Stage](), first_last
    for k, (rule, extension) in enumerate(zip(wider, last, strict=True)):
        options = () if extension is None else (following,)
        table.append(Stage(rule, n, _degree(n, len(rule)), offset, options, ()))
        if extension is not None:
            ends.append(Stage(extension, len(rule), _degree(len(rule), len(extension)), offset + 1 + k, (), ()))
            following += 1
    return (*table, *ends)


def _degree(known: int, nodes: int) -> int:
    """Return the degree of exactness of an extended symmetric rule, which is odd."""
    degree = 2 * nodes - known - 1
    return degree + 1 - degree % 2


def _odd_gauss(n: int) -> QuadratureRule:
    """Return the Gauss-Legendre rule of an odd order with its midpoint first."""
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
    # there is no such polynomial where the matrix is singular
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
    moments[0] = 1.0  # of the uniform distribution on [-1, 1]
    weights = np.linalg.solve(np.polynomial.legendre.legvander(nodes, n + m - 1).T, moments)
    if weights.min() <= 0:
        return None
    return QuadratureRule(
        f"{rule.name}, extended to {len(nodes)}",
        (*rule.nodes, *(0.5 + 0.5 * new).tolist()),
        tuple((weights / weights.sum()).tolist()),
    )


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
        is_searched: They were searched for kinks.
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
    is_searched: Bool[Tensor, " E"]
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
        inner: f at the same nodes, (E, K, C); of those that are new.
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
    inner: Float[Tensor, "E K C"]
    residual: Float[Tensor, "E C"]
    error: Float[Tensor, " E"]
    rounding: Float[Tensor, " E"]
    level: int
    table: "StageTable"


@dataclass(frozen=True, eq=False)
class StageTable:
    """The orders of intervals as tensors: row r belongs to the r-th order.

    Attributes:
        stages: The orders.
        first, half: As in `nested.Stages`.
        nodes: Padded with zeros, (R, Q).
        weights: Likewise, (R, Q).
        size: Number of nodes.
        num_known: Number of nodes that are those of the order before.
        degree: Degree of exactness.
        previous: Row of the order before, or -1.
        option: Row of the lowest order that it can be raised to, or -1.
        is_start: Intervals start with it.
        errors: `legendre_errors`, (R, J).
        num_kept: K, the largest number of nodes that is known to another order.
    """

    stages: tuple[Stage, ...]
    first: int
    half: int
    nodes: Float[Tensor, "R Q"]
    weights: Float[Tensor, "R Q"]
    size: Int64[Tensor, " R"]
    num_known: Int64[Tensor, " R"]
    degree: Int64[Tensor, " R"]
    previous: Int64[Tensor, " R"]
    option: Int64[Tensor, " R"]
    is_start: Bool[Tensor, " R"]
    errors: Float[Tensor, "R J"]
    num_kept: int


def stage_table(stages: Stages, reference: Tensor) -> StageTable:
    """Return the orders of intervals as tensors of a reference's dtype, on its device."""
    return _stage_table(stages, reference.dtype, reference.device)


@lru_cache(maxsize=16)
def _stage_table(stages: Stages, dtype: torch.dtype, device: torch.device) -> StageTable:
    table, reference = stages.table, torch.zeros((), dtype=dtype, device=device)
    width = max(len(stage.rule) for stage in table)

    def padded(rows: list[tuple[float, ...]]) -> Tensor:
        return reference.new_tensor([[*row, *[0.0] * (width - len(row))] for row in rows])

    def integers(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=reference.device)

    rises = len(table) > 1
    errors = [legendre_errors(stage.rule, stage.degree) for stage in table] if rises else [np.zeros(NUM_TERMS)]
    return StageTable(
        stages=table,
        first=stages.first,
        half=stages.half,
        nodes=padded([stage.rule.nodes for stage in table]),
        weights=padded([stage.rule.weights for stage in table]),
        size=integers([len(stage.rule) for stage in table]),
        num_known=integers([stage.num_known for stage in table]),
        degree=integers([stage.degree for stage in table]),
        previous=integers([stage.previous for stage in table]),
        option=integers([min(stage.options, default=-1) for stage in table]),
        is_start=integers([stage.previous < 0 for stage in table]).bool(),
        errors=reference.new_tensor(np.stack(errors)),
        num_kept=max(stage.num_known for stage in table),
    )


def spectrum_of(stage: Stage, reference: Tensor) -> Float[Tensor, "K K"]:
    """Return the matrix that gives Legendre coefficients of f' from what an interval's first order knows."""
    return _spectrum_of(stage, reference.dtype, reference.device)


@lru_cache(maxsize=16)
def _spectrum_of(stage: Stage, dtype: torch.dtype, device: torch.device) -> Tensor:
    points = tuple(sorted({*stage.rule.nodes, *stage.probes}))
    return torch.tensor(spectrum(stage.rule.nodes, points), dtype=dtype, device=device)


def nodes_of(intervals: Intervals, table: StageTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List every interval's nodes: which interval they belong to, their number in it, places and weights."""
    counts = table.size[intervals.stage]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    row, width = intervals.stage[owner], (intervals.b - intervals.a)[owner]
    return owner, number, intervals.a[owner] + width * table.nodes[row, number], width * table.weights[row, number]


def between_cuts(intervals: Intervals, owner: Tensor, cuts: Tensor, f_cuts: Tensor, to_cut: Tensor) -> Intervals:
    """Make the parts of cut intervals.

    For one interval with two cuts:

    left ends    a    c1   c2       sorted by owner, then position
    right ends   c1   c2   b        the next left end, or the interval's own end behind its last cut

    Args:
        intervals: All intervals.
        owner: Which of them each cut is in, (B,).
        cuts: The cuts, in the order of the owners and of the positions in each, (B,).
        f_cuts: f there, (B, C).
        to_cut: The intervals that are cut; those without a cut are one part.
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
