"""Every representation of a layer's Jacobian does what its dense form does, and so does its count-sketch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epk_gp.autodiff.representations import (
    DenseJacobian,
    LayerJacobian,
    LeftFactor,
    LogitsLastLayer,
    NodeWeights,
    OuterProductJacobian,
    SoftmaxLastLayer,
    SoftmaxLastLayerAverage,
    concat_rows,
    sum_outer_products,
)
from epk_gp.autodiff.sketches import FeatureSum, seeded_generator
from epk_gp.gram.accumulator import GramAccumulator
from helpers import assert_close

C, IN = 3, 5
LEFT, RIGHT = 4, 6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(n: int, *, positions: int = 1, bias: bool = False, constant: str = "") -> OuterProductJacobian:
    """With the same inputs (`constant="input"`) or output gradients for all points of one size."""
    inputs, grads = normal(n, positions, IN), normal(C, n, positions, 2)
    if constant == "input":
        inputs = torch.arange(n * positions * IN, dtype=torch.float64).sin().view(n, positions, IN)
    if constant == "cotangent":
        grads = torch.arange(C * n * positions * 2, dtype=torch.float64).cos().view(C, n, positions, 2)
    return OuterProductJacobian(inputs, grads, bias, constant == "input", constant == "cotangent")


def softmax(n: int) -> SoftmaxLastLayer:
    p = normal(n, C).softmax(1)
    grads = torch.eye(C, dtype=torch.float64)[:, None] - p
    return SoftmaxLastLayer(normal(n, 1, IN), grads[:, :, None], False, False, False, p)


MAKE: dict[str, Callable[[int], LayerJacobian]] = {
    "dense": lambda n: DenseJacobian(normal(C, n, 7)), "outer": outer, "outer_bias": lambda n: outer(n, bias=True),
    "outer_positions": lambda n: outer(n, positions=3, bias=True),
    "outer_constant_input": lambda n: outer(n, bias=True, constant="input"),
    "outer_constant_cotangent": lambda n: outer(n, constant="cotangent"),
    "logits": lambda n: LogitsLastLayer(normal(n, IN), C), "softmax": softmax,
}  # fmt: skip
AVERAGED = [name for name in MAKE if name not in ("outer", "outer_bias", "outer_positions")]


def inner(left: LeftFactor, right: LayerJacobian, n: int, *, per_class: bool, weight: float = 1.0) -> Tensor:
    tile = GramAccumulator((C, n, RIGHT) if per_class else (C, n, C, RIGHT), normal(0))
    left.add_inner(right, tile, weight, layer=0, same_points=True)
    return tile.result()


def dense_inner(left: Tensor, right: Tensor, *, per_class: bool) -> Tensor:
    return torch.einsum("knp,kmp->knm" if per_class else "knp,lmp->knlm", left, right)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_inner_products_are_those_of_the_dense_form(name: str, per_class: bool) -> None:
    left, right = MAKE[name](LEFT), MAKE[name](RIGHT)
    expected = 0.7 * dense_inner(left.to_dense(), right.to_dense(), per_class=per_class)
    assert_close(inner(left, right, LEFT, per_class=per_class, weight=0.7), expected)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_a_traced_tile_is_the_sum_of_the_equal_outputs(name: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs folded into the inner dimension, and one by one where that is long; in a sum that holds something."""
    if long:
        monkeypatch.setattr("epk_gp.autodiff.representations.LONG_INNER_DIM", 0)
    tile, expected = GramAccumulator((1, LEFT, RIGHT), normal(0), num_traced=C), torch.zeros(LEFT, RIGHT).double()
    for weight in (0.7, 0.2):
        left, right = MAKE[name](LEFT), MAKE[name](RIGHT)
        left.add_inner(right, tile, weight, layer=0, same_points=True)
        expected += weight * dense_inner(left.to_dense(), right.to_dense(), per_class=True).sum(0)
    assert_close(tile.result(), expected[None])


@pytest.mark.parametrize("name", MAKE)
def test_rows_are_multiplied_point_by_point_taken_apart_and_joined_again(name: str) -> None:
    whole, other = MAKE[name](LEFT), MAKE[name](LEFT)
    expected = torch.einsum("knp,lnp->nkl", whole.to_dense(), other.to_dense())
    assert_close(whole.pointwise_products(other), expected)
    parts = [[whole.rows(slice(0, 1))], [whole.rows(slice(1, 3))], [whole.rows(slice(3, LEFT))]]
    assert torch.equal(concat_rows(parts)[0].to_dense(), whole.to_dense())
    assert torch.equal(parts[1][0].to_dense(), whole.to_dense()[:, 1:3])
    assert whole.nbytes >= sum(part[0].nbytes for part in parts) > 0


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", AVERAGED)
def test_an_average_is_that_of_the_dense_form(name: str, ragged: bool, per_class: bool) -> None:
    right = MAKE[name](RIGHT)
    nodes, weights = [MAKE[name](LEFT) for _ in range(2)], (0.3, 0.7)
    expected = sum(w * node.to_dense() for w, node in zip(weights, nodes, strict=True))
    average: LeftFactor | None = None
    for weight, node in zip(weights, nodes, strict=True):
        of_rows = (torch.full((LEFT,), weight, dtype=torch.float64), torch.arange(LEFT))
        average = node.average(average, NodeWeights(*(of_rows if ragged else (weight, None)), LEFT))
    assert isinstance(average, SoftmaxLastLayerAverage if name == "softmax" else type(right))
    found = inner(average, right, LEFT, per_class=per_class)
    assert_close(found, dense_inner(torch.as_tensor(expected), right.to_dense(), per_class=per_class))


