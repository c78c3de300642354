"""A scikit-learn regressor: a recorded network, with error bars from a Gaussian process with its path kernel."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
import warnings
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from epk_gp.core.checks import as_tensor, door
from epk_gp.core.show import warn_caller
from epk_gp.core.trajectory import network_outputs
from epk_gp.estimator import LinearAndHidden, Network, RecordedEstimator, Table
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
        network: Network = LinearAndHidden,
        *,
        steps: int | None = None,
        lr: float = 0.05,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
        standardize: bool = True,
        cv: Any = 4,
        process: str = "inputs",
    ) -> None:
        self.process = process
        shared: dict[str, Any] = {
            "batch_size": batch_size,
            "optimizer": optimizer,
            "random_state": random_state,
            "cv": cv,
        }
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
        names = list(getattr(y, "columns", [getattr(y, "name", None)]))
        known_names = None if names == [None] else names
        table = Table(features, as_tensor(values), weights, values.shape[1])
        self._record(X, table, known_names, table.units[0])
        self._units, self._is_single, self.target_names_ = table.units, targets.ndim == 1, known_names
        self.__dict__.pop("process_", None)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Values | tuple[Values, Values]:
        """Evaluate the trained network, with error bars of new observations if they are asked for.

        Args:
            X: n rows.
            return_std: Whether to return how far an observation is from each prediction, too: the root of its mean
                square under `process_`.
        """
        points = self._points(X)
        z = network_outputs(self.trajectory_, points).numpy()
        if not return_std:
            return self._as_y(z)
        self._warn_if_far(points)
        mean, scale = self._units
        process_mean, variance = self.process_.predict(points)
        distance = (z - mean) / scale - process_mean
        std = np.sqrt(variance + distance**2) * scale
        return self._as_y(z), self._as_y(std)

    @cached_property
    def process_(self) -> "InputsProcess | PathProcess":
        """The process on the targets, in standard deviations, made when it is first asked for."""
        check_is_fitted(self)
        return _PROCESSES[self.process](self.trajectory_, self._weighted, self._units)

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


class InputsProcess:
    """A Gaussian process with an RBF and a linear kernel on the rows, for each target by itself."""

    def __init__(self, trajectory, rows, units):
        self.trajectory = trajectory
        X = in_network_units(trajectory, trajectory.inputs).numpy()
        Y = (trajectory.targets.numpy() - units[0]) / units[1]
        if rows is not None:
            X, Y = X[rows], Y[rows]
        D = X.shape[1]
        rng = np.random.default_rng(0)
        order = rng.permutation(len(X))
        few, most = order[:MOST_LEARNED], order[:MOST_CONDITIONED]
        self.gps = []
        for y in Y.T:
            kernel = (ConstantKernel(1.0, (1e-5, 1e3)) * RBF(D**0.5, (1e-2, 1e4))
                + ConstantKernel(1 / D, (1e-8, 1e3)) * DotProduct(1.0, "fixed") + WhiteKernel(0.1, (1e-8, 1e2)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                gp = GaussianProcessRegressor(kernel, random_state=0).fit(X[few], y[few])
            if len(few) < len(most):
                gp = GaussianProcessRegressor(gp.kernel_, optimizer=None).fit(X[most], y[most])
            self.gps.append(gp)

    def predict(self, points):
        X = in_network_units(self.trajectory, points).numpy()
        out = [gp.predict(X, return_std=True) for gp in self.gps]
        return np.stack([m for m, _ in out], 1), np.stack([s**2 for _, s in out], 1)


class PathProcess:
    def __init__(self, trajectory, rows, units):
        mean, scale = map(as_tensor, units)
        run = replace(trajectory, targets=(trajectory.targets - mean) / scale)
        self.gp = LogitGP(run, "independent", "constant", "labels", rows, nodes=20, noise=0.1)
        self.gp.fit(100)

    def predict(self, points):
        p = predict_targets(self.gp, points)
        return p.mean.detach().numpy(), p.variance.detach().numpy()


MOST_LEARNED, MOST_CONDITIONED = 1000, 5000
_PROCESSES = {"inputs": InputsProcess, "path": PathProcess}
