"""Path ridge is its formula with explicit Jacobians and the optimizer's own number for each weight."""

import pytest
import torch
from datamodel_cases import Dense, Loop, dense, internals

import epk_gp as epk
from helpers import assert_close

TIGHT = 1e-10 / torch.finfo(torch.float64).eps
LOOPS = {
    "mlp adam": Loop("mlp", "adam"),
    "mlp sgd": Loop("mlp", "sgd", steps=14),
    "cnn adamw in batches": Loop("cnn", "adamw", batch=4),
    "cnn momentum": Loop("cnn", "momentum"),
    "layer norm nesterov, schedule": Loop("layer_norm", "nesterov", decay=0.8),
    "layer norm adam, schedule": Loop("layer_norm", "adam", decay=0.9, batch=5),
    "batch norm adam, groups": Loop("batch_norm", "adam_groups"),
    "batch norm momentum in batches": Loop("batch_norm", "momentum", batch=6),
    "tokens rmsprop": Loop("tokens", "rmsprop"),
    "tokens adam, groups, schedule": Loop("tokens", "adam_groups", decay=0.85),
    "attention adamw": Loop("attention", "adamw"),
    "attention sgd, groups": Loop("attention", "sgd_groups", decay=0.9, batch=4),
}
EVEN = {name: loop for name, loop in LOOPS.items() if loop.optimizer in ("sgd", "momentum", "nesterov", "sgd_groups")}
every_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())


@every_loop
def test_scores_are_the_dense_formula(loop: Loop) -> None:
    reference, model = dense(loop), loop.model
    assert model.metric == "exact"
    assert_close(torch.stack(model.trainings[0].kernels), reference.kernels, rounding=TIGHT)
    assert_close(model.scores, reference.ridge(), rounding=TIGHT)


@pytest.mark.parametrize("loop", EVEN.values(), ids=EVEN.keys())
def test_one_number_for_each_parameter_goes_into_both_factors_exactly(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    assert_close(epk.datamodel(loop.run, *loop.asked).scores, loop.model.scores, rounding=TIGHT)


def test_factors_of_adam_s_metric_are_named_and_near(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LOOPS["mlp adam"]
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    factored = epk.datamodel(loop.run, *loop.asked)
    assert factored.metric == "factored"
    distance = float((factored.scores - loop.model.scores).norm() / loop.model.scores.norm())
    assert 1e-3 < distance < 0.3
