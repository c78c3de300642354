"""How many evaluations the adaptive rule takes: smooth stretches raise the order, kinks are located everywhere."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment, directional_derivatives
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.losses import Head
from epk_gp.datasets import three_gaussians
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.quadrature.rules import QuadratureStatus


class Recurrent(nn.Module):
    """A recurrent layer read at its last place."""

    def __init__(self, kind: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.rnn, self.out = kind(3, 6, **options), nn.LazyLinear(2)
        self.batch_first = bool(options.get("batch_first"))

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(x if self.batch_first else x.transpose(0, 1))[0]
        return self.out(h[:, -1] if self.batch_first else h[-1])


class Cells(nn.Module):
    """Cells called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(3, 6), nn.GRUCell(6, 5, bias=False)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, h = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)), x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            state = self.first(step, state)
            h = self.second(state[0], h)
        return self.out(h)


class Attentive(nn.Module):
    """Self-attention, and attention of other widths; both with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Linear(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.second = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, kdim=3, vdim=3)
        self.third, self.out = nn.MultiheadAttention(8, 4, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.norm(h + self.first(h, h, h, attn_mask=causal, need_weights=False)[0])
        keys = x.transpose(0, 1)
        padding = torch.zeros(len(x), x.shape[1], dtype=torch.bool)
        padding[:, -1] = True
        h = h + self.second(h.transpose(0, 1), keys, keys, key_padding_mask=padding)[0].transpose(0, 1)
        return self.out(self.third(h[:, :1], h, h)[0].squeeze(1))


class Bare(nn.Module):
    """Parameters without modules: products, sums, a tied and scaled transpose, slices, an `einsum`."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.W, self.V = nn.Parameter(0.4 * torch.randn(3, 12)), nn.Parameter(0.4 * torch.randn(2, 12, 2))
        self.b, self.scale = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.ones(12))
        self.start = nn.Parameter(torch.randn(1, 1, 3))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.start.expand(len(x), -1, -1), x], dim=1)
        h = self.activation(x @ self.W + self.b) * self.scale
        h = self.activation(h @ (0.5 * self.W.T) - self.b[:3]) @ self.W
        return torch.einsum("nld,dc->nc", h, self.V[0]) + h.sum(1) @ self.V.unbind()[1]


class GraphConvolution(nn.Module):
    """Two graph convolutions over four nodes, with a constant adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("A", torch.ones(4, 4) / 8 + torch.eye(4) / 2)
        self.W, self.V = nn.Parameter(0.5 * torch.randn(3, 12)), nn.Parameter(0.4 * torch.randn(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.A @ (torch.relu(self.A @ (x @ self.W)) @ self.V)).mean(1)


class TiedNorm(nn.Module):
    """A tied weight between layer normalisations."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.hidden, self.out = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm, self.activation = nn.LayerNorm(8), activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.norm(self.first(x.flatten(1))))
        h = self.activation(self.norm(self.hidden(h)))
        return self.out(self.activation(self.norm(F.linear(h, self.hidden.weight.t()))))


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.LazyLinear(2),
    )  # fmt: skip


# Each with the number of evaluations that a point and step may take on average.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), 4),
    "lstm_of_two_layers": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4), 4),
    "gru": (lambda: Recurrent(nn.GRU, bias=False), 4),
    "rnn": (lambda: Recurrent(nn.RNN, bidirectional=True, batch_first=True), 4),
    "rnn_with_kinks": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), 6),
    "cells": (Cells, 4),
    "attention": (Attentive, 4),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True, activation="gelu"),
                                      nn.Flatten(), nn.Linear(12, 2)), 6),
    "encoder_with_kinks": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
                                                 nn.Flatten(), nn.Linear(12, 2)), 8),
    "bare": (lambda: Bare(torch.tanh), 8),
    "bare_with_kinks": (lambda: Bare(torch.relu), 11),
    "graph": (GraphConvolution, 5),
    "tied_norm": (lambda: TiedNorm(torch.tanh), 11),
    "tied_norm_with_kinks": (lambda: TiedNorm(torch.relu), 16),
    "group_norm": (group_norm, 6),
    "slopes": (lambda: nn.Sequential(nn.Conv1d(4, 5, 2), nn.PReLU(), nn.Conv1d(5, 4, 1), nn.PReLU(4), nn.Flatten(),
                                     nn.Linear(8, 2)), 6),
}  # fmt: skip


