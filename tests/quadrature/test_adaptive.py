"""The adaptive rule: what it accepts, what it reports, and runs on which there is nothing to integrate."""

import math

import pytest
import torch
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.verification import plan_for
from epk_gp.gram.path_kernel import gram_diagonal_blocks
from epk_gp.kernel_machine.attribute import attribute_by
from epk_gp.kernel_machine.axes import by_parameter
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule
from helpers import make_case


def first_step(trajectory: epk.Trajectory, X: Tensor) -> WeightSegment:
    w, end = trajectory.states[0], trajectory.states[1]
    return WeightSegment(plan_for(trajectory, trajectory.model_for(X)), w, end - w, "logits", 1 << 30)


def test_a_huge_point_does_not_loosen_anothers_tolerance() -> None:
    """A float32-like sloppiness at one point comes from its own size, not from its neighbour's."""
    case = make_case("relu", lr=0.5)
    X, rule = case.test, epk.adaptive(1e-14)
    line = first_step(case.trajectory, X)
    alone = integrate(line, X, rule, 1)
    joined = integrate(line, torch.cat([X, 1e9 * X[:1]]), rule, 1)
    assert torch.equal(joined.evaluations[:5], alone.evaluations)
    assert torch.equal(joined.residual[:5], alone.residual)
    assert alone.evaluations.max() > 4  # the negative control: there was something to be loose about
    assert alone.residual.max() < 1e-13


@pytest.fixture
def no_steps() -> epk.Trajectory:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X = torch.randn(5, 3, dtype=torch.float64)
    with epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, torch.arange(5) % 2) as recorder:
        pass
    return recorder.trajectory


def test_a_run_without_steps_is_its_initial_network(no_steps: epk.Trajectory) -> None:
    X = torch.randn(3, 3, dtype=torch.float64)
    machine = epk.reconstruct(no_steps, X)
    initial = epk.network_outputs(no_steps, X, head="log_softmax")
    assert torch.equal(machine.outputs, initial)
    assert (machine.evaluations, machine.max_error, machine.max_residual) == (0.0, 0.0, 0.0)
    parts = epk.attribute(no_steps, X)
    assert torch.equal(parts.total, initial)
    assert (parts.evaluations, parts.max_residual) == (0.0, 0.0)
    assert not parts.samples.any()
    grouped = attribute_by(no_steps, X, [by_parameter(no_steps)])
    assert torch.equal(grouped.total, initial)
    points = epk.Points(X, False)
    assert not epk.gram_block(no_steps, points, points).any()
    assert not gram_diagonal_blocks(no_steps, points).any()


class Reciprocal(nn.Module):
    """Fine at all training points, infinite at x = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(1 / x)


class Root(nn.Module):
    """Finite at x = 0, where its derivative is not."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).abs().sqrt())


def trained(net: nn.Module) -> epk.Trajectory:
    X = torch.rand(4, 2, dtype=torch.float64) + 1
    net = net.double()
    return epk.train(net, X, torch.arange(4) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)


def test_outputs_that_are_not_finite_are_refused() -> None:
    trajectory = trained(Reciprocal())
    X = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    for ask in (epk.reconstruct, epk.attribute):
        with pytest.raises(ValueError, match=r"the network's outputs at the start of a step must be finite: row 1"):
            ask(trajectory, X)


@pytest.mark.parametrize("rule", [epk.adaptive(), epk.gauss_legendre(2)], ids=["adaptive", "fixed"])
def test_gradients_that_are_not_finite_stay_visible(rule: AdaptiveRule | QuadratureRule) -> None:
    trajectory, X = trained(Root()), torch.zeros(1, 2, dtype=torch.float64)
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves nan times"):
        machine = epk.reconstruct(trajectory, X, rule=rule)
    assert all(map(math.isnan, (machine.max_residual, machine.total_residual, machine.max_error)))
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves nan times"):
        parts = epk.attribute(trajectory, X, rule=rule)
    assert math.isnan(parts.max_residual)


def test_the_certificate_of_points_that_are_fine_is_a_number() -> None:
    """The negative control."""
    machine = epk.reconstruct(trained(Root()), torch.ones(1, 2, dtype=torch.float64))
    numbers = [value for value in vars(machine).values() if isinstance(value, float)]
    assert len(numbers) == 9
    assert all(map(math.isfinite, numbers))
