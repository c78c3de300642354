"""Families of rules of rising order, each of which contains the nodes of the one before.

An interval starts with few nodes, and df/dt and f there tell how fast f is resolved (`resolution.spectrum`). It then
goes to the smallest rule that promises to suffice and keeps the nodes that there are: the midpoint is a node of every
Gauss-Legendre rule of odd order, and other rules are extended by the nodes that give the highest degree (Kronrod 1965,
Patterson 1968). So a higher order costs its new nodes only.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre

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
