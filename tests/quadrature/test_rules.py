"""Quadrature rules are values: nodes, positive weights, and how exact they are."""

import math
from functools import partial

import pytest

import epk_gp as epk
from epk_gp.quadrature.rules import QuadratureRule

RULES = {
    "left_endpoint": (epk.QuadratureRule.left_endpoint(), 0, 1),
    "left_riemann_1": (epk.QuadratureRule.left_riemann(1), 0, 1),
    "left_riemann_10": (epk.QuadratureRule.left_riemann(10), 0, 10),
    "midpoint_1": (epk.QuadratureRule.midpoint(1), 1, 1),
    "midpoint_7": (epk.QuadratureRule.midpoint(7), 1, 7),
    **{f"gauss_legendre_{n}": (epk.gauss_legendre(n), 2 * n - 1, n) for n in (1, 2, 3, 4, 8, 16)},
}


def integral(rule, degree):
    """Integrate t^degree: exactly 1 / (degree + 1)."""
    return math.fsum(weight * t**degree for t, weight in rule)


@pytest.mark.parametrize(("rule", "degree", "nodes"), RULES.values(), ids=RULES)
def test_a_rule_is_exact_up_to_its_degree_and_no_further_with_positive_weights(rule, degree, nodes):
    for power in range(degree + 1):
        assert abs(integral(rule, power) - 1 / (power + 1)) < 1e-14
    if nodes <= 4:  # beyond, the error of the next power is below rounding
        assert abs(integral(rule, degree + 1) - 1 / (degree + 2)) > 1e-6
    assert len(rule) == len(rule.nodes) == len(rule.weights) == len(list(rule)) == nodes
    assert all(weight > 0 for weight in rule.weights)
    assert abs(math.fsum(rule.weights) - 1) < 1e-15
    assert all(0 <= t <= 1 for t in rule.nodes)
    assert list(rule.nodes) == sorted(set(rule.nodes))


def test_left_riemann_is_algorithm_1_and_midpoints_lie_between_its_nodes():
    rule = epk.QuadratureRule.left_riemann(4)
    assert rule.nodes == (0.0, 0.25, 0.5, 0.75)
    assert rule.weights == (0.25,) * 4
    assert epk.QuadratureRule.left_riemann(1).nodes == epk.QuadratureRule.left_endpoint().nodes
    assert epk.QuadratureRule.midpoint(4).nodes == (0.125, 0.375, 0.625, 0.875)


def test_rules_are_values():
    """They key caches and stand in headers of tables."""
    assert epk.gauss_legendre(4) == epk.gauss_legendre(4) != epk.gauss_legendre(3)
    assert epk.adaptive(1e-9) == epk.adaptive(1e-9, order=4) != epk.adaptive(1e-8)
    rules = [rule for rule, _, _ in RULES.values()] + [epk.adaptive(1e-9), epk.adaptive(1e-9, order=3)]
    assert len(set(rules)) == len({repr(rule) for rule in rules}) == len({rule.name for rule in rules}) == len(rules)
    for rule in rules:
        assert eval(repr(rule), vars(epk.quadrature.rules)) == rule
    with pytest.raises(AttributeError, match="cannot assign"):
        rules[0].nodes = (0.5,)


LARGEST = {epk.gauss_legendre: 1000, epk.QuadratureRule.left_riemann: 10_000, epk.QuadratureRule.midpoint: 10_000}
NODES = r"nodes must lie in \[0, 1\]"
REFUSED = {
    **{
        says: (partial(QuadratureRule, "mine", nodes, weights), says)
        for nodes, weights, says in (
            ((0.0, 1.0), (0.0, 1.0), "weights must be positive, .*definite: got 0.0"),
            ((0.0, 0.5, 1.0), (0.7, -0.4, 0.7), "weights must.*: got -0.4"),
            ((0.0, 1.0), (float("nan"), 1.0), "weights must be positive"),
            ((0.0, 1.0), (0.5, 0.6), "weights must sum to 1: got 1.1"),
            ((0.0, 1.0), (1.0,), "as many weights as nodes: got 2 and 1"),
            ((), (), "as many weights as nodes: got 0 and 0"),
            ((0.0, 1.5), (0.5, 0.5), NODES + ": got 0.0..1.5"),
            ((-0.5, 1.0), (0.5, 0.5), NODES + ": got -0.5..1.0"),
            ((float("nan"), 1.0), (0.5, 0.5), NODES),
        )
    },
    **{
        f"{make.__name__}_{n}": (lambda make=make, n=n: make(n), f"the number of nodes must be at least 1: got {n}")
        for make in LARGEST
        for n in (0, -1)
    },
    **{
        f"tol_{tol}": (lambda tol=tol: epk.adaptive(tol), "tol must be positive and finite: got")
        for tol in (0.0, -1e-9, float("inf"), float("nan"))
    },
    "no_order": (lambda: epk.adaptive(1e-9, order=0), "order must be at least 1: got 0"),
    "bound": (lambda: epk.adaptive(1e-9, max_evaluations=3), "max_evaluations must be at least 4: got 3"),
    **{
        f"{make.__name__}_{n}": (lambda make=make, n=n: make(n), f"must be at most {largest}: got {n}")
        for make, largest in LARGEST.items()
        for n in (largest + 1, 10**9, 10**30)
    },
    "order": (lambda: epk.adaptive(order=1001), "must be at most 1000: got 1001"),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_rule_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_limits_are_reached():
    for make, largest in LARGEST.items():
        assert len(make(largest)) == largest
    assert epk.adaptive(order=1000, max_evaluations=1000).order == 1000
    assert epk.adaptive(1e-9, order=4, max_evaluations=4) != epk.adaptive(1e-9, order=4)
    assert abs(1000 * integral(epk.gauss_legendre(1000), 999) - 1) < 1e-10  # exact to rounding
