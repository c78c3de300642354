"""Networks that are trained again say what predictions are worth; results name what they hold."""

import math
from typing import Any

import pytest
import torch
from datamodel_cases import Loop, internals, margin
from scipy.stats import spearmanr, t
from torch import Tensor

import epk_gp as epk
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
LOOP = Loop(optimizer="adam", steps=20, points=12)
X, Y = LOOP.asked
PAIRS = 4


@pytest.fixture(scope="module")
def forecast_model() -> Any:
    return epk.datamodel(LOOP.run, X, Y, pairs=PAIRS, seed=3)


def changes(model: Any, halves: Tensor) -> dict[str, Tensor]:
    """Return what both methods predict, without a unit."""
    return {"path training": model.predict(halves) - model.outputs, "path ridge": (halves - 1) @ model.scores.T}


def mean_spearman(a: Tensor, b: Tensor) -> float:
    """The mean rank correlation, as of infinitely many networks: found by halving, from the mean of m normal pairs."""
    return of_many(float(sum(spearmanr(x, y).statistic for x, y in zip(a.T, b.T, strict=True)) / a.shape[1]), len(a))


def of_many(found: float, m: int) -> float:
    if abs(found) >= 1:
        return found
    low, high = -1.0, 1.0
    for _ in range(80):
        rho = (low + high) / 2
        mean = 6 / (math.pi * (m + 1)) * (math.asin(rho) + (m - 2) * math.asin(rho / 2))
        low, high = (rho, high) if mean < found else (low, rho)
    return 6 / math.pi * math.asin((low + high) / 4)


def test_rank_correlations_of_few_normal_pairs_stand_for_those_of_many() -> None:
    """A control: without the correction they are too small by .05."""
    agreement, rho = internals("model")._rank_agreement, 0.82
    x, e = random(10, 20_000), random(10, 20_000, seed=1)
    y = rho * x + (1 - rho**2) ** 0.5 * e
    many = 6 / math.pi * math.asin(rho / 2)
    plain = sum(spearmanr(a, b).statistic for a, b in zip(x.T[:2000], y.T[:2000], strict=True)) / 2000
    assert agreement(x, y) == pytest.approx(many, abs=0.005)
    assert plain < many - 0.04


def test_halves_are_complementary_and_follow_the_seed(forecast_model: Any) -> None:
    halves = forecast_model.forecast.sample_weights
    assert halves.shape == (2 * PAIRS, 12)
    assert bool((halves.sum(dim=1) == 6).all())
    assert bool((halves[::2] + halves[1::2] == 1).all())
    draw = internals("model")._complementary_halves
    assert torch.equal(draw(12, 3, 3), halves[:6])
    assert not torch.equal(draw(12, 3, 4), halves[:6])
    odd = draw(11, 3, 0)  # all samples are in one half of each pair
    assert bool((odd[::2] + odd[1::2] == 1).all())
    assert odd.sum(dim=1).tolist() == [5, 6] * 3


def test_the_measured_numbers_are_those_of_retraining(forecast_model: Any) -> None:
    found = forecast_model.forecast
    networks = epk.retrain(LOOP.run, found.sample_weights)
    logits = networks.outputs(X, head="logits")
    assert_close(found.measured, torch.stack([margin(z, Y) for z in logits]))


def test_the_forecast_is_that_of_a_hand_computation(forecast_model: Any) -> None:
    found = forecast_model.forecast
    predicted = changes(LOOP.model, found.sample_weights)[found.method]
    assert found.lds == pytest.approx(mean_spearman(predicted, found.measured), abs=1e-10)
    x, y = predicted, found.measured - forecast_model.outputs
    slope = float(torch.linalg.lstsq(x.reshape(-1, 1), y.reshape(-1, 1)).solution)
    assert found.slope == pytest.approx(slope) != 1
    assert found.scatter == pytest.approx(float((y - slope * x).square().mean().sqrt()))
    without = []
    for pair in range(PAIRS):
        rest = torch.arange(2 * PAIRS) // 2 != pair
        without.append(mean_spearman(predicted[rest], found.measured[rest]))
    spread = torch.tensor(without, dtype=torch.float64)
    wide = t.ppf(0.975, PAIRS - 1) * float(((PAIRS - 1) * spread.var(correction=0)).sqrt())
    expected = max(-1.0, found.lds - wide), min(1.0, found.lds + wide)
    assert found.interval == pytest.approx(expected)