def test_points_may_have_nodes_of_their_own() -> None:
    """Point 0 has two nodes, point 1 one; the rows come in any order."""
    rows = outer(3, constant="cotangent")
    points, weights = torch.tensor([1, 0, 0]), torch.tensor([1.0, 0.25, 0.75], dtype=torch.float64)
    same = OuterProductJacobian(rows.inputs, rows.output_grads[:, [0, 1, 1]], False, False, True)
    average = same.average(None, NodeWeights(weights, points, 2))
    dense = same.to_dense()
    expected = torch.stack([0.25 * dense[:, 1] + 0.75 * dense[:, 2], dense[:, 0]], dim=1)
    assert_close(average.to_dense(), expected)


@pytest.mark.parametrize("name", MAKE)
def test_steps_that_can_be_joined_are_summed_and_others_say_that_they_cannot(name: str) -> None:
    """The negative control are those whose factors both change from step to step."""
    left, right = ([MAKE[name](n) for _ in range(3)] for n in (LEFT, RIGHT))
    assert left[0].commutes_with_average == (name in AVERAGED)
    assert left[0].fits_concatenation == (name in ("dense", "outer_constant_input", "logits"))
    if name in AVERAGED:
        assert left[0].average(None, NodeWeights(1.0, None, LEFT)).fits_concatenation == left[0].fits_concatenation
    if not left[0].fits_concatenation:
        return
    weights = [0.5, 2.0, 1.0]
    joined, others = left[0].concat_steps(left[1:], weights), right[0].concat_steps(right[1:], [1.0] * 3)
    steps = zip(weights, left, right, strict=True)
    expected = sum(w * dense_inner(a.to_dense(), b.to_dense(), per_class=False) for w, a, b in steps)
    assert_close(inner(joined, others, LEFT, per_class=False), torch.as_tensor(expected))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("positions", [1, 3, 70])
def test_gradients_are_written_out_as_sums_of_outer_products(positions: int, requires_grad: bool) -> None:
    """Of few positions, of many, and where a graph is kept; for groups that do not mix."""
    a, delta = normal(LEFT, positions, 2, IN), normal(C, LEFT, positions, 2, 6)
    a.requires_grad_(requires_grad)
    expected = torch.einsum("elgi,kelgo->kegoi", a, delta).flatten(2)
    found = sum_outer_products(a, delta)
    assert_close(found.detach(), expected.detach())
    assert found.requires_grad == requires_grad


E, K, CLASSES = 3, 2, 4
REFERENCE = torch.empty(0, dtype=torch.float64)


def sketched(jacobian, k, key=0):
    dense = jacobian.to_dense()
    total = FeatureSum(*dense.shape[:2], k, REFERENCE)
    jacobian.sketch(total, 1.0, seeded_generator(key))
    return total.result()


def product(n_in, n_out, generator, positions=1, *, has_bias=False):
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
        jacobian = product(n_in - has_bias, n_out, generator, has_bias=has_bias)
        assert_close(sketched(jacobian, k), jacobian.to_dense() @ S)


@pytest.mark.parametrize("k", [5, 16, 33])
def test_the_sketch_of_a_dense_gradient_is_a_count_sketch(k: int, generator) -> None:
    S = sketched(DenseJacobian(torch.eye(37, dtype=torch.float64)[None]), k)[0]
    assert is_count_sketch(S)
    values = torch.randn(K, E, 37, generator=generator, dtype=torch.float64)
    assert_close(sketched(DenseJacobian(values), k), values @ S)
    several = product(5, 6, generator, positions=3, has_bias=True)
    S = sketched(DenseJacobian(torch.eye(36, dtype=torch.float64)[None]), k)[0]
    assert_close(sketched(several, k), several.to_dense() @ S)


def test_the_last_layers_are_sketched_like_any_outer_product(generator) -> None:
    a = torch.randn(E, 5, generator=generator, dtype=torch.float64)
    S = matrix_of_factors(5, CLASSES, 16)
    logits = LogitsLastLayer(a, CLASSES)
    assert_close(sketched(logits, 16), logits.to_dense() @ S)
    p = torch.randn(E, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    grads = torch.eye(CLASSES, dtype=torch.float64)[:, None] - p
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