Optimizer = Callable[..., torch.optim.Optimizer]


def first_step(
    name: str, lr: float = 0.1, head: Head = "log_softmax", optimizer: Optimizer | None = None
) -> tuple[WeightSegment, Tensor]:
    torch.manual_seed(0)
    X = torch.randn(8, 4, 3, dtype=torch.float64)
    if name == "group_norm":
        X = X[:, :, :2].clone()
    net = NETWORKS[name][0]().double().eval()
    net(X)
    chosen = torch.optim.SGD(net.parameters(), lr=lr) if optimizer is None else optimizer(net.parameters())
    trajectory = epk.train(net, X, torch.arange(8) % 2, optimizer=chosen, steps=1)
    w, end = trajectory.states[0], trajectory.states[1]
    return WeightSegment(plan_for(trajectory, trajectory.model_for(X)), w, end - w, head, 1 << 30), X


def assert_exact(found: Integral) -> None:
    assert {QuadratureStatus(value) for value in found.status.tolist()} <= {
        QuadratureStatus.CONVERGED,
        QuadratureStatus.ROUNDING,
    }
    assert (found.end - found.start - found.total).abs().max() < 1e-11


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", NETWORKS)
def test_common_networks_take_few_evaluations(name: str) -> None:
    line, X = first_step(name)
    found = integrate(line, X, epk.adaptive(), 1)
    assert_exact(found)
    assert found.evaluations.mean() <= NETWORKS[name][1]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_at_places_of_their_own_share_a_pass(name: str) -> None:
    """Against the network at each row's own weights, by central differences of fourth order."""
    line, X = first_step(name, lr=1.0, head="logits")
    assert line.net.plan.supports_interpolation
    t = torch.linspace(0.05, 0.95, 2 * len(X), dtype=torch.float64)
    rows = X.repeat(2, *[1] * (X.ndim - 1))
    f, slope = directional_derivatives(line, rows, t)
    model = line.net.model

    def outputs(shift: float) -> Tensor:
        at = (model.unflatten(line.w + (place + shift) * line.d) for place in t)
        return torch.cat([model(params, row[None]) for params, row in zip(at, rows, strict=True)])

    with torch.no_grad():
        assert (f - outputs(0.0)).abs().max() < 1e-12
        h = 1e-4
        difference = (8 * (outputs(h) - outputs(-h)) - outputs(2 * h) + outputs(-2 * h)) / (12 * h)
    near = (slope - difference).abs().amax(dim=1) < 1e-8 * (1 + slope.abs().amax(dim=1))
    assert near.double().mean() > 0.8  # a kink lies within 2 h of some


class Detached(nn.Module):
    """A weight whose gradient is stopped at one of its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.out = nn.Parameter(torch.randn(3, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x[:, 0] @ self.W) * (x[:, 1] @ self.W.detach()))


class Squared(Detached):
    """A function of a weight that is not linear in it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x[:, 0] @ self.W) * (x[:, 1] @ self.W**2))


class Transposed(Detached):
    """Its rows are columns of a product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.W.T @ x[:, 0].T).T)


@pytest.mark.parametrize("kind", [Detached, Squared, Transposed])
def test_what_is_not_linear_in_a_weight_is_not_followed(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the rule is exact on them, or says that it is not, by the ways there were before."""
    monkeypatch.setitem(NETWORKS, "other", (kind, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)  # of the probe at recording
        line, X = first_step("other")
    assert not line.net.plan.supports_interpolation
    statuses = {QuadratureStatus(value) for value in integrate(line, X, epk.adaptive(), 1).status.tolist()}
    expected = QuadratureStatus.INCONSISTENT_DERIVATIVE if kind is Detached else QuadratureStatus.CONVERGED
    assert expected in statuses


def test_a_smooth_stretch_raises_the_order_instead_of_halving() -> None:
    """Each point has one interval, with as many nodes as it needs."""
    line, X = first_step("group_norm", lr=1.0)
    found = integrate(line, X, epk.adaptive(), 1)
    assert_exact(found)
    assert found.num_intervals.tolist() == [1] * len(X)
    assert torch.equal(found.orders, found.evaluations.long())  # no node was thrown away
    assert found.orders.unique().numel() > 1  # the control: points need different orders
    fixed = integrate(line, X, epk.gauss_legendre(5), 1)
    assert fixed.residual.max() > 1e-11


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["attention", "group_norm", "encoder"])
def test_large_steps_of_smooth_networks_take_at_most_eight_evaluations(name: str) -> None:
    """Four nodes and their extension by five, which is what there is otherwise, take nine."""
    line, X = first_step(name, optimizer=lambda params: torch.optim.AdamW(params, lr=0.02))
    found = integrate(line, X, epk.adaptive(), 1)
    assert_exact(found)
    assert found.evaluations.mean() <= 8
    assert integrate(line, X, epk.gauss_legendre(4), 1).residual.max() > 1e-11  # the control


