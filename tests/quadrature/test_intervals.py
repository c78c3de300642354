"""Quadrature rules are values: how exact they are, how their orders rise, and which of them suffices."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.quadrature.intervals import (
    extend,
    extrapolated_errors,
    legendre_errors,
    predicted_errors,
    rising_stages,
    spectrum,
)
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre

NODES = {"midpoint": ((0.5,), (0.2, 0.5, 0.8)), "four_nodes": (gauss_legendre(4).nodes, gauss_legendre(4).nodes)}
SIZES = range(3, 22, 2)
ERRORS = torch.tensor(np.stack([legendre_errors(gauss_legendre(n), 2 * n - 1) for n in SIZES]))


def exactness(rule: QuadratureRule) -> int:
    """Return the highest degree up to which Legendre polynomials are integrated, to rounding."""
    moments = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, 4 * len(rule) + 4).T @ rule.weights
    return int((np.abs(moments - np.eye(1, len(moments))[0]) > 1e-13).argmax()) - 1


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 12, 20])
def test_each_order_keeps_the_nodes_of_the_one_before_and_is_as_exact_as_it_says(order: int) -> None:
    table, half = rising_stages(order)
    assert table[0].rule.nodes == (0.5,)
    assert len(table[half].rule) == order
    for k, stage in enumerate(table):
        n, known = len(stage.rule), stage.num_known
        assert exactness(stage.rule) == stage.degree >= (2 * n - known - 1 if known else 2 * n - 1)
        errors = legendre_errors(stage.rule, stage.degree)
        assert not errors[: stage.degree + 1].any()
        assert errors[stage.degree + 1] > 1e-13
        assert min(stage.rule.weights) > 0
        assert stage.options or stage.previous >= 0  # there is something to raise
        assert list(stage.options) == sorted(stage.options, key=lambda row: len(table[row].rule))
        for option in (table[row] for row in stage.options):
            assert (option.previous, option.num_known) == (k, n)
            assert option.rule.nodes[:n] == stage.rule.nodes
            assert len(option.rule) > n


def test_a_midpoint_is_raised_to_the_gauss_legendre_rules_of_odd_orders() -> None:
    """No node is lost: these are exact to the highest degree that their number of nodes allows."""
    table, _ = rising_stages(4)
    raised = [table[row].rule for row in table[0].options]
    assert [len(rule) for rule in raised] == list(SIZES)
    for rule in raised:
        assert np.allclose(np.sort(rule.nodes), gauss_legendre(len(rule)).nodes, rtol=0, atol=1e-15)
    kronrod = extend(gauss_legendre(1))  # his rule on the midpoint
    assert np.allclose(np.sort(kronrod.nodes), gauss_legendre(3).nodes, rtol=0, atol=1e-15)


def test_rules_are_extended_where_there_is_an_extension() -> None:
    """Four nodes have no best extension by six."""
    assert extend(QuadratureRule.left_riemann(6)) is None  # its weights would not be positive
    assert extend(gauss_legendre(4), 6) is None
    for count in (5, 10):  # the positive control
        assert exactness(extend(gauss_legendre(4), count)) >= 4 + 2 * count - 1


def coefficients(f: Callable[[float], float], slope: Callable[[float], float], start: str) -> Tensor:
    """Return them from f and f' where an interval knows these."""
    nodes, points = NODES[start]
    data = [slope(t) for t in nodes] + list(np.diff([f(t) for t in (0.0, *points, 1.0)]))
    return torch.tensor(spectrum(nodes, points) @ np.array(data))


def smallest_rules(f: Callable[[float], float], slope: Callable[[float], float], start: str) -> tuple[int, int]:
    """Return the nodes of the smallest rule that leaves 1e-13, and of the smallest that is predicted to; 0 if none."""
    sums = [sum(weight * slope(t) for t, weight in gauss_legendre(n)) for n in SIZES]
    predicted = predicted_errors(coefficients(f, slope, start)[None, :, None], ERRORS)[0].tolist()
    true = [abs(value - (f(1.0) - f(0.0))) for value in sums]
    return tuple(next((n for n, e in zip(SIZES, errors, strict=True) if e <= 1e-13), 0) for errors in (true, predicted))


@pytest.mark.parametrize("start", NODES)
def test_the_rule_that_a_function_needs_is_predicted(start: str) -> None:
    K = len(spectrum(*NODES[start]))
    wanted = torch.arange(1.0, K + 1, dtype=torch.float64)
    p = np.polynomial.legendre.Legendre(wanted.numpy(), domain=[0, 1])
    assert (coefficients(p.integ(), p, start) - wanted).abs().max() < 1e-11  # a polynomial's are its own
    for rate in (0.1, 0.5, 1.0, 2.0):
        f, slope = lambda t, a=rate: math.exp(a * t), lambda t, a=rate: a * math.exp(a * t)
        needed, suffices = smallest_rules(f, slope, start)
        assert needed <= suffices <= needed + 4
    for place in (0.3, 0.47, 0.61):  # the negative control: a kink
        kinked = smallest_rules(lambda t, a=place: max(t - a, 0.0) + t, lambda t, a=place: float(t > a) + 1.0, start)
        assert kinked == (0, 0)


def test_two_orders_tell_how_fast_the_next_converges() -> None:
    sums = [sum(weight / (1 + t) for t, weight in gauss_legendre(n)) for n in (3, 5, 8)]
    before, now, after = (torch.tensor([abs(value - math.log(2))], dtype=torch.float64) for value in sums)
    degrees = (torch.tensor([2 * n - 1]) for n in (5, 3, 8))
    assert 0.1 < float(extrapolated_errors(now, before, *degrees) / after) < 10


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
    assert epk.gauss_legendre(4) == epk.gauss_legendre(4) != epk.gauss_legendre(3)
    assert epk.adaptive(1e-9) == epk.adaptive(1e-9, order=4) != epk.adaptive(1e-8)
    rules = [rule for rule, _, _ in RULES.values()] + [epk.adaptive(1e-9), epk.adaptive(1e-9, order=3)]
    assert len(set(rules)) == len({repr(rule) for rule in rules}) == len({rule.name for rule in rules}) == len(rules)
    for rule in rules:
        assert eval(repr(rule), vars(epk.quadrature.rules)) == rule
    with pytest.raises(AttributeError, match="cannot assign"):
        rules[0].nodes = (0.5,)


LARGEST = {epk.gauss_legendre: 1000, epk.QuadratureRule.left_riemann: 10_000, epk.QuadratureRule.midpoint: 10_000}
WITHIN = r"nodes must lie in \[0, 1\]"
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
            ((0.0, 1.5), (0.5, 0.5), WITHIN + ": got 0.0..1.5"),
            ((-0.5, 1.0), (0.5, 0.5), WITHIN + ": got -0.5..1.0"),
            ((float("nan"), 1.0), (0.5, 0.5), WITHIN),
        )
    },
    **{
        f"{make.__name__}_{n}": (lambda make=make, n=n: make(n), f"the number of nodes must be at least 1: got {n}")
        for make, n in itertools.product(LARGEST, (0, -1))
    },
    **{
        f"tol_{tol}": (lambda tol=tol: epk.adaptive(tol), "tol must be positive and finite: got")
        for tol in (0.0, -1e-9, float("inf"), float("nan"))
    },
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
