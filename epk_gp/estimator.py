"""What the scikit-learn estimators share: a network that is trained on a table, recorded, and explained."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp  # whose report needs matplotlib, which is imported when a report is written
from epk_gp.core.checks import as_tensor, validate_positive
from epk_gp.core.losses import Loss, per_sample_losses
from epk_gp.core.show import warn_caller
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.data import InUnits, class_labels, plain_frame, row_labels
from epk_gp.kernel_machine.attribute import Attribution, attribute
from epk_gp.recording.train import train

# torch notes in a global variable that a mode is entered, and puts it back as it was: one thread at a time.
_ENTERED = threading.RLock()

NO_UNITS = np.array([[0.0], [1.0]])  # of columns, or of outputs: nothing is subtracted, and all are divided by 1
Network = nn.Module | Callable[[int, int], nn.Module]


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything random in this thread draw from a generator, and nothing from torch's global one.

    The numbers are those that the global generator would give with the same seed. Seeding that one instead would
    disturb every other thread that draws from it, and be disturbed by them.

    Args:
        generator: A generator on the CPU.
    """
    with _ENTERED, _Draws(generator):
        yield


@final
class _Draws(TorchDispatchMode):
    """Give a generator to every operation that takes one and got none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            with suppress(RuntimeError, TypeError):  # it has no form that takes a generator
                return func.overloadpacket(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def one_hidden_layer(num_features: int, num_outputs: int, width: int = 32) -> nn.Module:
    """Build the default network: one hidden layer of tanh units."""
    return nn.Sequential(nn.Linear(num_features, width), nn.Tanh(), nn.Linear(width, num_outputs))


class RecordedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """A network that `fit` trains on the rows of a table and records."""

    def __init__(
        self,
        network: Network = one_hidden_layer,
        *,
        steps: int = 100,
        lr: float = 0.5,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
        standardize: bool = True,
    ) -> None:
        self.network = network
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.random_state = random_state
        self.standardize = standardize

    def attribute(self, X: ArrayLike, *, classes: ArrayLike | None = None, **settings: Any) -> Attribution:
        """Split predictions into exact contributions of the training rows: `epk_gp.attribute`.

        The table of the result, `to_frame()`, has the row labels of both data frames and the names of the outputs.

        Args:
            X: n rows.
            classes: One output for each row, by its name, such as `predict(X)` of a classifier; or by its number, where
                names are text or there are none. All outputs by default.
            settings: Further arguments of `epk_gp.attribute`, except `by`.

        Raises:
            TypeError, ValueError: As `epk_gp.attribute`; or rows or classes are unlike those of `fit`.
        """
        points, names, chosen = self._points(X), self._output_names, None
        if classes is not None:
            by_number = np.asarray(classes).dtype.kind in "iu" and np.asarray(names).dtype.kind not in "biuf"
            own = class_labels(self.trajectory_, classes, len(points), "classes", classes=None if by_number else names)
            settings["classes"], chosen = own, own.tolist() if names is None else [names[c] for c in own.tolist()]
        result = attribute(self.trajectory_, points, by=None, **settings)
        return result.labelled(point=row_labels(X), output=names, chosen=chosen, sample=self.index_)

    def report(self, file: str | Path, X: ArrayLike, y: ArrayLike | None = None, **settings: Any) -> Path:
        """Write what predictions are made of as one HTML file, with the names of features and outputs.

        Args:
            file: The file.
            X: n rows.
            y: Their targets, of the kind that `fit` was given.
            settings: Further arguments of `epk_gp.write_report`.

        Raises:
            TypeError, ValueError, OSError: As `epk_gp.write_report`; or rows or targets are unlike those of `fit`.
        """
        points, targets = self._points(X), None
        if y is not None and is_classifier(self):
            targets = class_labels(self.trajectory_, y, len(points), classes=self._output_names)
        elif y is not None:
            targets = as_tensor(np.atleast_1d(np.asarray(y, dtype=np.float64)))
        names = {"names": getattr(self, "feature_names_in_", None), "class_names": self._output_names}
        return epk_gp.write_report(file, self.trajectory_, points, targets, **{**names, **settings})

    def _record(
        self,
        X: ArrayLike,
        features: Float[np.ndarray, "M D"],
        targets: Tensor,
        names: Any,
        loss: Loss,
        weights: Float[np.ndarray, " M"],
        constant: Float[np.ndarray, " C"],
        units: Float[np.ndarray, "2 C"] = NO_UNITS,
    ) -> None:
        """Train a network and record the run.

        Args:
            X: The rows as they were given.
            features: Their features.
            targets: Their targets.
            names: Of the outputs, if they have any.
            loss: The loss.
            weights: Of the rows.
            constant: The constant outputs of least loss.
            units: Mean and scale of each output.

        Raises:
            ValueError: Training ended above the loss that it began with and above that of the constant.
        """
        if self.optimizer is None:
            validate_positive(self.lr, "lr")
        elif not callable(self.optimizer):
            raise TypeError(f"optimizer must be a function of parameters: got {self.optimizer!r}.")
        seed, num_outputs = int(check_random_state(self.random_state).randint(2**31 - 1)), len(constant)
        with draw_from(torch.Generator().manual_seed(seed)):
            net = self._network(features.shape[1], num_outputs).double()
        columns = fit_units(features, weights) if self.standardize else NO_UNITS
        wrapped = InUnits(net, as_tensor(columns), as_tensor(units))
        points = as_tensor(features)
        _validate_num_outputs(net, wrapped.standardized(points[:1]), num_outputs)
        parameters = [p for p in net.parameters() if p.requires_grad]
        trajectory = train(
            wrapped,
            points,
            targets,
            optimizer=torch.optim.SGD(parameters, lr=self.lr) if self.optimizer is None else self.optimizer(parameters),
            steps=self.steps,
            loss=loss,
            batch_size=self.batch_size,
            generator=torch.Generator().manual_seed(seed),
            sample_weight=as_tensor(weights),
        )
        _validate_trained(trajectory, as_tensor(weights / weights.sum()), as_tensor(constant))
        self.trajectory_, self.index_, self._output_names = trajectory, row_labels(X), names
        self._weighted = None if weights.all() else torch.from_numpy(np.flatnonzero(weights))  # None: all rows

    def _network(self, num_features: int, num_outputs: int) -> nn.Module:
        if isinstance(self.network, nn.Module):
            return copy.deepcopy(self.network)
        net = self.network(num_features, num_outputs) if callable(self.network) else self.network
        if not isinstance(net, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module or a function that returns one: got {net!r}.")
        return net

    def _points(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return as_tensor(validate_data(self, plain_frame(X), dtype=np.float64, reset=False))

    def _outputs(self, X: ArrayLike) -> Float[Tensor, "n C"]:
        points = self._points(X)  # checks first that there is a run
        return network_outputs(self.trajectory_, points)


def fit_units(values: Float[np.ndarray, "M D"], weights: Float[np.ndarray, " M"]) -> Float[np.ndarray, "2 D"]:
    """Return mean and standard deviation of columns over weighted rows, 1 for that of a constant.

    Wrong weights, which `train` refuses, count as none.
    """
    known = weights if (weights >= 0).all() and weights.any() else None
    scaler = StandardScaler().fit(values, sample_weight=known)
    return np.stack([scaler.mean_, scaler.scale_])


def _validate_trained(trajectory: Trajectory, shares: Float[Tensor, " M"], constant: Float[Tensor, " C"]) -> None:
    """Compare the loss with that before training and with that of a constant; rows count by their shares.

    Raises:
        ValueError: It is above both.
    """
    outputs = [network_outputs(trajectory, trajectory.inputs, state=state) for state in (0, -1)]
    outputs.append(constant.expand(len(shares), -1))
    first, last, least = (float(per_sample_losses(trajectory.loss, z, trajectory.targets) @ shares) for z in outputs)
    found = f"its loss is {last:.4g}, before the first step it was {first:.4g}, and a constant has {least:.4g}."
    if not last <= max(first, least):
        raise ValueError(f"training diverged: {found} Lower lr, or pass another optimizer.")
    if last >= least > torch.finfo(constant.dtype).eps:  # targets that are all alike leave nothing to be better at
        advice = f"Training gave nothing better than a constant: {found} Take more steps, or another lr or network."
        warn_caller(advice, ConvergenceWarning)


def _validate_num_outputs(net: nn.Module, point: Tensor, num_outputs: int) -> None:
    """Raise if a network has not one output per class or target; what else may be wrong with it, `train` says."""
    try:
        with torch.no_grad():
            outputs = net(point)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] != num_outputs:
        raise ValueError(
            f"network must have one output per class or target of y, {num_outputs}: it has {outputs.shape[1]}. Change "
            "its last layer, or pass a function of the numbers of features and outputs."
        )
