import pytest
import torch
from torch import Tensor

import epk_gp as epk
import reference
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.show import CertificateWarning
from epk_gp.datasets import three_gaussians
from epk_gp.kernel_machine import factored
from epk_gp.kernel_machine import terms as problem_module
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.kernel_machine.baselines import single_machine
from epk_gp.kernel_machine.terms import IntegratedLine
from epk_gp.quadrature.kinks import Kinks
from epk_gp.quadrature.rules import WeightPath
from helpers import NETWORKS, Case, assert_close, make_case

SMOOTH = {
    "tanh",
    "one_class",
    "linear",
    "conv1d",
    "wide_conv",
    "gelu",
    "twice",
    "tied",
    "attention",
    "cosine",
    "sequence_first",
}


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_kernel_machine_equals_the_network(case: Case) -> None:
    """Theorem 3.6."""
    for head in case.heads:
        result = epk.reconstruct(case.trajectory, case.test, head=head, rule=epk.adaptive(1e-13))
        expected = epk.network_outputs(case.trajectory, case.test, head=head)
        assert_close(result.network, expected)
        assert (result.outputs - expected).abs().max() <= 1e-12
        assert result.max_error <= 1e-12
        assert result.max_residual <= result.total_residual <= 1e-12


def test_one_node_does_not_equal_the_network(case: Case) -> None:
    """The negative control: without the integral the same sum is off (Figure 7)."""
    if case.name == "linear":
        pytest.skip("the logits of a linear network are linear in t: one node is exact")
    with pytest.warns(CertificateWarning, match="the quadrature of a step leaves .*; a fixed rule"):
        result = epk.reconstruct(case.trajectory, case.test, head=case.heads[-1], rule=epk.left_endpoint())
    assert not result.certified
    assert result.max_error > 1e-3 * result.network.abs().max()


def test_contributions_and_initial_output_sum_to_the_network(case: Case) -> None:
    for head in case.heads:
        parts = epk.attribute(case.trajectory, case.test, head=head, rule=epk.adaptive(1e-13))
        expected = epk.network_outputs(case.trajectory, case.test, head=head)
        assert (parts.total - expected).abs().max() <= 1e-12
        assert parts.max_error <= 1e-12
        assert parts.samples.shape == (*expected.shape, 7)


@pytest.mark.slow
def test_contributions_equal_the_definition(case: Case) -> None:
    rule = epk.gauss_legendre(3)
    for head in case.heads:
        parts = epk.attribute(case.trajectory, case.test[:2], head=head, rule=rule)
        assert_close(parts.samples, reference.contributions(case.trajectory, case.test[:2], head, rule))


@pytest.mark.slow
def test_adaptive_contributions_equal_a_fine_rule() -> None:
    """Each sample's own share, not only the sum: composite midpoints on a kinked network."""
    case = make_case("relu", lr=0.05)
    found = epk.attribute(case.trajectory, case.test, rule=epk.adaptive(1e-13)).samples
    assert_close(found, epk.attribute(case.trajectory, case.test, rule=epk.midpoint(1000)).samples, rounding=1e11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "cnn"])
def test_contributions_do_not_depend_on_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name)
    whole = epk.attribute(case.trajectory, case.test)
    for sizes in ("adjoint_points", "vanilla_gd_points"):
        monkeypatch.setattr(MemoryPlan, sizes, lambda *args: 2)
    assert_close(epk.attribute(case.trajectory, case.test).samples, whole.samples)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["relu", "cnn", "attention"])
