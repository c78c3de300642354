"""The adaptive rule: why it stopped, what it reports, and that no network makes it run without end."""

import math
import warnings
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weighted_loops import Apply

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.show import CertificateWarning
from epk_gp.kernel_machine.axes import by_parameter
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import QuadratureStatus, Rule
from helpers import first_step, gram_block_per_class, gram_diagonal_blocks, make_case

DOUBLE, SINGLE = torch.float64, torch.float32
ONE = torch.ones(1, 1, dtype=DOUBLE)


def run_of(function: Callable[[Tensor], Tensor], dtype: torch.dtype = DOUBLE) -> epk.Trajectory:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), Apply(function)).to(dtype)
    X, y = torch.linspace(0.5, 1.5, 4, dtype=dtype)[:, None], torch.zeros(4, 1, dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # the probe at recording has tests of its own
        return epk.train(net, X, y, optimizer=optimizer, steps=1, loss=epk.MeanSquaredError())


@cache
def segment(function: Callable[[Tensor], Tensor], dtype: torch.dtype = DOUBLE) -> WeightSegment:
    """h = x (-1 + 3 t): at x = 1 it is zero at t = 1/3."""
    trajectory = run_of(function, dtype)
    net = plan_for(trajectory, trajectory.model_for(torch.ones(1, 1, dtype=dtype)))
    w, d = torch.tensor([-1.0], dtype=dtype), torch.tensor([3.0], dtype=dtype)
    return WeightSegment(net, w, d, "logits", 1 << 30)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "relu": F.relu, "root": lambda h: h.abs().sqrt(),
    "root_at_the_start": lambda h: (h + 1).abs().sqrt(), "cancellation": lambda h: torch.sin(3 * h) + 1e4 - 1e4,
    "straight_through": lambda h: torch.tanh(h + ((4 * h).round() / 4 - h).detach()),  # rounds in the forward pass
    "stop_gradient": lambda h: h * torch.exp(h).detach(), "bfloat16": lambda h: torch.tanh(h.bfloat16()).to(h.dtype),
    "jump": lambda h: torch.where(h > 0, 1 + h, h), "many_jumps": lambda h: torch.frac(1e5 * h),
    "blind_kink": lambda h: torch.where(h > 0, torch.exp(h), 1 - h),
    "many_kinks": lambda h: torch.where((50 * h).sin() > 0, (50 * h).sin(), 0 * h),
}  # fmt: skip
INCONSISTENT = QuadratureStatus.INCONSISTENT_DERIVATIVE


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "rule", "status", "least", "most"), [
    ("tanh", epk.adaptive(1e-6), QuadratureStatus.CONVERGED, 0, 1e-6),
    ("tanh", epk.adaptive(), QuadratureStatus.CONVERGED, 0, 1e-12),
    ("tanh", epk.adaptive(1e-300), QuadratureStatus.ROUNDING, 0, 1e-14),
    ("cancellation", epk.adaptive(1e-15), QuadratureStatus.ROUNDING, 16 * torch.finfo(DOUBLE).eps, 1e-10),
    ("tanh", epk.gauss_legendre(3), QuadratureStatus.FIXED, 1e-9, 1),
    ("straight_through", epk.gauss_legendre(3), QuadratureStatus.FIXED, 1e-2, 1),
    ("root_at_the_start", epk.adaptive(1e-10), QuadratureStatus.INTERVAL_LIMIT, 1e-10, 1e-4),
    ("blind_kink", epk.adaptive(max_evaluations=60), QuadratureStatus.EVALUATION_LIMIT, 1e-6, 1),
    ("blind_kink", epk.adaptive(), QuadratureStatus.CONVERGED, 0, 1e-11),
    ("straight_through", epk.adaptive(), INCONSISTENT, 1e-2, 100),
    ("stop_gradient", epk.adaptive(), INCONSISTENT, 1e-2, 100),
    ("jump", epk.adaptive(), INCONSISTENT, 1 - 1e-9, 1 + 1e-9),
])  # fmt: skip
def test_each_status_has_a_network_that_provokes_it_and_a_residual_that_shows_it(name, rule, status, least, most):
    found = integrate(segment(FUNCTIONS[name]), ONE, rule, 1)
    assert QuadratureStatus(int(found.status)) is status
    assert least <= float(found.residual) <= most