def test_a_forecast_sets_the_unit_of_predictions_and_no_score(forecast_model: Any) -> None:
    kept = (torch.arange(12) % 3 != 0).double()
    change = changes(LOOP.model, kept[None])[forecast_model.method][0]
    expected = forecast_model.outputs + forecast_model.forecast.slope * change
    assert_close(forecast_model.predict(kept), expected)
    assert torch.equal(forecast_model.scores, LOOP.model.scores)
    assert torch.equal(forecast_model.predict(torch.ones(12)), forecast_model.outputs)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_slope_is_that_of_whole_changes_and_is_taken_only_if_it_helps_on_other_pairs() -> None:
    """A shift that all halves share belongs to the change: of the differences alone, the first slope would be 2."""
    forecast, halves, x = internals("model")._forecast, torch.zeros(8, 5), random(8, 6)
    outputs = random(6, seed=4)
    for predicted, measured, slope in (
        (x + 10, 2 * x + 10, pytest.approx(1, abs=0.05)),
        (x + 10, 3 * x + 30, pytest.approx(3)),
        (x, random(8, 6, seed=5) * torch.tensor([100.0, 100, 0, 0, 0, 0, 0, 0])[:, None] + x, 1),
    ):
        found = forecast({"path training": predicted}, measured + outputs, halves, outputs).slope
        assert found == slope
    assert abs(float((predicted * measured).sum() / predicted.square().sum()) - 1) > 0.1  # a fit to all pairs


def test_the_other_method_counts_only_if_it_is_better_beyond_chance() -> None:
    forecast, halves = internals("model")._forecast, torch.zeros(8, 5)
    measured = random(8, 6)
    good, bad = measured + 0.05 * random(8, 6, seed=1), random(8, 6, seed=2)
    nearly = measured + 0.06 * random(8, 6, seed=3)
    names = ("path training", "path ridge")
    for first, second, best in ((good, bad, 0), (bad, good, 1), (good, nearly, 0), (nearly, good, 0)):
        found = forecast(dict(zip(names, (first, second), strict=True)), measured, halves, torch.zeros(6))
        assert found.method == names[best]


def test_a_model_that_predicts_by_path_ridge_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals("model"), "_jackknife", lambda without: -10.0)  # the second method is always taken
    model = epk.datamodel(LOOP.run, X, Y, pairs=3)
    assert model.method == "path ridge"
    kept = (torch.arange(12) % 3 != 0).double()
    expected = model.outputs + model.forecast.slope * ((kept - 1) @ model.scores.T)
    assert_close(model.predict(kept), expected)
    assert "path ridge" in str(model)


def test_questions_that_do_not_vary_have_no_rank() -> None:
    agreement = internals("model")._rank_agreement
    a = random(6, 3)
    b = torch.stack([a[:, 0], torch.ones(6).double(), -a[:, 2]], dim=1)
    assert agreement(b, a) == pytest.approx(0.0)
    tied = torch.tensor([[0.0, 1, 1, 2, 3, 3]]).T
    assert agreement(tied, a[:, :1]) == pytest.approx(of_many(spearmanr(tied[:, 0], a[:, 0]).statistic, 6))


QUESTIONS: dict[str, dict[str, Any]] = {
    "log-odds": {"y": Y},
    "an output": {"classes": Y},
    "a logit": {"classes": Y, "head": "logits"},
    "a function": {"function": lambda z: z.softmax(dim=1)[:, :2]},
}


