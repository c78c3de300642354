"""Path training is Euler's method on its equation; path ridge is its formula with explicit Jacobians."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from datamodel_cases import TIGHT, Dense, Loop, dense, error, internals, margin, mlp, vectors
from optimizer_cases import OPTIONS
from torch import Tensor

import epk_gp as epk
from epk_gp.optimizers.update_rules import broadcast_to_params
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
STIFF = Loop("mlp", "sgd", steps=250)  # ten Euler steps and more
LOOPS = {"stiff": STIFF, "adam": Loop("mlp", "adam", steps=41, batch=4), "short": Loop("cnn", "sgd", steps=7)}
every_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())


def some_weights(M: int) -> Tensor:
    """All, all but one, halves, a few, none, and numbers up to 1."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.ones(7, M, dtype=torch.float64)
    weights[1, 3] = 0
    weights[2:4] = (torch.rand(2, M, generator=generator) < 0.5).double()
    weights[4, 2:] = 0
    weights[5] = 0
    weights[6] = torch.rand(M, generator=generator, dtype=torch.float64)
    return weights


WEIGHTS = some_weights(11)


def changes(loop: Loop, steps: int) -> Tensor:
    """Return what numbers change by without samples, by so many Euler steps a part in kernels of explicit Jacobians."""
    (X, y), (X_asked, y_asked) = loop.data, loop.asked
    start, evaluate, reference = loop.run.weights(0), loop.run.model.evaluate, dense(loop)
    begun = torch.cat([margin(evaluate(start, X), y), margin(evaluate(start, X_asked), y_asked)]).detach()
    found = torch.stack([simulated(begun, reference, weights, steps) for weights in WEIGHTS])
    return found - found[0]


def simulated(u: Tensor, reference: Dense, weights: Tensor, steps: int) -> Tensor:
    for K in reference.kernels:
        for _ in range(steps):
            u = u + K @ (weights * reference.a * torch.sigmoid(-u[: len(weights)])) / steps
    return u[len(weights) :]


