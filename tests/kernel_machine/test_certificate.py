"""One certificate: it holds for sound runs, and sees what the quadrature's residual alone does not."""

from dataclasses import replace

import pytest
import torch
from checked_networks import FAULTY, TopOneExperts
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import functionalize
from epk_gp.kernel_machine.baselines import single_machine
from epk_gp.kernel_machine.certificate import larger
from loops import data, mlp

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def record(make_net=mlp, dtype=torch.float64, make_optimizer=OPTIMIZERS["sgd"], wrong=None):
    """Record batches of 4, the first and last gradient recomputed; at the step `wrong` it is 1.5 times too large."""
    net, (X, y) = make_net().to(dtype), data(dtype=dtype)
    optimizer = make_optimizer(net.parameters())
    with epk.Recorder(net, optimizer, X, y, check_every=1000) as recorder:
        for step in range(STEPS):
            rows = torch.arange(4) + step
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows]), y[rows]).mul(1.5 if step == wrong else 1.0).backward()
            recorder.batch(rows)
            optimizer.step()
    return recorder.trajectory


def off_by_a_billionth(run):
    """Move the states behind step 1 by 1e-9 of that step, as a gradient that is 1e-9 too large would."""
    moved = 1e-9 * (run.states[2] - run.states[1])
    return replace(run, states=(*run.states[:2], *(state + moved for state in run.states[2:])))


def another_activation(run):
    return replace(run, model=functionalize(mlp(activation=nn.Sigmoid)))


def another_loss(run):
    return replace(run, loss=epk.CrossEntropy(label_smoothing=1e-4))


def another_learning_rate(run):
    updates = [replace(update, lr=1.0001 * update.lr) if s == 2 else update for s, update in enumerate(run.updates)]
    return replace(run, updates=tuple(updates))


def other_targets(run):
    return replace(run, targets=run.targets.roll(1))


FAULTS = {
    "wrong_factor": lambda run: record(wrong=2),
    "gradient_off_by_a_billionth": off_by_a_billionth,
    "another_activation": another_activation,
    "another_loss": another_loss,
    "another_learning_rate": another_learning_rate,
    "other_targets": other_targets,
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_sound_runs_are_certified(make_optimizer, dtype):
    run = record(dtype=dtype, make_optimizer=make_optimizer)
    for X in (run.inputs[:3], run.inputs[:3].double()):
        result = epk.reconstruct(run, X)
        assert result.certified
        assert 0 <= result.residual_ratio <= 1
        assert 0 <= result.mismatch_ratio <= 1
        assert result.max_error <= result.error_tolerance
        parts = epk.attribute(run, X)
        assert parts.certified
        assert parts.mismatch_ratio == pytest.approx(result.mismatch_ratio)


@pytest.mark.parametrize("make_fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_step_that_is_not_the_stated_one_is_not_certified_although_the_quadrature_is_exact(make_fault):
    faulty = make_fault(record())
    for call, name in ((epk.reconstruct, "reconstruction"), (epk.attribute, "attribution")):
        with pytest.warns(epk.CertificateWarning, match=rf"{name} is not certified: step \d differs from the step"):
            result = call(faulty, faulty.inputs[:3])
        assert not result.certified
        assert result.max_residual < 1e-12  # the residual alone sees nothing
        assert result.mismatch_ratio > 10


def test_two_faults_that_cancel_in_the_sum_are_found():
    """Steps 1 and 2 have each other's batches: the weights end nearly where they would, the shares are others'."""
    net, (X, y) = mlp(), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(net(X[step : step + 4]), y[step : step + 4]).backward()
            recorder.batch(torch.arange(4) + step)
            optimizer.step()
    steps = list(recorder.trajectory.steps)
    steps[1], steps[2] = replace(steps[1], batch=steps[2].batch), replace(steps[2], batch=steps[1].batch)
    with pytest.warns(epk.CertificateWarning, match=r"attribution is not certified: step [12] differs"):
        parts = epk.attribute(replace(recorder.trajectory, steps=tuple(steps)), X[:2])
    assert parts.max_error <= parts.error_tolerance  # the sum sees nothing


@pytest.mark.mostly_slow
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_large_steps_are_certified(activation):
    """Every interval may leave its share of the tolerance."""
    net, (X, y) = mlp(activation=activation), data()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=10.0), steps=6)
    result = epk.reconstruct(run, X[:3])
    assert result.max_error < 1e-10
    assert result.certified
    assert epk.attribute(run, X[:3]).certified


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("make_net", FAULTY.values(), ids=FAULTY.keys())
def test_a_derivative_that_is_none_ends_soon_and_is_not_certified(make_net, dtype):
    """At first 82,000 evaluations for one point and step."""
    torch.manual_seed(0)
    with pytest.warns(epk.CertificateWarning, match="derivative is not the derivative of its outputs"):
        run = record(make_net, dtype)
    with pytest.warns(epk.CertificateWarning, match="reconstruction is not certified: the quadrature of a step leaves"):
        result = epk.reconstruct(run, run.inputs[:2])
    assert not result.certified
    assert result.evaluations < 2000
    with pytest.warns(epk.CertificateWarning, match="attribution is not certified"):
        assert not epk.attribute(run, run.inputs[:2]).certified


@pytest.mark.slow
def test_outputs_that_jump_are_not_certified_and_the_reason_is_said():
    torch.manual_seed(0)
    net = TopOneExperts().double()
    X, y = torch.randn(24, 4).double(), torch.randint(3, (24,))
    with pytest.warns(epk.CertificateWarning, match="outputs jump"):
        run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=2.0), steps=2)
    with pytest.warns(epk.CertificateWarning, match="INCONSISTENT_DERIVATIVE of 48 pairs of a point and a step"):
        result = epk.reconstruct(run, X)
    assert not result.certified


def test_a_fixed_rule_is_certified_where_it_is_exact():
    run = record()
    assert epk.reconstruct(run, run.inputs[:3], rule=epk.gauss_legendre(8)).certified
    with pytest.warns(epk.CertificateWarning, match=r"a fixed rule: epk_gp.adaptive\(\)"):
        assert not epk.reconstruct(run, run.inputs[:3], rule=epk.left_riemann(10)).certified
    with pytest.warns(epk.CertificateWarning, match=r"attribution .*a fixed rule: epk_gp.adaptive\(\)"):
        assert not epk.attribute(run, run.inputs[:3], rule=epk.left_riemann(10)).certified


def test_the_single_machine_says_it_too():
    net, (X, y) = mlp(), data()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3)
    assert single_machine(run, X[:3]).certified
    with pytest.warns(epk.CertificateWarning, match="single kernel machine is not certified: its sum misses"):
        assert not single_machine(run, X[:3], rule=epk.left_endpoint()).certified


def test_a_run_without_steps_is_certified():
    net, (X, y) = mlp(), data()
    with epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, y) as recorder:
        pass
    result = epk.reconstruct(recorder.trajectory, X[:3])
    assert result.certified
    assert result.worst_step == -1


@pytest.mark.parametrize(("a", "b", "expected"), [(1.0, 2.0, 2.0), (3.0, 2.0, 3.0)])
def test_the_larger_of_two_numbers_keeps_nan(a, b, expected):
    assert larger(a, b) == expected
    for pair in ((a, float("nan")), (float("nan"), b)):
        assert larger(*pair) != larger(*pair)
