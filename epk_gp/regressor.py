"""A scikit-learn regressor: a recorded network, with error bars from a Gaussian process with its path kernel."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from epk_gp.core.checks import as_tensor, door
from epk_gp.core.losses import PerSampleLoss
from epk_gp.estimator import Network, RecordedEstimator, one_hidden_layer
from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import predict_targets

Values = Float[np.ndarray, "n *T"]  # (n,), or (n, targets) if y had that shape


@final
class EPKRegressor(MultiOutputMixin, RegressorMixin, RecordedEstimator):  # type: ignore[misc]  # as the base class
    """Train and record a network on squared error, and predict one target or several, with error bars.

    Inputs are rows of features and are not scaled: put a `StandardScaler` in front. Targets are: the network's outputs
    are multiplied by the standard deviations of the targets and their means are added, and the loss is the mean squared
    error in these units. The recorded network gives targets as they are, and so are contributions.

    Args:
        network: As of `EPKClassifier`; it maps (n, features) to (n, targets).
        steps: Training steps.
        lr: Learning rate of plain gradient descent.
        batch_size: As of `EPKClassifier`.
        optimizer: As of `EPKClassifier`.
        random_state: As of `EPKClassifier`.

    Attributes:
        target_names_: Names of the targets, where y was a series or a data frame; else None.
        n_features_in_: As of `EPKClassifier`.
        feature_names_in_: As of `EPKClassifier`.
        index_: As of `EPKClassifier`.
        trajectory_: The recorded run, in float64.
    """

    def __init__(
        self,
        network: Network = one_hidden_layer,
        *,
        steps: int = 300,
        lr: float = 0.05,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        options: dict[str, Any] = {"batch_size": batch_size, "optimizer": optimizer, "random_state": random_state}
        super().__init__(network, steps=steps, lr=lr, **options)

    @door
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "EPKRegressor":
        """Train the network, recording the run.

        Args:
            X: (n, features).
            y: (n,) or (n, targets).
            sample_weight: Weights of the rows, as of `epk_gp.train`.

        Raises:
            TypeError, ValueError: As `EPKClassifier.fit`.
        """
        features, targets = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        values = targets.reshape(len(targets), -1).astype(np.float64)
        known = weights if (weights >= 0).all() and weights.any() else None  # others are refused below
        self._units, self._is_single = StandardScaler().fit(values, sample_weight=known), targets.ndim == 1
        self.__dict__.pop("process_", None)
        scaled_error = partial(_squared_error, as_tensor(self._units.scale_))
        names = list(getattr(y, "columns", [getattr(y, "name", None)]))
        self.target_names_ = None if names == [None] else names
        asked = values.shape[1], self.target_names_, PerSampleLoss(scaled_error, name="squared error of scaled targets")
        self._record(X, features, as_tensor(values), *asked, weights, lambda net: _InUnits(net, self._units))
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Values | tuple[Values, Values]:
        """Evaluate the trained network, with error bars of new observations if they are asked for.

        Args:
            X: n rows.
            return_std: Whether to return how far an observation is from each prediction, too: the root of its mean
                square under `process_`, the Gaussian process with the path kernel on the training targets. This is the
                process's variance, with its noise, and the square of its mean's distance from the network.
        """
        z = self._outputs(X).numpy()
        if not return_std:
            return self._as_y(z)
        under_process = predict_targets(self.process_, self._points(X))
        distance = self._units.transform(z) - under_process.mean.detach().numpy()
        std = np.sqrt(under_process.variance.detach().numpy() + distance**2) * self._units.scale_
        return self._as_y(z), self._as_y(std)

    @cached_property
    def process_(self) -> LogitGP:
        """The process on the targets, in standard deviations, made when it is first asked for."""
        check_is_fitted(self)
        run = replace(self.trajectory_, targets=as_tensor(self._units.transform(self.trajectory_.targets.numpy())))
        process = LogitGP(run, "independent", "constant", "labels", self._weighted, nodes=20, noise=0.1)
        process.fit(100)
        return process

    def _as_y(self, values: Float[np.ndarray, "n T"]) -> Values:
        """Return values of targets in the shape that y had."""
        return values[:, 0] if self._is_single else values


class _InUnits(nn.Module):
    """A network whose outputs are in units of the targets."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, units: StandardScaler) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", as_tensor(units.mean_))
        self.register_buffer("std", as_tensor(units.scale_))

    def forward(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n T"]:
        """Evaluate the network."""
        z: Tensor = self.net(x)
        return z * self.std + self.mean


def _squared_error(std: Float[Tensor, " T"], z: Float[Tensor, "n T"], y: Float[Tensor, "n T"]) -> Float[Tensor, " n"]:
    return ((z - y) / std).square().mean(dim=1)
