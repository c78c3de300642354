"""Sketched features: unbiased, accurate, the same bytes however they are computed."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from graph_runs import make_net, record

import epk_gp as epk
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.core import plans as memory_plan
from epk_gp.gram import sketch as node_sketch
from epk_gp.gram import sketch as path_sketch
from epk_gp.gram.path_features import PathFeatures, SketchError, trace_sketch
from epk_gp.gram.sketch import nodes_trajectory
from helpers import Case, assert_close, make_case


class Sum(torch.nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, left, right):
        return self.layer(left).tanh() + self.layer(right)


K, NODES, SEEDS = 24, 4, 40


@pytest.fixture(
    scope="module",
    params=["relu", "one_class", "wide", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "twice"))],
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
    monkeypatch.setattr(path_sketch, "PIECE_BLOCKS", 2)


def features(case, seed, X, **options):
    return epk.path_features(case.trajectory, X, K, nodes=NODES, seed=seed, num_probe=0, **options)


def trace_of_nodes(case, points, head):
    run = nodes_trajectory(case.trajectory, NODES)
    K = epk.gram_block(run, points, points, head=head, rule=epk.left_endpoint())
    return torch.einsum("ncmc->nm", K) / run.num_outputs


def deviation(products, exact):
    """The mean's distance from the exact kernel in standard errors: root mean square over pairs of points."""
    standard_error = products.std(0) / len(products) ** 0.5
    return float(((products.mean(0) - exact) / standard_error).square().mean().sqrt())


def test_products_of_features_are_the_trace_kernel_on_average(case: Case, unchecked) -> None:
    """And not so if the two features of a pair come from different sketches.

    The squared deviation of a mean of 40 in its own standard errors is 39 / 37 on average; like points deviate alike.
    """
    z = torch.stack([features(case, seed, case.test, head="logits") for seed in range(SEEDS)])
    exact = trace_of_nodes(case, epk.Points(case.test, False), "logits")
    assert deviation(z @ z.mT, exact) < 3
    assert deviation(z @ z.roll(1, 0).mT, exact) > 4


def test_a_softmax_head_has_its_own_features(case: Case, unchecked) -> None:
    if len(case.heads) == 1:
        pytest.skip("one output")
    z = torch.stack([features(case, seed, case.test, head="log_softmax") for seed in range(SEEDS)])
    points = epk.Points(case.test, False)
    assert deviation(z @ z.mT, trace_of_nodes(case, points, "log_softmax")) < 3
    assert deviation(z @ z.mT, trace_of_nodes(case, points, "logits")) > 3


def test_training_copies_are_taken_at_the_starts_of_their_steps(tanh: Case) -> None:
    """A node in the middle of each step: training copies, of the same sketch, stand at its start."""
    run = tanh.trajectory
    mask = torch.tensor([True, False, True, False, True])
    z = epk.path_features(run, tanh.test, K, nodes=3, is_train=mask, num_probe=0)
    frozen = replace(nodes_trajectory(run, 3), states=run.states)
    sketch = trace_sketch(run, K, nodes=3, seed=0, head=None)
    vars(sketch)["run"] = replace(frozen, digest=sketch.run.digest)
    starts = sketch.features(epk.Points(tanh.test, False))[:, 0]
    moving = epk.path_features(run, tanh.test, K, nodes=3, num_probe=0)
    assert_close(z[mask] @ z.T, starts[mask] @ torch.where(mask[:, None], starts, moving).T)
    assert_close(z[~mask] + 0, moving[~mask])
    assert not torch.allclose(z[mask] + 0, moving[mask])


@pytest.mark.parametrize(("nodes", "outputs"), [(4, 3), (20, 10), (8, 1)])
def test_expected_products_are_exact_where_the_matrix_fits_the_nodes(nodes: int, outputs: int) -> None:
    sketch = trace_sketch(make_case("tanh").trajectory, 8, nodes=nodes, seed=3, head="logits")
    run = replace(sketch.run, num_outputs=outputs)
    from_seed = path_sketch.trace_coefficients(run, 3)[:, 0]
    torch.testing.assert_close(from_seed.T @ from_seed, nodes * torch.eye(outputs, dtype=torch.float64))


