"""Sketched features: unbiased, accurate, the same bytes however they are computed; features of an RBF."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from graph_runs import make_net, record
from signatures import TwoInputs, two_inputs

import epk_gp as epk
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.sketches import hadamard_matrix, hadamard_order, rbf_features, tensor_sketch
from epk_gp.core import plans as memory_plan
from epk_gp.gram import sketch as node_sketch
from epk_gp.gram.path_features import PathFeatures, SketchError, trace_sketch
from epk_gp.gram.sketch import nodes_trajectory
from helpers import Case, assert_close, deviation, make_case

K, NODES, SEEDS = 24, 4, 40


@pytest.fixture(
    scope="module", params=["one_class", "wide", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn", "twice"))]
)
def case(request):
    return make_case(request.param, steps=3)


@pytest.fixture(scope="module")
def tanh():
    return make_case("tanh", steps=3)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 2 points, pieces of 2 blocks."""
    monkeypatch.setattr(memory_plan, "SKETCHED_POINTS", 2)
    monkeypatch.setattr(node_sketch, "PIECE_BLOCKS", 2)


def features(case, seed, X, **options):
    return epk.path_features(case.trajectory, X, K, nodes=NODES, seed=seed, num_probe=0, **options)


def trace_of_nodes(case, points, head):
    run = nodes_trajectory(case.trajectory, NODES)
    K = epk.gram_block(run, points, points, head=head, rule=epk.QuadratureRule.left_endpoint())
    return torch.einsum("ncmc->nm", K) / run.num_outputs


def test_products_of_features_are_the_trace_kernel_of_their_head_on_average(case: Case, unchecked) -> None:
    """And not so if the two features of a pair come from different sketches.

    The squared deviation of a mean of 40 in its own standard errors is 39 / 37 on average; like points deviate alike.
    """
    points = epk.Points(case.test, False)
    exact = {head: trace_of_nodes(case, points, head) for head in case.heads}
    for head in case.heads:
        z = torch.stack([features(case, seed, case.test, head=head) for seed in range(SEEDS)])
        assert deviation(z @ z.mT, exact[head], diagonal=True) < 3
        assert deviation(z @ z.roll(1, 0).mT, exact[head], diagonal=True) > 4
    if len(exact) > 1:
        assert deviation(z @ z.mT, exact["logits"], diagonal=True) > 3


def test_training_copies_are_taken_at_the_starts_of_their_steps(tanh: Case) -> None:
    run = tanh.trajectory
    mask = torch.tensor([True, False, True, False, True])
    z = epk.path_features(run, tanh.test, K, nodes=3, is_train=mask, num_probe=0)
    frozen = replace(nodes_trajectory(run, 3), states=run.states)
    sketch = trace_sketch(run, K, nodes=3, seed=0, head=None)
    vars(sketch)["run"] = replace(frozen, digest=sketch.run.digest)
    starts = sketch.features(epk.Points(tanh.test, False))
    moving = epk.path_features(run, tanh.test, K, nodes=3, num_probe=0)
    assert_close(z[mask] @ z.T, starts[mask] @ torch.where(mask[:, None], starts, moving).T)
    assert_close(z[~mask] + 0, moving[~mask])
    assert not torch.allclose(z[mask] + 0, moving[mask])


@pytest.mark.parametrize(("nodes", "outputs"), [(4, 3), (20, 10), (8, 1)])
def test_expected_products_are_exact_where_the_matrix_fits_the_nodes(nodes: int, outputs: int) -> None:
    sketch = trace_sketch(make_case("tanh").trajectory, 8, nodes=nodes, seed=3, head="logits")
    run = replace(sketch.run, num_outputs=outputs)
    from_seed = node_sketch.trace_coefficients(run, 3)
    torch.testing.assert_close(from_seed.T @ from_seed, nodes * torch.eye(outputs, dtype=torch.float64))


def cosines(products):
    """The cosines of all pairs of different points."""
    length = products.diagonal().sqrt()
    return (products / length / length[:, None])[~torch.eye(len(products), dtype=torch.bool)]


def test_the_error_is_that_of_the_cosine_kernel(tanh: Case, monkeypatch) -> None:
    run, X = tanh.trajectory, tanh.test
    z = epk.path_features(run, X, 256, nodes=NODES, head="logits")
    error = z.error
    exact = epk.PathKernel(run, "logits", epk.gauss_legendre(2)).trace_block(*[epk.Points(X, False)] * 2)
    difference = cosines(z @ z.T) - cosines(exact)
    assert isinstance(error, SketchError)
    assert error.rms == pytest.approx(float(difference.square().mean().sqrt()))
    assert error.max == pytest.approx(float(difference.abs().max()))
    assert 0 < error.nodes_rms <= error.nodes_max < error.max
    assert error.expected_rms == pytest.approx(1.06 / 16)
    assert error.reference == "all 3 steps, 2 nodes each"
    assert isinstance(z, PathFeatures)
    for plain in (z + 0, z[:2], z.T @ z, torch.cat([z, z])):  # the error goes lost
        assert type(plain) is torch.Tensor
    assert epk.path_features(run, X[:1], K).error is None
    assert features(tanh, 0, X).error is None
    of_nodes = epk.path_features(nodes_trajectory(run, NODES), X, K, nodes=None)
    assert torch.equal(of_nodes, features(tanh, 0, X))
    assert of_nodes.error.reference == "all 4 steps, each at its start"
    monkeypatch.setattr("epk_gp.gram.path_features.MAX_PROBE_STEPS", 2)
    assert epk.path_features(run, X, K).error.reference == "2 nodes of the path"