def test_the_derivative_of_another_function_is_given_up_after_two_halvings() -> None:
    function = FUNCTIONS["stop_gradient"]
    found = integrate(segment(function), ONE, epk.adaptive(), 1)
    assert found.status.tolist() == [INCONSISTENT]
    assert float(found.evaluations) <= 64
    with pytest.warns(epk.CertificateWarning, match="INCONSISTENT_DERIVATIVE: the derivative is not the outputs'"):
        epk.attribute(run_of(function), ONE)


@pytest.mark.parametrize("rule", [epk.adaptive(), epk.gauss_legendre(3)], ids=["adaptive", "fixed"])
def test_a_derivative_that_is_not_finite_has_a_status_of_its_own_and_stays_visible(rule: Rule) -> None:
    found = integrate(segment(FUNCTIONS["root"]), 0 * ONE, rule, 1)
    assert found.status.tolist() == [QuadratureStatus.NOT_FINITE]
    assert found.residual.isnan().all()
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves nan times"):
        machine = epk.reconstruct(run_of(FUNCTIONS["root"]), 0 * ONE, rule=rule)
    assert all(map(math.isnan, (machine.max_residual, machine.total_residual, machine.max_error)))
    with pytest.warns(epk.CertificateWarning, match="the quadrature of a step leaves nan times"):
        assert math.isnan(epk.attribute(run_of(FUNCTIONS["root"]), 0 * ONE, rule=rule).max_residual)


def test_the_certificate_of_points_that_are_fine_is_a_number() -> None:
    """The negative control."""
    machine = epk.reconstruct(run_of(torch.tanh), ONE)
    numbers = [value for value in vars(machine).values() if isinstance(value, float)]
    assert len(numbers) == 9
    assert all(map(math.isfinite, numbers))


def test_outputs_that_are_not_finite_are_refused() -> None:
    trajectory = run_of(torch.reciprocal)
    for ask in (epk.reconstruct, epk.attribute):
        with pytest.raises(ValueError, match=r"the network's outputs at the start of a step must be finite: row 1"):
            ask(trajectory, torch.cat([ONE, 0 * ONE]))


@pytest.mark.slow
def test_a_points_status_is_its_own_and_its_intervals_most_severe() -> None:
    line = segment(lambda h: torch.where(h > 1.5, 1 + h, h).sin())
    found = integrate(line, torch.cat([ONE, 0.5 * ONE]), epk.adaptive(), 1)
    assert found.status.tolist() == [INCONSISTENT, QuadratureStatus.CONVERGED]


def test_a_located_kink_is_exact_and_costs_four_evaluations() -> None:
    """The ends show that a unit switches: a search takes 2, before any node; the parts, linear in t, take 1 each."""
    found = integrate(segment(F.relu), ONE, epk.adaptive(), 1)
    start, kink = found.breakpoints.sort().values.tolist()
    assert start == 0.0
    assert abs(kink - 1 / 3) < 1e-12
    assert abs(float(found.total) - 2) < 1e-14
    assert float(found.evaluations) == 4


