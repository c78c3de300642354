"""The ensemble of kernel machines is the network, and each sample's share of it is the definition's."""

import pytest
import torch
from torch import Tensor
from weighted_loops import record

import epk_gp as epk
import reference
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine import descent
from epk_gp.kernel_machine import terms as problem_module
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.kernel_machine.terms import IntegratedLines
from helpers import NETWORKS, Case, assert_close, make_case


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_kernel_machine_and_contributions_sum_to_the_network(case):
    """Theorem 3.6."""
    for head in case.heads:
        expected = epk.network_outputs(case.trajectory, case.test, head=head)
        result = epk.reconstruct(case.trajectory, case.test, head=head, rule=epk.adaptive(1e-13))
        assert_close(result.network, expected)
        assert (result.outputs - expected).abs().max() <= 1e-12
        assert result.max_error <= 1e-12
        assert result.max_residual <= result.total_residual <= 1e-12
        parts = epk.attribute(case.trajectory, case.test, head=head, rule=epk.adaptive(1e-13))
        assert (parts.total - expected).abs().max() <= 1e-12
        assert parts.max_error <= 1e-12
        assert parts.samples.shape == (*expected.shape, 7)


@pytest.mark.parametrize("name", ["relu", "cnn", "transformer"])
def test_one_node_does_not_equal_the_network(name):
    """The negative control: without the integral the same sum is off (Figure 7)."""
    case = make_case(name)
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves .*; a fixed rule"):
        result = epk.reconstruct(
            case.trajectory, case.test, head=case.heads[-1], rule=epk.QuadratureRule.left_endpoint()
        )
    assert not result.certified
    assert result.max_error > 1e-3 * result.network.abs().max()


@pytest.mark.slow
def test_contributions_equal_the_definition(case):
    rule = epk.gauss_legendre(3)
    for head in case.heads:
        parts = epk.attribute(case.trajectory, case.test[:1], head=head, rule=rule)
        assert_close(parts.samples, reference.contributions(case.trajectory, case.test[:1], head, rule))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "path", "num_samples"),
    [("relu", epk.chords(every=3), 3), ("cnn", epk.straight(), 1000), ("attention", epk.chords(every=3), 1000)],
)
def test_contributions_do_not_depend_on_how_much_is_held(name, path, num_samples, monkeypatch):
    """Nodes that do not fit are computed again, and what they add to a sample is one term."""
    case, passes = make_case(name), []
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *args: 1)
    groupings = [[by_sample(case.trajectory)], [by_layer(case.trajectory), by_step(case.trajectory)]]

    def found() -> list[Tensor]:
        options = {"path": path, "rule": epk.gauss_legendre(5)}
        parts = epk.attribute(case.trajectory, case.test, by=groupings, **options)
        return [*(part.values for part in parts), epk.attribute(case.trajectory, case.test, **options).amplification]

    whole, computed = found(), IntegratedLines.node_batches
    monkeypatch.setattr(MemoryPlan, "node_bytes", 1)
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_samples", lambda *args: num_samples)
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_points", lambda *args: 3)
    monkeypatch.setattr(problem_module, "rows_per_pass", lambda *args: 10)  # of nodes
    monkeypatch.setattr(
        IntegratedLines, "node_batches", lambda line: (passes.append(batch) or batch for batch in computed(line))
    )
    for actual, expected in zip(found(), whole, strict=True):
        assert_close(actual, expected, rounding=1e5)
    assert len(passes) > 2 * case.trajectory.num_steps


def test_the_data_of_a_step_is_read_once(monkeypatch):
    """However few samples are computed at a time: the data may be of another dtype, and be copied."""
    case, read, steps = make_case("relu", batch_size=None), descent.batch_of, []
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *args: 1)
    monkeypatch.setattr(descent, "batch_of", lambda run, s, like: steps.append(s.index) or read(run, s, like))
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_samples", lambda *args: 2)
    epk.attribute(case.trajectory, case.test)
    assert steps == list(range(case.trajectory.num_steps))


def test_a_repeated_index_counts_twice():
    X, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    run = record(net, torch.optim.SGD(net.parameters(), lr=0.3), X, y, ([0, 0, 1], [2, 3, 2]))
    parts = epk.attribute(run, X)
    assert parts.max_error <= 1e-13
    assert_close(parts.samples, reference.contributions(run, X, "log_softmax", epk.gauss_legendre(8)))