def test_the_error_is_that_of_the_cosine_kernel(tanh: Case) -> None:
    z = epk.path_features(tanh.trajectory, tanh.test, 256, nodes=NODES, head="logits")
    error = z.error
    exact = torch.einsum(
        "ncmc->nm",
        epk.gram_block(
            *[tanh.trajectory, *[epk.Points(tanh.test, False)] * 2], head="logits", rule=epk.gauss_legendre(2)
        ),
    )
    cosine = exact / exact.diagonal().sqrt() / exact.diagonal().sqrt()[:, None]
    own = torch.nn.functional.normalize(z)
    difference = (own @ own.T - cosine)[~torch.eye(5, dtype=torch.bool)]
    assert isinstance(error, SketchError)
    assert error.rms == pytest.approx(float(difference.square().mean().sqrt()))
    assert error.max == pytest.approx(float(difference.abs().max()))
    assert 0 < error.nodes_rms <= error.nodes_max < error.max
    assert error.expected_rms == pytest.approx(1.06 / 16)
    assert error.reference == "all 3 steps, 2 nodes each"


def test_points_without_a_gradient_are_left_out_of_the_error() -> None:
    """A network without biases: at 0 nothing depends on the weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.ReLU(), torch.nn.Linear(5, 2, bias=False))
    net, X = net.double(), torch.randn(6, 3, dtype=torch.float64)
    run = epk.train(net, X, torch.arange(6) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    at_zero = torch.zeros(1, 3, dtype=torch.float64)
    with_zero, expected = (epk.path_features(run, points, 16).error for points in (torch.cat([at_zero, X]), X))
    assert with_zero is not None
    assert expected is not None
    assert with_zero.num_points == expected.num_points == 6
    assert [with_zero.rms, with_zero.nodes_max] == pytest.approx([expected.rms, expected.nodes_max])
    assert epk.path_features(run, torch.cat([at_zero, X[:1]]), 16).error is None


@pytest.mark.slow
def test_errors_are_as_small_as_stated(case: Case, unchecked) -> None:
    """Over seeds, without the nodes' share; fewer features have more."""
    points = epk.Points(case.test, False)

    def rms(k):
        squares = []
        for seed in range(12):
            sketch = trace_sketch(case.trajectory, k, nodes=NODES, seed=seed, head="logits")
            z = torch.nn.functional.normalize(sketch.features(points)[:, 0])
            exact = sketch.products(points, points)[0][0]
            cosine = exact / exact.diagonal().sqrt() / exact.diagonal().sqrt()[:, None]
            squares.append((z @ z.T - cosine)[~torch.eye(5, dtype=torch.bool)].square().mean())
        return float(torch.stack(squares).mean().sqrt())

    assert rms(256) < 1.15 / 16
    assert rms(4) > rms(256)


def test_the_error_goes_lost_in_any_operation(tanh: Case) -> None:
    z = epk.path_features(tanh.trajectory, tanh.test, K, nodes=NODES)
    assert isinstance(z, PathFeatures)
    for plain in (z + 0, z[:2], z.T @ z, torch.cat([z, z])):
        assert type(plain) is torch.Tensor


def test_one_point_has_no_error_and_neither_has_a_call_that_asks_for_none(tanh: Case) -> None:
    assert epk.path_features(tanh.trajectory, tanh.test[:1], K).error is None
    assert features(tanh, 0, tanh.test).error is None


def test_a_long_run_is_compared_with_some_nodes(tanh: Case, monkeypatch) -> None:
    monkeypatch.setattr("epk_gp.gram.path_features.MAX_PROBE_STEPS", 2)
    assert epk.path_features(tanh.trajectory, tanh.test, K).error.reference == "2 nodes of the path"


def test_a_run_of_nodes_is_taken_step_by_step(tanh: Case) -> None:
    run = nodes_trajectory(tanh.trajectory, NODES)
    z = epk.path_features(run, tanh.test, K, nodes=None)
    assert torch.equal(z, features(tanh, 0, tanh.test))
    assert z.error.reference == "all 4 steps, each at its start"


def test_bytes_do_not_depend_on_budget_or_workers(tanh: Case, small_blocks) -> None:
    X = torch.cat([tanh.test, tanh.trajectory.inputs])
    expected = features(tanh, 0, X)
    assert torch.equal(features(tanh, 0, X, memory_budget=1 << 20), expected)
    with ThreadPoolExecutor(3) as executor:
        assert torch.equal(features(tanh, 0, X, executor=executor, memory_budget=1 << 20), expected)
        assert torch.equal(features(tanh, 0, X, executor=executor), expected)
    assert_close(features(tanh, 0, X[3:]) + 0, expected[3:])


@pytest.mark.slow
def test_bytes_do_not_depend_on_processes(tanh: Case) -> None:
    expected = features(tanh, 0, tanh.test)
    with ProcessPoolExecutor(1) as executor:
        assert torch.equal(features(tanh, 0, tanh.test, executor=executor), expected)