def test_points_without_a_gradient_are_left_out_of_the_error() -> None:
    """A network without biases: at 0 nothing depends on the weights."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.ReLU(), torch.nn.Linear(5, 2, bias=False))
    net, X = net.double(), torch.randn(6, 3, dtype=torch.float64)
    run = epk.train(net, X, torch.arange(6) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    with_zero = torch.cat([torch.zeros(1, 3, dtype=torch.float64), X])
    error, expected = (epk.path_features(run, points, 16).error for points in (with_zero, X))
    assert error.num_points == expected.num_points == 6
    assert [error.rms, error.nodes_max] == pytest.approx([expected.rms, expected.nodes_max])
    assert epk.path_features(run, with_zero[:2], 16).error is None


def test_bytes_do_not_depend_on_budget_workers_or_a_kill(tanh: Case, small_blocks, tmp_path, monkeypatch) -> None:
    X = torch.cat([tanh.test, tanh.trajectory.inputs])
    expected, folder = features(tanh, 0, X), tmp_path / "sums"
    with ThreadPoolExecutor(3) as executor:
        for options in ({}, {"executor": executor}):
            assert torch.equal(features(tanh, 0, X, memory_budget=1 << 20, **options), expected)
    assert_close(features(tanh, 0, X[3:]) + 0, expected[3:])
    pieces, original = [], node_sketch.NodeSketch.piece

    def dying(sketch, rows):
        if len(pieces) == 2:
            raise KeyboardInterrupt
        pieces.append(len(rows))
        return original(sketch, rows)

    monkeypatch.setattr(node_sketch.NodeSketch, "piece", dying)
    with pytest.raises(KeyboardInterrupt):
        features(tanh, 0, X, checkpoint=folder)
    pieces[:] = [None]
    assert torch.equal(features(tanh, 0, X, checkpoint=folder), expected)
    assert pieces == [None, 4]  # of 12 points: 8 were there
    with pytest.raises(ValueError, match="must be of this very computation"):
        features(tanh, 1, X, checkpoint=folder)


def test_integers_nodes_of_a_graph_and_several_inputs_have_features(unchecked) -> None:
    case = make_case("attention", steps=1)
    z = epk.path_features(case.trajectory, case.test, 256, nodes=2)
    assert (z.dtype, z.shape) == (torch.float64, (5, 256))
    assert z.error.rms < 3 / 16
    run = record(make_net(), steps=2)
    assert epk.path_features(run, run.inputs, 64, nodes=4).error.rms < 4 / 8
    net = TwoInputs().double()
    X = two_inputs(6)
    run = epk.train(net, X, torch.arange(6) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    assert torch.equal(epk.path_features(run, X, 64, nodes=4), epk.path_features(run, run.pack(X), 64, nodes=4))


def test_inputs_that_change_the_plan_say_that_earlier_features_are_of_another_sketch(monkeypatch) -> None:
    case, original = make_case("relu", steps=1), node_sketch.NodeSketch.piece

    def failing(sketch, X):
        if sketch.net.plan.bias_of:
            raise UnsupportedParameterUseError("the layer must see all rows")
        return original(sketch, X)

    monkeypatch.setattr(node_sketch.NodeSketch, "piece", failing)
    with pytest.warns(UserWarning, match="features that were computed before are of another sketch"):
        first = features(case, 0, case.test)
    assert torch.equal(features(case, 0, case.test), first)


def test_features_follow_the_dtype_and_the_seed(tanh: Case) -> None:
    z, single = features(tanh, 0, tanh.test), features(tanh, 0, tanh.test.float())
    assert (z.dtype, single.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single.double(), z + 0, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(features(tanh, 1, tanh.test) + 0, z + 0)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"num_features": 0}, ValueError, "num_features must be at least 1: got 0"),
    ({"num_features": 2.5}, TypeError, "num_features must be a whole number"),
    ({"nodes": 0}, ValueError, "nodes must be at least 1"),
    ({"seed": "a"}, TypeError, "seed must be a whole number"),
    ({"num_probe": -1}, ValueError, "num_probe must be at least 0"),
    ({"is_train": torch.ones(3, dtype=torch.bool)}, ValueError, "is_train must have one entry per point"),
    ({"accumulate": torch.float64}, TypeError, "unexpected keyword argument 'accumulate'"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused(tanh: Case, unchecked, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        epk.path_features(**{"trajectory": tanh.trajectory, "X": tanh.test, **arguments})


N = 6


@pytest.fixture
def X(generator):
    return torch.randn(N, 2, 3, generator=generator, dtype=torch.float64)


def rbf(X, lengthscale):
    return torch.exp(-torch.cdist(X.flatten(1), X.flatten(1)).square() / (2 * lengthscale**2))


def test_features_have_the_products_of_an_rbf_on_average(X, unchecked) -> None:
    phi = torch.stack([rbf_features(X, 1.5, 20, seed=seed) for seed in range(200)])
    assert deviation(phi @ phi.mT, rbf(X, 1.5)) < 2
    assert deviation(phi @ phi.mT, rbf(X, 1.8)) > 4
    torch.testing.assert_close(phi.norm(dim=2), torch.ones(200, N, dtype=torch.float64))


def test_orthogonal_frequencies_have_a_smaller_error_than_independent_ones(X, generator, unchecked) -> None:
    exact, squares, independent = rbf(X, 2.0), [], []
    for seed in range(60):
        phi = rbf_features(X, 2.0, 12, seed=seed)
        squares.append((phi @ phi.T - exact).square().mean())
        angles = X.flatten(1) @ torch.randn(6, 6, generator=generator, dtype=torch.float64) / 2
        psi = torch.cat([angles.cos(), angles.sin()], dim=1) / 6**0.5
        independent.append((psi @ psi.T - exact).square().mean())
    assert torch.stack(squares).mean() < 0.75 * torch.stack(independent).mean()


def test_the_joint_sketch_has_the_product_of_both_kernels_on_average(X, unchecked) -> None:
    """The control: the product with itself is another."""
    case = make_case("tanh", steps=2)
    inputs = torch.cat([case.test, case.test[:1] + 0.1])
    z = torch.nn.functional.normalize(epk.path_features(case.trajectory, inputs, 32, nodes=2, num_probe=0))
    phi = rbf_features(X, 1.0, 16)
    s = torch.stack([tensor_sketch(z, phi, 16, seed=seed) for seed in range(100)])
    assert deviation(s @ s.mT, (z @ z.T) * (phi @ phi.T)) < 2
    assert deviation(s @ s.mT, (z @ z.T) ** 2) > 4


def test_features_are_the_same_in_every_call_and_for_every_number_of_points(X) -> None:
    many = X.repeat(100, 1, 1)
    assert torch.equal(rbf_features(many, 1.0, 8, seed=3)[:256], rbf_features(many[:256], 1.0, 8, seed=3))
    assert not torch.equal(rbf_features(X, 1.0, 8, seed=3), rbf_features(X, 1.0, 8, seed=4))
    z = X.flatten(1)
    assert torch.equal(tensor_sketch(z, z, 8), tensor_sketch(z, z, 8))
    assert rbf_features(X.float(), 1.0, 8).dtype == torch.float32


def test_products_can_be_differentiated(X) -> None:
    def values(x):
        phi = rbf_features(x, 1.0, 6)
        return tensor_sketch(phi, phi, 5)

    assert torch.autograd.gradcheck(values, X[:2].clone().requires_grad_(), fast_mode=True)


def test_what_has_no_features_or_order_is_refused(unchecked) -> None:
    z, zeros = torch.zeros(3, 2), {"X": torch.zeros(3, 2), "lengthscale": 1.0, "num_features": 4}
    for change, error, message in (
        ({"lengthscale": 0.0}, ValueError, "lengthscale must be positive"),
        ({"num_features": 7}, ValueError, "num_features must be even"),
        ({"num_features": 0}, ValueError, "num_features must be at least 2"),
        ({"X": torch.zeros(3)}, ValueError, "X must have shape"),
        ({"X": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "X must be float32 or float64"),
        ({"X": torch.full((3, 2), float("nan"))}, ValueError, "X must be finite"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number"),
    ):
        with pytest.raises(error, match=message):
            rbf_features(**{**zeros, **change})
    for phi, size, message in (
        (torch.zeros(4, 2), 8, r"must be of the same points and dtype: got \(3, 2\)"),
        (z.double(), 8, "must be of the same points and dtype"),
        (z, 0, "num_features must be at least 1"),
        (z[0], 8, "phi must have 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_sketch(z, phi, size)


def test_rows_and_columns_of_a_hadamard_matrix_are_orthogonal() -> None:
    for order in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 44, 48, 60, 64, 68, 72, 80, 84):
        H, expected = hadamard_matrix(order).to(torch.int64), order * torch.eye(order, dtype=torch.int64)
        assert torch.equal(H.abs(), torch.ones_like(H))
        assert torch.equal(H @ H.T, expected)
        assert torch.equal(H.T @ H, expected)


def test_the_order_of_a_hadamard_matrix_divides_the_number_of_nodes_if_it_can() -> None:
    cases = {(10, 20): 20, (10, 16): 16, (10, 12): 12, (10, 24): 12, (3, 20): 4, (1, 20): 1, (2, 20): 2, (10, 10): 12}
    for (outputs, nodes), order in (cases | {(3, 6): 4, (100, 20): 104, (28, 28): 32, (36, 36): 40}).items():
        assert hadamard_order(outputs, nodes) == order
