"""A scikit-learn classifier: a recorded network, which leads to the uncertainty of its predictions."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn

from epk_gp.core.checks import as_tensor, validate_positive
from epk_gp.core.losses import CrossEntropy
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.recording.passes import draw_from
from epk_gp.recording.train import train

Network = nn.Module | Callable[[int, int], nn.Module]


def one_hidden_layer(num_features: int, num_classes: int, width: int = 32) -> nn.Module:
    """Build the default network: one hidden layer of tanh units."""
    return nn.Sequential(nn.Linear(num_features, width), nn.Tanh(), nn.Linear(width, num_classes))


@final
class EPKClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Train and record a network, and predict with it; `uncertain_classifier` says how sure it is.

    Inputs are rows of features and are not scaled: put a `StandardScaler` in front.

    Args:
        network: A torch module, which is copied and not changed, or a function of the numbers of features and classes
            that returns one. It maps (n, features) to (n, classes).
        steps: Training steps.
        lr: Learning rate of plain gradient descent.
        batch_size: Points per step; all by default.
        optimizer: Maps parameters to a `torch.optim.Optimizer`, in place of SGD with `lr`.
        random_state: Seed of initial weights and batches. A function `network` draws its weights from a generator of
            the classifier's own, although it is written as if it drew from torch's global one, which is neither used
            nor changed: fits in several threads at once, as with joblib's threading backend, are reproducible. A
            `numpy.random.RandomState` that they share is not: the fits take its numbers in any order.

    Attributes:
        classes_: The labels.
        n_features_in_: Number of features.
        trajectory_: The recorded run, in float64.
    """

    def __init__(
        self,
        network: Network = one_hidden_layer,
        *,
        steps: int = 100,
        lr: float = 0.5,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.network = network
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> "EPKClassifier":
        """Train the network on cross entropy, recording the run.

        Args:
            X: (n, features).
            y: n labels of any kind.

        Raises:
            TypeError: `network` is neither a module nor a function of two numbers that returns one, or an option is of
                the wrong kind.
            ValueError: There are fewer than two classes, the network has not one output per class, an option is out of
                range, or data, network or optimizer cannot be recorded.
        """
        features, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        if self.optimizer is None:
            validate_positive(self.lr, "lr")
        elif not callable(self.optimizer):
            raise TypeError(f"optimizer must be a function of parameters: got {self.optimizer!r}.")
        encoder = LabelEncoder().fit(labels)
        if len(encoder.classes_) < 2:
            raise ValueError(f"y must hold at least 2 classes: got 1 class, {encoder.classes_[0]!r}.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with draw_from(torch.Generator().manual_seed(seed)):
            net = self._network(features.shape[1], len(encoder.classes_)).double()
        points = as_tensor(features)
        _validate_num_outputs(net, points[:1], len(encoder.classes_))
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=self.lr) if self.optimizer is None else self.optimizer(parameters)
        self.trajectory_ = train(
            net,
            points,
            torch.as_tensor(encoder.transform(labels)).long(),
            optimizer=optimizer,
            steps=self.steps,
            loss=CrossEntropy(),
            batch_size=self.batch_size,
            generator=torch.Generator().manual_seed(seed),
        )
        self.classes_ = encoder.classes_
        return self

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "n C"] | Float[np.ndarray, " n"]:
        """Evaluate the trained network's logits; for two classes their difference."""
        z = self._logits(X).numpy()
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    def predict_proba(self, X: ArrayLike) -> Float[np.ndarray, "n C"]:
        """Evaluate the trained network's softmax."""
        return torch.softmax(self._logits(X), dim=1).numpy()

    def predict(self, X: ArrayLike) -> Shaped[np.ndarray, " n"]:
        """Return the most likely class of each point."""
        z = self._logits(X)
        labels: np.ndarray = self.classes_[z.argmax(dim=1).numpy()]
        return labels

    def uncertain_classifier(self, X: ArrayLike, y: ArrayLike, **settings: Any) -> UncertainClassifier:
        """Return the trained network beside a Gaussian process on the labels of all its training points.

        Its scores say when to abstain, and which points are unlike the training data; its probabilities are as a rule
        better than the network's, and its sets of classes hold the true one as often as asked for: see
        `UncertainClassifier`. It takes rows of features and gives labels, as this classifier does.

        Args:
            X: Validation points, (n, features), at least 20, that `fit` has not seen.
            y: n labels of the kind that `fit` was given.
            settings: Arguments of `UncertainClassifier` other than the run and the names of its classes.

        Raises:
            TypeError: A setting is of the wrong kind, or there is none of this name.
            ValueError: There are too few validation points, or points or labels unlike those of `fit`.
        """
        points = self._points(X)
        return UncertainClassifier(self.trajectory_, classes=self.classes_, **settings).fit(points, y)

    def _network(self, num_features: int, num_classes: int) -> nn.Module:
        if isinstance(self.network, nn.Module):
            return copy.deepcopy(self.network)
        net = self.network(num_features, num_classes) if callable(self.network) else self.network
        if not isinstance(net, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module or a function that returns one: got {net!r}.")
        return net

    def _points(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return as_tensor(validate_data(self, X, dtype=np.float64, reset=False))

    def _logits(self, X: ArrayLike) -> Tensor:
        points = self._points(X)  # checks first that there is a run
        return network_outputs(self.trajectory_, points)


def _validate_num_outputs(net: nn.Module, point: Tensor, num_classes: int) -> None:
    """Raise if a network has not one output per class; what else may be wrong with it, `train` says."""
    try:
        with torch.no_grad():
            outputs = net(point)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] != num_classes:
        raise ValueError(
            f"network must have one output per class of y, {num_classes}: it has {outputs.shape[1]}. Change its last "
            "layer, or pass a function of the numbers of features and classes."
        )