def test_features_do_not_depend_on_the_number_of_threads(tanh: Case, small_blocks) -> None:
    """Beyond rounding: the same sketches are drawn."""
    expected, before = features(tanh, 0, tanh.test), torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert_close(features(tanh, 0, tanh.test) + 0, expected + 0)
    finally:
        torch.set_num_threads(before)


def test_a_killed_call_resumes_to_the_same_bytes(tanh: Case, small_blocks, tmp_path, monkeypatch) -> None:
    X = torch.cat([tanh.test, tanh.trajectory.inputs])
    expected = features(tanh, 0, X)
    pieces, original = [], node_sketch.NodeSketch.piece

    def dying(sketch, rows):
        if len(pieces) == 2:
            raise KeyboardInterrupt
        pieces.append(len(rows))
        return original(sketch, rows)

    monkeypatch.setattr(node_sketch.NodeSketch, "piece", dying)
    with pytest.raises(KeyboardInterrupt):
        features(tanh, 0, X, checkpoint=tmp_path / "sums")
    pieces[:] = [None]
    assert torch.equal(features(tanh, 0, X, checkpoint=tmp_path / "sums"), expected)
    assert pieces == [None, 4]  # of 12 points: 8 were there
    with pytest.raises(ValueError, match="must be of this very computation"):
        features(tanh, 1, X, checkpoint=tmp_path / "sums")


def test_networks_of_integers_have_features() -> None:
    case = make_case("attention", steps=1)
    z = epk.path_features(case.trajectory, case.test, 256, nodes=2)
    assert (z.dtype, z.shape) == (torch.float64, (5, 256))
    assert z.error.rms < 3 / 16


def test_nodes_of_a_graph_and_several_inputs_have_features(unchecked) -> None:
    run = record(make_net(), steps=2)
    z = epk.path_features(run, run.inputs, 64, nodes=4)
    assert z.shape == (7, 64)
    assert z.error.rms < 4 / 8
    generator = torch.Generator().manual_seed(0)
    X = {name: torch.randn(6, 3, generator=generator, dtype=torch.float64) for name in ("left", "right")}
    net = Sum().double()
    y = torch.arange(6) % 2
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
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
    z = features(tanh, 0, tanh.test)
    single = features(tanh, 0, tanh.test.float())
    assert (z.dtype, single.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single.double(), z + 0, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(features(tanh, 1, tanh.test) + 0, z + 0)


@pytest.mark.parametrize("name", ["tanh", "wide_conv", "norms"])
def test_features_can_be_differentiated(name: str) -> None:
    """A weighted sum of the features of both copies; the reference: finite differences."""
    case = make_case(name, steps=3)
    sketch = trace_sketch(case.trajectory, 7, nodes=2, seed=0, head=None)
    X, step = case.test[:3], 1e-5
    points = epk.Points(X, torch.tensor([True, False, True]))
    weights = torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 1, 7)
    direction = torch.linspace(1, -1, X.numel(), dtype=torch.float64).view_as(X)
    gradient = sketch.input_gradients(points, weights)

    def value(t):
        return (sketch.features(epk.Points(X + t * direction, points.is_train)) * weights).sum()

    expected = (value(step) - value(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_features": 0}, ValueError, "num_features must be at least 1: got 0"),
        ({"num_features": 2.5}, TypeError, "num_features must be a whole number"),
        ({"nodes": 0}, ValueError, "nodes must be at least 1"),
        ({"seed": "a"}, TypeError, "seed must be a whole number"),
        ({"num_probe": -1}, ValueError, "num_probe must be at least 0"),
        ({"head": "probabilities"}, ValueError, "head must be one of"),
        ({"executor": 2}, TypeError, "executor must have a method submit"),
        ({"is_train": torch.ones(3, dtype=torch.bool)}, ValueError, "is_train must have one entry per point"),
        ({"accumulate": torch.float64}, TypeError, "unexpected keyword argument 'accumulate'"),
        ({"memory_budget": 3}, ValueError, "memory_budget must be at least 1 MiB"),
    ],
)
def test_what_cannot_be_used_is_refused(tanh: Case, unchecked, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        epk.path_features(tanh.trajectory, tanh.test, **arguments)


def test_points_that_the_network_cannot_take_are_refused(tanh: Case, unchecked) -> None:
    with pytest.raises(ValueError, match="X must have shape"):
        epk.path_features(tanh.trajectory, tanh.test[:, :2])
    with pytest.raises(TypeError, match="trajectory must be an epk_gp.Trajectory"):
        epk.path_features(None, tanh.test)
