"""Predictions of which rule suffices, from the first Legendre coefficients of a derivative."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from epk_gp.quadrature.intervals import extrapolated_errors, legendre_errors, predicted_errors, rising_stages, spectrum
from epk_gp.quadrature.rules import gauss_legendre

NODES = {"midpoint": ((0.5,), (0.2, 0.5, 0.8)), "four_nodes": (gauss_legendre(4).nodes, gauss_legendre(4).nodes)}
SIZES = range(3, 22, 2)
ERRORS = torch.tensor(np.stack([legendre_errors(gauss_legendre(n), 2 * n - 1) for n in SIZES]))


def coefficients(f: Callable[[float], float], slope: Callable[[float], float], start: str) -> Tensor:
    """Return them from f and f' where an interval knows these."""
    nodes, points = NODES[start]
    data = [slope(t) for t in nodes] + list(np.diff([f(t) for t in (0.0, *points, 1.0)]))
    return torch.tensor(spectrum(nodes, points) @ np.array(data))


def suffices(f: Callable[[float], float], slope: Callable[[float], float], start: str) -> int:
    """Return the number of nodes of the smallest rule that is predicted to leave 1e-13; 0 if none is."""
    predicted = predicted_errors(coefficients(f, slope, start)[None, :, None], ERRORS)[0]
    return next((n for n, error in zip(SIZES, predicted.tolist(), strict=True) if error <= 1e-13), 0)


def needed(f: Callable[[float], float], slope: Callable[[float], float]) -> int:
    """Return the number that does."""
    rules = {n: gauss_legendre(n) for n in SIZES}
    sums = {n: sum(weight * slope(t) for t, weight in rule) for n, rule in rules.items()}
    return next((n for n, value in sums.items() if abs(value - (f(1.0) - f(0.0))) <= 1e-13), 0)


@pytest.mark.parametrize("start", NODES)
def test_the_coefficients_of_a_polynomial_are_its_own(start: str) -> None:
    K = len(spectrum(*NODES[start]))
    wanted = torch.arange(1.0, K + 1, dtype=torch.float64)
    p = np.polynomial.legendre.Legendre(wanted.numpy(), domain=[0, 1])
    assert (coefficients(p.integ(), p, start) - wanted).abs().max() < 1e-11


@pytest.mark.parametrize("start", NODES)
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0, 2.0])
def test_the_rule_that_an_analytic_function_needs_is_predicted(rate: float, start: str) -> None:
    f, slope = lambda t: math.exp(rate * t), lambda t: rate * math.exp(rate * t)
    assert needed(f, slope) <= suffices(f, slope, start) <= needed(f, slope) + 4


@pytest.mark.parametrize("start", NODES)
@pytest.mark.parametrize("place", [0.3, 0.47, 0.61])
def test_no_rule_is_predicted_to_suffice_at_a_kink(place: float, start: str) -> None:
    """The negative control."""
    f, slope = lambda t: max(t - place, 0.0) + t, lambda t: float(t > place) + 1.0
    assert suffices(f, slope, start) == needed(f, slope) == 0


def test_two_orders_tell_how_fast_the_next_converges() -> None:
    """For 1 / (1 + t): errors of Gauss-Legendre with 3, 5 and 8 nodes."""
    sums = [sum(weight / (1 + t) for t, weight in gauss_legendre(n)) for n in (3, 5, 8)]
    before, now, after = (torch.tensor([abs(value - math.log(2))], dtype=torch.float64) for value in sums)
    degrees = (torch.tensor([2 * n - 1]) for n in (5, 3, 8))
    assert 0.1 < float(extrapolated_errors(now, before, *degrees) / after) < 10


def test_errors_of_a_rule_are_zero_up_to_its_degree() -> None:
    for stage in rising_stages(4).table:
        errors = legendre_errors(stage.rule, stage.degree)
        assert not errors[: stage.degree + 1].any()
        assert errors[stage.degree + 1] > 1e-6