def with_smaller_steps(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(internals("training"), "_EULER", 1.2 * factor)
    monkeypatch.setattr(internals("training"), "_FARTHEST", 2.0 * factor)


@every_loop
def test_predictions_are_the_equation_by_hand(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with_smaller_steps(monkeypatch, 1 / 64)
    model = epk.datamodel(loop.run, *loop.asked)
    assert error(model.predict(WEIGHTS) - model.outputs, changes(loop, steps=400)) < 0.01


def test_with_smaller_steps_predictions_reach_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    solution, model = changes(STIFF, steps=400), STIFF.model
    errors = list[float]()
    for factor in (1.0, 1 / 4, 1 / 16):
        with_smaller_steps(monkeypatch, factor)
        fresh = epk.datamodel(STIFF.run, *STIFF.asked)
        errors.append(error(fresh.predict(WEIGHTS) - fresh.outputs, solution))
    assert errors[0] < 0.1
    assert errors[1] < 0.4 * errors[0]
    assert errors[2] < 0.4 * errors[1]
    assert error(model.scores @ (WEIGHTS - 1).T, solution.T) > 3 * errors[0]  # the control: path ridge is another


@every_loop
def test_of_all_samples_the_recorded_numbers_are_predicted_to_the_bit(loop: Loop) -> None:
    recorded = margin(epk.network_outputs(loop.run, loop.asked[0]), loop.asked[1])
    assert_close(loop.model.outputs, recorded, rounding=TIGHT)
    assert torch.equal(loop.model.predict(torch.ones(11)), loop.model.outputs)


@every_loop
def test_a_prediction_does_not_depend_on_the_subsets_beside_it(loop: Loop) -> None:
    together = loop.model.predict(WEIGHTS)
    assert together.shape == (7, 4)
    for weights, found in zip(WEIGHTS, together, strict=True):
        assert_close(loop.model.predict(weights), found, rounding=1e3)
    assert_close(loop.model.predict(WEIGHTS.flip(0)).flip(0), together, rounding=1e3)
    assert_close(loop.model.predict(WEIGHTS[2:4]), together[2:4], rounding=1e3)


def test_booleans_and_integers_are_weights_0_and_1() -> None:
    kept = WEIGHTS[2:4]
    for same in (kept.bool(), kept.long(), kept.float()):
        assert torch.equal(STIFF.model.predict(same), STIFF.model.predict(kept))


def test_without_samples_the_untrained_network_is_predicted() -> None:
    training = STIFF.model.trainings[0]
    expected = STIFF.model.outputs + (training.start[11:] - training.repeated)
    assert_close(STIFF.model.predict(torch.zeros(11)), expected, rounding=1e3)


def differences(model: Any, size: float = 1e-4) -> Tensor:
    """Differentiate predictions in each weight, by central differences."""
    step = size * torch.eye(11, dtype=torch.float64)
    return ((model.predict(1 + step) - model.predict(1 - step)) / (2 * size)).T


def test_the_derivative_is_that_of_predictions() -> None:
    """Exactly where a part is one step, whose size does not follow the weights."""
    short = LOOPS["short"].model
    assert error(short.derivative(), differences(short)) < 1e-7


def test_the_derivative_takes_the_steps_sizes_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = list[float]()
    for factor in (1.0, 1 / 8):
        with_smaller_steps(monkeypatch, factor)
        fresh = epk.datamodel(STIFF.run, *STIFF.asked)
        errors.append(error(fresh.derivative(), differences(fresh)))
    assert errors[0] < 0.1
    assert errors[1] < 0.4 * errors[0]


def regression(steps: int, outputs: int = 2) -> tuple[epk.Trajectory, Tensor]:
    loop = Loop("mlp", steps=steps)
    X, _ = loop.data
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, outputs)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    y = X[:, :outputs].sin()
    return epk.train(net, X, y, optimizer=optimizer, steps=steps, loss=epk.MeanSquaredError()), loop.asked[0]


@pytest.mark.parametrize("outputs", [1, 2])
def test_of_squared_error_predictions_reach_the_matrix_exponential(outputs, monkeypatch):
    run, X = regression(50, outputs)
    y, errors = run.targets.T.flatten(), list[float]()
    for factor in (1.0, 1 / 4, 1 / 16):
        with_smaller_steps(monkeypatch, factor)
        model = epk.datamodel(run, X)
        N, training = 11 * outputs, model.trainings[0]
        ends = list[Tensor]()
        for weights in WEIGHTS:
            force = weights.repeat(outputs) * 2 / outputs / 11  # of a mean over samples and outputs
            v = training.start.clone()
            v[:N] -= y
            for K in training.kernels:
                generator = torch.zeros(len(v), len(v), dtype=torch.float64)
                generator[:, :N] = -K * force
                v = torch.linalg.matrix_exp(generator) @ v
            ends.append(v[N:])
        solution = torch.stack(ends) - ends[0]
        errors.append(error(model.predict(WEIGHTS) - model.outputs, solution))
    assert errors[0] < 0.15
    assert errors[1] < 0.45 * errors[0]
    assert errors[2] < 0.45 * errors[1]


RIDGES = {
    "mlp adam": Loop("mlp", "adam"), "wide adam": Loop("wide", "adam"),
    "wide sgd, groups": Loop("wide", "sgd_groups", steps=14), "cnn adamw in batches": Loop("cnn", "adamw", batch=4),
    "cnn momentum": Loop("cnn", "momentum"), "layer norm nesterov, schedule": Loop("layer_norm", "nesterov", decay=0.8),
    "layer norm adam, schedule": Loop("layer_norm", "adam", decay=0.9, batch=5),
    "layer norm adam, groups": Loop("layer_norm", "adam_groups"), "batch norm sgd": Loop("batch_norm", "sgd"),
    "batch norm momentum in batches": Loop("batch_norm", "momentum", batch=6),
    "tokens rmsprop": Loop("tokens", "rmsprop"),
    "tokens adam, groups, schedule": Loop("tokens", "adam_groups", decay=0.85),
    "attention adamw": Loop("attention", "adamw"),
    "attention sgd, groups": Loop("attention", "sgd_groups", decay=0.9, batch=4),
}  # fmt: skip
every_ridge = pytest.mark.parametrize("loop", RIDGES.values(), ids=RIDGES.keys())
REFUSED = ("Muon", "SparseAdam", "Rprop")  # matrices; rates that are 0 where a gradient changes its sign
SHORT = Loop("mlp", "sgd", steps=7, points=7)


@every_ridge
def test_scores_are_the_formula_with_explicit_jacobians(loop: Loop) -> None:
    reference, model = dense(loop), loop.model
    assert model.metric == "exact"
    assert_close(torch.stack(model.trainings[0].kernels), reference.kernels, rounding=TIGHT)
    assert_close(model.scores, reference.ridge(), rounding=TIGHT)


def test_one_number_for_each_parameter_goes_into_two_factors_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = RIDGES["wide sgd, groups"]
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    model = epk.datamodel(loop.run, *loop.asked)
    assert model.metric == "exact"
    assert_close(model.scores, dense(loop).ridge(), rounding=TIGHT)


@pytest.mark.parametrize("name", [name for name in OPTIONS if hasattr(torch.optim, name) and name not in REFUSED])
def test_every_optimizer_of_torch_has_the_metric_of_its_recorded_steps(name: str) -> None:
    """H = grad_scale (lr + momentum_lr q), q = beta q + one_minus_dampening, weight by weight."""
    for options in OPTIONS[name].values():
        if "maximize" in options or "centered" in options:
            continue
        torch.manual_seed(1)
        net, y = mlp().double(), torch.arange(9) % 3
        optimizer = getattr(torch.optim, name)(net.parameters(), **options)
        run = epk.train(net, vectors(9), y, optimizer=optimizer, steps=7)
        nodes, w, q = internals("kernels").path_nodes(run), torch.zeros(51).double(), torch.zeros(51).double()
        assert nodes.steps == (0, 1, 2, 4, 5, 6)
        for s, update in enumerate(run.updates):
            gamma, epsilon, mu, beta, tau = (
                broadcast_to_params(getattr(update, field), run.model.sizes, w)
                for field in ("grad_scale", "lr", "momentum_lr", "beta", "one_minus_dampening")
            )
            q = beta * q + tau
            if s in nodes.steps:
                node = nodes.steps.index(s)
                expected = gamma * (epsilon + mu * q) * nodes.times[node]
                found = nodes.metric(node, run.states[s])
                assert_close(found, torch.minimum(expected, found), rounding=TIGHT)  # less where no gradient was seen
                assert float((found == expected).double().mean()) > 0.7


def in_two_factors(H: Tensor) -> Tensor:
    """Let 1 / H of each layer of "wide", bias as a column, be means over rows times those over columns by its mean."""
    changed = list[Tensor]()
    for own, rows in zip(H.split([150, 930, 93]), (30, 30, 3), strict=True):
        inverse = 1 / torch.cat([own[:-rows].view(rows, -1), own[-rows:, None]], dim=1)
        factored = inverse.mean() / (inverse.mean(dim=1, keepdim=True) * inverse.mean(dim=0))
        changed += [factored[:, :-1].flatten(), factored[:, -1]]
    return torch.cat(changed)


def test_a_number_for_each_weight_goes_into_two_factors_by_means_of_its_inverse(monkeypatch):
    loop = RIDGES["wide adam"]
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    model = epk.datamodel(loop.run, *loop.asked)
    assert model.metric == "factored"
    assert_close(model.scores, dense(loop, metric=in_two_factors).ridge(), rounding=TIGHT)
    assert 0.01 < error(model.scores, dense(loop).ridge()) < 0.3


def test_other_metrics_are_no_metrics_of_adam() -> None:
    """The control: one number for all weights, or the second moments of the first node alone, give other scores."""
    loop = RIDGES["wide adam"]
    scores = loop.model.scores
    flat = dense(loop, metric=lambda H: H.mean().expand(len(H))).ridge()
    assert error(flat, scores) > 0.3
    assert error(dense(loop, metric=torch.ones_like).ridge(), scores) > 0.3


def test_the_kernel_of_the_last_state_gives_other_scores() -> None:
    """The control: states along the path matter."""
    loop = Loop("mlp", "sgd", steps=62)
    reference = dense(loop)
    last = reference.kernels[-1:].expand(6, -1, -1)
    assert_close(loop.model.scores, reference.ridge(), rounding=TIGHT)
    assert error(replace(reference, kernels=last).ridge(), loop.model.scores) > 0.05


@pytest.mark.parametrize("rate", [1e-3, 1e-4])
def test_of_few_small_steps_scores_are_contributions(rate: float) -> None:
    """lambda grows as 1 / time: what is left is k r, to an error that shrinks with the steps."""
    X, y = SHORT.data
    net = SHORT.net
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    run = epk.train(net, X, y, optimizer=optimizer, steps=7)
    X, y = SHORT.asked
    model = epk.datamodel(run, X, y)
    ask = epk.RowFunction(margin, y)
    contributions = epk.attribute(run, X, function=ask).samples[:, 0]
    assert error(model.scores, contributions) < 20 * rate
    training = model.trainings[0]
    k = sum(training.kernels)[len(training.forces) :]
    assert error(model.scores, k * training.forces / 7) < 20 * rate
    assert error(model.derivative(), contributions) < 20 * rate