@pytest.mark.slow
def test_chords_of_twenty_steps_take_at_most_one_and_a_half_evaluations_per_step() -> None:
    torch.manual_seed(0)
    X, y = three_gaussians(8, dim=16).inputs, torch.arange(24) // 8
    layers = [nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)]
    net = nn.Sequential(*layers).double()
    run = epk.train(net, X, y, optimizer=torch.optim.AdamW(net.parameters(), lr=2e-3), steps=40, batch_size=12)
    machine = epk.reconstruct(run, X[::6], path=epk.chords(20))
    assert machine.max_error < 1e-11
    assert machine.evaluations <= 1.5
    assert machine.evaluations > 10 / 20  # the control: there are kinks


class Gate(nn.Module):
    """A unit that every step moves in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


class FourthRoot(Gate):
    """Its derivative is not finite where the weight is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) ** 2) ** 0.75


def from_minus_one(net: nn.Module, end: float) -> WeightSegment:
    """Return the straight line of a network's one weight from -1."""
    X = torch.ones(4, 1, dtype=torch.float64)
    loss, net = epk.MeanSquaredError(), net.double()
    run = epk.train(net, X, X + 1, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1, loss=loss)
    w = torch.full_like(run.states[0], -1.0)
    return WeightSegment(plan_for(run, run.model_for(X)), w, end - w, "logits", 1 << 30)


def test_kinks_are_searched_before_any_node_only_where_a_unit_switches() -> None:
    """Of two points of one step, the unit of the first is on from 1/2 on, and that of the other always off."""
    X = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    found = integrate(from_minus_one(Gate(), 1.0), X, epk.adaptive(), 1)
    assert found.num_intervals.tolist() == [2, 1]
    assert found.evaluations.tolist() == [2 + 2, 1]  # the search, and a midpoint for each part
    off = integrate(from_minus_one(Gate(), -0.5), X, epk.adaptive(), 1)
    assert off.evaluations.tolist() == [1, 1]


def test_a_midpoint_without_a_derivative_is_halved() -> None:
    line, X = from_minus_one(FourthRoot(), 1.0), torch.ones(1, 1, dtype=torch.float64)
    assert directional_derivatives(line, X, torch.full((1,), 0.5, dtype=torch.float64))[1].isnan().all()
    found = integrate(line, X, epk.adaptive(1e-6), 1)
    assert found.residual.max() < 1e-4


@pytest.mark.slow
def test_a_common_mesh_has_the_order_that_each_stretch_needs() -> None:
    line, X = first_step("tied_norm_with_kinks", lr=1.0)
    rule = epk.adaptive()
    found = integrate(line, X, rule, 1)
    assert found.orders.max() > rule.order
    nodes, weights = torch.tensor(union_mesh(found, rule), dtype=torch.float64).unbind(1)
    assert abs(float(weights.sum()) - 1) < 1e-12
    assert bool((weights > 0).all())
    for n in range(len(X)):
        slope = directional_derivatives(line, X[n : n + 1].expand(len(nodes), *X.shape[1:]), nodes)[1]
        assert (weights @ slope - (found.end - found.start)[n]).abs().max() < 1e-11


def test_rounding_inside_the_network_does_not_make_the_rule_grind() -> None:
    """The outputs carry 1e-12 of rounding: higher orders leave the integral as it is."""
    line, X = first_step("bare", lr=1.0, head="logits")
    original = line.net.model.module.forward
    line.net.model.module.forward = lambda x: original(x) + 1e4 - 1e4  # type: ignore[method-assign]
    found = integrate(line, X, epk.adaptive(1e-15), 1)
    assert QuadratureStatus.ROUNDING in {QuadratureStatus(value) for value in found.status.tolist()}
    assert found.evaluations.max() <= 60
