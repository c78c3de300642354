"""The single kernel machine says where there is none; a run that stands still has the tangent kernel."""

import pytest
import torch

import epk_gp as epk
import reference
from epk_gp.kernel_machine.baselines import single_machine, tangent_trajectory
from helpers import assert_close, make_case


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=3)


@pytest.mark.parametrize("state", [0, 2, -1])
def test_standing_still_gives_the_tangent_kernel(case, state):
    run = tangent_trajectory(case.trajectory, state)
    s = state % (case.trajectory.num_steps + 1)
    rows = [case.test[:3], case.trajectory.inputs[:2]]
    at = (s - 1, 1.0) if s == case.trajectory.num_steps else (s, 0.0)
    J = [torch.stack([reference.jacobian(case.trajectory, *at, x, "log_softmax") for x in X]) for X in rows]
    expected = torch.einsum("ncp,mdp->ncmd", *J)
    for copies in (True, False):
        found = epk.gram_block(run, epk.Points(rows[0], copies), epk.Points(rows[1], True))
        assert_close(found, expected)
    other = epk.gram_block(tangent_trajectory(case.trajectory, 1), epk.Points(rows[0], True), epk.Points(rows[1], True))
    assert (other - expected).abs().max() > 1e-3 * expected.abs().max()  # the negative control: another state


def test_tangent_runs_serve_kernels_and_processes(case):
    runs = [tangent_trajectory(case.trajectory, s) for s in (0, -1)]
    assert len({run.digest for run in (*runs, case.trajectory)}) == 3
    x = epk.test_copy(case.test)
    K = [epk.EPKKernel(run)(x).to_dense() for run in runs]
    assert (K[0] - K[1]).abs().max() > 1e-3
    assert_close(epk.EPKKernel(runs[0])(epk.train_copy(case.test)).to_dense(), K[0])
    gp = epk.LogitGP(runs[1])
    assert torch.equal(gp.prior_mean(x), epk.network_outputs(case.trajectory, case.test))
    with pytest.raises(IndexError, match=r"state must lie in 0\.\.3 \(or be negative\): got 4"):
        tangent_trajectory(case.trajectory, 4)


def test_the_discrete_path_kernel_is_a_sum_of_tangent_kernels(case):
    """DPK = sum_s eps_s NTK_s; with more nodes (the negative control) it is not."""
    run, A = case.trajectory, epk.Points(case.test, False)
    parts = [step.lr * epk.gram_block(tangent_trajectory(run, step.index), A, A) for step in run.steps]
    assert_close(epk.gram_block(run, A, A, rule=epk.QuadratureRule.left_endpoint()), sum(parts))
    exact = epk.gram_block(run, A, A, rule=epk.gauss_legendre(4))
    assert (exact - sum(parts)).abs().max() > 1e-3 * exact.abs().max()


def test_the_coefficients_of_a_single_machine_are_those_of_the_loss():
    """Theorem 3.7, with a_i = c_i q_i; 1/M in place twice, as the theorem is printed, is off."""
    case = make_case("tanh", batch_size=None)
    result = single_machine(case.trajectory, case.test, rule=epk.adaptive(1e-13))
    assert result.max_error <= 1e-12
    assert_close(result.coefficients, torch.nn.functional.one_hot(case.trajectory.targets, 3).double() / 7)
    twice = result.initial + (result.outputs - result.initial) / 7
    assert (twice - result.network).abs().max() > 1e-2


def test_a_run_without_constant_coefficients_has_no_single_machine():
    whole = make_case("tanh", batch_size=None)
    for case, options, says in (
        (make_case("one_class"), {}, "a loss derivative that stays constant"),
        (whole, {"head": "logits"}, 'head="log_softmax": with respect to'),
        (make_case("tanh"), {}, "every step to use all training points: step 0 used"),
    ):
        with pytest.raises(ValueError, match=f"the single kernel machine needs {says}.*Use epk_gp.reconstruct"):
            single_machine(case.trajectory, case.test, **options)
