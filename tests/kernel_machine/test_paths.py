"""Other paths between the same states: other contributions, the same sums (docs/theory.md, section 11)."""

import math

import pytest
import torch
from path_runs import OPTIMIZERS, RUNS, STEPS, mlp, path_average, queries, recorded, state
from path_shares import shares
from torch import nn
from weighted_loops import Apply

import epk_gp as epk
from distributed_cases import Shuffled
from epk_gp.autodiff import averages
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.kernel_machine import attribute
from epk_gp.kernel_machine.axes import by_parameter, by_sample, by_step
from epk_gp.kernel_machine.reconstruct import single_machine
from epk_gp.quadrature.rules import LayerwisePath, QuadratureStatus
from helpers import NETWORKS, assert_close, gram_diagonal_blocks, make_case

RULE = epk.gauss_legendre(3)
slow = pytest.mark.slow


PATHS = [
    *((name, epk.chords((2, 100)[number % 2])) for number, name in enumerate(RUNS)),
    *((name, epk.layerwise((1, 3)[number % 2])) for number, name in enumerate(RUNS)),
]
QUICK = {"relu_sgd", "batch_norm_sgd", "transformer_adamw"}


@pytest.mark.parametrize(("name", "path"), [
    pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case[0] in QUICK else slow) for case in PATHS
])  # fmt: skip
def test_sums_are_exact_along_every_path(name, path):
    run, X = recorded(name), queries()
    parts = epk.attribute(run, X, path=path)
    assert parts.certified
    assert parts.max_error <= 1e-11
    assert_close(parts.total, parts.network, rounding=1e5)
    if isinstance(path, LayerwisePath):
        assert parts.evaluations == pytest.approx(2 * math.ceil(run.num_steps / path.every) / run.num_steps)
        assert {*parts.statuses} <= {QuadratureStatus.CONVERGED, QuadratureStatus.ROUNDING}
    else:
        result = epk.reconstruct(run, X, path=path)
        assert (result.certified, result.path) == (True, str(path))
        assert result.max_error <= 1e-11
        assert parts.evaluations == pytest.approx(result.evaluations)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", sorted({*NETWORKS} - {"cosine", "sequence_first"}))
def test_layerwise_sums_are_exact_for_every_kind_of_layer(name):
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


@pytest.mark.parametrize(("name", "path"), [
    ("tanh_momentum", epk.chords(2)), ("relu_sgd", epk.layerwise(1)), ("relu_sgd", epk.layerwise(2)),
    pytest.param("tanh_sgd", epk.chords(100), marks=slow), pytest.param("tanh_adamw", epk.chords(2), marks=slow),
])  # fmt: skip
def test_contributions_equal_the_definition(name, path):
    run, X, is_layerwise = recorded(name), queries(2), isinstance(path, LayerwisePath)
    parts = epk.attribute(run, X, head="logits" if is_layerwise else "log_softmax", rule=RULE, path=path)
    of_samples = shares(run)
    for n, x in enumerate(X):
        expected = torch.zeros(3, run.num_points + 1, dtype=torch.float64)
        for s in range(run.num_steps):
            if is_layerwise:
                first = s // path.every * path.every
                Phi = mean_derivatives(run, first, min(first + path.every, STEPS), x)
            else:
                average = path_average(run, path, s, x, "log_softmax", RULE)
                Phi = torch.cat([average[name] for name in run.model.names], dim=1)
            expected += Phi @ of_samples[s].T
        assert_close(parts.samples[n], expected[:, :-1])
        assert_close(parts.decay[n], expected[:, -1], rounding=1e5)


