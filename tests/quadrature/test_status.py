"""Why the adaptive rule stopped: each status is provoked by a network, and no network makes it run without end."""

import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.show import CertificateWarning
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, QuadratureStatus


class OneWeight(nn.Module):
    """A function of h = w x, with one trained weight."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(1, 1, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def run_of(net: nn.Module, dtype: torch.dtype = torch.float64) -> epk.Trajectory:
    net = net.to(dtype)
    X, y = torch.linspace(0.5, 1.5, 4, dtype=dtype)[:, None], torch.zeros(4, 1, dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # the probe at recording has tests of its own
        return epk.train(net, X, y, optimizer=optimizer, steps=1, loss=epk.MeanSquaredError())


@cache
def segment(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> WeightSegment:
    """h = x (-1 + 3 t): at x = 1 it is zero at t = 1/3."""
    trajectory = run_of(OneWeight(function), dtype)
    net = plan_for(trajectory, trajectory.model_for(torch.ones(1, 1, dtype=dtype)))
    w, d = torch.tensor([-1.0], dtype=dtype), torch.tensor([3.0], dtype=dtype)
    return WeightSegment(net, w, d, "logits", 1 << 30)


def straight_through(h: Tensor) -> Tensor:
    """Round in the forward pass; its derivative is that of the identity."""
    return torch.tanh(h + ((4 * h).round() / 4 - h).detach())


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "root": lambda h: h.abs().sqrt(),
    "root_at_the_start": lambda h: (h + 1).abs().sqrt(),
    "cancellation": lambda h: torch.sin(3 * h) + 1e4 - 1e4,
    "straight_through": straight_through,
    "stop_gradient": lambda h: h * torch.exp(h).detach(),
    "bfloat16": lambda h: torch.tanh(h.bfloat16()).to(h.dtype),
    "jump": lambda h: torch.where(h > 0, 1 + h, h),
    "blind_kink": lambda h: torch.where(h > 0, torch.exp(h), 1 - h),
    "many_kinks": lambda h: torch.where((50 * h).sin() > 0, (50 * h).sin(), 0 * h),
    "many_jumps": lambda h: torch.frac(1e5 * h),
}
ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "rule", "status"),
    [
        ("tanh", epk.adaptive(1e-6), QuadratureStatus.CONVERGED),
        ("tanh", epk.adaptive(1e-300), QuadratureStatus.ROUNDING),
        ("cancellation", epk.adaptive(1e-15), QuadratureStatus.ROUNDING),
        ("tanh", epk.gauss_legendre(3), QuadratureStatus.FIXED),
        ("straight_through", epk.gauss_legendre(3), QuadratureStatus.FIXED),
        ("root_at_the_start", epk.adaptive(1e-10), QuadratureStatus.INTERVAL_LIMIT),
        ("blind_kink", epk.adaptive(max_evaluations=60), QuadratureStatus.EVALUATION_LIMIT),
        ("blind_kink", epk.adaptive(), QuadratureStatus.CONVERGED),
        ("straight_through", epk.adaptive(), QuadratureStatus.INCONSISTENT_DERIVATIVE),
        ("stop_gradient", epk.adaptive(), QuadratureStatus.INCONSISTENT_DERIVATIVE),
        ("jump", epk.adaptive(), QuadratureStatus.INCONSISTENT_DERIVATIVE),
    ],
)
def test_each_status_has_a_network_that_provokes_it(
    name: str, rule: AdaptiveRule | QuadratureRule, status: QuadratureStatus
) -> None:
    found = integrate(segment(FUNCTIONS[name]), ONE, rule, 1)
    assert QuadratureStatus(int(found.status)) is status


@pytest.mark.parametrize("rule", [epk.adaptive(), epk.gauss_legendre(3)], ids=["adaptive", "fixed"])
def test_a_derivative_that_is_not_finite_has_a_status_of_its_own(rule: AdaptiveRule | QuadratureRule) -> None:
    """At x = 0, the root's argument stays zero, where its derivative is infinite."""
    found = integrate(segment(FUNCTIONS["root"]), 0 * ONE, rule, 1)
    assert found.status.tolist() == [QuadratureStatus.NOT_FINITE]
    assert found.residual.isnan().all()


@pytest.mark.slow
def test_the_residual_shows_what_the_status_names() -> None:
    """Converged and rounding leave nothing; a jump of 1 leaves 1; noise is above the outputs' rounding."""
    eps = torch.finfo(torch.float64).eps

    def residual(name: str, tol: float = 1e-12) -> float:
        return float(integrate(segment(FUNCTIONS[name]), ONE, epk.adaptive(tol), 1).residual)

    assert residual("tanh") < 1e-11
    assert abs(residual("jump") - 1) < 1e-9
    assert residual("cancellation", 1e-15) > 16 * eps
    assert residual("straight_through") > 1e-2


