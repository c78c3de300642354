"""Predictions along the joint path of weights and moving statistics: the sum over the steps is the network's change."""

import itertools
from dataclasses import replace

import pytest
import torch
from statistics_runs import Shared, cnn, in_plain_words, mlp, rows, train_by_hand
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.model import functionalize
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.trajectory import flat_state, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.terms import Predictions, integrate_stretches
from epk_gp.quadrature import adaptive as refinement
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import QuadratureStatus, adaptive

FLAT, IMAGE = (4,), (1, 8, 8)
NETWORKS = {
    "mlp_tanh": (mlp, FLAT),
    "mlp_relu_without_scale": (lambda: mlp(nn.ReLU, affine=False), FLAT),
    "mlp_tanh_cumulative": (lambda: mlp(momentum=None), FLAT),
    "cnn_relu": (cnn, IMAGE),
    "cnn_relu_without_scale": (lambda: cnn(affine=False), IMAGE),
    "cnn_relu_cumulative": (lambda: cnn(momentum=None), IMAGE),
    "instance_norm": (lambda: cnn(norm=nn.InstanceNorm2d), IMAGE),
    "spectral_norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)).double(), FLAT),
    "shared": (Shared, FLAT),
}


def recorded(name, num_points=4, num_steps=3):
    make, shape = NETWORKS[name]
    net = make()
    trajectory = train_by_hand(net, *rows(24, shape), num_steps=num_steps)
    return net.eval(), trajectory, torch.randn(num_points, *shape, dtype=torch.float64)


def integrals(trajectory, X, rule=adaptive(), head="logits"):
    net = plan_for(trajectory, trajectory.model_for(X))
    states = [flat_state(trajectory, s, X) for s in range(trajectory.num_steps + 1)]
    segments = (WeightSegment(net, a, b - a, head, 1 << 27) for a, b in itertools.pairwise(states))
    return [integrate(segment, X, rule, trajectory.num_steps) for segment in segments]


def change(trajectory, X, head="logits"):
    return network_outputs(trajectory, X, head=head) - network_outputs(trajectory, X, state=0, head=head)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "head"),
    [("mlp_tanh", "log_softmax"), ("cnn_relu", "log_softmax"), *((name, "logits") for name in NETWORKS)],
)
def test_integrals_sum_to_the_change_of_the_network(name, head):
    net, trajectory, X = recorded(name)
    steps = integrals(trajectory, X, head=head)
    assert all(QuadratureStatus(int(status)).is_supported for step in steps for status in step.status)
    assert max(float(step.residual.max()) for step in steps) < 1e-11
    total = torch.stack([step.total for step in steps]).sum(0)
    torch.testing.assert_close(total, change(trajectory, X, head), rtol=0, atol=1e-11)
    with torch.no_grad():
        trained = net(X) if head == "logits" else net(X).log_softmax(1)
    initial = network_outputs(trajectory, X, state=0, head=head)
    torch.testing.assert_close(initial + total, trained, rtol=0, atol=1e-11)
    steps = integrals(trajectory, X.float(), head=head)  # certified up to its rounding
    assert all(QuadratureStatus(int(status)).is_supported for step in steps for status in step.status)
    total = torch.stack([step.total for step in steps]).sum(0)
    torch.testing.assert_close(total, change(trajectory, X.float(), head), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_relu", "cnn_relu_cumulative"])
def test_the_statistics_part_is_not_small(name):
    """The negative control: a path on which the statistics stand still ends elsewhere."""
    net, trajectory, X = recorded(name)
    still = replace(trajectory, statistics=(trajectory.statistics[0],) * len(trajectory.statistics))
    total = torch.stack([step.total for step in integrals(still, X)]).sum(0)
    with torch.no_grad():
        missing = net(X) - network_outputs(trajectory, X, state=0) - total
    assert missing.abs().max() > 0.01


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_relu"])
def test_a_derivative_without_the_statistics_is_not_certified(name):
    """The negative control of the residual: a network that detaches its statistics moves with them all the same."""
    net, trajectory, X = recorded(name)
    detached = functionalize(in_plain_words(net, detaches=True), trajectory.model.names, trajectory.model.statistics)
    trajectory = replace(trajectory, model=detached)
    steps = integrals(trajectory, X)
    statuses = {QuadratureStatus(int(status)) for step in steps for status in step.status}
    assert any(not status.is_supported for status in statuses)
    assert max(float(step.residual.max()) for step in steps) > 1e-3


def test_a_float64_run_read_in_float32_is_certified():
    """Statistics are compared up to the rounding of the weights that they follow from."""
    _, trajectory, X = recorded("mlp_tanh", num_steps=12)
    assert epk.reconstruct(trajectory, X.float()).certified


def test_kinks_behind_batch_normalisation_are_located(monkeypatch):
    _, trajectory, X = recorded("cnn_relu", num_points=2, num_steps=1)
    steps = integrals(trajectory, X)
    located = torch.stack([step.evaluations for step in steps]).mean()
    assert located < 30  # 22 per (point, step)
    monkeypatch.setattr(refinement, "locate_kinks", lambda line, X, pair, a, b: (a[:0].long(), a[:0], a > 2))
    bisected = torch.stack([step.evaluations for step in integrals(trajectory, X)]).mean()
    assert bisected > 8 * located


@pytest.mark.parametrize(("head", "classes"), [("logits", torch.tensor([0, 2, 1])), ("log_softmax", None)])
@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_relu", "instance_norm", "spectral_norm", "shared"])
def test_averaged_gradients_in_weights_and_statistics_give_the_integral(name, classes, head, monkeypatch):
    _, trajectory, X = recorded(name, num_points=3, num_steps=2)
    kernel = PathKernel(trajectory, head, adaptive())
    net = plan_for(trajectory, trajectory.model_for(X))
    problem = Predictions(net, trajectory, kernel.head, kernel.rule, kernel.path, 1 << 26, X, classes)
    for step in trajectory.steps:
        line = integrate_stretches(problem, [range(step.index, step.index + 1)], 7)
        of_weights = X.new_empty(3, problem.num_outputs, trajectory.num_weights)
        line.average_into(of_weights[None])
        of_statistics = line.averaged_statistics_jacobian()
        with monkeypatch.context() as patch:  # in small blocks
            patch.setattr(MemoryPlan, "statistics_rows", lambda *_: 2)
            torch.testing.assert_close(line.averaged_statistics_jacobian(), of_statistics, rtol=0, atol=1e-14)
        d = flat_state(trajectory, step.index + 1, X) - flat_state(trajectory, step.index, X)
        P = trajectory.num_weights
        assert of_weights.shape[2] == P
        assert of_statistics.shape == (problem.num_outputs, 3, len(d) - P)
        total = of_weights @ d[:P] + (of_statistics @ d[P:]).T
        chosen = line.integral.total
        chosen = chosen if classes is None else chosen.gather(1, classes[:, None])
        torch.testing.assert_close(total, chosen, rtol=0, atol=1e-13)
        assert (of_statistics @ d[P:]).abs().max() > 1e-4
