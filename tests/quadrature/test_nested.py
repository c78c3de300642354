"""Rules of rising order whose nodes are used again."""

import numpy as np
import pytest

from epk_gp.quadrature.intervals import extend, fixed_stages, rising_stages
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre, left_riemann


def exactness(rule: QuadratureRule) -> int:
    """Return the highest degree up to which Legendre polynomials are integrated, to rounding."""
    moments = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, 4 * len(rule) + 4).T @ rule.weights
    wrong = np.abs(moments - np.eye(1, len(moments))[0]) > 1e-13
    return int(wrong.argmax()) - 1


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 12, 20])
def test_each_order_keeps_the_nodes_of_the_one_before(order: int) -> None:
    table, first, half = vars(rising_stages(order)).values()
    assert table[first].rule.nodes == (0.5,)
    assert len(table[half].rule) == order
    for k, stage in enumerate(table):
        assert list(stage.options) == sorted(stage.options, key=lambda row: len(table[row].rule))
        for option in (table[row] for row in stage.options):
            assert option.previous == k
            assert option.num_known == len(stage.rule)
            assert option.rule.nodes[: option.num_known] == stage.rule.nodes
            assert len(option.rule) > len(stage.rule)
    assert all(stage.options for stage in table if stage.previous < 0)  # there is something to raise


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 12, 20])
def test_orders_are_as_exact_as_they_say(order: int) -> None:
    for stage in rising_stages(order).table:
        n, known = len(stage.rule), stage.num_known
        assert exactness(stage.rule) == stage.degree
        assert stage.degree >= (2 * n - known - 1 if known else 2 * n - 1)
        assert min(stage.rule.weights) > 0


def test_a_midpoint_is_raised_to_the_gauss_legendre_rules_of_odd_orders() -> None:
    """No node is lost: these are exact to the highest degree that their number of nodes allows."""
    table, first, _ = vars(rising_stages(4)).values()
    sizes = []
    for stage in (table[row] for row in table[first].options):
        sizes.append(len(stage.rule))
        assert np.allclose(np.sort(stage.rule.nodes), gauss_legendre(sizes[-1]).nodes, rtol=0, atol=1e-15)
    assert sizes == list(range(3, 22, 2))


def test_two_nodes_more_on_three_are_kronrods() -> None:
    """The control: the rule of three nodes that holds the midpoint is Gauss-Legendre itself."""
    extended = extend(gauss_legendre(1))
    assert extended is not None
    assert np.allclose(np.sort(extended.nodes), gauss_legendre(3).nodes, rtol=0, atol=1e-15)


def test_a_rule_without_a_positive_extension_has_none() -> None:
    assert extend(left_riemann(6)) is None


def test_four_nodes_have_no_best_extension_by_six() -> None:
    """The positive control: by five, and by ten, they have one."""
    rule = gauss_legendre(4)
    assert extend(rule, 6) is None
    for count in (5, 10):
        extended = extend(rule, count)
        assert extended is not None
        assert exactness(extended) >= 4 + 2 * count - 1


def test_a_fixed_rule_has_one_order() -> None:
    ((stage,), first, half) = vars(fixed_stages(left_riemann(3))).values()
    assert (stage.options, stage.num_known, first, half) == ((), 0, 0, 0)
