"""Sketches of layer Jacobians: count-sketches, the same in factors and written out."""

import pytest
import torch

from epk_gp.autodiff.representations import DenseJacobian, LogitsLastLayer, OuterProductJacobian, SoftmaxLastLayer
from epk_gp.autodiff.sketches import FeatureSum, seeded_generator
from helpers import assert_close

E, K, C = 3, 2, 4
REFERENCE = torch.empty(0, dtype=torch.float64)


def sketched(jacobian, k, key=0):
    dense = jacobian.to_dense()
    total = FeatureSum(*dense.shape[:2], k, REFERENCE)
    jacobian.sketch(total, 1.0, seeded_generator(key))
    return total.result()


def outer(n_in, n_out, generator, positions=1, *, has_bias=False):
    a = torch.randn(E, positions, n_in, generator=generator, dtype=torch.float64)
    delta = torch.randn(K, E, positions, n_out, generator=generator, dtype=torch.float64)
    return OuterProductJacobian(a, delta, has_bias, False, False)


def matrix_of_factors(n_in, n_out, k, key=0):
    """The sketch of every unit vector e_j (x) e_i, row j n_in + i."""
    rows = []
    for j in range(n_out):
        delta = torch.zeros(1, n_in, n_out, dtype=torch.float64)
        delta[0, :, j] = 1
        total = FeatureSum(1, n_in, k, REFERENCE)
        total.add_outer_products(torch.eye(n_in, dtype=torch.float64), delta, 1.0, seeded_generator(key))
        rows.append(total.result()[0])
    return torch.cat(rows)


def is_count_sketch(S):
    """Every row has one entry, 1 or -1."""
    sizes = S.abs().sum(1)
    return bool(((S.abs() > 0.5).sum(1) == 1).all()) and torch.allclose(sizes, torch.ones_like(sizes))


@pytest.mark.parametrize("k", [5, 16, 33])
@pytest.mark.parametrize(("n_in", "n_out"), [(6, 3), (1, 7), (12, 1), (40, 21)])
def test_the_sketch_of_factors_is_a_count_sketch_of_their_product(n_in: int, n_out: int, k: int, generator) -> None:
    """Of every number of inputs and outputs, below and above k."""
    S = matrix_of_factors(n_in, n_out, k)
    assert is_count_sketch(S)
    for has_bias in (False, True):
        jacobian = outer(n_in - has_bias, n_out, generator, has_bias=has_bias)
        assert_close(sketched(jacobian, k), jacobian.to_dense() @ S)


@pytest.mark.parametrize("k", [5, 16, 33])
def test_the_sketch_of_a_dense_gradient_is_a_count_sketch(k: int, generator) -> None:
    S = sketched(DenseJacobian(torch.eye(37, dtype=torch.float64)[None]), k)[0]
    assert is_count_sketch(S)
    values = torch.randn(K, E, 37, generator=generator, dtype=torch.float64)
    assert_close(sketched(DenseJacobian(values), k), values @ S)
    several = outer(5, 6, generator, positions=3, has_bias=True)
    S = sketched(DenseJacobian(torch.eye(36, dtype=torch.float64)[None]), k)[0]
    assert_close(sketched(several, k), several.to_dense() @ S)


def test_the_last_layers_are_sketched_like_any_outer_product(generator) -> None:
    a = torch.randn(E, 5, generator=generator, dtype=torch.float64)
    S = matrix_of_factors(5, C, 16)
    logits = LogitsLastLayer(a, C)
    assert_close(sketched(logits, 16), logits.to_dense() @ S)
    p = torch.randn(E, C, generator=generator, dtype=torch.float64).softmax(1)
    grads = torch.eye(C, dtype=torch.float64)[:, None] - p
    softmax = SoftmaxLastLayer(a[:, None], grads[:, :, None], False, False, False, p)
    assert_close(sketched(softmax, 16), softmax.to_dense() @ S)


def test_two_numbers_share_a_place_as_often_as_chance_has_it(unchecked) -> None:
    """1 / k for numbers of different pieces or outputs, never within one: then no pair collides more often."""
    k, draws = 8, 400
    S = torch.stack([matrix_of_factors(6, 3, k, key).abs() for key in range(draws)])
    collide = torch.einsum("dpk,dqk->pq", S, S) / draws
    collide.fill_diagonal_(0)
    tolerance = 4.5 * (1 / k / draws) ** 0.5
    assert collide.max() < 1 / (k - 1) + tolerance
    assert torch.allclose(collide.view(3, 6, 3, 6).diagonal(dim1=0, dim2=2), torch.zeros(6, 6, 3, dtype=torch.float64))


def test_sketches_of_different_keys_are_different_of_the_same_key_equal_and_of_nothing_zero(generator) -> None:
    values = DenseJacobian(torch.randn(K, E, 9, generator=generator, dtype=torch.float64))
    assert torch.equal(sketched(values, 16, "a"), sketched(values, 16, "a"))
    assert not torch.allclose(sketched(values, 16, "a"), sketched(values, 16, "b"))
    assert torch.equal(FeatureSum(K, E, 4, REFERENCE).result(), torch.zeros(K, E, 4, dtype=torch.float64))
