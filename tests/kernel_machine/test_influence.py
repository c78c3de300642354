"""Influence: what it returns, how it is split, what is said of it; that it is a derivative, test_retrain shows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from checked_networks import GradientReversal, StopGradient, StraightThrough
from optimizer_cases import OF_TORCH
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from weighted_loops import CLASSES, INPUTS, POINTS, Apply, WeightedLoop, mlp, operation, record

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine.axes import Axis, by_label, by_parameter, by_sample, by_step
from epk_gp.kernel_machine.influence import Influence
from epk_gp.optimizers.torch_rules import rule_for

adamw = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
momentum = partial(torch.optim.SGD, lr=0.2, momentum=0.8, weight_decay=0.01)
sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.5)
LOOP = WeightedLoop(adamw)
X = LOOP.test_points
CHOSEN = torch.tensor([2, 0, 1])


@pytest.fixture(scope="module")
def run() -> epk.Trajectory:
    return LOOP.record()


@pytest.fixture(scope="module")
def whole(run: epk.Trajectory) -> Influence:
    return epk.influence(run, X)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def test_influence_on_averaged_weights_is_the_derivative_of_their_outputs():
    loop = WeightedLoop(momentum)
    average = averaged_trajectory(loop.record(), averaging_coefficients(loop.steps, decay=0.7))
    weights = torch.ones(2, POINTS, dtype=torch.float64)
    weights[:, 3] += torch.tensor([1e-4, -1e-4])
    up, down = epk.retrain(average, weights).outputs(X)
    found, expected = epk.influence(average, X).values[:, :, 3], (up - down) / 2e-4
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_influence_evaluates_the_network_once_a_step(optimizer):
    calls = list[int]()
    counted = lambda: mlp(Apply(lambda h: calls.append(1) or h))  # noqa: E731
    counts = list[int]()
    for steps in (8, 8, 20):  # the first one plans the network
        run = WeightedLoop(optimizer, counted, steps=steps).record()
        calls.clear()
        epk.influence(run, X)
        counts.append(len(calls))
    assert counts[2] - counts[1] == 12


@pytest.mark.slow
def test_what_the_optimizer_kept_is_the_same_in_a_budget_that_does_not_hold_all_of_it():
    run = WeightedLoop(adamw, steps=100).record()
    small, large = (epk.influence(run, X, memory_budget=budget).values for budget in (1 << 20, 1 << 30))
    assert close(small, large)


def test_what_is_held_as_recorded_is_said_aloud():
    spectral = lambda: nn.Sequential(spectral_norm(nn.Linear(INPUTS, 6)), nn.Tanh(), nn.Linear(6, CLASSES))  # noqa: E731
    muon = WeightedLoop(lambda p: OF_TORCH["Muon"]([q for q in p if q.ndim == 2], lr=0.02))
    for held, trajectory in (
        ("Muon", muon.record(unexplained=0.9)),
        ("moving statistics", WeightedLoop(momentum, spectral).record()),
        ("own rule", LOOP.record(update_rule=rule_for(adamw(list(mlp().parameters()))))),
    ):
        with pytest.warns(epk.CertificateWarning, match=f"how {held} would change with the gradients is not known"):
            effect = epk.influence(trajectory, X)
        assert f"how {held} would change" in effect.findings[0]
        assert not effect.certified


def test_the_terms_of_a_run_on_disk_are_those_in_memory(tmp_path, whole):
    LOOP.record(folder=tmp_path / "run")
    stored = epk.load_trajectory(tmp_path / "run", mlp().double())
    assert torch.equal(epk.influence(stored, X).values, whole.values)


def test_a_run_without_the_optimizers_options_is_refused_where_they_are_needed(run):
    with pytest.raises(ValueError, match="must hold the options of its optimizer, AdamW.*Record it again"):
        epk.influence(replace(run, optimizer_groups=()), X)
    assert epk.influence(replace(WeightedLoop(momentum).record(), optimizer_groups=()), X).certified


def test_classes_and_functions_are_combinations_of_all_outputs(run, whole):
    columns = whole.values[torch.arange(3), CHOSEN]
    chosen = epk.influence(run, X, classes=CHOSEN)
    assert close(chosen.values[:, 0], columns)
    assert close(chosen.outputs[:, 0], whole.outputs[torch.arange(3), CHOSEN])
    losses = epk.influence(run, X, function=epk.RowFunction.loss_value(CHOSEN))
    assert close(losses.values[:, 0], -columns)
    joint = epk.influence(run, X, function=lambda z: F.cross_entropy(z, CHOSEN))
    assert joint.values.shape == (1, 1, POINTS)
    assert close(joint.values[0, 0], -columns.mean(dim=0))


def test_axes_sum_what_single_samples_and_steps_add(run, whole):
    split = epk.influence(run, X, by=[by_label(run), by_step(run, [3])])
    by_class = torch.stack([whole.values[:, :, run.targets == c].sum(dim=2) for c in range(CLASSES)], dim=2)
    assert close(split.values.sum(dim=3), by_class)
    other_order = epk.influence(run, X, by=[by_step(run, [3]), by_label(run)])
    assert torch.equal(other_order.values, split.values.transpose(2, 3))
    steps, last = epk.influence(run, X, by=[by_sample(run), by_step(run)]), epk.influence(run, X, truncate=3)
    assert close(last.values, steps.values[:, :, :, -3:].sum(dim=3))
    with pytest.raises(ValueError, match="std needs the derivative in each sample's weight"):
        _ = split.std


def test_the_own_influence_is_each_samples_own_derivative(run):
    inputs, y = LOOP.data
    every = epk.influence(run, inputs, function=epk.RowFunction.loss_value(y))
    own = epk.influence(run, own=True).values[:, 0, 0]
    assert close(own, every.values[:, 0].diagonal())
    some = epk.influence(run, own=[4, 1])
    assert close(some.values[:, 0, 0], own[[4, 1]])
    assert "2 training samples, each on its own loss" in str(some)
    assert "jackknife" not in str(some)
    named = Axis("sample", torch.zeros(POINTS, dtype=torch.int64), ("itself",))  # a name says nothing
    assert "each on its own loss" not in str(epk.influence(run, inputs, by=[named]))
    assert [row[0] for row in some.to_frame().index] == [4, 1]
    for ask in (lambda: some.std, lambda: some.predict(torch.ones(POINTS))):
        with pytest.raises(ValueError, match="Leave by= and own= out|leave by= and own= out"):
            ask()


def test_predictions_and_the_jackknife_follow_from_the_values(whole):
    weights = torch.rand(2, POINTS, dtype=torch.float64)
    expected = whole.outputs + torch.stack([(whole.values * (w - 1)).sum(dim=2) for w in weights])
    assert torch.allclose(whole.predict(weights), expected)
    assert torch.allclose(whole.predict(weights[0]), expected[0])
    assert torch.allclose(whole.std, whole.values.square().sum(dim=2).sqrt())


def test_adjoint_norms_are_those_of_the_derivative_in_the_weights():
    loop = WeightedLoop(lambda p: torch.optim.SGD(p, lr=0.2))
    run, (inputs, y) = loop.record(), loop.data
    effect = epk.influence(run, X, classes=torch.tensor([0, 1, 2]))

    def trained(w: Tensor, first: int) -> Tensor:
        for (batch,) in list(loop.batches())[first:]:
            loss = F.cross_entropy(run.model(run.model.unflatten(w), inputs[batch]), y[batch])
            w = w - 0.2 * torch.autograd.grad(loss, w, create_graph=True)[0]
        return run.model(run.model.unflatten(w), X).log_softmax(dim=1)[1, 1]

    for state in (0, 5, 8):
        w = run.states[state].clone().requires_grad_()
        (expected,) = torch.autograd.grad(trained(w, state), w)
        assert effect.adjoint_norms[1, 0, state] == pytest.approx(float(expected.norm()), rel=1e-9)
    assert effect.growth[1, 0] == effect.adjoint_norms[1, 0].max() / effect.adjoint_norms[1, 0, -1]


def test_blocks_of_points_outputs_rows_and_adjoints_change_nothing(run, whole, monkeypatch):
    for name, size in (("influence_points", 2), ("curvature_rows", 2), ("curvature_adjoints", 4)):
        monkeypatch.setattr(MemoryPlan, name, lambda *_, size=size: size)
    assert close(epk.influence(run, X).values, whole.values)
    # outputs are computed apart where the adjoints of all of a point do not fit
    monkeypatch.setattr(MemoryPlan, "influence_points", lambda _, num_outputs: 2 if num_outputs == 1 else 0)
    apart = epk.influence(run, X)
    assert close(apart.values, whole.values)
    assert torch.allclose(apart.adjoint_norms, whole.adjoint_norms, rtol=1e-10)


def test_smoothing_is_the_mean_of_the_derivatives_of_retrained_runs(run, whole):
    smoothing = epk.Smoothing(num_runs=2, low=0.5, high=1.5, seed=3)
    smooth = epk.influence(run, X, smoothing=smoothing)
    first, second = smoothing.weights(POINTS)
    assert torch.allclose(first + second, torch.full_like(first, 2.0))
    move = 1e-4 * F.one_hot(torch.tensor(7), POINTS)
    expected = sum((LOOP.outputs(w + move) - LOOP.outputs(w - move)) / 4e-4 for w in (first, second))
    assert (smooth.values[:, :, 7] - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert smooth.certified
    assert torch.equal(smooth.outputs, whole.outputs)


def test_a_run_with_huge_derivatives_does_not_spoil_the_average():
    values = torch.randn(8, 5, dtype=torch.float64)
    values[3] *= 1e6
    assert torch.allclose(epk.Smoothing(8).average(values), values.sort(dim=0).values[1:-1].mean(dim=0))
    assert torch.equal(epk.Smoothing(2).average(values[:2]), values[:2].mean(dim=0))


def test_every_row_of_a_function_must_be_that_of_one_input(run):
    for function in (
        lambda f: torch.cat([f[:1], f[1:] - f[:-1]]),
        lambda f: f.cumsum(0),
        lambda f: torch.where(torch.arange(len(f))[:, None] == 2, f.flip(0), f),
        lambda f: f - f.mean(dim=0).detach(),
        lambda f: f * (f >= f.amax(dim=0)),
    ):
        with pytest.raises(ValueError, match="result [012] depends on other rows"):
            epk.influence(run, X, function=function)


def test_wrong_arguments_are_refused(run, whole):
    for call, kind, message in (
        (lambda: epk.influence(run, X, classes=CHOSEN, function=lambda f: f), ValueError, "must not be given together"),
        (lambda: epk.influence(run, X, classes=torch.tensor([0, 1, 3])), ValueError, r"classes must lie in 0..2"),
        (lambda: epk.influence(run, X, truncate=0), ValueError, "truncate must be"),
        (lambda: epk.influence(run, X, by=[by_parameter(run)]), ValueError, "has no part of one"),
        (lambda: epk.Smoothing(low=1.0, high=1.0), ValueError, "0 <= low < high: got 1.0 and 1.0"),
        (lambda: whole.predict(torch.ones(3).double()), ValueError, r"one weight per sample, \(..., 12\): got shape"),
        (lambda: epk.influence(run, own=torch.tensor([3, 12])), ValueError, r"own must lie in 0..11: got 3..12"),
        (lambda: epk.influence(run, own=torch.ones(3) > 0), TypeError, r"own must be indices: .*mask.nonzero"),
        (lambda: epk.influence(run, own=1), TypeError, "own must be a list or tensor of indices"),
        (lambda: epk.influence(run, own=[]), ValueError, "own must be a list of at least one index"),
        (lambda: epk.influence(run), TypeError, r"must be given the inputs X .*, or own=True: got neither"),
        (lambda: epk.influence(run, X, own=True), ValueError, r"own= asks for the losses .*must be left out"),
    ):
        with pytest.raises(kind, match=message):
            call()


def scaled() -> nn.Module:
    """An embedding whose gradient is divided by how often each entry is used."""
    entries, mean = Apply(lambda x: (2 * x.abs()).long() % 5), Apply(lambda h: h.mean(dim=1).tanh())
    return nn.Sequential(entries, nn.Embedding(5, 4, scale_grad_by_freq=True), mean, nn.Linear(4, CLASSES))


def quantised(dtype: torch.dtype | None = None, scale: float = 0.02) -> nn.Module:
    """A layer whose weights are rounded, in a dtype whatever the network's is, with a gradient as if they were not."""
    net = mlp()
    rounded = lambda w: torch.fake_quantize_per_tensor_affine(w.to(dtype or w.dtype), scale, 0, -128, 127)  # noqa: E731
    register_parametrization(net[0], "weight", Apply(lambda w: rounded(w).to(w.dtype)))
    return net


