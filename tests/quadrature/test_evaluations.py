"""How many evaluations the adaptive rule takes: smooth stretches raise the order, kinks are located everywhere."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weighted_loops import Apply

import epk_gp as epk
from epk_gp.autodiff.dense import PlannedModel, WeightSegment, directional_derivatives
from epk_gp.autodiff.verification import build_plan
from epk_gp.core.model import functionalize
from epk_gp.datasets import three_gaussians
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.quadrature.rules import QuadratureStatus
from helpers import first_step


def recurrent(kind: Callable[..., nn.Module], **options: object) -> nn.Module:
    takes, first = (lambda r: r[0][:, -1]), (lambda x: x)
    if not options.get("batch_first"):
        takes, first = (lambda r: r[0][-1]), (lambda x: x.transpose(0, 1))
    return nn.Sequential(Apply(first), kind(3, 6, **options), Apply(takes), nn.LazyLinear(2))


class Cells(nn.Module):
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


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.LazyLinear(2),
    )  # fmt: skip


# Each with the number of evaluations that a point and step may take on average.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "lstm": (lambda: recurrent(nn.LSTM, batch_first=True), 4),
    "lstm_of_two_layers": (lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4), 4),
    "gru": (lambda: recurrent(nn.GRU, bias=False), 4),
    "rnn": (lambda: recurrent(nn.RNN, bidirectional=True, batch_first=True), 4),
    "rnn_with_kinks": (lambda: recurrent(nn.RNN, nonlinearity="relu"), 6),
    "cells": (Cells, 4),
    "attention": (Attentive, 4),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True, activation="gelu"),
                                      nn.Flatten(), nn.Linear(12, 2)), 6),
    "encoder_with_kinks": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
                                                 nn.Flatten(), nn.Linear(12, 2)), 8),
    "bare": (lambda: Bare(torch.tanh), 8),
    "bare_with_kinks": (lambda: Bare(torch.relu), 11),
    "group_norm": (group_norm, 6),
    "slopes": (lambda: nn.Sequential(nn.Conv1d(4, 5, 2), nn.PReLU(), nn.Conv1d(5, 4, 1), nn.PReLU(4), nn.Flatten(),
                                     nn.Linear(8, 2)), 6),
}  # fmt: skip


def step_of(name: str, lr: float = 0.1, head: str = "log_softmax", kind: str = "SGD") -> tuple[WeightSegment, Tensor]:
    torch.manual_seed(0)
    X = torch.randn(8, 4, 3, dtype=torch.float64)
    if name == "group_norm":
        X = X[:, :, :2].clone()
    net = NETWORKS[name][0]().double().eval()
    net(X)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=lr)
    return first_step(epk.train(net, X, torch.arange(8) % 2, optimizer=optimizer, steps=1), X, head), X


def integrated(line: WeightSegment, X: Tensor) -> Integral:
    """Integrate, and check that this is exact."""
    found = integrate(line, X, epk.adaptive(), 1)
    assert {*found.status.tolist()} <= {QuadratureStatus.CONVERGED, QuadratureStatus.ROUNDING}
    assert (found.end - found.start - found.total).abs().max() < 1e-11
    return found


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_at_places_of_their_own_share_a_pass_and_take_few_evaluations(name: str) -> None:
    """Values against the network at each row's own weights; that the slopes are theirs is what the integral shows."""
    line, X = step_of(name)
    assert line.net.plan.supports_interpolation
    assert integrated(line, X).evaluations.mean() <= NETWORKS[name][1]
    t, model = torch.linspace(0.05, 0.95, len(X), dtype=torch.float64), line.net.model
    with torch.no_grad():
        rows = [model(model.unflatten(line.w + u * line.d), x[None]) for u, x in zip(t, X, strict=True)]
    assert (directional_derivatives(line, X, t)[0] - torch.cat(rows).log_softmax(1)).abs().max() < 1e-12


class OfAWeight(nn.Module):
    """A function of inputs and one weight, and a layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.W, self.out, self.function = nn.Parameter(torch.randn(3, 5)), nn.Linear(5, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(x, self.W))


NOT_LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "detached": lambda x, W: torch.tanh(x[:, 0] @ W) * (x[:, 1] @ W.detach()),
    "squared": lambda x, W: torch.tanh(x[:, 0] @ W) * (x[:, 1] @ W**2),
    "transposed": lambda x, W: torch.tanh(W.T @ x[:, 0].T).T,  # its rows are columns of a product
}


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")  # of the probe at recording
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_in_a_weight_is_not_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the rule is exact on them, or says that it is not, by the ways there were before."""
    monkeypatch.setitem(NETWORKS, "other", (lambda: OfAWeight(NOT_LINEAR[name]), 0.0))
    line, X = step_of("other")
    assert not line.net.plan.supports_interpolation
    expected = QuadratureStatus.INCONSISTENT_DERIVATIVE if name == "detached" else QuadratureStatus.CONVERGED
    assert expected in integrate(line, X, epk.adaptive(), 1).status.tolist()


def test_a_smooth_stretch_raises_the_order_instead_of_halving() -> None:
    line, X = step_of("group_norm", lr=1.0)
    found = integrated(line, X)
    assert found.num_intervals.tolist() == [1] * len(X)
    assert torch.equal(found.orders, found.evaluations.long())  # no node was thrown away
    assert found.orders.unique().numel() > 1  # the control: points need different orders
    assert integrate(line, X, epk.gauss_legendre(5), 1).residual.max() > 1e-11


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["attention", "group_norm", "encoder"])
def test_large_steps_of_smooth_networks_take_at_most_eight_evaluations(name: str) -> None:
    """Four nodes and their extension by five, which is what there is otherwise, take nine."""
    line, X = step_of(name, lr=0.02, kind="AdamW")
    assert integrated(line, X).evaluations.mean() <= 8
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


