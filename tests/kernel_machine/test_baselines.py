"""The asymmetric and test-dependent forms of earlier papers, against loops over their definitions."""

import warnings

import pytest
import torch

import epk_gp as epk
import reference
from epk_gp.core.show import CertificateWarning
from epk_gp.kernel_machine.baselines import (
    chen_machine,
    domingos_machine,
    k_prime_block,
    single_machine,
    tangent_trajectory,
)
from helpers import assert_close, make_case


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=3)


def full_batch(lr, steps):
    return make_case("tanh", steps=steps, lr=lr, batch_size=None)


def path_terms(case, head, rule):
    """Loop: for every (step, node), columns, eps omega c <grad, grad>, and dL/df."""
    run = case.trajectory
    for step in run.steps:
        batch = range(run.num_points) if step.batch is None else step.batch.tolist()
        for t, omega in rule:
            J_test = torch.stack([reference.jacobian(run, step.index, t, x, head) for x in case.test])
            start, end = run.weights(step.index), run.weights(step.index + 1)
            here = {name: start[name] + t * (end[name] - start[name]) for name in start}
            for i in batch:
                x, y = run.inputs[i], run.targets[i]
                J = reference.jacobian(run, step.index, t, x, head)
                p = reference.output(run, here, x, "logits").softmax(0)
                target = torch.nn.functional.one_hot(y, 3).double()
                derivative = p - target if head == "logits" else -target
                yield i, step.lr * omega / len(batch) * torch.einsum("ncp,dp->ncd", J_test, J), derivative


@pytest.mark.parametrize("rule", [epk.left_endpoint(), epk.gauss_legendre(2)], ids=["left", "gauss"])
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_blocks_and_coefficients_are_those_of_the_definitions(case, head, rule):
    chen, domingos = torch.zeros(5, 3, 7, 3).double(), torch.zeros(5, 3, 7, 3).double()
    weighted = torch.zeros_like(domingos)
    for i, K, derivative in path_terms(case, head, rule):
        chen[:, :, i] += K * derivative.abs()
        domingos[:, :, i] += K
        weighted[:, :, i] += K * derivative
    found = chen_machine(case.trajectory, case.test, head=head, rule=rule)
    assert_close(found.block, chen)
    signs = torch.ones(7, 3).double() - 2 * torch.nn.functional.one_hot(case.trajectory.targets, 3)
    expected = -signs if head == "logits" else torch.nn.functional.one_hot(case.trajectory.targets, 3).double()
    assert torch.equal(found.coefficients, expected)
    other = domingos_machine(case.trajectory, case.test, head=head, rule=rule)
    assert_close(other.block, domingos)
    assert_close(other.block * other.coefficients, -weighted)
    assert other.coefficients.std(0).max() > 1e-6 if head == "logits" else True  # they depend on the test point
    assert_close(found.outputs, other.outputs)  # the same sum, written in two ways


@pytest.mark.slow
@pytest.mark.parametrize("machine", [chen_machine, domingos_machine])
def test_the_error_is_reported_and_falls_with_the_step(machine):
    """Both take the steps for gradient flow. The exact ensemble on the same run is the negative control."""
    coarse, fine = full_batch(0.4, 5), full_batch(0.04, 50)
    errors = [machine(c.trajectory, c.test).max_error for c in (coarse, fine)]
    assert errors[0] > 1e-3
    assert errors[1] < 0.2 * errors[0]
    assert epk.reconstruct(coarse.trajectory, coarse.test, head="logits").max_error < 1e-12


@pytest.mark.slow
def test_more_nodes_do_not_make_these_machines_exact():
    """Their training side moves along the step, the run's did not: the error is not the quadrature's."""
    case = full_batch(0.4, 5)
    few, many = (chen_machine(case.trajectory, case.test, rule=epk.gauss_legendre(n)).max_error for n in (4, 8))
    assert few == pytest.approx(many, rel=1e-6)
    assert many > 1e-4


def test_chens_block_is_not_symmetric():
    case = full_batch(0.4, 5)
    run = case.trajectory
    K = chen_machine(run, run.inputs).block
    assert (K - K.permute(2, 3, 0, 1)).abs().max() > 0.1 * K.abs().max()
    path = domingos_machine(run, run.inputs).block  # the negative control: without the weights it is
    assert_close(path, path.permute(2, 3, 0, 1))


def test_k_prime_is_exact_between_test_and_training_points_and_no_gram_matrix_elsewhere():
    case = full_batch(0.4, 5)
    run = case.trajectory
    K = k_prime_block(run, case.test, run.inputs)
    machine = single_machine(run, case.test, rule=epk.gauss_legendre(4))
    outputs = machine.initial + torch.einsum("ncmd,md->nc", K, machine.coefficients)
    assert_close(outputs, machine.outputs)
    assert machine.max_error < 1e-10
    own = k_prime_block(run, case.test, case.test)
    assert (own - own.permute(2, 3, 0, 1)).abs().max() > 1e-4 * own.abs().max()


@pytest.mark.slow
def test_a_derivative_that_changes_its_sign_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # squared error overshoots; how soon that is seen, is open
        case = make_case("one_class", steps=60, lr=1.0)
    with pytest.raises(ValueError, match=r"loss derivatives of constant sign: that of training point \d"):
        chen_machine(case.trajectory, case.test)
    assert domingos_machine(case.trajectory, case.test).max_error > 0


def test_log_softmax_without_cross_entropy_is_refused():
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 3).double()
    X, y = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    run = epk.train(
        net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1, loss=epk.MeanSquaredError()
    )
    with pytest.raises(ValueError, match="needs a loss that is a function of it, CrossEntropy"):
        chen_machine(run, X, head="log_softmax")


# Tangent kernels


@pytest.mark.parametrize("state", [0, 2, -1])
def test_standing_still_gives_the_tangent_kernel(case, state):
    run = tangent_trajectory(case.trajectory, state)
    s = state % (case.trajectory.num_steps + 1)
    rows = [case.test[:3], case.trajectory.inputs[:2]]
    last = s == case.trajectory.num_steps
    J = [
        torch.stack([reference.jacobian(case.trajectory, s - last, float(last), x, "log_softmax") for x in X])
        for X in rows
    ]
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
    A = epk.Points(case.test, False)
    parts = [
        step.lr * epk.gram_block(tangent_trajectory(case.trajectory, step.index), A, A)
        for step in case.trajectory.steps
    ]
    assert_close(epk.gram_block(case.trajectory, A, A, rule=epk.left_endpoint()), sum(parts))
    exact = epk.gram_block(case.trajectory, A, A, rule=epk.gauss_legendre(4))
    assert (exact - sum(parts)).abs().max() > 1e-3 * exact.abs().max()


def test_what_needs_plain_gradients_says_that_a_run_was_made_in_training_mode():
    X, y = torch.ones(6, 2).double(), torch.arange(6) % 2
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    with pytest.raises(ValueError, match="the run was made by SGD, with passes in training mode or other rows"):
        chen_machine(run, X)
    with pytest.raises(ValueError, match="or forward passes with dropout, moving statistics or other rows"):
        single_machine(run, X)