@pytest.mark.parametrize("asked", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_what_is_verified_is_what_networks_say_that_are_trained_again(asked: dict[str, Any]) -> None:
    model = epk.datamodel(LOOP.run, X, **asked)
    kept = torch.ones(3, 12, dtype=torch.bool)
    kept[0, :6] = kept[1, ::2] = kept[2, 3] = False
    found = model.verify(kept)
    z = epk.retrain(LOOP.run, kept.double()).outputs(X, head="logits")
    numbers = {
        "y": lambda z: margin(z, Y),
        "classes": lambda z: (z if "head" in asked else z.log_softmax(dim=1))[range(4), Y],
        "function": lambda z: asked["function"](z).flatten(),
    }[next(name for name in ("y", "classes", "function") if name in asked)]
    assert_close(found.measured, torch.stack([numbers(own) for own in z]))
    assert torch.equal(found.predicted, model.predict(kept))
    assert torch.equal(found.outputs, model.outputs)
    x, y = ((value - model.outputs).flatten() for value in (found.predicted, found.measured))
    assert found.correlation == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))
    assert found.slope == pytest.approx(float((x @ y) / (x @ x)))
    assert model.verify(kept[0]).measured.shape == found.measured[:1].shape


def test_a_derivative_makes_predictions_of_single_samples_better() -> None:
    """By a quarter of what path training's own misses: the control of what it is for."""
    plain, corrected = (epk.datamodel(LOOP.run, X, Y, derivative=is_asked) for is_asked in (False, True))
    left_out = 1 - torch.eye(12)
    measured = plain.verify(left_out).measured
    miss = [float((model.predict(left_out) - measured).norm()) for model in (plain, corrected)]
    assert miss[1] < miss[0]


def test_top_samples_are_the_largest_scores() -> None:
    samples, scores = LOOP.model.top(2, 5)
    expected = LOOP.model.scores[2].sort(descending=True)
    assert torch.equal(samples, expected.indices[:5])
    assert torch.equal(scores, expected.values[:5])
    assert LOOP.model.top(0).samples.shape == (10,)
    assert LOOP.model.top(0, 1).samples.tolist() == [int(LOOP.model.scores[0].argmax())]


def test_a_model_names_what_it_holds(forecast_model: Any) -> None:
    text, forecast = str(LOOP.model), forecast_model.forecast
    words = ("Datamodel of 12 training samples for 4 questions", "path training", "path ridge", "exact metric")
    for word in (*words, "96 gradients at 6 states", "those of 240 rows", "pairs=5", "influence"):
        assert word in " ".join(text.split()), word
    text = " ".join(str(forecast_model).split())
    assert f"LDS {forecast.lds:.2f}" in text
    assert f"slope {forecast.slope:.2f}" in text
    assert "from 8 networks" in text
    assert forecast_model.method in text
    text = str(forecast)
    assert f"{forecast.lds:.2f} (95 % [{forecast.interval[0]:.2f}" in text
    assert "tensor" not in text


@pytest.mark.parametrize("name", ["y", "classes", "function"])
def test_a_frame_has_a_row_for_each_question_and_a_column_for_each_sample(name: str) -> None:
    asked = {"y": Y} if name == "y" else {"classes": Y} if name == "classes" else QUESTIONS["a function"]
    model = epk.datamodel(LOOP.run, X, **asked)
    frame, K = model.to_frame(), 2 if name == "function" else 1
    kind = {"y": "log-odds", "classes": "output", "function": "number"}[name]
    assert frame.index.names == ["point", kind]
    assert frame.index.tolist() == [(point, k) for point in range(4) for k in range(K)]
    assert frame["scores"].columns.tolist() == list(range(12))
    assert_close(torch.tensor(frame["scores"].to_numpy()), model.scores)
    assert_close(torch.tensor(frame["outputs"].to_numpy()), model.outputs)


def test_a_verification_names_what_it_compares() -> None:
    kept = torch.ones(3, 12)
    kept[0, :6] = kept[1, ::2] = kept[2, 3] = 0
    found = LOOP.model.verify(kept)
    text = " ".join(str(found).split())
    assert "3 networks trained again, 4 questions" in text
    assert f"correlation {found.correlation:.2f}, slope {found.slope:.2f}" in text
    assert f"LDS {mean_spearman(found.predicted, found.measured):.2f}" in text
    assert "LDS" not in str(LOOP.model.verify(kept[:2]))
