"""`EPKClassifier` and `EPKRegressor` on data frames: names, weights of rows, error bars, and scikit-learn's tools."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

import epk_gp as epk
from animals import KINDS, WEIGHTS, table
from epk_gp.estimator import LinearAndHidden, line, waves


@pytest.fixture(scope="module")
def classifier():
    X, kind, _ = table(45, 0)
    return epk.EPKClassifier(steps=20, random_state=0).fit(X, kind)


@pytest.fixture(scope="module")
def regressor():
    X, _, targets = table(45, 0)
    return epk.EPKRegressor(steps=60, random_state=0).fit(X, targets)


def test_an_attribution_has_the_names_of_rows_and_classes(classifier):
    X = table(4, 1)[0]
    frame = classifier.attribute(X).to_frame()
    assert list(frame.index.get_level_values("point").unique()) == list(X.index)
    assert list(frame.index.get_level_values("output")) == [*KINDS] * 4
    assert list(frame["samples"].columns) == list(classifier.index_) == list(table(45, 0)[0].index)
    expected = epk.attribute(classifier.trajectory_, torch.tensor(X.to_numpy()))
    np.testing.assert_array_equal(frame["samples"].to_numpy(), expected.samples.flatten(0, 1))
    one = classifier.attribute(X, classes=classifier.predict(X))
    assert list(one.to_frame().index) == list(zip(X.index, classifier.predict(X), strict=True))
    plain = epk.EPKClassifier(steps=1).fit(*(np.asarray(part) for part in table(45, 0)[:2]))
    frame = plain.attribute(X.to_numpy()).to_frame()
    assert (frame.index[0], frame["samples"].columns[-1], plain.index_) == ((0, "ant"), 44, None)


def test_suspicious_labels_have_the_names_of_rows_and_classes():
    X, kind, _ = table(60, 0)
    X, kind[7] = X + 2 * np.eye(3)[np.arange(60) % 3], "cat"
    classifier = epk.EPKClassifier(steps=20, random_state=0).fit(X, kind)
    frame = classifier.label_errors(nodes=3).to_frame()
    assert frame.index.name == "sample"
    assert set(frame.index) == set(X.index)
    assert "animal 0.7" in frame.index[:6]
    assert set(frame["predicted"]) == set(KINDS)


def test_a_report_has_the_names_of_features_and_outputs(classifier, regressor, tmp_path):
    X, kind, targets = table(6, 1)
    for name, model, y in (("c", classifier, kind), ("r", regressor, targets)):
        page = model.report(tmp_path / f"{name}.html", X, y, explained=1, kernel_points=0).read_text()
        expected = [*X.columns, *(KINDS if model is classifier else targets.columns)]
        assert [word for word in expected if f'"{word}"' not in page] == []


def test_contributions_of_a_regressor_are_in_the_units_of_its_targets(regressor):
    X, _, targets = table(8, 1)
    frame = regressor.attribute(X).to_frame()
    np.testing.assert_allclose(frame.sum(axis=1).unstack("output")[["mass", "age"]], regressor.predict(X), rtol=1e-10)
    assert regressor.attribute(X).certified
    assert regressor.target_names_ == ["mass", "age"]
    start = frame[("initial", "")].xs("mass", level="output")
    assert np.abs(start - 1000).max() < 600  # around the mean, before training
    assert regressor.score(X, targets) > 0.3


def test_targets_may_be_one_series_one_array_or_several_columns(regressor):
    X, _, targets = table(45, 0)
    single = epk.EPKRegressor(steps=5, random_state=0)
    assert single.fit(X, targets["mass"]).attribute(X[:1]).to_frame().index[0] == ("animal 0.0", "mass")
    assert single.predict(X[:4]).shape == (4,)
    assert single.fit(X, targets["mass"].to_numpy()).target_names_ is None
    assert single.attribute(X[:1]).to_frame().index[0] == ("animal 0.0", 0)
    assert regressor.predict(X[:4]).shape == (4, 2)
    assert [values.shape for values in regressor.predict(X[:4], return_std=True)] == [(4, 2)] * 2


def test_error_bars_cover_new_targets_and_keep_the_prediction(regressor):
    X, _, targets = table(300, 2)
    mean, std = regressor.predict(X, return_std=True)  # no warning: the rows are as the training rows, and new
    np.testing.assert_array_equal(mean, regressor.predict(X))
    covered = (np.abs(targets.to_numpy() - mean) < 1.645 * std).mean(axis=0)
    assert (covered > 0.8).all()  # of 0.9
    assert (covered < 1).all()
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_allclose(again.predict(X[:5], return_std=True)[1], std[:5], rtol=1e-6)
    other = epk.EPKRegressor(steps=20, random_state=0).fit(X, targets["mass"])
    first = other.predict(X[:5], return_std=True)[1]
    other.fit(X, 10 * targets["mass"])
    np.testing.assert_allclose(other.predict(X[:5], return_std=True)[1], 10 * first, rtol=1e-3)  # of the new fit


UNITS, ORIGIN = np.array([1e9, 3e-5, 40.0, 7.0]), np.array([1.7e18, -2e-4, 1e3, 5.0])


def in_other_units(X):
    """A table with a column that is constant, in units far from 1: a time in nanoseconds, a share, degrees."""
    return X.assign(constant=0.0) * UNITS + ORIGIN


@pytest.mark.slow
@pytest.mark.parametrize("kind", [epk.EPKClassifier, epk.EPKRegressor])
def test_answers_do_not_depend_on_the_units_of_the_columns(kind):
    X, classes, targets = table(45, 0)
    new = table(20, 1)[0]
    y = pd.Series(classes, index=X.index) if kind is epk.EPKClassifier else targets["mass"]
    given = {"network": [LinearAndHidden, waves], "steps": 25, "random_state": 0, "cv": 2}
    models = [kind(**given).fit(own, y) for own in (X.assign(constant=0.0), in_other_units(X))]
    expected, found = (
        m.attribute(own) for m, own in zip(models, (new.assign(constant=0.0), in_other_units(new)), strict=True)
    )
    scale = 1 if kind is epk.EPKClassifier else targets["mass"].std()
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-5 * scale)
    assert found.certified
    if kind is epk.EPKRegressor:  # as on the run itself, on the rows as they are
        np.testing.assert_allclose(found.network[:, 0], models[1].predict(in_other_units(new)), rtol=1e-12)
    raw = kind(**given, standardize=False).fit(X.assign(constant=0.0), y)  # the control
    assert (raw.attribute(new.assign(constant=0.0)).samples - expected.samples).abs().max() > 1e-3 * scale
    own = epk.attribute(models[1].trajectory_, torch.tensor(in_other_units(new).to_numpy()))
    torch.testing.assert_close(own.samples, found.samples)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["exact", 1024])
def test_scores_do_not_depend_on_the_units_of_the_columns(features, tmp_path):
    """The RBF kernel's distances are in the network's units, in a file too; float32 would not tell the rows apart."""
    (X, y, _), (held_out, labels, _) = table(45, 0), table(30, 1)
    plain, scaled = (lambda table: table.assign(constant=0.0)), in_other_units
    judged, net = [], LinearAndHidden(4, 3)
    for in_units in (plain, scaled):
        model = epk.EPKClassifier(net, steps=25, random_state=0).fit(in_units(X), y)
        judged.append(model.uncertain_classifier(in_units(held_out), labels, nodes=3, features=features))
        judged[-1].save(tmp_path / str(len(judged)))
    expected, found = (u.uncertainty(in_units(held_out)) for u, in_units in zip(judged, (plain, scaled), strict=True))
    tolerance = 1e-3 if features == "exact" else 0.05  # of two sketches
    for score in ("error", "out_of_distribution"):
        np.testing.assert_allclose(getattr(found, score), getattr(expected, score), rtol=0.05, atol=tolerance)
    assert list(found.to_frame().index) == list(held_out.index)
    read = epk.UncertainClassifier.load(tmp_path / "2", LinearAndHidden(4, 3))  # the network that fit() was given
    assert list(read.feature_names_in_) == [*X.columns, "constant"]
    np.testing.assert_allclose(read.uncertainty(scaled(held_out)).error, found.error, rtol=1e-6)
    again = pickle.loads(pickle.dumps(judged[1]))
    np.testing.assert_allclose(again.predict_proba(scaled(X)), judged[1].predict_proba(scaled(X)), rtol=1e-9)


def test_codes_of_categories_reach_a_network_as_they_are():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, x):
            return self.table(x[:, 0].long())

    codes = np.arange(40)[:, None] % 4
    kind = KINDS[codes[:, 0] % 3]
    model = epk.EPKClassifier(Codes(), steps=50, random_state=0, standardize=False).fit(codes, kind)
    weights = model.trajectory_.weights(-1)["net.table.weight"]
    np.testing.assert_allclose(model.predict_proba(codes), weights.softmax(1).numpy()[codes[:, 0]], rtol=1e-12)


@pytest.mark.slow
def test_training_that_makes_it_worse_than_a_constant_is_an_error_and_one_that_is_no_better_a_warning():
    X, kind, targets = table(45, 0)
    noise = np.random.default_rng(3).normal(size=45)
    for model, y in ((epk.EPKRegressor(lr=90, steps=20), targets), (epk.EPKClassifier(lr=300, steps=20), kind)):
        with pytest.raises(ValueError, match="training diverged"):
            model.set_params(random_state=0).fit(X, y)
        assert not hasattr(model, "trajectory_")
    given = {"network": nn.Linear, "lr": 1e-6, "steps": 2}
    for model, y in ((epk.EPKRegressor(**given), noise), (epk.EPKClassifier(**given), noise > 0)):
        with pytest.warns(ConvergenceWarning, match="nothing better than a constant: its loss is .*, before the first"):
            model.set_params(random_state=0).fit(X, y)


@pytest.mark.slow
def test_bars_grow_outside_the_training_rows_and_a_warning_tells_of_rows_that_are_far():
    x = np.random.default_rng(0).uniform(-1, 1, 60)
    X, y = pd.DataFrame({"depth": x, "other": 0.0}), np.sin(3 * x) + 0.1 * np.random.default_rng(1).normal(size=60)
    given = {"network": LinearAndHidden, "steps": 480, "random_state": 0}
    model = epk.EPKRegressor(**given).fit(X, y)
    inside = model.uncertainty(X)
    assert (inside.distance <= 1e-6).all()  # rows that it has seen
    assert not inside.columns_outside.any()
    wide = X.assign(depth=2 * x)
    mean, std = model.predict(wide, return_std=True)  # no warning
    is_far = np.abs(wide["depth"]) > 1.5
    covered = np.abs(np.sin(6 * x) - mean) < 1.645 * std
    assert covered[is_far].mean() > 0.8  # of 0.9
    assert std[is_far].min() > 2 * inside.std.max()
    frame = model.uncertainty(wide).to_frame()
    assert (frame["columns_outside"] == (wide["depth"].abs() > np.abs(x).max())).mean() > 0.95  # both ends differ
    with pytest.warns(UserWarning, match=r"\d+ of 60 rows are more than 3 times as far .* row \d+ for one"):
        model.predict(X.assign(depth=30 * x), return_std=True)
    path = epk.EPKRegressor(**given, process="path").fit(X, y)  # the control
    np.testing.assert_array_equal(path.predict(wide), mean)
    assert path.predict(wide, return_std=True)[1][is_far].mean() < 0.7 * std[is_far].mean()
    weighted = epk.EPKRegressor(steps=20, random_state=0).fit(X, y, sample_weight=x < 0)
    assert weighted.uncertainty(X[x > 0.6]).distance.min() > 1  # rows of weight 0 are no training rows


def test_predictions_with_bars_are_a_table_with_the_names_of_rows_and_targets(regressor):
    X, _, targets = table(4, 1)
    u = regressor.uncertainty(X)
    frame = u.to_frame()
    assert list(frame.index) == [(row, name) for row in X.index for name in ("mass", "age")]
    np.testing.assert_array_equal(frame["std"].unstack("output")[["mass", "age"]], u.std)
    np.testing.assert_array_equal(frame["distance"].xs("age", level="output"), u.distance)
    low, high = u.interval(0.5)
    np.testing.assert_allclose((high - low) / u.std, 2 * 0.67449, rtol=1e-5)
    single = epk.EPKRegressor(steps=5, random_state=0).fit(X, targets["mass"]).uncertainty(X[:2])
    assert list(single.to_frame().columns) == ["mean", "std", "distance", "columns_outside"]
    assert list(single.to_frame().index) == list(X.index[:2])
    assert "Predictions of 2 rows with error bars" in repr(single)
    assert "(4, 2)" in repr(u)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        u.interval(90)


@pytest.mark.slow
def test_bars_follow_a_noise_that_depends_on_the_row():
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(600, 2))
    scale = 0.05 + X[:, 1]
    y = 3 * X[:, 0] + scale * rng.normal(size=600)
    model = epk.EPKRegressor(line, steps=200, random_state=0).fit(X[:300], y[:300])
    u = model.uncertainty(X[300:])
    assert np.corrcoef(u.std, scale[300:])[0, 1] > 0.9
    low, high = u.interval(0.9)
    covered, is_quiet = (low <= y[300:]) & (y[300:] <= high), scale[300:] < 0.3
    assert 0.8 < covered[is_quiet].mean() < 0.99  # one noise for all covers 1.0 there, and 0.84 elsewhere
    assert 0.8 < covered[~is_quiet].mean() < 0.99


@pytest.mark.parametrize(("mean", "scale"), [(2e5, 8e4), (0, 1e5), (0, 1e-6), (0, 1e-12)])
def test_contributions_are_certified_and_exact_in_any_unit_of_the_targets(mean, scale):
    """In units of the targets: a small one must not make every error small, nor a large one a rounding error large."""
    X, _, targets = table(45, 0)
    y = (targets["mass"] - targets["mass"].mean()) / targets["mass"].std()
    network = lambda d, t: nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, t))  # noqa: E731
    model = epk.EPKRegressor(network, steps=100, random_state=0).fit(X, mean + scale * y)
    new = table(12, 1)[0]
    result = model.attribute(new)  # a warning is an error
    assert result.certified
    np.testing.assert_allclose(result.to_frame().sum(axis=1), model.predict(new), rtol=0, atol=1e-10 * scale)
    assert result.error_tolerance < 1e-6 * (mean + scale)


def test_a_function_of_the_output_has_its_own_unit():
    X, _, targets = table(45, 0)
    scale = 1e9
    model = epk.EPKRegressor(waves, steps=40, random_state=0).fit(X, scale * targets["mass"])
    result = model.attribute(table(6, 1)[0], function=lambda z: (z[:, 0] / scale / 1000).exp())
    assert result.certified
    assert result.max_error < 1e-10
    assert result.error_tolerance < 1e-5


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_networks_with_weights_that_hooks_compute_are_trained():
    X, _, targets = table(45, 0)
    network = lambda d, t: nn.Sequential(nn.utils.weight_norm(nn.Linear(d, 8)), nn.Tanh(), nn.Linear(8, t))  # noqa: E731
    model = epk.EPKRegressor([network, line], steps=40, random_state=0).fit(X, targets["mass"])
    assert model.score(X, targets["mass"]) > 0.5


def test_names_of_targets_may_be_tuples():
    X, _, targets = table(45, 0)
    targets.columns = pd.MultiIndex.from_tuples([("size", "mass"), ("size", "age")])
    model = epk.EPKRegressor(line, steps=5).fit(X, targets)
    frame = model.attribute(X[:2]).to_frame()
    assert list(frame.index.get_level_values("output")) == [*targets.columns] * 2


def test_the_trained_network_takes_rows_in_their_units_and_can_be_exported(regressor, tmp_path):
    X = torch.tensor(table(4, 1)[0].to_numpy())
    program = torch.export.export(regressor.network_, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.export.save(program, tmp_path / "network.pt2")
    served = torch.export.load(tmp_path / "network.pt2").module()
    for rows in (X, X[:2]):
        np.testing.assert_allclose(served(rows).detach(), regressor.predict(table(4, 1)[0])[: len(rows)], rtol=1e-12)
    single = regressor.network_.float()(X.float())
    np.testing.assert_allclose(single.detach(), regressor.predict(table(4, 1)[0]), rtol=1e-4)
    regressor.network_.double()


def test_a_constant_target_is_predicted():
    X = table(20, 0)[0]
    model = epk.EPKRegressor(LinearAndHidden, steps=100, random_state=0).fit(X, np.full(20, 0.1))
    np.testing.assert_allclose(model.predict(X), 0.1, atol=0.05)


@pytest.mark.parametrize("kind", [epk.EPKClassifier, epk.EPKRegressor])
def test_a_weight_of_two_is_the_row_twice(kind):
    X, classes, targets = table(45, 0)
    y = pd.Series(classes, index=X.index) if kind is epk.EPKClassifier else targets
    model = kind([line, waves], steps=25, random_state=0, cv=2)
    weighted = clone(model).fit(X, y, sample_weight=WEIGHTS / 3)
    repeated = clone(model).fit(X.loc[X.index.repeat(WEIGHTS)], y.loc[X.index.repeat(WEIGHTS)])
    new = table(10, 1)[0]
    np.testing.assert_allclose(weighted.attribute(new).network, repeated.attribute(new).network, rtol=1e-9)
    shares, copies = (m.attribute(new).to_frame()["samples"].T for m in (weighted, repeated))
    np.testing.assert_allclose(shares[WEIGHTS > 0], copies.groupby(level=0, sort=False).sum(), rtol=1e-7, atol=1e-12)
    assert (shares[WEIGHTS == 0] == 0).all(axis=None)
    assert weighted.attribute(new).certified
    unweighted = clone(model).fit(X, y)
    assert (weighted.attribute(new).network / unweighted.attribute(new).network - 1).abs().max() > 1e-3
    alike = clone(model).fit(X, y, sample_weight=np.full(45, 3)).attribute(new).network
    torch.testing.assert_close(alike, unweighted.attribute(new).network, rtol=1e-10, atol=1e-12)


def test_results_are_those_of_a_fit_without_the_rows_of_weight_zero():
    X, classes, targets = table(45, 0)
    used = WEIGHTS > 0
    X[~used] += 30  # what they say of the scale of the inputs would be seen
    new, labels, _ = table(30, 1)
    weighted, fewer = (
        epk.EPKClassifier(steps=10, random_state=0).fit(*data)
        for data in ((X, classes, used), (X[used], classes[used]))
    )
    first, second = (model.label_errors(nodes=3).to_frame() for model in (weighted, fewer))
    assert set(first.index) == set(X.index[used])
    np.testing.assert_allclose(first["margin"], second["margin"][first.index], atol=0.02)  # each sketches on its own
    first, second = (model.uncertain_classifier(new, labels, nodes=3) for model in (weighted, fewer))
    lengths = [own.process_.kernel.lengthscale for own in (first, second)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-12)
    np.testing.assert_allclose(first.predict_proba(new), second.predict_proba(new), atol=0.02)
    (mean, std), (expected_mean, expected_std) = (
        epk.EPKRegressor(steps=10, random_state=0).fit(*data).predict(new, return_std=True)
        for data in ((X, targets, used), (X[used], targets[used]))
    )
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-9)
    np.testing.assert_allclose(std, expected_std, rtol=0.01)
    of_path = epk.EPKRegressor(steps=10, random_state=0, process="path").fit(X, targets, sample_weight=used)
    assert len(of_path.process_.points) == used.sum()


def test_rows_of_weight_zero_are_unseen_validation_points():
    X, classes, _ = table(75, 0)
    is_held_out = np.arange(75) >= 45
    model = epk.EPKClassifier(steps=10, random_state=0).fit(X, classes, sample_weight=~is_held_out)
    alone = epk.EPKClassifier(steps=10, random_state=0).fit(X[:45], classes[:45])
    held_out = X[is_held_out], classes[is_held_out]
    first, second = (own.uncertain_classifier(*held_out, nodes=3) for own in (model, alone))
    np.testing.assert_allclose(first.stacking_.process, second.stacking_.process, rtol=0.1)
    with pytest.raises(ValueError, match="30 of 30 are training points"):
        model.uncertain_classifier(X[:30], classes[:30], nodes=3)
    with pytest.raises(ValueError, match="30 of 30 are training points"):  # of the process
        model.uncertain_classifier(*held_out, nodes=3, points=None)


def test_one_target_of_each_row_is_chosen_by_its_name_or_number(regressor, classifier):
    X, _, targets = table(4, 1)
    every = regressor.attribute(X)
    asked, numbers = ["age", "mass", "mass", "age"], [1, 0, 0, 1]
    for classes in (asked, numbers, torch.tensor(numbers), pd.Series(asked)):
        parts = regressor.attribute(X, classes=classes)
        assert list(parts.to_frame().index) == list(zip(X.index, asked, strict=True))
        torch.testing.assert_close(parts.samples[:, 0], every.samples[torch.arange(4), numbers], rtol=1e-9, atol=1e-12)
    nameless = epk.EPKRegressor(steps=5, random_state=0).fit(X, targets.to_numpy())
    assert list(nameless.attribute(X, classes=numbers).to_frame().index) == list(zip(X.index, numbers, strict=True))
    years = epk.EPKRegressor(steps=5, random_state=0).fit(X, targets.set_axis([2025, 2026], axis=1))
    assert years.attribute(X[:1], classes=[2026]).to_frame().index[0][1] == 2026
    for model, classes in ((regressor, ["len"] * 4), (years, [0] * 4), (regressor, [0, 1, 2, 0]), (regressor, [0])):
        with pytest.raises(ValueError, match="classes must"):
            model.attribute(X, classes=classes)
    kinds = ["cat", "ant", "ant"]  # as many rows as classes
    assert list(classifier.attribute(X[:3], classes=kinds).to_frame().index.get_level_values("output")) == kinds


@pytest.mark.slow
def test_pipelines_grids_and_column_transformers_take_data_frames():
    X, kind, targets = table(60, 0)
    X["habitat"] = np.where(X["eye"] > 0, "wood", "field")
    numbers = ("number", StandardScaler(), make_column_selector(dtype_include="number"))
    columns = ColumnTransformer([numbers, ("word", OneHotEncoder(), ["habitat"])]).set_output(transform="default")
    for model, y in (
        (epk.EPKClassifier(steps=20, random_state=0), kind),
        (epk.EPKRegressor([line, LinearAndHidden], steps=60, random_state=0), targets),
    ):
        pipeline = make_pipeline(columns, model)
        assert cross_val_score(pipeline, X, y, cv=2).mean() > 0.25
        name = type(model).__name__.lower()
        grid = GridSearchCV(pipeline, {f"{name}__steps": [2, 30]}, cv=2)
        grid.fit(X, y, **{f"{name}__sample_weight": np.ones(60)})
        assert grid.best_params_ == {f"{name}__steps": 30}
        assert not hasattr(model, "trajectory_")  # clones were fitted
    named = make_pipeline(StandardScaler().set_output(transform="pandas"), clone(model)).fit(X[["wing", "leg"]], y)
    assert list(named[-1].feature_names_in_) == ["wing", "leg"]
    frame = named[-1].attribute(named[:-1].transform(X[["wing", "leg"]][:2])).to_frame()
    assert list(frame["samples"].columns) == list(X.index)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_a_run_is_resumed_with_the_recorded_weights_only(options, tmp_path):
    X, weights = torch.tensor(table(8, 0)[0].to_numpy()), torch.arange(8.0)

    def trained(steps, weights, folder="run"):
        net = Weighted()
        return epk.train(
            net, X, X[:, :1], optimizer=torch.optim.SGD(net.parameters(), lr=0.05), steps=steps,
            generator=torch.Generator().manual_seed(2), loss=epk.MeanSquaredError(), sample_weight=weights,
            folder=tmp_path / folder, resume=True, **options,
        )  # fmt: skip

    trained(2, weights)
    for other in (None, weights + 1):
        with pytest.raises(ValueError, match=r"stateful must have the names \['sample_weight of digest"):
            trained(4, other)
    assert trained(4, weights).digest == trained(4, weights, "whole").digest


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.w)[:, None] * self.w[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weighted_contributions_are_those_by_hand(reduction):
    """With batches: the divisor of a mean is that of the batch times the mean weight of all points."""
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randn(8, k, dtype=torch.float64, generator=generator) for k in (3, 1))
    weights, lr = torch.tensor([1.0, 2, 0, 3, 1, 0.5, 4, 1], dtype=torch.float64), 0.05
    net, order = Weighted(), torch.Generator().manual_seed(2)
    run = epk.train(
        net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=lr), steps=6, batch_size=3, check_every=1,
        generator=torch.Generator().manual_seed(2), loss=epk.MeanSquaredError(reduction), sample_weight=weights,
    )  # fmt: skip
    batches = [b for _ in range(2) for b in torch.randperm(8, generator=order).split(3)]
    nodes, shares = np.polynomial.legendre.leggauss(20)
    w, point, by_hand = Weighted().w.detach(), torch.ones(1, 3, dtype=torch.float64), torch.zeros(8).double()

    def gradient(function, at):
        return torch.autograd.functional.jacobian(function, at)

    def output(x, at):
        return (torch.tanh(x @ at)[:, None] * at[0])[:, 0]

    for batch in batches[: run.num_steps]:
        c = weights[batch] / (len(batch) * weights.mean() if reduction == "mean" else 1)
        losses = gradient(lambda at, batch=batch: (output(X[batch], at) - y[batch, 0]) ** 2, w)
        end = w - lr * c @ losses
        line = zip((nodes + 1) / 2, shares / 2, strict=True)
        average = sum(share * gradient(lambda at: output(point, at)[0], w + t * (end - w)) for t, share in line)
        by_hand.index_add_(0, batch, -lr * c * (losses @ average))
        w = end
    torch.testing.assert_close(net.w.detach(), w, rtol=1e-12, atol=1e-14)
    parts = epk.attribute(run, point)
    torch.testing.assert_close(parts.samples[0, 0], by_hand, rtol=1e-9, atol=1e-12)
    assert parts.certified


def test_wrong_weights_and_calls_are_refused(classifier, regressor, unchecked):
    X, kind, targets = table(45, 0)
    model, new = epk.EPKClassifier(steps=1), table(4, 1)[0]
    two_of_one = np.where(kind == "ant", 0.0, np.where(kind == "bee", 0.0, 1.0))
    refused = [
        (".", lambda: model.fit(X, kind, sample_weight=np.zeros(45))),
        (r"\(44,\)", lambda: model.fit(X, kind, sample_weight=np.ones(44))),
        ("NaN", lambda: model.fit(X, kind, sample_weight=np.full(45, np.nan))),
        ("44 are such numbers, 44 above", lambda: model.fit(X, kind, sample_weight=np.r_[-1, np.ones(44)])),
        (r"at least 2 classes: got 1 class, \['cat'\]", lambda: model.fit(X, kind, sample_weight=two_of_one)),
        ("0 are such numbers, 0 above", lambda: epk.EPKRegressor().fit(X, targets, sample_weight=-np.ones(45))),
        ("0 are such numbers, 0 above", lambda: model.fit(X, kind, sample_weight=-np.ones(45))),
        ("2 target values for each of 4 points", lambda: regressor.report("r.html", new, targets[:3])),
        ("2 target values", lambda: regressor.report("r.html", new, targets.to_numpy()[:4].ravel())),
        ("could not convert string", lambda: epk.EPKRegressor().fit(X, kind)),
        ("the network must accept X", lambda: epk.EPKRegressor(nn.Linear(9, 2)).fit(X, targets)),
        ("one gradient a step", lambda: epk.EPKRegressor(optimizer=torch.optim.LBFGS).fit(X, targets)),
        ("a list of at least one: got an empty list", lambda: epk.EPKRegressor([]).fit(X, targets)),
        ("none of its 0 folds does", lambda: epk.EPKRegressor(cv=[]).fit(X, targets)),
        ("cv must give rows to train on", lambda: epk.EPKRegressor(cv=[([0, 1], [])]).fit(X, targets)),
        ("positions of the 45 rows: index 45", lambda: epk.EPKRegressor(cv=[([0], [45])]).fit(X, targets)),
        ("after no number of", lambda: epk.EPKRegressor([line, line], lr=1e9, steps=20, cv=2).fit(X, targets)),
        ("samples that differ", lambda: epk.EPKRegressor().fit(X * 0, targets * 0)),
        (r"y, 2: it maps 2 rows to shape \(2, 3\)", lambda: epk.EPKRegressor(nn.Linear(3, 3)).fit(X, targets)),
        ("classes must hold classes .*: got 'dog'", lambda: classifier.attribute(new, classes=["dog"] * 4)),
        ("feature names", lambda: classifier.attribute(new[["wing"]])),
        ("one entry per point", lambda: classifier.report("r.html", new, ["ant"])),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    for call in (
        lambda: epk.EPKRegressor().attribute(X),
        lambda: epk.EPKRegressor().process_,
        lambda: epk.EPKClassifier().label_errors(),
    ):
        with pytest.raises(NotFittedError, match="not fitted"):
            call()
