"""`UncertainClassifier` in scikit-learn's hands: pipelines, clones, cross-validation, and classes with names."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

import epk_gp as epk
from epk_gp.estimators import EPKClassifier
from gp_cases import gaussian_net, gaussian_run
from gp_cases import gaussians as gaussian_tensors

NAMES = np.array(["ant", "bee", "cat"])


def gaussians(count, seed):
    return tuple(values.numpy() for values in gaussian_tensors(count, seed))


@pytest.fixture(scope="module")
def scaler():
    """The scaler that the network's inputs went through, fitted to training points alone."""
    return StandardScaler().fit(gaussians(15, 0)[0])


@pytest.fixture(scope="module")
def run(scaler):
    X, y = gaussians(15, 0)
    return gaussian_run(torch.as_tensor(scaler.transform(X)), torch.as_tensor(y))


@pytest.fixture(scope="module")
def named(run, scaler):
    X, y = gaussians(20, 1)
    return epk.UncertainClassifier(run, nodes=3, classes=NAMES).fit(scaler.transform(X), NAMES[y])


def test_a_pipeline_scores_raw_points(run, scaler):
    (X, y), (X_test, y_test) = gaussians(20, 1), gaussians(20, 2)
    pipeline = make_pipeline(FrozenEstimator(scaler), epk.UncertainClassifier(run, nodes=3)).fit(X, y)
    alone = epk.UncertainClassifier(run, nodes=3).fit(scaler.transform(X), y)
    np.testing.assert_array_equal(pipeline.predict_proba(X_test), alone.predict_proba(scaler.transform(X_test)))
    assert pipeline.score(X_test, y_test) == alone.score(scaler.transform(X_test), y_test) > 0.8
    assert list(pipeline.classes_) == [0, 1, 2]
    assert is_classifier(pipeline)
    error = pipeline[-1].uncertainty(pipeline[:-1].transform(X_test)).error
    np.testing.assert_array_equal(error, alone.uncertainty(scaler.transform(X_test)).error)


@pytest.mark.slow
def test_cross_validation_and_a_grid_fit_clones(run, scaler):
    X, y = gaussians(25, 1)
    X = scaler.transform(X)
    model = epk.UncertainClassifier(run, nodes=3)
    scores = cross_validate(model, X, y, cv=2, scoring=("accuracy", "neg_log_loss"))
    assert scores["test_accuracy"].min() > 0.7
    assert np.isfinite(scores["test_neg_log_loss"]).all()
    grid = GridSearchCV(model, {"inputs_kernel": ["rbf", None]}, cv=2).fit(X, y)
    assert grid.best_params_.keys() == {"inputs_kernel"}
    assert not hasattr(model, "process_")  # clones were fitted


def test_a_clone_has_the_arguments_and_no_fit(named):
    copied = clone(named)
    assert all(copied.get_params()[name] is value for name, value in named.get_params().items())
    check_is_fitted(named)
    with pytest.raises(NotFittedError, match="not fitted"):
        check_is_fitted(copied)


def test_arguments_that_changed_after_the_fit_are_neither_used_nor_stored(run, scaler, tmp_path):
    X, y = gaussians(20, 1)
    X = scaler.transform(X)
    model = epk.UncertainClassifier(run, nodes=3).fit(X, y)
    probability, std = model.predict_proba(X), model.uncertainty(X).std
    other = gaussian_run(run.inputs, run.targets, steps=1)
    model.set_params(seed=5, classes=NAMES, trajectory=other)
    model.save(tmp_path)
    read = epk.UncertainClassifier.load(tmp_path, gaussian_net())
    np.testing.assert_allclose(read.predict_proba(X), probability, rtol=1e-12)
    np.testing.assert_allclose(model.uncertainty(X[:-1]).std, std[:-1], rtol=1e-9)
    np.testing.assert_array_equal(model.predict(X), probability.argmax(1))
    assert model.score(X, y) == (probability.argmax(1) == y).mean()
    again = model.set_params(inputs_kernel=None, classes=None, trajectory=run).fit(X, y)
    assert np.abs(again.predict_proba(X) - probability).max() > 1e-3  # the next fit uses them


