"""Rules of rising order whose nodes are used again."""

import numpy as np
import pytest

from epk_gp.quadrature.nested import extend, fixed_stages, rising_stages
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre, left_riemann


def exactness(rule: QuadratureRule) -> int:
    """Return the highest degree up to which Legendre polynomials are integrated, to rounding."""
    moments = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, 4 * len(rule) + 4).T @ rule.weights
    wrong = np.abs(moments - np.eye(1, len(moments))[0]) > 1e-13
    return int(wrong.argmax()) - 1


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 12, 20])
def test_each_order_keeps_the_nodes_of_the_one_before(order: int) -> None:
    table = rising_stages(order).table
    assert len(table) >= 2
    for stage in table:
        if stage.next >= 0:
            following = table[stage.next]
            assert following.num_known == len(stage.rule)
            assert following.rule.nodes[: following.num_known] == stage.rule.nodes
            assert len(following.rule) == 2 * len(stage.rule) + 1


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 12, 20])
def test_an_extension_is_exact_to_three_times_the_nodes_it_keeps(order: int) -> None:
    for stage in rising_stages(order).table:
        n = stage.num_known
        assert exactness(stage.rule) >= (3 * n + 1 if n else 2 * len(stage.rule) - 1)
        assert min(stage.rule.weights) > 0


def test_two_nodes_more_on_three_are_kronrods() -> None:
    """The control: the rule of three nodes that holds the midpoint is Gauss-Legendre itself."""
    extended = extend(gauss_legendre(1))
    assert extended is not None
    assert np.allclose(np.sort(extended.nodes), gauss_legendre(3).nodes, rtol=0, atol=1e-15)


def test_a_rule_without_a_positive_extension_has_none() -> None:
    assert extend(left_riemann(6)) is None


def test_a_fixed_rule_has_one_order() -> None:
    ((stage,), first, low) = vars(fixed_stages(left_riemann(3))).values()
    assert (stage.next, stage.num_known, first, low) == (-1, 0, 0, 0)
