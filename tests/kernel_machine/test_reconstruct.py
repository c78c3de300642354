"""The ensemble of kernel machines is the network, each share the definition's; where there is a single machine."""

import pytest
import torch
from optimizer_cases import problem
from torch import Tensor
from torch.optim import SGD, Adam

import epk_gp as epk
import reference
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine import descent
from epk_gp.kernel_machine import terms as problem_module
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.kernel_machine.reconstruct import single_machine, tangent_trajectory
from epk_gp.kernel_machine.terms import IntegratedLines
from helpers import NETWORKS, Case, assert_close, make_case


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_kernel_machine_and_contributions_sum_to_the_network(case):
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
    case, rule = make_case(name), epk.QuadratureRule.left_endpoint()
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves .*; a fixed rule"):
        result = epk.reconstruct(case.trajectory, case.test, head=case.heads[-1], rule=rule)
    assert not result.certified
    assert result.max_error > 1e-3 * result.network.abs().max()


@pytest.mark.slow
def test_contributions_equal_the_definition(case):
    rule = epk.gauss_legendre(3)
    for head in case.heads:
        parts = epk.attribute(case.trajectory, case.test[:1], head=head, rule=rule)
        assert_close(parts.samples, reference.contributions(case.trajectory, case.test[:1], head, rule))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "path", "num_samples"), [
    ("relu", epk.chords(every=3), 3), ("cnn", epk.straight(), 1000), ("attention", epk.chords(every=3), 1000),
])  # fmt: skip
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
    noted = lambda line: (passes.append(batch) or batch for batch in computed(line))  # noqa: E731
    monkeypatch.setattr(IntegratedLines, "node_batches", noted)
    for actual, expected in zip(found(), whole, strict=True):
        assert_close(actual, expected, rounding=1e5)
    assert len(passes) > 2 * case.trajectory.num_steps


def test_the_data_of_a_step_is_read_once(monkeypatch):
    case, read, steps = make_case("relu", batch_size=None), descent.batch_of, []
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *args: 1)
    monkeypatch.setattr(descent, "batch_of", lambda run, s, like: steps.append(s.index) or read(run, s, like))
    monkeypatch.setattr(MemoryPlan, "vanilla_gd_samples", lambda *args: 2)
    epk.attribute(case.trajectory, case.test)
    assert steps == list(range(case.trajectory.num_steps))


@pytest.fixture(scope="module")
def small():
    return make_case("tanh", steps=3)


@pytest.mark.parametrize("state", [0, 2, -1])
def test_standing_still_gives_the_tangent_kernel(small, state):
    run = tangent_trajectory(small.trajectory, state)
    s = state % (small.trajectory.num_steps + 1)
    rows = [small.test[:3], small.trajectory.inputs[:2]]
    at = (s - 1, 1.0) if s == small.trajectory.num_steps else (s, 0.0)
    J = [torch.stack([reference.jacobian(small.trajectory, *at, x, "log_softmax") for x in X]) for X in rows]
    expected = torch.einsum("ncp,mdp->ncmd", *J)
    for copies in (True, False):
        found = epk.gram_block(run, epk.Points(rows[0], copies), epk.Points(rows[1], True))
        assert_close(found, expected)
    other = epk.gram_block(tangent_trajectory(small.trajectory, 1), *(epk.Points(X, True) for X in rows))
    assert (other - expected).abs().max() > 1e-3 * expected.abs().max()  # the negative control: another state


def test_tangent_runs_serve_kernels_and_processes(small):
    runs = [tangent_trajectory(small.trajectory, s) for s in (0, -1)]
    assert len({run.digest for run in (*runs, small.trajectory)}) == 3
    x = epk.test_copy(small.test)
    K = [epk.EPKKernel(run)(x).to_dense() for run in runs]
    assert (K[0] - K[1]).abs().max() > 1e-3
    assert_close(epk.EPKKernel(runs[0])(epk.train_copy(small.test)).to_dense(), K[0])
    gp = epk.LogitGP(runs[1])
    assert torch.equal(gp.prior_mean(x), epk.network_outputs(small.trajectory, small.test))
    with pytest.raises(IndexError, match=r"state must lie in 0\.\.3 \(or be negative\): got 4"):
        tangent_trajectory(small.trajectory, 4)


def test_the_discrete_path_kernel_is_a_sum_of_tangent_kernels(small):
    """DPK = sum_s eps_s NTK_s; with more nodes (the negative control) it is not."""
    run, A = small.trajectory, epk.Points(small.test, False)
    parts = [step.lr * epk.gram_block(tangent_trajectory(run, step.index), A, A) for step in run.steps]
    assert_close(epk.gram_block(run, A, A, rule=epk.QuadratureRule.left_endpoint()), sum(parts))
    exact = epk.gram_block(run, A, A, rule=epk.gauss_legendre(4))
    assert (exact - sum(parts)).abs().max() > 1e-3 * exact.abs().max()


def test_the_coefficients_of_a_single_machine_are_those_of_the_loss():
    """Theorem 3.7, with a_i = c_i q_i; 1/M in place twice, as the theorem is printed, is off."""
    small = make_case("tanh", batch_size=None)
    result = single_machine(small.trajectory, small.test, rule=epk.adaptive(1e-13))
    assert result.max_error <= 1e-12
    assert_close(result.coefficients, torch.nn.functional.one_hot(small.trajectory.targets, 3).double() / 7)
    twice = result.initial + (result.outputs - result.initial) / 7
    assert (twice - result.network).abs().max() > 1e-2


def test_a_run_without_constant_coefficients_has_no_single_machine():
    whole = make_case("tanh", batch_size=None)
    for small, options, says in (
        (make_case("one_class"), {}, "a loss derivative that stays constant"),
        (whole, {"head": "logits"}, 'head="log_softmax": with respect to'),
        (make_case("tanh"), {}, "every step to use all training points: step 0 used"),
    ):
        with pytest.raises(ValueError, match=f"the single kernel machine needs {says}.*Use epk_gp.reconstruct"):
            single_machine(small.trajectory, small.test, **options)
    net, X, y = problem("SGD")
    for make, options in ((SGD, {"momentum": 0.9}), (SGD, {"weight_decay": 0.1}), (Adam, {"amsgrad": True})):
        run = epk.train(net, X, y, optimizer=make(net.parameters(), lr=0.01, **options), steps=2)
        with pytest.raises(ValueError, match="needs steps of plain gradient descent on the loss itself: step 0 of"):
            single_machine(run, X[:2])
