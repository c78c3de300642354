"""Path training is Euler's method on its equation, in plain Python, and the equation's solution with smaller steps."""

from typing import Any

import pytest
import torch
from datamodel_cases import Dense, Loop, dense, internals, margin
from torch import Tensor

import epk_gp as epk
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
TIGHT = 1e-10 / torch.finfo(torch.float64).eps
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


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


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
    assert (
        error(model.scores @ (WEIGHTS - 1).T, solution.T) > 3 * errors[0]
    )  # the control: path ridge is another answer


@every_loop
def test_of_all_samples_the_recorded_numbers_are_predicted_to_the_bit(loop: Loop) -> None:
    recorded = margin(epk.network_outputs(loop.run, loop.asked[0]), loop.asked[1])
    assert_close(loop.model.outputs, recorded, rounding=TIGHT)
    for kept in (torch.ones(11), torch.ones(11, dtype=torch.float64), torch.ones(11, dtype=torch.bool)):
        assert torch.equal(loop.model.predict(kept), loop.model.outputs)


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
    """To what path training misses of the recorded training."""
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
