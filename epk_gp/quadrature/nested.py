"""Sequences of rules of rising order, each of which contains the nodes of the one before.

Gauss-Legendre rules are extended by the nodes that give the highest degree with the old ones kept (Kronrod 1965,
Patterson 1968): n nodes become 2n + 1. On a smooth stretch a higher order then costs its new nodes only.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre

# Nodes of an interval between located kinks. The logits of an L-layer ReLU network are a polynomial of degree at most L
# there, for which ceil(L / 2) nodes are exact (docs/theory.md, section 3).
LOW_ORDER = 2

# Extensions of a rule, and the largest rule that is extended: with more nodes, intervals are halved instead.
_EXTENSIONS, _MAX_EXTENDED_NODES = 2, 32


@dataclass(frozen=True)
class Stage:
    """One order of an interval.

    Attributes:
        rule: Its nodes; the first `num_known` are those of the stage before, in their order.
        num_known: Number of them.
        next: Index of the next higher order; -1 if there is none.
        is_low: It is the first of an interval between located kinks: too low to tell anything, but that it suffices.
        searches: The interval is searched for kinks if this order does not suffice.
    """

    rule: QuadratureRule
    num_known: int
    next: int
    is_low: bool
    searches: bool


@dataclass(frozen=True)
class Stages:
    """The orders that intervals pass through.

    Attributes:
        table: All of them.
        first: Index of the one with which a step, or a half of an interval, starts.
        low: Index of that with which an interval between located kinks starts.
    """

    table: tuple[Stage, ...]
    first: int
    low: int


def fixed_stages(rule: QuadratureRule) -> Stages:
    """Return a rule that is used as it is."""
    return Stages((Stage(rule, 0, -1, is_low=False, searches=False),), 0, 0)


@cache
def rising_stages(order: int) -> Stages:
    """Return the orders of an adaptive rule that starts with `order` Gauss-Legendre nodes."""
    wide = _chain(_extensions(gauss_legendre(order)), 0, first_is_low=False)
    if order <= LOW_ORDER:
        return Stages(wide, 0, 0)
    narrow = _chain(_extensions(gauss_legendre(LOW_ORDER)), len(wide), first_is_low=True)
    return Stages((*wide, *narrow), 0, len(wide))


def _chain(rules: list[QuadratureRule], offset: int, *, first_is_low: bool) -> tuple[Stage, ...]:
    return tuple(
        Stage(
            rule,
            num_known=len(rules[k - 1]) if k else 0,
            next=offset + k + 1 if k + 1 < len(rules) else -1,
            is_low=first_is_low and k == 0,
            searches=k == int(first_is_low),
        )
        for k, rule in enumerate(rules)
    )


def _extensions(rule: QuadratureRule) -> list[QuadratureRule]:
    """List a rule and its extensions, as far as they exist with positive weights."""
    rules: list[QuadratureRule] = [rule]
    while len(rules) <= _EXTENSIONS and len(rules[-1]) <= _MAX_EXTENDED_NODES:
        extended = extend(rules[-1])
        if extended is None:
            break
        rules.append(extended)
    return rules


def extend(rule: QuadratureRule) -> QuadratureRule | None:
    """Add n + 1 nodes to n so that the degree of exactness is the highest possible, at least 3n + 1.

    With E(x) = prod (x - x_i) over the nodes on [-1, 1], the new ones are the roots of the polynomial F of degree n + 1
    for which the integral of E F p is zero for every p of degree n at most. The weights follow from the degree of
    exactness of an interpolation, 2n.

    Returns:
        The old nodes, then the new ones; None if there is no such rule with nodes in [0, 1] and positive weights.
    """
    n = len(rule)
    known = 2 * np.array(rule.nodes) - 1
    x, w = np.polynomial.legendre.leggauss(2 * n + 2)
    P = np.polynomial.legendre.legvander(x, n + 1)
    products = P[:, : n + 1].T @ (P * (w * np.prod(x[:, None] - known, axis=1))[:, None])
    scale = np.abs(products).max()
    coefficients = np.linalg.solve(products[:, : n + 1] / scale, -products[:, n + 1] / scale)
    F = np.polynomial.legendre.Legendre([*coefficients, 1.0])
    new = F.roots()
    if np.iscomplexobj(new) and np.abs(new.imag).max() > 0:
        return None
    new = np.sort(np.real(new).astype(np.float64))
    new = new - F(new) / F.deriv()(new)
    nodes = np.concatenate([known, new])
    if np.abs(nodes).max() > 1:
        return None
    moments = np.zeros(2 * n + 1)
    moments[0] = 1.0  # of the uniform distribution on [-1, 1]
    weights = np.linalg.solve(np.polynomial.legendre.legvander(nodes, 2 * n).T, moments)
    if weights.min() <= 0:
        return None
    return QuadratureRule(
        f"{rule.name}, extended to {len(nodes)}",
        (*rule.nodes, *(0.5 + 0.5 * new).tolist()),
        tuple((weights / weights.sum()).tolist()),
    )