def test_averages_of_other_stretches_miss_the_network():
    """The negative control of both definitions: with the chords' averages one step too late the sum is off."""
    x, total = queries(1)[0], {late: torch.zeros(3, dtype=torch.float64) for late in (0, 1)}
    run = recorded("relu_sgd")
    first, last = (epk.network_outputs(run, x[None], state=s)[0] for s in (0, -1))
    way = flat_state(run, STEPS, x) - flat_state(run, 0, x)
    assert_close(mean_derivatives(run, 0, STEPS, x) @ way, last - first)
    run = recorded("tanh_sgd")
    first, last = (epk.network_outputs(run, x[None], state=s)[0] for s in (0, -1))
    for s in range(STEPS):
        d = flat_state(run, s + 1, x) - flat_state(run, s, x)
        for late in total:
            Phi = path_average(run, epk.chords(2), max(0, s - late), x, "logits", epk.gauss_legendre(8))
            total[late] += torch.cat(list(Phi.values()), dim=1) @ d
    assert (total[0] - (last - first)).abs().max() < 1e-9
    assert (total[1] - (last - first)).abs().max() > 1e-3


def test_moving_statistics_are_split_along_the_path():
    run, X, path = recorded("batch_norm_sgd"), queries(2), epk.chords(2)
    (steps, whole) = epk.attribute(run, X, by=[[by_step(run)], [by_sample(run)]], rule=RULE, path=path)
    for n, x in enumerate(X):
        for s in range(STEPS):
            Phi, start, end = path_average(run, path, s, x, "log_softmax", RULE), state(run, s), state(run, s + 1)
            expected = sum(Phi[name] @ (end[name] - start[name]).flatten() for name in run.model.statistics)
            assert_close(steps.statistics[n, :, s], expected, rounding=1e5)
    assert steps.statistics.abs().max() > 1e-3
    split = whole.statistics.sum(dim=2) + whole.statistics_of_no_sample.squeeze(2)
    assert_close(split, steps.statistics.sum(dim=2), rounding=1e5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["batch_norm_sgd", "relu_sgd"])
def test_the_steps_of_a_chord_sum_to_the_change_between_its_ends(name):
    run, X = recorded(name), queries()
    parts = epk.attribute(run, X, by=[by_step(run)], head="logits", path=epk.chords(2))
    of_steps = parts.values + parts.statistics + parts.unexplained
    f = [epk.network_outputs(run, X, state=s) for s in (0, 2, 4, 5)]
    for k, (first, last) in enumerate([(0, 2), (2, 4), (4, 5)]):
        assert_close(of_steps[:, :, first:last].sum(dim=2), f[k + 1] - f[k], rounding=1e5)


def test_chords_of_one_step_are_straight_and_others_are_not():
    run, X = recorded("tanh_momentum"), queries()
    straight, same, other = (epk.attribute(run, X, path=p) for p in (epk.straight(), epk.chords(1), epk.chords(2)))
    assert torch.equal(same.samples, straight.samples)
    assert (other.samples - straight.samples).norm() > 1e-3 * straight.samples.norm()
    assert torch.equal(epk.reconstruct(run, X, path=epk.chords(1)).outputs, epk.reconstruct(run, X).outputs)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["batch_norm_sgd", "tanh_momentum", "transformer_adamw"])
def test_layerwise_outputs_steps_and_parameters_sum_to_the_same(name):
    run, X, path = recorded(name), queries(), epk.layerwise(2)
    classes, whole = torch.tensor([2, 0, 1]), epk.attribute(run, X, path=path)
    one = epk.attribute(run, X, path=path, classes=classes)
    assert_close(one.samples[:, 0], whole.samples[torch.arange(3), classes])
    for parts in epk.attribute(run, X, by=[[by_step(run)], [by_sample(run)], [by_parameter(run)]], path=path):
        assert_close(parts.values.sum(dim=2), whole.samples.sum(dim=2), rounding=1e5)


@slow
def test_ranges_of_steps_begin_where_chords_do():
    """Workers share 40 steps in ranges; the sum is that of one process, and every chord is integrated once."""
    run, X, path = recorded("relu_sgd", steps=40), queries(), epk.chords(7)
    alone, shared = (epk.reconstruct(run, X, path=path, executor=executor) for executor in (None, Shuffled()))
    assert torch.equal(alone.outputs, shared.outputs)
    assert alone.evaluations == shared.evaluations < epk.reconstruct(run, X).evaluations / 2
    assert sum(alone.statuses.values()) == 6 * len(X)
    alone, shared = (epk.attribute(run, X, path=path, executor=executor) for executor in (None, Shuffled()))
    assert torch.equal(alone.samples, shared.samples)
    assert sum(shared.statuses.values()) == 6 * len(X)
    assert shared.max_error <= 1e-12


