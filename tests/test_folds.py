"""What folds of a table choose, and what rows they give to whom."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import KFold, PredefinedSplit, ShuffleSplit, TimeSeriesSplit, check_cv
from torch import nn

import epk_gp as epk
from animals import WEIGHTS, table
from epk_gp.estimator import STEPS, LinearAndHidden, line


@pytest.mark.slow
def test_folds_choose_a_line_for_a_line_and_a_curve_for_a_curve():
    rng = np.random.default_rng(0)
    many = rng.uniform(-1, 1, size=(120, 20))
    flat = many @ np.r_[np.ones(6), np.zeros(14)] + 0.5 * rng.normal(size=120)
    few, bent = many[:, :2], np.sin(4 * many[:, 0]) + 0.1 * rng.normal(size=120)
    for X, y, is_line in ((many, flat, True), (few, bent, False)):
        model = epk.EPKRegressor(random_state=0, cv=2).fit(X, y)
        assert (model.network_.net.hidden is None) == is_line
        losses = {(k, steps): loss for k, own in enumerate(model.fold_losses_) for steps, loss in own.items()}
        assert min(losses, key=losses.get)[1] == model.steps_ == model.trajectory_.num_steps
        assert {steps for _, steps in losses} <= {*STEPS}
        residual = (model.out_of_fold_[:, 0].numpy() - y) / y.std()
        assert (residual**2).mean() == pytest.approx(min(losses.values()), rel=1e-9)
        assert (residual**2).mean() > ((model.predict(X) - y) ** 2).mean() / y.var()  # which has seen them
        assert torch.is_grad_enabled()  # as before: folds wait for each other
    given = epk.EPKRegressor(line, steps=30, random_state=0).fit(many, flat)
    assert (given.steps_, given.fold_losses_, given.out_of_fold_) == (30, None, None)


def test_held_out_rows_are_predicted_by_a_network_that_did_not_see_them():
    """Each fold by hand: the same training on the other rows alone; in batches and with weights too."""
    X, _, targets = table(45, 0)
    splits = [(np.delete(np.arange(45), np.s_[k::3]), np.arange(45)[k::3]) for k in range(3)]
    weights = WEIGHTS + 0.5
    for settings in ({}, {"batch_size": 7}):
        networks = [LinearAndHidden(3, 1), line]
        model = epk.EPKRegressor(networks, steps=12, random_state=0, cv=splits, **settings)
        model.fit(X, targets["mass"], sample_weight=weights)
        chosen = networks[int(model.network_.net.hidden is None)]
        for trained, held_out in splits:
            alone = epk.EPKRegressor(chosen, steps=12, random_state=0, **settings)
            alone.fit(X.iloc[trained], targets["mass"].iloc[trained], sample_weight=weights[trained])
            np.testing.assert_allclose(model.out_of_fold_[held_out, 0], alone.predict(X.iloc[held_out]), rtol=1e-5)


def test_copies_of_a_row_are_in_one_fold_and_rows_of_weight_zero_in_none():
    X, kind, _ = table(45, 0)
    twice = pd.concat([X, X])
    model = epk.EPKClassifier(steps=10, random_state=0).fit(twice, np.r_[kind, kind])
    torch.testing.assert_close(model.out_of_fold_[:45], model.out_of_fold_[45:])
    once = epk.EPKClassifier(steps=10, random_state=0).fit(X, kind)
    torch.testing.assert_close(model.out_of_fold_[:45], once.out_of_fold_, rtol=1e-4, atol=1e-4)
    weighted = epk.EPKClassifier(steps=10, random_state=0).fit(X, kind, sample_weight=WEIGHTS)
    assert (weighted.out_of_fold_.isnan().all(1).numpy() == (WEIGHTS == 0)).all()


SPLITTERS = [KFold(4, shuffle=True, random_state=1), TimeSeriesSplit(3), PredefinedSplit(np.arange(45) % 4 - 1), None]


@pytest.mark.parametrize("cv", [*SPLITTERS, "pairs", "masks"])
def test_rows_of_weight_zero_are_as_left_out_whatever_divides_the_rows(cv):
    X, _, targets = table(45, 0)
    kept, place = np.flatnonzero(WEIGHTS), np.cumsum(WEIGHTS != 0) - 1
    if isinstance(cv, str):
        splits = [(np.flatnonzero(np.arange(45) % 3 != k), np.flatnonzero(np.arange(45) % 3 == k)) for k in range(2)]
        cv = splits if cv == "pairs" else [tuple(np.isin(np.arange(45), own) for own in pair) for pair in splits]
    else:
        splits = [*check_cv(cv).split(X)]
    without = [tuple(place[own[WEIGHTS[own] != 0]] for own in pair) for pair in splits]
    networks = [line, LinearAndHidden]
    model = epk.EPKRegressor(networks, steps=30, cv=cv, random_state=0)
    model.fit(X, targets["mass"], sample_weight=WEIGHTS)
    other = epk.EPKRegressor(networks, steps=30, cv=without, random_state=0)
    other.fit(X.iloc[kept], targets["mass"].iloc[kept], sample_weight=WEIGHTS[kept])
    for found, expected in zip(model.fold_losses_, other.fold_losses_, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.out_of_fold_[kept], other.out_of_fold_, rtol=1e-5, atol=1e-3, equal_nan=True)
    assert model.out_of_fold_[WEIGHTS == 0].isnan().all()


def test_a_function_that_returns_one_module_again_and_again_is_as_the_module():
    X, _, targets = table(45, 0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    before = [p.clone() for p in net.parameters()]
    own, made = (
        epk.EPKRegressor(network, steps=40, cv=3, random_state=0).fit(X, targets["mass"])
        for network in ([net, net], [lambda d, t: net, lambda d, t: net])
    )
    assert own.fold_losses_ == made.fold_losses_
    assert all(torch.equal(p, q) and p.dtype == torch.float32 for p, q in zip(net.parameters(), before, strict=True))


def test_a_seed_fixes_what_a_network_draws_in_training():
    X, kind, _ = table(45, 0)
    state = torch.get_rng_state()

    def fitted(seed):
        network = lambda d, c: nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.3), nn.Linear(8, c))  # noqa: E731
        return epk.EPKClassifier([network, line], steps=20, random_state=seed).fit(X, kind)

    models = [fitted(0), fitted(0), fitted(1)]
    np.testing.assert_array_equal(models[0].predict_proba(X), models[1].predict_proba(X))
    assert models[0].fold_losses_ == models[1].fold_losses_ != models[2].fold_losses_
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_in_no_fold_leave_the_classifier_its_others():
    X, kind, _ = table(60, 0)
    new, known, _ = table(45, 1)
    model = epk.EPKClassifier(line, cv=ShuffleSplit(2, test_size=0.3, random_state=0), random_state=0).fit(X, kind)
    judged = model.uncertain_classifier(new, known)
    assert judged.stacking_.num_labels == 45 + int((~model.out_of_fold_.isnan().any(1)).sum()) < 105
