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
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from epk_gp.core.checks import as_tensor, door
from epk_gp.core.losses import PerSampleLoss
from epk_gp.core.show import warn_caller
from epk_gp.core.trajectory import network_outputs
from epk_gp.estimator import Network, RecordedEstimator, fit_units, one_hidden_layer
from epk_gp.gp.data import in_network_units, plain_frame
from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import predict_targets

_COMPARED = 1024  # rows whose distances are held at a time
Values = Float[np.ndarray, "n *T"]  # (n,), or (n, targets) if y had that shape


@final
class EPKRegressor(MultiOutputMixin, RegressorMixin, RecordedEstimator):  # type: ignore[misc]  # as the base class
    """Train and record a network on squared error, and predict one target or several, with error bars.

    Inputs are as of `EPKClassifier`, in any units, and so are targets: the network's outputs are multiplied by the
    standard deviations of the targets and their means are added, and the loss is the mean squared error in these units.
    The recorded network gives targets as they are, and so are contributions.

    Args:
        network: As of `EPKClassifier`; it maps (n, features) to (n, targets).
        steps: Training steps.
        lr: Learning rate of plain gradient descent.
        batch_size: As of `EPKClassifier`.
        optimizer: As of `EPKClassifier`.
        random_state: As of `EPKClassifier`.
        standardize: As of `EPKClassifier`; targets are standardised in any case.

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
        standardize: bool = True,
    ) -> None:
        shared: dict[str, Any] = {"batch_size": batch_size, "optimizer": optimizer, "random_state": random_state}
        super().__init__(network, steps=steps, lr=lr, standardize=standardize, **shared)

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
        features, targets = validate_data(self, plain_frame(X), y, dtype=np.float64, multi_output=True, y_numeric=True)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        values = targets.reshape(len(targets), -1).astype(np.float64)
        units = fit_units(values, weights)
        names = list(getattr(y, "columns", [getattr(y, "name", None)]))
        known_names = None if names == [None] else names
        loss = PerSampleLoss(partial(_squared_error, as_tensor(units[1])), name="squared error of scaled targets")
        self._record(X, features, as_tensor(values), known_names, loss, weights, units[0], units)
        self._units, self._is_single, self.target_names_ = units, targets.ndim == 1, known_names
        self.__dict__.pop("process_", None)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Values | tuple[Values, Values]:
        """Evaluate the trained network, with error bars of new observations if they are asked for.

        Args:
            X: n rows.
            return_std: Whether to return how far an observation is from each prediction, too: the root of its mean
                square under `process_`, the Gaussian process with the path kernel on the training targets. This is the
                process's variance, with its noise, and the square of its mean's distance from the network. It hardly
                grows with the distance from the training rows, so it is too small where the network extrapolates: a
                warning tells of rows more than twice as far from their nearest training row as any training row is.
        """
        points = self._points(X)
        z = network_outputs(self.trajectory_, points).numpy()
        if not return_std:
            return self._as_y(z)
        self._warn_if_far(points)
        under_process = predict_targets(self.process_, points)
        mean, scale = self._units
        distance = (z - mean) / scale - under_process.mean.detach().numpy()
        std = np.sqrt(under_process.variance.detach().numpy() + distance**2) * scale
        return self._as_y(z), self._as_y(std)

    @cached_property
    def process_(self) -> LogitGP:
        """The process on the targets, in standard deviations, made when it is first asked for."""
        check_is_fitted(self)
        mean, scale = map(as_tensor, self._units)
        run = replace(self.trajectory_, targets=(self.trajectory_.targets - mean) / scale)
        process = LogitGP(run, "independent", "constant", "labels", self._weighted, nodes=20, noise=0.1)
        process.fit(100)
        return process

    def _warn_if_far(self, points: Float[Tensor, "n D"]) -> None:
        """Warn where a row lies farther from all training rows than rows of the same kind do.

        Of new rows as the training rows hardly any is: not so of a range for each column, as columns are many.
        """
        known = self.trajectory_.inputs if self._weighted is None else self.trajectory_.inputs[self._weighted]
        known, x = (in_network_units(self.trajectory_, rows) for rows in (known, points))
        usual = torch.cdist(known, known).fill_diagonal_(torch.inf).amin(1).max()
        nearest = torch.cat([torch.cdist(some, known).amin(1) for some in x.split(_COMPARED)])
        if (is_far := nearest > 2 * usual).any():
            warn_caller(
                f"{int(is_far.sum())} of {len(x)} rows are more than twice as far from their nearest training row as "
                "any training row is from its own, where error bars are too small as a rule: row "
                f"{int(is_far.nonzero()[0])} for one."
            )

    def _as_y(self, values: Float[np.ndarray, "n T"]) -> Values:
        """Return values of targets in the shape that y had."""
        return values[:, 0] if self._is_single else values


def _squared_error(std: Float[Tensor, " T"], z: Float[Tensor, "n T"], y: Float[Tensor, "n T"]) -> Float[Tensor, " n"]:
    return ((z - y) / std).square().mean(dim=1)