def test_a_checkpoint_belongs_to_its_path(tmp_path):
    run, X = recorded("relu_sgd"), queries()
    block = lambda run, X, **o: epk.gram_block(run, *[epk.Points(X, is_train=False)] * 2, **o)  # noqa: E731
    diagonal = lambda run, X, **o: gram_diagonal_blocks(run, epk.Points(X, is_train=False), **o)  # noqa: E731
    for number, call in enumerate((epk.attribute, epk.reconstruct, block, diagonal)):
        folder = tmp_path / str(number)
        call(run, X, path=epk.chords(2), checkpoint=folder)
        call(run, X, path=epk.chords(2), checkpoint=folder)
        for other in (epk.straight(), epk.chords(3)):
            with pytest.raises(ValueError, match="must be of this very computation"):
                call(run, X, path=other, checkpoint=folder)


def test_float32_leaves_its_rounding_as_a_term(monkeypatch):
    run, X = recorded("relu_sgd", dtype=torch.float32), queries(dtype=torch.float32)
    assert epk.attribute(run, X, by=[by_step(run)], path=epk.chords(2)).unexplained.abs().sum(dim=(0, 1)).bool().all()
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: 1)  # layers that stay factors: that of a whole chord
    parts = epk.attribute(run, X, by=[by_step(run)], path=epk.chords(2))
    assert parts.certified
    assert parts.max_error <= 1e-5
    assert parts.unexplained.abs().sum(dim=(0, 1)).bool().tolist() == [False, True, False, True, True]


def test_a_single_machine_follows_the_path_of_its_kernel():
    """Theorem 3.7 holds along every path: the coefficients are the same, the kernel is the path's."""
    X, y, net = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3, mlp(nn.Tanh).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.3), steps=8)
    rule, path = epk.gauss_legendre(12), epk.chords(4)
    machine = single_machine(run, queries(), rule=rule, path=path)
    assert machine.certified
    assert machine.max_error < 1e-11
    test, train = epk.Points(queries(), is_train=False), epk.Points(X, is_train=True)
    K, straight = (epk.gram_block(run, test, train, rule=rule, path=p) for p in (path, epk.straight()))
    sums = torch.einsum("ncmd,md->nc", K, machine.coefficients)
    assert_close(machine.outputs, machine.initial + sums, rounding=1e4)
    assert (K - straight).abs().max() > 1e-3 * K.abs().max()  # the control: another kernel, the same sum
    assert_close(torch.einsum("ncmd,md->nc", straight, machine.coefficients), sums, rounding=1e5)
    with pytest.warns(epk.CertificateWarning, match="single kernel machine is not certified: its sum .*a fixed rule"):
        assert not single_machine(run, queries(), rule=epk.QuadratureRule.left_endpoint(), path=path).certified


@pytest.mark.parametrize("is_faulty", ["secant", "network"])
def test_a_layerwise_average_that_misses_the_outputs_is_not_certified(is_faulty, monkeypatch):
    """With a wrong mean derivative of ReLU, as a mistake would have it; and with a straight-through estimator."""
    if is_faulty == "secant":
        run, right = recorded("relu_sgd"), averages.quotient_slope
        monkeypatch.setattr(averages, "quotient_slope", lambda *args, **options: 0.9 * right(*args, **options))
    else:
        rounded = Apply(lambda h: h + ((4 * h).round() / 4 - h).detach())
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), rounded, nn.Linear(6, 3)).double()
        with pytest.warns(epk.CertificateWarning, match="straight-through"):
            run = epk.train(net, queries(10), torch.arange(10) % 3, optimizer=OPTIMIZERS["momentum"](net), steps=4)
    with pytest.warns(epk.CertificateWarning, match="not certified"):
        parts = epk.attribute(run, queries(), path=epk.layerwise())
    assert QuadratureStatus.INCONSISTENT_DERIVATIVE in parts.statuses