NO_FUNCTIONS = {
    "straight_through": StraightThrough, "stop_gradient": StopGradient, "reversal": GradientReversal, "scaled": scaled,
    "quantised": quantised, "quantised_in_float32": lambda: quantised(torch.float32, 0.05),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
@pytest.mark.parametrize("make", NO_FUNCTIONS.values(), ids=NO_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_that_of_no_function_is_said(make, dtype):
    X, y, net = torch.randn(12, 4, dtype=dtype), torch.arange(12) % CLASSES, make().to(dtype)
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=3)
    for call in (lambda: epk.influence(run, X[:1]), lambda: epk.influence(run, own=True)):
        with pytest.warns(epk.CertificateWarning, match="torch's derivative of the gradient differs by"):
            call()


@pytest.mark.parametrize("make", [lambda p: sgd(p), lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)])
def test_a_row_that_gets_no_gradient_is_no_false_alarm(make):
    """As that of a padding index, on which the outputs depend all the same."""
    mean, entries = Apply(lambda h: h.mean(dim=1).tanh()), Apply(lambda x: (2 * x.abs()).long() % 5)
    net = lambda: nn.Sequential(entries, nn.Embedding(5, 4, padding_idx=0), mean, nn.Linear(4, CLASSES))  # noqa: E731
    loop = WeightedLoop(make, net)
    effect, expected = epk.influence(loop.record(), loop.test_points), loop.slopes(3)
    assert effect.certified
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
def test_a_kernel_of_gradients_that_depend_on_the_other_points_is_refused():
    X, y, net = torch.randn(12, 4).double(), torch.arange(12) % CLASSES, scaled().double()
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=2)
    points = epk.Points(X[:3], is_train=False)
    for call in (lambda: epk.gram_block(run, points, points), lambda: epk.path_features(run, X[:3], 8)):
        with pytest.raises(ValueError, match=r"divides them by how often .* scale_grad_by_freq=False"):
            call()