def from_minus_one(activation: nn.Module, end: float) -> WeightSegment:
    """Return the straight line of a network's one weight from -1."""
    X, net = torch.ones(4, 1, dtype=torch.float64), nn.Sequential(nn.Linear(1, 1, bias=False), activation).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, X, X + 1, optimizer=optimizer, steps=1, loss=epk.MeanSquaredError())
    w = torch.full_like(run.states[0], -1.0)
    return replace(first_step(run, X), w=w, d=end - w)


def test_kinks_are_searched_before_any_node_only_where_a_unit_switches() -> None:
    X = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    found = integrate(from_minus_one(nn.ReLU(), 1.0), X, epk.adaptive(), 1)
    assert found.num_intervals.tolist() == [2, 1]
    assert found.evaluations.tolist() == [2 + 2, 1]  # the search, and a midpoint for each part
    off = integrate(from_minus_one(nn.ReLU(), -0.5), X, epk.adaptive(), 1)
    assert off.evaluations.tolist() == [1, 1]


def test_a_midpoint_without_a_derivative_is_halved() -> None:
    """It is not finite where the input is zero."""
    line, X = from_minus_one(Apply(lambda x: (x**2) ** 0.75), 1.0), torch.ones(1, 1, dtype=torch.float64)
    assert directional_derivatives(line, X, torch.full((1,), 0.5, dtype=torch.float64))[1].isnan().all()
    assert integrate(line, X, epk.adaptive(1e-6), 1).residual.max() < 1e-4


@pytest.mark.slow
def test_a_common_mesh_has_the_order_that_each_stretch_needs() -> None:
    line, X = step_of("bare_with_kinks", lr=1.0)
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
    line, X = step_of("bare", lr=1.0, head="logits")
    original = line.net.model.module.forward
    line.net.model.module.forward = lambda x: original(x) + 1e4 - 1e4  # type: ignore[method-assign]
    found = integrate(line, X, epk.adaptive(1e-15), 1)
    assert QuadratureStatus.ROUNDING in found.status.tolist()
    assert found.evaluations.max() <= 60


KINKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu_in_place": lambda h: F.relu_(h + 0), "hardtanh": lambda h: F.hardtanh(h, -0.3, 0.4),
    "relu6": lambda h: F.relu6(4 * h + 3), "softshrink": lambda h: F.softshrink(h, 0.2),
    "threshold": lambda h: F.threshold(h, 0.0, 0.0), "clamp": lambda h: h.clamp(min=-0.2),
    "clamp_": lambda h: torch.clamp_(h.clone(), min=-0.2), "clamp_min": lambda h: torch.clamp_min(h, 0.1),
    "clamp_max": lambda h: h.clamp_max(0.1), "abs": abs,
    "max_pool1d": lambda h: F.max_pool1d(h.unflatten(1, (2, 8)), 4).flatten(1),
    "adaptive_max_pool1d": lambda h: F.adaptive_max_pool1d(h.unflatten(1, (2, 8)), 3).flatten(1),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h.view(-1, 1, 4, 4), (2, 3)).flatten(1),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(h.view(-1, 1, 2, 2, 4), (1, 2, 2)).flatten(1),
    "amax": lambda h: h.view(-1, 4, 4).amax(dim=(1, 2))[:, None],
    "amax_of_one_dimension": lambda h: torch.amax(h.view(-1, 2, 4, 2), -2).flatten(1),
    "amin": lambda h: h.view(-1, 4, 4).amin(1), "max": lambda h: h.view(-1, 4, 4).max(dim=1).values,
    "min": lambda h: torch.min(h.view(-1, 4, 4), 2)[0], "maximum": lambda h: torch.maximum(h[:, :8], h[:, 8:]),
    "minimum": lambda h: torch.minimum(h[:, :8], h[:, 8:]),
    "maximum_of_numbers": lambda h: torch.maximum(h, torch.tensor(0.1, dtype=h.dtype)),
}  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", KINKED)
def test_a_located_kink_costs_a_fraction_of_a_blind_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.randn(6, 3, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 16), Apply(KINKED[name]), nn.LazyLinear(2)).double()
    net(X)
    model = functionalize(net)
    w, d = model.flatten(dict(net.named_parameters())), torch.randn(model.num_weights, dtype=torch.float64)
    line = WeightSegment(PlannedModel(model, build_plan(model, w, X)), w, d, "logits", 1 << 26)
    found = integrate(line, X, epk.adaptive(1e-12, order=2), 1)
    assert found.status.max() <= QuadratureStatus.ROUNDING
    assert (found.end - found.start - found.total).abs().max() < 1e-13 * found.end.abs().max()
    none = lambda line, x, pair, a, b: (a[:0].long(), a[:0], torch.ones_like(a, dtype=torch.bool))  # noqa: E731
    monkeypatch.setattr("epk_gp.quadrature.adaptive.locate_kinks", none)
    ten_times = epk.adaptive(1e-12, order=2, max_evaluations=round(10 * float(found.evaluations.mean())))
    assert integrate(line, X, ten_times, 1).status.max() == QuadratureStatus.EVALUATION_LIMIT