@pytest.mark.parametrize("name", ["cosine", "sequence_first"])
def test_weights_that_are_not_used_linearly_are_refused(name):
    case = make_case(name)
    with pytest.raises(ValueError, match=r"layerwise\(\) needs a network whose weights .* Take chords"):
        epk.attribute(case.trajectory, case.test, path=epk.layerwise())


@pytest.mark.parametrize(("name", "takes"), [("cnn", epk.layerwise()), ("cosine", epk.straight())])
def test_large_networks_take_layerwise_by_default_where_they_can_and_say_so(name, takes, monkeypatch):
    case = make_case(name)
    small = epk.attribute(case.trajectory, case.test)
    assert (small.path, "path " in repr(small)) == ("straight steps", False)
    monkeypatch.setattr(attribute, "_LARGE", case.trajectory.num_weights)
    parts, asked = (epk.attribute(case.trajectory, case.test, **path) for path in ({}, {"path": takes}))
    assert torch.equal(parts.samples, asked.samples)
    assert parts.path == asked.path == str(takes)
    assert (parts.path in " ".join(repr(parts).split())) == (takes != epk.straight())


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("no such file")])
def test_a_fault_of_the_network_is_no_reason_for_another_path(error, monkeypatch):
    """Only what has no average, here the size of complex numbers, is a reason."""

    def sizes(h):
        if fails:
            raise error
        return torch.view_as_complex(h.view(-1, 3, 2)).abs()

    def failing(*args):
        fails.append(True)
        try:
            return average(*args)
        finally:
            fails.clear()

    fails, average = [], attribute.secant_jacobians
    net = nn.Sequential(nn.Linear(4, 6), Apply(sizes)).double()
    run = epk.train(net, queries(8), torch.arange(8) % 3, optimizer=OPTIMIZERS["momentum"](net), steps=1)
    monkeypatch.setattr(attribute, "_LARGE", 1)
    assert epk.attribute(run, queries(1)).path == "straight steps"
    monkeypatch.setattr(attribute, "secant_jacobians", failing)
    with pytest.raises(type(error), match=str(error)):
        epk.attribute(run, queries(1))


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_path_or_cannot_be_integrated_is_refused():
    run, X, path = recorded("tanh_sgd"), queries(), epk.layerwise(2)
    points, no_integral = (epk.Points(X, is_train=False), r"(along a path|one state) .* got layerwise\(every=2\)")
    calls = [
        (lambda: epk.reconstruct(run, X, path=path), ValueError, no_integral),
        (lambda: epk.gram_block(run, points, points, path=path), ValueError, no_integral),
        (lambda: epk.EPKKernel(run, path=path), ValueError, no_integral),
        (lambda: epk.path_features(run, X, num_features=16, nodes=4, path=path), ValueError, no_integral),
        (lambda: nodes_trajectory(run, 4, path=path), ValueError, no_integral),
        (lambda: epk.layerwise(0), ValueError, "every must be at least 1: got 0"),
        (lambda: epk.chords(0), ValueError, "every must be at least 1: got 0"),
        (lambda: epk.chords(every=2.5), TypeError, r"every must be a whole number, at least 1: got 2\.5"),
    ]
    for door in (epk.reconstruct, epk.attribute, single_machine):
        calls.append((lambda door=door: door(run, X, path="chords"), TypeError, "path must be a path .*: got 'chords'"))
    for wrong in (20, epk.chords):
        calls.append((lambda wrong=wrong: epk.PathKernel(run, path=wrong), TypeError, "path must be a path such as"))
    for call, kind, message in calls:
        with pytest.raises(kind, match=message):
            call()


def test_layerwise_averages_pass_hooks_on_gradients_by():
    """They are not made of gradients, so a hook that looks at one, or changes it, leaves shares and sum as they are."""

    class Watched(nn.Sequential):
        def forward(self, x):
            hidden = self[1](self[0](x))
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: None).remove()
                hidden.register_hook(lambda gradient: None)
                hidden.retain_grad()
            return self[2](hidden)

    def samples(kind):
        torch.manual_seed(0)
        net = kind(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        X, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
        run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3)
        return epk.attribute(run, X[:2], path=epk.layerwise())

    found = samples(Watched)
    assert found.certified
    assert torch.equal(found.samples, samples(nn.Sequential).samples)
