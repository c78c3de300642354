"""scikit-learn estimators: recorded networks that also provide the uncertainty of their predictions."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, final

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors, label_errors
from epk_gp.core.checks import as_tensor, door
from epk_gp.core.show import SHOWN_POINTS, Entry, Summary, Table, columns_note, count, number, warn_caller
from epk_gp.core.trajectory import network_outputs
from epk_gp.estimator import DEFAULT_NETWORKS, Network, RecordedEstimator, TrainingTable
from epk_gp.gp.data import in_network_units, plain_frame, row_labels
from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import NormalPredictions, predict_targets
from epk_gp.gp.uncertain_classifier import UncertainClassifier

_COMPARED = 1024  # rows that are predicted, or whose distances are held, at a time
MOST_LEARNED, MOST_CONDITIONED = 1000, 5000  # most rows for learning hyperparameters, and for conditioning
_LOG_CHI2 = -1.2704  # mean of the logarithm of a squared standard normal variable
_SMALLEST = 1e-6  # smallest squared residual, in variances, before its logarithm
_PROCESSES = ("inputs", "path")
FAR = 3  # spreads of the training rows to the nearest of them: rows about four times as far out
Values = Float[np.ndarray, "n *T"]  # (n,), or (n, targets) if y had that shape


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


@final
class EPKRegressor(MultiOutputMixin, RegressorMixin, RecordedEstimator):  # type: ignore[misc]  # as the base class
    """Train and record a network on squared error, and predict one target or several, with error bars.

    Inputs are like those of `EPKClassifier`, in any units, and so are targets: the network's outputs are multiplied by
    the standard deviations of the targets and their means are added, and the loss is the mean squared error in these
    units. The recorded network returns targets in their own units, and so do contributions.

    Args:
        network: The argument of `EPKClassifier`; it maps (n, features) to (n, targets).
        steps: The argument of `EPKClassifier`.
        lr: The argument of `EPKClassifier`, with another default.
        batch_size: The argument of `EPKClassifier`.
        optimizer: The argument of `EPKClassifier`.
        random_state: The argument of `EPKClassifier`.
        standardize: The argument of `EPKClassifier`; targets are always standardised.
        cv: The argument of `EPKClassifier`.
        process: The process of the error bars: "inputs" has an RBF kernel on the standardised rows, with one
            lengthscale, and noise that depends on the row (`InputsProcess`); "path" has the path kernel of the run
            (`LogitGP`). The path kernel was made with the targets, so the likelihood trusts it too much: its bars
            hardly grow with the distance from the training rows, and are too small there.

    Attributes:
        target_names_: Names of the targets, if y was a series or a data frame; otherwise None.
        n_features_in_: The attribute of `EPKClassifier`.
        feature_names_in_: The attribute of `EPKClassifier`.
        index_: The attribute of `EPKClassifier`.
        trajectory_: The recorded run, in float64.
        network_: The attribute of `EPKClassifier`; it returns targets in their units.
        steps_: The attribute of `EPKClassifier`.
        fold_losses_: The attribute of `EPKClassifier`.
        out_of_fold_: The attribute of `EPKClassifier`; predictions, (M, targets).
        process_: The process of the error bars, in standard deviations of the targets.
    """

    def __init__(
        self,
        network: Network | Sequence[Network] = DEFAULT_NETWORKS,
        *,
        steps: int | None = None,
        lr: float = 0.05,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
        standardize: bool = True,
        cv: Any = 4,
        process: Literal["inputs", "path"] = "inputs",
    ) -> None:
        self.process = process
        shared: dict[str, Any] = {"batch_size": batch_size, "optimizer": optimizer, "random_state": random_state}
        super().__init__(network, steps=steps, lr=lr, standardize=standardize, cv=cv, **shared)

    @door
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "EPKRegressor":
        """Train the network, recording the run.

        Args:
            X: (n, features).
            y: (n,) or (n, targets).
            sample_weight: Weights of the rows, as in `epk_gp.train`.

        Raises:
            TypeError, ValueError: As in `EPKClassifier.fit`.
        """
        if self.process not in _PROCESSES:
            raise ValueError(f"process must be one of {list(_PROCESSES)}: got {self.process!r}.")
        features, targets = validate_data(self, plain_frame(X), y, dtype=np.float64, multi_output=True, y_numeric=True)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        values = targets.reshape(len(targets), -1).astype(np.float64)
        names = list(getattr(y, "columns", [getattr(y, "name", None)]))
        known_names = None if names == [None] else names
        table = TrainingTable(features, as_tensor(values), weights, values.shape[1])
        self._record(X, table, known_names, table.units[0])
        self._units, self._is_single, self.target_names_ = table.units, targets.ndim == 1, known_names
        self._process_name = self.process
        self.__dict__.pop("process_", None)  # from an earlier fit
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Values | tuple[Values, Values]:
        """Evaluate the trained network, with error bars of new observations if requested.

        Args:
            X: n rows.
            return_std: Whether to also return the error bars, `uncertainty(X).std`.
        """
        if not return_std:
            return self._as_y(self._outputs(X).numpy())
        u = self.uncertainty(X)
        if (is_far := u.distance > FAR).any():
            warn_caller(
                f"{int(is_far.sum())} of {len(is_far)} rows are more than {FAR} times as far from the nearest training "
                "row as training rows are from their mean, where error bars may be too small: row "
                f"{int(is_far.argmax())} for one. uncertainty(X) has the distances."
            )
        return u.mean, u.std

    def uncertainty(self, X: ArrayLike) -> "TargetUncertainty":
        """Return predictions with error bars, and the distance of each row from the training rows.

        Args:
            X: n rows.

        Raises:
            TypeError, ValueError: Rows differ from those of `fit`.
        """
        points = self._points(X)
        mean, scale = self._units
        z = network_outputs(self.trajectory_, points).numpy()
        if isinstance(self.process_, LogitGP):
            prediction = predict_targets(self.process_, points)
            of_process, variance = (part.detach().numpy() for part in (prediction.mean, prediction.variance))
        else:
            of_process, variance = self.process_.predict(in_network_units(self.trajectory_, points).numpy())
        distance = (z - mean) / scale - of_process
        std = np.sqrt(variance + distance**2) * scale
        known, _ = self._training_rows()
        is_outside = (points < known.amin(0)) | (points > known.amax(0))
        columns = is_outside.sum(1).numpy()
        result = TargetUncertainty(self._as_y(z), self._as_y(std), self._distance(points), columns)
        return result.labelled(point=row_labels(X), output=self.target_names_)

    @cached_property
    def process_(self) -> "InputsProcess | LogitGP":
        """The process of the error bars, created at its first use."""
        check_is_fitted(self)
        run, (mean, scale) = self.trajectory_, self._units
        if self._process_name == "path":
            scaled = replace(run, targets=(run.targets - as_tensor(mean)) / as_tensor(scale))
            process = LogitGP(scaled, "independent", "constant", "labels", self._weighted, nodes=20, noise=0.1)
            process.fit(100)
            return process
        X, y = self._training_rows()
        rows = torch.from_numpy(np.random.default_rng(0).permutation(len(X))[:MOST_CONDITIONED])
        return InputsProcess(in_network_units(run, X[rows]).numpy(), (y[rows].numpy() - mean) / scale)

    def _training_rows(self) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N T"]]:
        """Return the rows with weight above 0, and their targets."""
        rows = slice(None) if self._weighted is None else self._weighted
        return self.trajectory_.inputs[rows], self.trajectory_.targets[rows]

    def _distance(self, points: Float[Tensor, "n D"]) -> Float[np.ndarray, " n"]:
        """Return the distance of rows from the nearest training row, relative to the spread of the training rows."""
        known, X = (in_network_units(self.trajectory_, rows) for rows in (self._training_rows()[0], points))
        spread = (known - known.mean(0)).square().sum(1).mean().sqrt().clamp_min(torch.finfo(known.dtype).tiny)
        nearest = [torch.cdist(rows, known).amin(1) for rows in X.split(_COMPARED)]
        return (torch.cat(nearest) / spread).numpy()

    def _as_y(self, values: Float[np.ndarray, "n T"]) -> Values:
        """Return values of targets in the shape of y."""
        return values[:, 0] if self._is_single else values


@dataclass(frozen=True, eq=False, repr=False)
class TargetUncertainty(NormalPredictions):
    """Predictions of n rows with error bars, in the units of the targets, and the position of the rows.

    Attributes:
        mean: Prediction of the network, (n,), or (n, targets) if y had that shape.
        std: Expected distance of a new observation from it: the root of its mean square under the process of the error
            bars, which is the process's variance, with its noise, plus the square of its mean's distance from the
            network.
        distance: Distance from the nearest training row, in standardised columns, relative to the root mean square
            distance of the training rows from their mean. Far above 1 bars may be too small; `predict` warns above 3.
        columns_outside: Number of columns whose value lies outside the range of the training rows.
    """

    mean: Values
    std: Values
    distance: Float[np.ndarray, " n"]
    columns_outside: Int64[np.ndarray, " n"]

    def _frame(self) -> tuple[Any, ...]:
        n = len(self.mean)
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.mean.ndim == 1:
            return {"point": range(n)}, columns, ()
        T = self.mean.shape[1]
        per_row = {name: np.repeat(columns[name], T).reshape(n, T) for name in ("distance", "columns_outside")}
        return {"point": range(n), "output": range(T)}, columns | per_row, ()

    def _summary(self) -> Summary:
        n = len(self.mean)
        shown = min(n, SHOWN_POINTS)
        first = {"prediction": self.mean, "std": self.std} if self.mean.ndim == 1 else {}
        values = first | {"distance": self.distance, "columns outside": self.columns_outside}
        rows = tuple((name, *map(number, column[:shown].tolist())) for name, column in values.items() if n)
        table = Table(("", *(f"point {i}" for i in range(shown))), rows, columns_note(shown, n)) if n else None
        return Summary(
            f"Predictions of {count(n, 'row')} with error bars", (Entry("shape", str(self.mean.shape)),), table
        )


class InputsProcess:
    """A Gaussian process for each target, with an RBF kernel on the standardised rows of a table.

    Args:
        X: N standardised rows, (N, D).
        Y: Their targets, in standard deviations, (N, T).
    """

    def __init__(self, X: Float[np.ndarray, "N D"], Y: Float[np.ndarray, "N T"]) -> None:
        self.targets = [TargetProcess(X, y) for y in Y.T]

    def predict(self, X: Float[np.ndarray, "n D"]) -> tuple[Float[np.ndarray, "n T"], Float[np.ndarray, "n T"]]:
        """Return mean and variance of new observations at n rows."""
        parts = np.array_split(X, range(_COMPARED, len(X), _COMPARED))
        found = [np.stack([target.predict(part) for target in self.targets], axis=-1) for part in parts]
        mean, variance = np.concatenate(found, axis=1)
        return mean, variance


class TargetProcess:
    """A Gaussian process with noise that depends on the row; mean and noise by scikit-learn.

    Hyperparameters are the most likely ones for at most 1000 rows; at most 5000 rows are used for conditioning. The
    logarithm of the noise variance is a separate process, with an RBF kernel, on logarithms of squared residuals of the
    rows, each predicted from all others (equation 5.12 of Rasmussen & Williams, 2006). As observations of it these have
    the variance pi^2 / 2. If the noise is even, that process is nearly constant.

    Args:
        X: N standardised rows, in random order, (N, D).
        y: Their targets, in standard deviations, (N,).
    """

    def __init__(self, X: Float[np.ndarray, "N D"], y: Float[np.ndarray, " N"]) -> None:
        D, few = X.shape[1], slice(MOST_LEARNED)
        smooth = ConstantKernel(1.0, (1e-5, 1e3)) * RBF(D**0.5, (1e-2, 1e4))
        uneven = ConstantKernel(0.3, (1e-4, 1e2)) * RBF(D**0.5, (0.1, 1e3)) + ConstantKernel(1.0, "fixed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # at a bound the kernel or the noise is not needed
            process = GaussianProcessRegressor(smooth + WhiteKernel(0.1, (1e-8, 1e2))).fit(X[few], y[few])
            inverse = np.linalg.inv(process.kernel_(X[few]))
            variances = 1 / inverse.diagonal()
            squares = (inverse @ y[few] * variances) ** 2 / variances
            logs = np.log(squares.clip(_SMALLEST)) - _LOG_CHI2
            self.log_noise = GaussianProcessRegressor(uneven, alpha=np.pi**2 / 2).fit(X[few], logs)
        self.noise = process.kernel_.k2.noise_level
        self.scale = self.noise / np.exp(self.log_noise.predict(X[few])).mean()
        if len(X) > MOST_LEARNED:
            process = GaussianProcessRegressor(process.kernel_, optimizer=None).fit(X, y)
        self.process = process

    def predict(self, X: Float[np.ndarray, "n D"]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Return mean and variance of new observations at n rows."""
        mean, std = self.process.predict(X, return_std=True)
        return mean, (std**2 - self.noise).clip(0) + self.scale * np.exp(self.log_noise.predict(X))
