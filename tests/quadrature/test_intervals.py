"""Rules of rising order whose nodes are used again, and predictions of which of them suffices."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

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
        needed, suffices = smallest_rules(
            lambda t, a=rate: math.exp(a * t), lambda t, a=rate: a * math.exp(a * t), start
        )
        assert needed <= suffices <= needed + 4
    for place in (0.3, 0.47, 0.61):  # the negative control: a kink
        kinked = smallest_rules(lambda t, a=place: max(t - a, 0.0) + t, lambda t, a=place: float(t > a) + 1.0, start)
        assert kinked == (0, 0)


def test_two_orders_tell_how_fast_the_next_converges() -> None:
    """For 1 / (1 + t): errors of Gauss-Legendre with 3, 5 and 8 nodes."""
    sums = [sum(weight / (1 + t) for t, weight in gauss_legendre(n)) for n in (3, 5, 8)]
    before, now, after = (torch.tensor([abs(value - math.log(2))], dtype=torch.float64) for value in sums)
    degrees = (torch.tensor([2 * n - 1]) for n in (5, 3, 8))
    assert 0.1 < float(extrapolated_errors(now, before, *degrees) / after) < 10