@pytest.mark.parametrize(
    ("path", "num_samples"), [(epk.chords(every=3), 3), (epk.straight(), 1000)], ids=["chords", "steps"]
)
def test_contributions_do_not_depend_on_how_many_nodes_are_held(
    name: str, path: WeightPath, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that do not fit are computed again, and what they add to a sample is one term."""
    case, passes = make_case(name), []
    groupings = [[by_sample(case.trajectory)], [by_layer(case.trajectory), by_step(case.trajectory)]]

    def found() -> list[Tensor]:
        options = {"path": path, "rule": epk.gauss_legendre(5)}
        parts = attribute_many(case.trajectory, case.test, groupings, **options)
        return [*(part.values for part in parts), epk.attribute(case.trajectory, case.test, **options).amplification]

    whole = found()
    monkeypatch.setattr(MemoryPlan, "node_bytes", 1)
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_samples", lambda *args: num_samples)
    monkeypatch.setattr(problem_module, "rows_per_pass", lambda *args: 10)  # of nodes
    computed = IntegratedLine.node_batches
    monkeypatch.setattr(
        IntegratedLine, "node_batches", lambda line: (passes.append(batch) or batch for batch in computed(line))
    )
    for actual, expected in zip(found(), whole, strict=True):
        assert_close(actual, expected, rounding=1e5)
    assert len(passes) > 2 * case.trajectory.num_steps


def test_the_data_of_a_step_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few samples are computed at a time: the data may be of another dtype, and be copied."""
    case, read, steps = make_case("relu", batch_size=None), factored.batch_of, []
    monkeypatch.setattr(factored, "batch_of", lambda run, step, like: steps.append(step.index) or read(run, step, like))
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_samples", lambda *args: 2)
    epk.attribute(case.trajectory, case.test)
    assert steps == list(range(case.trajectory.num_steps))


def test_a_repeated_index_counts_twice() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for batch in ([0, 0, 1], [2, 3, 2]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    parts = epk.attribute(recorder.trajectory, X)
    assert parts.max_error <= 1e-13
    assert_close(parts.samples, reference.contributions(recorder.trajectory, X, "log_softmax", epk.gauss_legendre(8)))


@pytest.mark.slow
def test_single_machine_equals_the_network() -> None:
    """Theorem 3.7, with a_i = c_i q_i."""
    for name in ("relu", "tanh", "cnn"):
        case = make_case(name, batch_size=None)
        result = single_machine(case.trajectory, case.test, rule=epk.adaptive(1e-13))
        assert result.max_error <= 1e-12
        q = torch.nn.functional.one_hot(case.trajectory.targets, 3).double()
        assert_close(result.coefficients, q / 7)


def test_wrong_coefficients_do_not_equal_the_network() -> None:
    """The negative control: 1/M in place twice, as the theorem is printed, is off."""
    case = make_case("tanh", batch_size=None)
    result = single_machine(case.trajectory, case.test)
    twice = result.initial + (result.outputs - result.initial) / 7
    assert (twice - result.network).abs().max() > 1e-2


@pytest.mark.slow
def test_toy_problem_is_exact_with_few_evaluations() -> None:
    """3 Gaussians in 100-D, one hidden ReLU layer, 100 full-batch steps of 0.1, 300 points."""
    data = three_gaussians(100)
    test = three_gaussians(4, generator=torch.Generator().manual_seed(1)).inputs
    net = torch.nn.Sequential(torch.nn.Linear(100, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).double()
    trajectory = epk.train(
        net, data.inputs, data.labels, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=100
    )
    for head in ("logits", "log_softmax"):
        result = epk.reconstruct(trajectory, test, head=head)
        assert result.max_error <= 1e-12
        assert result.evaluations <= 12
        assert epk.reconstruct(trajectory, test, head=head, rule=epk.left_endpoint()).max_error >= 1e-3


def test_float32_run_is_explained_up_to_float32_rounding() -> None:
    case = make_case("relu", dtype=torch.float32)
    narrow = epk.reconstruct(case.trajectory, case.test)
    assert narrow.outputs.dtype == torch.float32
    assert narrow.max_error <= 1e-5
    wide = epk.reconstruct(case.trajectory, case.test.double())
    assert wide.outputs.dtype == torch.float64
    assert wide.max_error <= 1e-6
    assert 0 < wide.max_step_mismatch <= 1e-7


@pytest.mark.slow
def test_located_kinks_cost_less_than_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control for `kinks.locate_kinks`: blind bisection of the same run takes far more evaluations."""
    case = make_case("cnn", lr=0.5, steps=6)
    located = epk.reconstruct(case.trajectory, case.test, rule=epk.adaptive(1e-13))

    def no_kinks(line: object, x: Tensor, a: Tensor, b: Tensor) -> Kinks:
        return Kinks(torch.zeros(0, dtype=torch.int64), a[:0], torch.ones_like(a, dtype=torch.bool))

    monkeypatch.setattr("epk_gp.quadrature.adaptive.locate_kinks", no_kinks)
    blind = epk.reconstruct(case.trajectory, case.test, rule=epk.adaptive(1e-13))
    assert located.max_error <= 1e-12
    assert blind.max_error <= 1e-11
    assert blind.evaluations > 2 * located.evaluations
