"""scikit-learn's own checks of estimators, for all three of the package."""

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted, validate_data

import epk_gp as epk
from epk_gp.estimator import LinearAndHidden
from epk_gp.gp.data import MIN_VALIDATION_POINTS


class HeldOutUncertainty(ClassifierMixin, BaseEstimator):
    """`UncertainClassifier` as an estimator of data alone: its constructor takes a run, and its `fit` other rows.

    Of each class every second row trains the run, and the others are held out. Of small data these are repeated until
    there are as many as `UncertainClassifier` asks for. Rows that are predicted reach it as they are.
    """

    def __init__(self, steps=15, random_state=0):
        self.steps, self.random_state = steps, random_state

    def fit(self, X, y):
        X, y = validate_data(self, X, y, dtype=np.float64)
        by_class = np.argsort(y, kind="stable")
        trained, held_out = by_class[::2], by_class[1::2]
        held_out = np.resize(held_out, max(MIN_VALIDATION_POINTS, len(held_out)))
        settings = {"steps": self.steps, "random_state": self.random_state}
        network = epk.EPKClassifier(LinearAndHidden, **settings).fit(X[trained], y[trained])
        model = epk.UncertainClassifier(network.trajectory_, classes=network.classes_, nodes=3)
        self.model_ = model.fit(X[held_out], y[held_out])
        self.classes_ = self.model_.classes_
        return self

    def predict(self, X):
        check_is_fitted(self)
        return self.model_.predict(X)

    def predict_proba(self, X):
        check_is_fitted(self)
        return self.model_.predict_proba(X)


# Checks that `UncertainClassifier` does not pass, and why. They are strict: one that passes fails here.
REASONS = {
    "check_n_features_in_after_fitting": "points have any shape: the error names the shape, not a number of features",
    "check_fit2d_predict1d": "the error says which shape points must have, in other words than 'Reshape your data'",
    "check_dtype_object": "an array of Python objects is refused: points are as the network takes them",
}
# Folds, which both share, are in the classifier's checks. No function: its address would be in the tests' names.
CLASSIFIER = epk.EPKClassifier([LinearAndHidden, LinearAndHidden], steps=15, cv=2)
ESTIMATORS = [CLASSIFIER, epk.EPKRegressor(LinearAndHidden, steps=15), HeldOutUncertainty()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks provoke warnings on purpose
@parametrize_with_checks(
    ESTIMATORS,
    expected_failed_checks=lambda model: REASONS if isinstance(model, HeldOutUncertainty) else {},
)
def test_scikit_learns_own_checks_pass(estimator, check, unchecked):
    check(estimator)