@pytest.mark.slow
def test_a_kink_that_is_not_located_costs_more_and_more_than_a_small_bound() -> None:
    """The control: `where` is not among the functions whose events are located."""
    found = integrate(segment(lambda h: torch.where(h > 0, h, 0 * h)), ONE, epk.adaptive(), 1)
    assert abs(float(found.total) - 2) < 1e-11
    assert float(found.evaluations) > 100
    line, rules = segment(FUNCTIONS["blind_kink"]), (epk.adaptive(max_evaluations=k) for k in (100, 1000))
    few, enough = (integrate(line, ONE, rule, 1) for rule in rules)
    assert 100 < float(enough.evaluations) < 1000
    assert float(enough.residual) < 1e-11 < 1e-6 < float(few.residual)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_evaluations_never_pass_their_bound(name: str) -> None:
    X = torch.linspace(-1, 1, 8, dtype=DOUBLE)[:, None]
    for bound in (4, 50):
        found = integrate(segment(FUNCTIONS[name]), X, epk.adaptive(max_evaluations=bound), 1)
        assert float(found.evaluations.max()) <= bound
        weights = torch.zeros(8, dtype=DOUBLE).index_add_(0, found.point, found.weight)
        assert (weights - 1).abs().max() < 1e-12  # what is accepted at the bound still covers the step


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.Hardswish])
def test_large_steps_of_sound_networks_are_never_called_inconsistent(activation, dtype):
    for seed in range(2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), activation(), nn.Linear(16, 8), activation())
        net = nn.Sequential(net, nn.Linear(8, 3)).to(dtype)
        X = torch.randn(8, 6, dtype=dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
        line = first_step(epk.train(net, X, torch.arange(8) % 3, optimizer=optimizer, steps=1), X)
        status = integrate(line, X, epk.adaptive(), 1).status
        assert {*status.tolist()} <= {QuadratureStatus.CONVERGED, QuadratureStatus.ROUNDING}


@pytest.mark.slow
def test_gram_blocks_warn_once_of_integrals_that_are_not_the_outputs_change() -> None:
    trajectory = run_of(FUNCTIONS["stop_gradient"])
    a, b = epk.Points(ONE.repeat(3, 1), False), epk.Points(trajectory.inputs, True)
    for ask, *points in ((epk.gram_block, a, b), (gram_block_per_class, a, a), (gram_diagonal_blocks, a)):
        with pytest.warns(CertificateWarning, match=r"3 of 3 .* \(3 INCONSISTENT_DERIVATIVE; largest") as caught:
            ask(trajectory, *points, head="logits", rule=epk.adaptive())
        assert len(caught) == 1


def test_gram_blocks_do_not_warn_under_a_fixed_rule_or_of_a_sound_network() -> None:
    """The negative control; a warning is an error in this suite."""
    a = epk.Points(ONE.repeat(3, 1), False)
    for name, rule in (("stop_gradient", epk.gauss_legendre(2)), ("relu", epk.adaptive()), ("tanh", epk.adaptive())):
        epk.gram_block(run_of(FUNCTIONS[name]), a, a, head="logits", rule=rule)


def test_a_huge_point_does_not_loosen_anothers_tolerance() -> None:
    case = make_case("relu", lr=0.5)
    X, of = case.test, partial(integrate, first_step(case.trajectory, case.test), rule=epk.adaptive(1e-14), num_steps=1)
    alone, joined = of(X), of(torch.cat([X, 1e9 * X[:1]]))
    assert torch.equal(joined.evaluations[:5], alone.evaluations)
    assert torch.equal(joined.residual[:5], alone.residual)
    assert alone.evaluations.max() > 4  # the negative control: there was something to be loose about
    assert alone.residual.max() < 1e-13


def test_a_run_without_steps_is_its_initial_network() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X = torch.randn(5, 3, dtype=DOUBLE)
    with epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, torch.arange(5) % 2) as recorder:
        pass
    no_steps = recorder.trajectory
    machine, initial = epk.reconstruct(no_steps, X), epk.network_outputs(no_steps, X, head="log_softmax")
    assert torch.equal(machine.outputs, initial)
    assert (machine.evaluations, machine.max_error, machine.max_residual) == (0.0, 0.0, 0.0)
    parts, grouped = epk.attribute(no_steps, X), epk.attribute(no_steps, X, by=[by_parameter(no_steps)])
    assert torch.equal(parts.total, initial)
    assert torch.equal(grouped.total, initial)
    assert (parts.evaluations, parts.max_residual) == (0.0, 0.0)
    points = epk.Points(X, False)
    for zeros in (parts.samples, epk.gram_block(no_steps, points, points), gram_diagonal_blocks(no_steps, points)):
        assert not zeros.any()
