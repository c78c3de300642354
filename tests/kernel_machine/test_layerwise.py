"""Layerwise averages: exact sums without an integral, whatever the network is made of (docs/theory.md, section 11)."""

import pytest
import torch
from path_runs import RUNS, STEPS, queries, recorded
from path_shares import shares
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.secants import ElementwiseSecant, mean_of_rows
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import by_parameter, by_sample, by_step
from epk_gp.quadrature.rules import QuadratureStatus
from helpers import NETWORKS, assert_close, make_case


class InPlaceResidual(nn.Module):
    """As residual networks are written: batch and group norm, ReLU in place, a sum in place."""

    def __init__(self):
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.norm_b = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.norm_a(self.a(x.view(-1, 1, 4, 4))))
        skip, x = x, self.norm_b(self.b(x))
        x += skip
        return self.out(F.adaptive_max_pool2d(self.relu(x), 2).mean((2, 3)))


class Characters(nn.Module):
    """Embedding, learned positions, pre-norm attention: parameters that are no layer's among them."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(7, 8), nn.Parameter(0.3 * torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, activation="gelu", norm_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.norm(self.layer(self.embed(x) + self.places)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.lstm(x.view(-1, 8, 2))[0][:, -1])


OTHERS = {"in_place": InPlaceResidual, "characters": Characters, "recurrent": Recurrent}


def train(net, X, *, lr=0.05, steps=4, momentum=0.9):
    net = net.to(X.dtype if X.is_floating_point() else torch.float64).train()
    y = torch.arange(len(X)) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for s in range(steps):
            batch = torch.arange(4 * s, 4 * s + 4) % len(X)
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def run_and_points(name):
    if name in RUNS:
        return recorded(name), queries()
    torch.manual_seed(2)
    net = OTHERS[name]()
    generator = torch.Generator().manual_seed(4)
    is_text = name == "characters"
    X = torch.randint(0, 7, (10, 5)) if is_text else torch.randn(10, 16, generator=generator, dtype=torch.float64)
    return train(net, X), X[:3]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
def test_sums_are_exact_to_rounding_at_two_evaluations_a_stretch(name, every):
    run, X = run_and_points(name)
    parts = epk.attribute(run, X, path=epk.layerwise(every))
    assert parts.certified
    assert parts.max_error <= 1e-12
    stretches = -(-run.num_steps // every)
    assert parts.evaluations == pytest.approx(2 * stretches / run.num_steps)
    assert {*parts.statuses} <= {QuadratureStatus.CONVERGED, QuadratureStatus.ROUNDING}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", sorted({*NETWORKS} - {"cosine", "sequence_first"}))
def test_sums_are_exact_for_every_kind_of_layer(name):
    """Tied and bare weights, transposed and grouped convolutions, frozen statistics, class tokens."""
    case = make_case(name)
    parts = epk.attribute(case.trajectory, case.test, path=epk.layerwise())
    assert parts.certified
    assert_close(parts.total, parts.network)


def mean_derivatives(run, first, last, x):
    """The definition for a network of three linear layers with ReLU in between: (C, P), by loops over its layers."""
    start, end = run.weights(first), run.weights(last)
    weights, biases = ([name for name in run.model.names if name.endswith(kind)] for kind in ("weight", "bias"))
    hidden, inputs, slopes = [x, x], [], []
    for number, (W, b) in enumerate(zip(weights, biases, strict=True)):
        inputs.append((hidden[0] + hidden[1]) / 2)
        z = [at[W] @ h + at[b] for at, h in zip((start, end), hidden, strict=True)]
        if number < len(weights) - 1:
            hidden = [value.clamp(min=0) for value in z]
            is_same = z[0] == z[1]  # the last layer's step may leave a unit where it was
            slopes.append(torch.where(is_same, (z[0] > 0).to(x), (hidden[1] - hidden[0]) / (z[1] - z[0])))
    multiplier, gradients = torch.eye(3, dtype=x.dtype), {}
    for number in reversed(range(len(weights))):
        W, b = weights[number], biases[number]
        gradients[W] = (multiplier[:, :, None] * inputs[number]).flatten(1)
        gradients[b] = multiplier
        if number:
            multiplier = multiplier @ ((start[W] + end[W]) / 2) * slopes[number - 1]
    return torch.cat([gradients[name] for name in run.model.names], dim=1)


@pytest.mark.parametrize("every", [1, 2])
def test_contributions_equal_the_definition(every):
    run, X = recorded("relu_sgd"), queries(2)
    parts = epk.attribute(run, X, head="logits", path=epk.layerwise(every))
    of_samples = shares(run)
    for n, x in enumerate(X):
        expected = torch.zeros(3, run.num_points + 1, dtype=torch.float64)
        for s in range(STEPS):
            first = s // every * every
            expected += mean_derivatives(run, first, min(first + every, STEPS), x) @ of_samples[s].T
        assert_close(parts.samples[n], expected[:, :-1])


def test_the_definition_gives_the_change_of_the_outputs():
    run, x = recorded("relu_sgd"), queries(1)[0]
    change = flat_state(run, STEPS, x) - flat_state(run, 0, x)
    f = [epk.network_outputs(run, x[None], state=s)[0] for s in (0, STEPS)]
    assert_close(mean_derivatives(run, 0, STEPS, x) @ change, f[1] - f[0])


def test_half_the_step_differs_a_quarter_from_the_straight_path():
    """Both averages agree to second order in the step."""
    X, differences = queries(10), []
    for lr in (0.2, 0.1):
        torch.manual_seed(0)
        run = train(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), X, lr=lr, steps=1, momentum=0)
        own, straight = (epk.attribute(run, X, path=path).samples for path in (epk.layerwise(), epk.straight()))
        differences.append(float((own - straight).norm() / straight.norm()))
    assert differences[0] > 1e-6
    assert differences[0] / differences[1] == pytest.approx(4, rel=0.1)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["tanh_momentum", "batch_norm_sgd", "transformer_adamw"])
def test_one_output_is_that_of_all(name):
    run, X = recorded(name), queries()
    classes = torch.tensor([2, 0, 1])
    every, one = (epk.attribute(run, X, path=epk.layerwise(2), classes=chosen) for chosen in (None, classes))
    assert_close(one.samples[:, 0], every.samples[torch.arange(3), classes])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["tanh_momentum", "batch_norm_sgd"])
def test_steps_and_parameters_sum_to_the_same(name):
    run, X = recorded(name), queries()
    path = epk.layerwise(2)
    whole = epk.attribute(run, X, path=path)
    (steps, samples) = attribute_many(run, X, [[by_step(run)], [by_sample(run)]], path=path)
    parameters = attribute_by(run, X, [by_parameter(run)], path=path)
    assert_close(samples.values.sum(dim=2), whole.samples.sum(dim=2), rounding=1e5)
    for parts in (steps, parameters):
        assert_close(parts.values.sum(dim=2), whole.samples.sum(dim=2), rounding=1e5)


@pytest.mark.slow
def test_float32_is_certified():
    torch.manual_seed(2)
    X = torch.randn(10, 16, generator=torch.Generator().manual_seed(4))
    run = train(InPlaceResidual(), X)
    parts = epk.attribute(run, X[:3], path=epk.layerwise())
    assert parts.certified
    assert parts.max_error <= 1e-4


def test_an_average_that_misses_the_outputs_is_not_certified(monkeypatch):
    """With the derivative of ReLU at the first row only, as a mistake would have it."""
    run, X = recorded("relu_sgd"), queries()
    monkeypatch.setattr(
        ElementwiseSecant, "backward", staticmethod(lambda ctx, grad: (0.9 * mean_of_rows(grad), None, None))
    )
    with pytest.warns(epk.CertificateWarning, match="not certified"):
        parts = epk.attribute(run, X, path=epk.layerwise())
    assert QuadratureStatus.INCONSISTENT_DERIVATIVE in parts.statuses


@pytest.mark.parametrize("name", ["cosine", "sequence_first"])
def test_weights_that_are_not_used_linearly_are_refused(name):
    case = make_case(name)
    with pytest.raises(ValueError, match=r"layerwise\(\) needs a network whose weights .* Take chords"):
        epk.attribute(case.trajectory, case.test, path=epk.layerwise())


def test_what_integrates_refuses_it():
    run, X = recorded("tanh_sgd"), queries()
    points, path = epk.Points(X, is_train=False), epk.layerwise(2)
    for call in (
        lambda: epk.reconstruct(run, X, path=path),
        lambda: epk.gram_block(run, points, points, path=path),
        lambda: epk.EPKKernel(run, path=path),
        lambda: epk.path_features(run, X, num_features=16, nodes=4, path=path),
        lambda: nodes_trajectory(run, 4, path=path),
    ):
        with pytest.raises(ValueError, match=r"(along a path|one state) .* got layerwise\(every=2\)"):
            call()


def test_stretches_are_whole_numbers_of_steps():
    with pytest.raises(ValueError, match="every must be"):
        epk.layerwise(0)


class Rounded(nn.Module):
    """A straight-through estimator: what autograd computes is not the derivative of the outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h + ((4 * h).round() / 4 - h).detach())


def test_a_derivative_that_is_not_that_of_the_outputs_is_said_aloud():
    torch.manual_seed(0)
    with pytest.warns(epk.CertificateWarning, match="straight-through"):
        run = train(Rounded(), queries(10))
    with pytest.warns(epk.CertificateWarning, match="not certified"):
        parts = epk.attribute(run, queries(), path=epk.layerwise())
    assert QuadratureStatus.INCONSISTENT_DERIVATIVE in parts.statuses
