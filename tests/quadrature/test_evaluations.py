"""How many evaluations the adaptive rule takes: smooth stretches raise the order, kinks are located everywhere."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.directional import WeightSegment, directional_derivatives
from epk_gp.autodiff.planning import plan_for
from epk_gp.core.head import Head
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.quadrature.status import QuadratureStatus


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
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), 9),
    "lstm_of_two_layers": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4), 9),
    "gru": (lambda: Recurrent(nn.GRU, bias=False), 9),
    "rnn": (lambda: Recurrent(nn.RNN, bidirectional=True, batch_first=True), 9),
    "rnn_with_kinks": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), 20),
    "cells": (Cells, 9),
    "attention": (Attentive, 9),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True, activation="gelu"),
                                      nn.Flatten(), nn.Linear(12, 2)), 12),
    "encoder_with_kinks": (lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
                                                 nn.Flatten(), nn.Linear(12, 2)), 20),
    "bare": (lambda: Bare(torch.tanh), 9),
    "bare_with_kinks": (lambda: Bare(torch.relu), 20),
    "graph": (GraphConvolution, 12),
    "tied_norm": (lambda: TiedNorm(torch.tanh), 12),
    "tied_norm_with_kinks": (lambda: TiedNorm(torch.relu), 24),
    "group_norm": (group_norm, 9),
    "slopes": (lambda: nn.Sequential(nn.Conv1d(4, 5, 2), nn.PReLU(), nn.Conv1d(5, 4, 1), nn.PReLU(4), nn.Flatten(),
                                     nn.Linear(8, 2)), 20),
}  # fmt: skip


def first_step(name: str, lr: float = 0.1, head: Head = "log_softmax") -> tuple[WeightSegment, Tensor]:
    torch.manual_seed(0)
    X = torch.randn(8, 4, 3, dtype=torch.float64)
    if name == "group_norm":
        X = X[:, :, :2].clone()
    net = NETWORKS[name][0]().double().eval()
    net(X)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    trajectory = epk.train(net, X, torch.arange(8) % 2, optimizer=optimizer, steps=1)
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
    """Four nodes do not suffice here: one interval has nine, or nineteen."""
    line, X = first_step("tied_norm")
    found = integrate(line, X, epk.adaptive(), 1)
    assert_exact(found)
    assert found.num_intervals.tolist() == [1] * len(X)
    assert 9 in found.orders.tolist()
    assert found.evaluations.max() <= 19
    assert float(found.evaluations.max()) > 4  # the control: there was something to raise


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