@pytest.mark.slow
def test_a_points_status_is_its_own_and_its_intervals_most_severe() -> None:
    """The jump is in one of many intervals, and at x = 1/2 there is none."""
    line = segment(lambda h: torch.where(h > 1.5, 1 + h, h).sin())
    found = integrate(line, torch.tensor([[1.0], [0.5]], dtype=torch.float64), epk.adaptive(), 1)
    assert found.status.tolist() == [QuadratureStatus.INCONSISTENT_DERIVATIVE, QuadratureStatus.CONVERGED]


def test_a_located_kink_is_exact_and_costs_four_evaluations() -> None:
    """The ends show that a unit switches: a search takes 2, before any node; the parts, linear in t, take 1 each."""
    found = integrate(segment(F.relu), ONE, epk.adaptive(), 1)
    start, kink = found.breakpoints.sort().values.tolist()
    assert start == 0.0
    assert abs(kink - 1 / 3) < 1e-12
    assert abs(float(found.total) - 2) < 1e-14
    assert float(found.evaluations) == 4


@pytest.mark.slow
def test_a_kink_that_is_not_located_costs_more() -> None:
    """The control: `where` is not among the functions whose events are located."""
    line = segment(lambda h: torch.where(h > 0, h, 0 * h))
    found = integrate(line, ONE, epk.adaptive(), 1)
    assert abs(float(found.total) - 2) < 1e-11
    assert float(found.evaluations) > 100


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["straight_through", "stop_gradient", "bfloat16", "jump"])
def test_a_derivative_that_is_none_ends_the_search(name: str, dtype: torch.dtype) -> None:
    found = integrate(segment(FUNCTIONS[name], dtype), ONE.to(dtype), epk.adaptive(), 1)
    assert float(found.evaluations) < 6000
    assert float(found.residual) > 1e-3


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bound", [4, 50, 300])
def test_evaluations_never_pass_their_bound(name: str, bound: int) -> None:
    X = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    found = integrate(segment(FUNCTIONS[name]), X, epk.adaptive(max_evaluations=bound), 1)
    assert float(found.evaluations.max()) <= bound
    weights = torch.zeros(8, dtype=torch.float64).index_add_(0, found.point, found.weight)
    assert (weights - 1).abs().max() < 1e-12  # what is accepted at the bound still covers the step


@pytest.mark.slow
def test_evaluations_pass_a_small_bound_where_it_is_large() -> None:
    """The control: the same integrand needs more than 100."""
    few, enough = (
        integrate(segment(FUNCTIONS["blind_kink"]), ONE, epk.adaptive(max_evaluations=k), 1) for k in (100, 1000)
    )
    assert 100 < float(enough.evaluations) < 1000
    assert float(enough.residual) < 1e-11 < 1e-6 < float(few.residual)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.Hardswish])
def test_large_steps_of_sound_networks_are_never_called_inconsistent(
    activation: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), activation(), nn.Linear(16, 8), activation())
        net = nn.Sequential(net, nn.Linear(8, 3)).to(dtype)
        X = torch.randn(8, 6, dtype=dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
        trajectory = epk.train(net, X, torch.arange(8) % 3, optimizer=optimizer, steps=1)
        w, end = trajectory.states[0], trajectory.states[1]
        line = WeightSegment(plan_for(trajectory, trajectory.model_for(X)), w, end - w, "logits", 1 << 30)
        found = integrate(line, X, epk.adaptive(), 1)
        assert {QuadratureStatus(value) for value in found.status.tolist()} <= {
            QuadratureStatus.CONVERGED,
            QuadratureStatus.ROUNDING,
        }


@pytest.mark.slow
def test_gram_blocks_warn_once_of_integrals_that_are_not_the_outputs_change() -> None:
    trajectory = run_of(OneWeight(FUNCTIONS["stop_gradient"]))
    a, b = epk.Points(torch.ones(3, 1, dtype=torch.float64), False), epk.Points(trajectory.inputs, True)
    rule = epk.adaptive()
    for ask in (
        lambda: epk.gram_block(trajectory, a, b, head="logits", rule=rule),
        lambda: gram_block_per_class(trajectory, a, a, head="logits", rule=rule),
        lambda: gram_diagonal_blocks(trajectory, a, head="logits", rule=rule),
    ):
        with pytest.warns(CertificateWarning, match=r"3 of 3 .* \(3 INCONSISTENT_DERIVATIVE; largest") as caught:
            ask()
        assert len(caught) == 1


def test_gram_blocks_do_not_warn_under_a_fixed_rule_or_of_a_sound_network() -> None:
    """The negative control; a warning is an error in this suite."""
    for name, rule in (("stop_gradient", epk.gauss_legendre(2)), ("relu", epk.adaptive()), ("tanh", epk.adaptive())):
        trajectory = run_of(OneWeight(FUNCTIONS[name]))
        a = epk.Points(torch.ones(3, 1, dtype=torch.float64), False)
        epk.gram_block(trajectory, a, a, head="logits", rule=rule)