def test_classes_with_names_go_in_and_come_out(named, run, scaler, tmp_path):
    (X, y), (X_test, y_test) = gaussians(20, 1), gaussians(20, 2)
    X, X_test = scaler.transform(X), scaler.transform(X_test)
    numbered = epk.UncertainClassifier(run, nodes=3).fit(X, y)
    np.testing.assert_array_equal(named.predict(X_test), NAMES[numbered.predict(X_test)])
    np.testing.assert_array_equal(named.predict(torch.as_tensor(X_test)), named.predict(X_test))
    np.testing.assert_array_equal(named.predict_proba(X_test), numbered.predict_proba(X_test))
    assert named.score(X_test, NAMES[y_test]) == numbered.score(X_test, y_test)
    named.save(tmp_path / "named")
    read = epk.UncertainClassifier.load(tmp_path / "named", gaussian_net())
    np.testing.assert_array_equal(read.predict(X_test), named.predict(X_test))
    np.testing.assert_array_equal(read.classes_, NAMES)


@pytest.mark.parametrize("kind", [NAMES.astype(object), np.array([-1.0, 0.0, 2.0])])
def test_a_recorded_classifier_leads_to_the_scores(kind):
    (X, y), (X_val, y_val), (X_test, y_test) = gaussians(15, 0), gaussians(20, 1), gaussians(20, 2)
    classifier = EPKClassifier(steps=15, random_state=0).fit(X, kind[y])
    model = classifier.uncertain_classifier(X_val, kind[y_val], nodes=3)
    assert model.trajectory is classifier.trajectory_
    settings = {"nodes": 3, "out_of_fold": classifier.out_of_fold_}
    numbered = epk.UncertainClassifier(classifier.trajectory_, **settings).fit(X_val, y_val)
    np.testing.assert_array_equal(model.predict(X_test), kind[numbered.predict(X_test)])
    np.testing.assert_array_equal(model.uncertainty(X_test).error, numbered.uncertainty(X_test).error)
    assert model.score(X_test, kind[y_test]) > 0.8


ONCE = "classes must name each of the 3 outputs once"


def test_names_and_labels_that_are_no_classes_are_refused(run, named, unchecked):
    X, y = gaussians(20, 1)

    def fit(classes, labels=y):
        return epk.UncertainClassifier(run, nodes=3, classes=classes).fit(X, labels)

    recorded = EPKClassifier(steps=2, random_state=0)
    with pytest.raises(NotFittedError, match="not fitted"):
        recorded.uncertain_classifier(X, y)
    recorded.fit(X[:45], NAMES[y[:45]])
    for call, error, message in (
        (lambda: fit(["ant", "bee"]), ValueError, ONCE + r".*got \['ant', 'bee'\]"),
        (lambda: fit(["ant", "bee", "ant"]), ValueError, ONCE),
        (lambda: fit([[1], [2], [3]]), ValueError, ONCE),
        (lambda: fit([None, 1, 2]), TypeError, "classes must be numbers or text: got an array of object"),
        (lambda: fit(None, NAMES[y]), TypeError, r"y must be whole numbers.*classes=\.\.\."),
        (lambda: named.score(X, np.where(y == 1, "dog", "cat")), ValueError, r"y must hold classes .*: got 'dog'"),
        (lambda: named.score(X, NAMES[y[1:]]), ValueError, r"one entry per point: got shape \(59,\) for 60 points"),
        (lambda: recorded.uncertain_classifier(X[:, :2], NAMES[y]), ValueError, "expecting 3 features"),
        (lambda: recorded.uncertain_classifier(X, y), ValueError, "y must hold classes of the network"),
        (lambda: recorded.uncertain_classifier(X, NAMES[y], width=3), TypeError, "width"),
        (lambda: EPKClassifier().fit(X[:3], ["ant", None, "bee"]), ValueError, "or for none: got None beside text"),
        (lambda: EPKClassifier().fit(X[:3], ["ant", np.nan, "bee"]), ValueError, "or for none: got nan beside text"),
        (lambda: named.predict(csr_array(X)), TypeError, r"X must be dense: got csr_array. Pass X.toarray\(\)"),
    ):
        with pytest.raises(error, match=message):
            call()
