"""A scikit-learn classifier: a recorded network that also provides the uncertainty of its predictions."""

from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from epk_gp.analysis.labels import LabelErrors, label_errors
from epk_gp.core.checks import door
from epk_gp.estimator import RecordedEstimator, TrainingTable
from epk_gp.gp.data import plain_frame
from epk_gp.gp.uncertain_classifier import UncertainClassifier


@final
class EPKClassifier(ClassifierMixin, RecordedEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Train and record a network, and predict with it; `uncertain_classifier` adds the uncertainty of its predictions.

    Inputs are rows of features in any units: the recorded network subtracts the mean of each column over the training
    rows and divides by their standard deviation (by 1 if a column is constant). For a data frame, the labels of its
    rows and columns name samples and features in tables; a report uses the labels of columns.

    Args:
        network: A torch module, which is copied and not changed, or a function of the numbers of features and classes
            that returns one. It maps (n, features) to (n, classes). The networks of a list are compared by folds. By
            default a linear model, one with an additional hidden layer, and one with a layer of cosines
            (`LinearAndHidden`).
        steps: Number of training steps; None for the number with the least loss on held-out rows, among 15 numbers from
            5 to 960. With a number, folds only compare the networks; with a number and one network there are no folds.
        lr: Learning rate of gradient descent with a momentum of 0.9.
        batch_size: Points per step; all by default.
        optimizer: Maps parameters to a `torch.optim.Optimizer` that replaces SGD with `lr`.
        random_state: Seed of initial weights and batches. A function `network` draws its weights from the classifier's
            own generator, although it is written as if it drew from torch's global one, which is neither used nor
            changed: fits in several threads at once, as with joblib's threading backend, are reproducible. A shared
            `numpy.random.RandomState` is not: the fits take its numbers in any order. A network that draws during
            training, such as with dropout, draws from torch's global generator, which is seeded for that time: fit such
            networks one after the other, not in several threads.
        standardize: Whether to standardise columns; False for a network that takes them unchanged, such as codes of
            categories that it embeds.
        cv: Folds, if there is something to choose: their number, a splitter of scikit-learn, or pairs of indices. For
            each fold, a network that is trained on all other folds predicts it; rows with weight 0 are in no fold. Rows
            that belong together, such as those of one patient, must be in one fold: `cv=list(GroupKFold().split(X, y,
            groups))`.

    Attributes:
        classes_: The labels.
        n_features_in_: Number of features.
        feature_names_in_: Their names, for a data frame.
        index_: Labels of the training rows, for a data frame; otherwise None.
        trajectory_: The recorded run, in float64.
        network_: The trained network, a `torch.nn.Module` that takes rows in their own units, in float64.
        steps_: Number of training steps.
        fold_losses_: For each network that folds compared, the mean loss of the held-out rows by number of steps, in
            nats; None if there was nothing to choose.
        out_of_fold_: Logits of each training row, by a network that was trained on other folds, (M, classes); NaN for
            rows in no fold, and None if there was nothing to choose.
    """

    @door
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "EPKClassifier":
        """Train the network on cross entropy, recording the run.

        Args:
            X: (n, features).
            y: n labels of any kind.
            sample_weight: Weights of the rows, as in `epk_gp.train`.

        Raises:
            TypeError: `network` is neither a module nor a function of two numbers that returns one, or an option has a
                wrong type.
            ValueError: There are fewer than two classes, the network does not have one output per class, an option is
                out of range, or data, weights, network or optimizer cannot be recorded.
        """
        given = np.asarray(y, dtype=object).ravel()
        if 0 < len(others := [label for label in given if not isinstance(label, str)]) < len(given):
            raise ValueError(f"y must hold text for every row, or for none: got {others[0]!r} beside text.")
        features, labels = validate_data(self, plain_frame(X), y, dtype=np.float64)
        check_classification_targets(labels)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        encoder = LabelEncoder().fit(labels)
        present = np.unique(labels[weights != 0]).tolist()
        if len(present) < 2:
            raise ValueError(f"y must hold at least 2 classes: got {len(present)} class, {present}.")
        targets, classes = torch.as_tensor(encoder.transform(labels)).long(), encoder.classes_
        frequencies = np.bincount(targets, weights.clip(0), len(classes))
        constant = np.log(np.maximum(frequencies, np.finfo(np.float64).tiny))  # logits, up to a common constant
        self._record(X, TrainingTable(features, targets, weights, len(classes)), classes.tolist(), constant)
        self.classes_ = classes
        return self

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "n C"] | Float[np.ndarray, " n"]:
        """Evaluate the trained network's logits; for two classes their difference."""
        z = self._outputs(X).numpy()
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    def predict_proba(self, X: ArrayLike) -> Float[np.ndarray, "n C"]:
        """Evaluate the trained network's softmax."""
        return torch.softmax(self._outputs(X), dim=1).numpy()

    def predict(self, X: ArrayLike) -> Shaped[np.ndarray, " n"]:
        """Return the most likely class of each point."""
        z = self._outputs(X)
        labels: np.ndarray = self.classes_[z.argmax(dim=1).numpy()]
        return labels

    def label_errors(self, **settings: Any) -> LabelErrors:
        """Rank training rows by the suspicion of their labels, by `epk_gp.label_errors`.

        The table of the result, `to_frame()`, has the labels of the rows and the names of the expected classes.

        Args:
            settings: Arguments of `epk_gp.label_errors` other than the run.

        Raises:
            TypeError, ValueError: As in `epk_gp.label_errors`.
        """
        check_is_fitted(self)
        found = label_errors(self.trajectory_, **{"points": self._weighted, **settings})
        return found.labelled(sample=self.index_, output=self.classes_)

    def uncertain_classifier(self, X: ArrayLike, y: ArrayLike, **settings: Any) -> UncertainClassifier:
        """Return the trained network with a Gaussian process on the labels of all its training points.

        Its scores help to decide when to abstain, and which points are unlike the training data; its probabilities are
        usually better than the network's, and its sets of classes contain the true one as often as requested: see
        `UncertainClassifier`. Like this classifier, it takes rows of features and returns labels. The weights of
        training rows apply to the network; the process leaves out rows with weight 0, and treats all others alike.

        Args:
            X: Validation points, (n, features), at least 20, that `fit` has not seen.
            y: n labels of the same kind as in `fit`.
            settings: Arguments of `UncertainClassifier` other than the run and the names of its classes.

        Raises:
            TypeError: A setting has a wrong type, or does not exist.
            ValueError: There are too few validation points, or points or labels differ from those of `fit`.
        """
        points, names = self._points(X), getattr(self, "feature_names_in_", None)
        folds = getattr(self, "out_of_fold_", None)
        settings = {"points": self._weighted, "feature_names": names, "out_of_fold": folds, **settings}
        return UncertainClassifier(self.trajectory_, classes=self.classes_, **settings).fit(points, y)