def test_a_wrong_second_derivative_of_any_operation_is_found():
    a_tenth_too_large = lambda x: 3 * (x * x + 0.1 * (x * x - (x * x).detach()))  # noqa: E731
    loop = WeightedLoop(sgd, lambda: mlp(activation=operation(lambda x: x**3, a_tenth_too_large)))
    run = loop.record()
    assert epk.attribute(run, loop.test_points).certified
    with pytest.warns(epk.CertificateWarning, match="or torch's second derivative of an operation is wrong"):
        epk.influence(run, loop.test_points)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kinks_random_numbers_and_float32_are_no_false_alarm(dtype):
    """Measured on 27 kinds of networks; warnings are errors in this suite."""
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 8, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    ).to(dtype)  # fmt: skip
    X, y = torch.randn(24, 4, dtype=dtype), torch.arange(24) % CLASSES
    run = record(net, torch.optim.AdamW(net.parameters(), lr=1e-2), X, y, [None] * 4)
    assert epk.influence(run, X[:1]).certified


def test_an_operation_without_a_second_derivative_is_named():
    square = operation(torch.square, lambda x: 2 * x, once_differentiable)
    loop = WeightedLoop(sgd, lambda: mlp(nn.BatchNorm1d(6), activation=square))
    run, says = loop.record(), r"@once_differentiable \(operations of one's own here: Operation\)"
    with pytest.raises(ValueError, match=f"must have second derivatives.*{says}.*use epk_gp.attribute"):
        epk.influence(run, loop.test_points)
    assert epk.attribute(run, loop.test_points).certified  # double backward would leave its part out in silence
