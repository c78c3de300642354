"""The common part of the scikit-learn estimators: a network is trained on a table, recorded, and explained."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, isfinite, pi
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold, check_cv
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp  # its report needs matplotlib, which is imported when a report is written
from epk_gp.core.checks import as_tensor, validate_count, validate_positive
from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, PerSampleLoss, per_sample_losses
from epk_gp.core.show import warn_caller
from epk_gp.core.torch_overrides import CopyingResults
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.data import InUnits, class_labels, plain_frame, row_labels
from epk_gp.kernel_machine.attribute import Attribution, attribute
from epk_gp.quadrature.rules import AdaptiveRule, adaptive
from epk_gp.recording.train import EpochSampler, train, validate_row_weights

# torch stores in a global variable that a mode is entered, and restores it afterwards: one thread at a time.
_ENTERED = threading.RLock()

NO_UNITS = np.array([[0.0], [1.0]])  # units of columns, or of outputs: nothing is subtracted, and all are divided by 1
Network = nn.Module | Callable[[int, int], nn.Module]
N = TypeVar("N", bound=nn.Module)
Fold = tuple[Int64[np.ndarray, "..."], Int64[np.ndarray, "..."]]  # rows for training, and held-out rows

MOMENTUM = 0.9
_TOLERANCE = 1e-12  # tolerance of the integrals of contributions, in standard deviations of the targets
STEPS = tuple(round(5 * 192 ** (k / 14)) for k in range(15))  # 5, 7, 11, ..., 660, 960: folds choose among these


@dataclass(frozen=True)
class TrainingTable:
    """The rows on which a network is trained.

    Attributes:
        features: (M, D).
        targets: (M,) classes or (M, C) values.
        weights: Weights of the rows, (M,).
        num_outputs: C.
    """

    features: Float[np.ndarray, "M D"]
    targets: Shaped[Tensor, "M ..."]
    weights: Float[np.ndarray, " M"]
    num_outputs: int

    @cached_property
    def units(self) -> Float[np.ndarray, "2 C"]:
        """Mean and scale of the values; classes have none."""
        return fit_units(self.targets.numpy(), self.weights) if self.targets.ndim == 2 else NO_UNITS

    @property
    def loss(self) -> Loss:
        """Cross entropy for classes; for values, the squared error in their standard deviations."""
        if self.targets.ndim == 1:
            return CrossEntropy()
        squared_error = partial(_squared_error, as_tensor(self.units[1]))
        return PerSampleLoss(squared_error, name="squared error of scaled targets")

    def of(self, rows: Int64[np.ndarray, " m"]) -> "TrainingTable":
        """Return some rows."""
        return TrainingTable(self.features[rows], self.targets[rows], self.weights[rows], self.num_outputs)


@dataclass(frozen=True, eq=False)
class Choice:
    """A network and its number of steps, with the results of the folds that chose them; None without folds.

    Attributes:
        network: The network, in the form of the argument.
        steps: The number of steps.
        losses: Mean loss of the held-out rows, by number of steps.
        outputs: Outputs for each row, by the network that did not see it, after `steps` steps, (M, C); NaN outside
            folds.
    """

    network: Network
    steps: int
    losses: Any = None
    outputs: Float[Tensor, "M C"] | None = None


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Make all random operations in this thread draw from a generator, and none from torch's global one.

    The numbers are those of the global generator with the same seed. Seeding the global one instead would disturb every
    other thread that draws from it, and be disturbed by them.

    Args:
        generator: A generator on the CPU.
    """
    with _ENTERED, _Draws(generator):
        yield


@final
class _Draws(TorchDispatchMode):
    """Passes a generator to every operation that accepts one and got none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            with suppress(RuntimeError, TypeError):  # the operation has no form with a generator
                return func.overloadpacket(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


class LinearAndHidden(nn.Module):
    """A linear model plus one hidden layer.

        f(x) = A x / sqrt(D) + b + V h(W x + c)

    h is silu, or with `waves` 2 sqrt(2 / width) cos: random Fourier features of an RBF kernel with the lengthscale
    sqrt(D) (Rahimi & Recht 2007), whose frequencies W and phases c are trained too. A, b and V start at 0.

    Args:
        num_features: D.
        num_outputs: C.
        width: Number of hidden units; 0 for a linear model.
        waves: Whether h is a cosine.
    """

    def __init__(self, num_features: int, num_outputs: int, width: int = 64, *, waves: bool = False) -> None:
        super().__init__()
        self.waves = waves
        self.linear = nn.Linear(num_features, num_outputs)
        self.hidden = nn.Linear(num_features, width) if width else None
        self.last = nn.Linear(width, num_outputs, bias=False) if width else None
        for layer in filter(None, (self.linear, self.last)):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        if waves and self.hidden is not None:
            nn.init.normal_(self.hidden.weight, std=num_features**-0.5)
            nn.init.uniform_(self.hidden.bias, 0, 2 * pi)

    def forward(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n C"]:
        """Evaluate the network."""
        z: Tensor = self.linear(x / x.shape[1] ** 0.5)
        if self.hidden is None or self.last is None:
            return z
        u = self.hidden(x)
        h = torch.cos(u) * (8 / u.shape[1]) ** 0.5 if self.waves else nn.functional.silu(u)
        bent: Tensor = self.last(h)
        return z + bent


def line(num_features: int, num_outputs: int) -> nn.Module:
    """Build a linear model."""
    return LinearAndHidden(num_features, num_outputs, width=0)


def waves(num_features: int, num_outputs: int) -> nn.Module:
    """Build a linear model plus a hidden layer of cosines."""
    return LinearAndHidden(num_features, num_outputs, waves=True)


DEFAULT_NETWORKS = (line, LinearAndHidden, waves)  # folds choose among these


class RecordedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """A network that `fit` trains on the rows of a table and records."""

    def __init__(
        self,
        network: Network | Sequence[Network] = DEFAULT_NETWORKS,
        *,
        steps: int | None = None,
        lr: float = 0.03,
        batch_size: int | None = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        random_state: int | np.random.RandomState | None = None,
        standardize: bool = True,
        cv: Any = 4,
    ) -> None:
        self.network = network
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.random_state = random_state
        self.standardize = standardize
        self.cv = cv

    def attribute(self, X: ArrayLike, *, classes: ArrayLike | None = None, **settings: Any) -> Attribution:
        """Split predictions into exact contributions of the training rows, by `epk_gp.attribute`.

        Logarithms of the classes' probabilities are split, or the logits with `head="logits"`; for a regressor the
        predictions. The table of the result, `to_frame()`, has the row labels of both data frames and the names of the
        outputs.

        Args:
            X: n rows.
            classes: One output for each row, by its name, such as `predict(X)` of a classifier; or by its number, if
                names are text or do not exist. All outputs by default.
            settings: Further arguments of `epk_gp.attribute`, except `by`.

        Raises:
            TypeError, ValueError: As in `epk_gp.attribute`; or rows or classes differ from those of `fit`.
        """
        points, names, chosen = self._points(X), self._output_names, None
        if classes is not None:
            by_number = np.asarray(classes).dtype.kind in "iu" and np.asarray(names).dtype.kind not in "biuf"
            own = class_labels(self.trajectory_, classes, len(points), "classes", classes=None if by_number else names)
            settings["classes"], chosen = own, own.tolist() if names is None else [names[c] for c in own.tolist()]
        if settings.get("function") is None:  # otherwise the split numbers have their own units
            settings = {"rule": self._rule(), **settings}
        result = attribute(self.trajectory_, points, by=None, **settings)
        return result.labelled(point=row_labels(X), output=names, chosen=chosen, sample=self.index_)

    def report(self, file: str | Path, X: ArrayLike, y: ArrayLike | None = None, **settings: Any) -> Path:
        """Write a report of predictions and their contributions as one HTML file, with names of features and outputs.

        Args:
            file: The file.
            X: n rows.
            y: Their targets, of the same kind as in `fit`.
            settings: Further arguments of `epk_gp.write_report`.

        Raises:
            TypeError, ValueError, OSError: As in `epk_gp.write_report`; or rows or targets differ from those of `fit`.
        """
        points, targets = self._points(X), None
        if y is not None and is_classifier(self):
            targets = class_labels(self.trajectory_, y, len(points), classes=self._output_names)
        elif y is not None:
            targets = as_tensor(np.atleast_1d(np.asarray(y, dtype=np.float64)))
        own = {"names": getattr(self, "feature_names_in_", None), "class_names": self._output_names}
        return epk_gp.write_report(file, self.trajectory_, points, targets, **{**own, "rule": self._rule(), **settings})

    def _rule(self) -> AdaptiveRule:
        """Return the adaptive rule with its usual tolerance, in units of the targets."""
        return adaptive(max(_TOLERANCE * float(self.network_.outputs[1].max()), np.finfo(np.float64).tiny))

    def _record(self, X: ArrayLike, table: TrainingTable, names: Any, constant: Float[np.ndarray, " C"]) -> None:
        """Choose the number of steps by folds if it is not given, train a network on all rows and record the run.

        Args:
            X: The rows in the form of the argument.
            table: Their features, targets and weights.
            names: Names of the outputs, if they have any.
            constant: The constant outputs with the least loss.

        Raises:
            ValueError: Training ended above its initial loss and above the loss of the constant.
        """
        if self.optimizer is None:
            validate_positive(self.lr, "lr")
        elif not callable(self.optimizer):
            raise TypeError(f"optimizer must be a function of parameters: got {self.optimizer!r}.")
        for name in ("steps", "batch_size"):
            if getattr(self, name) is not None:
                validate_count(getattr(self, name), name)
        validate_row_weights(as_tensor(table.weights), len(table.weights))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        networks = [*self.network] if isinstance(self.network, Sequence) else [self.network]
        if not networks:
            raise ValueError("network must be one network, or a list of at least one: got an empty list.")
        trials = [_tried(self._started(network, table, seed)[0], table) for network in networks]
        with torch.random.fork_rng(devices=[]) if any(trials) else nullcontext():
            if any(trials):
                torch.default_generator.manual_seed(seed)
            try:
                choice = self._choose(networks, table, seed)
            except (RuntimeError, TypeError, IndexError):
                for network in networks:  # a recorded step gives clear errors
                    self._trained(network, table, seed, steps=1)
                raise
            if any(trials):
                torch.default_generator.manual_seed(seed)
            net, trajectory = self._trained(choice.network, table, seed, choice.steps)
        _validate_trained(trajectory, as_tensor(table.weights / table.weights.sum()), as_tensor(constant))
        self.trajectory_, self.network_ = trajectory, _copied(net).eval()
        self.steps_ = trajectory.num_steps
        self.fold_losses_, self.out_of_fold_ = choice.losses, choice.outputs
        self.index_, self._output_names = row_labels(X), names
        self._weighted = None if table.weights.all() else torch.from_numpy(np.flatnonzero(table.weights))  # None: all

    def _trained(self, network: Network, table: TrainingTable, seed: int, steps: int) -> tuple[InUnits, Trajectory]:
        """Train a network on all rows, recorded."""
        net, optimizer = self._started(network, table, seed)
        trajectory = train(
            net,
            as_tensor(table.features),
            table.targets,
            optimizer=optimizer,
            steps=steps,
            loss=table.loss,
            batch_size=self.batch_size,
            generator=torch.Generator().manual_seed(seed),
            sample_weight=as_tensor(table.weights),
        )
        return net, trajectory

    def _started(
        self, network: Network, table: TrainingTable, seed: int, dtype: torch.dtype = torch.float64
    ) -> tuple[InUnits, torch.optim.Optimizer]:
        """Build a network for a table, in units of its rows, and its optimizer."""
        net = network
        if callable(network) and not isinstance(network, nn.Module):
            with draw_from(torch.Generator().manual_seed(seed)):
                net = network(table.features.shape[1], table.num_outputs)
        if not isinstance(net, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module or a function that returns one: got {net!r}.")
        net = _copied(net)  # a function may return the same one repeatedly
        columns = fit_units(table.features, table.weights) if self.standardize else NO_UNITS
        parameters = [p for p in net.to(dtype).parameters() if p.requires_grad]
        make = partial(torch.optim.SGD, lr=self.lr, momentum=MOMENTUM) if self.optimizer is None else self.optimizer
        return InUnits(net, as_tensor(columns), as_tensor(table.units)), make(parameters)

    def _choose(self, networks: Sequence[Network], table: TrainingTable, seed: int) -> Choice:
        """Choose the network and number of steps with the least loss on held-out rows; given values are not chosen.

        Raises:
            ValueError: There are too few rows, or `cv` gives no usable folds.
        """
        if len(networks) == 1 and self.steps is not None:
            return Choice(networks[0], self.steps)
        folds = self._folds(table, seed)
        choices = [self._choose_steps(network, folds, table, seed) for network in networks]
        best = min(choices, key=lambda choice: choice.losses[choice.steps])
        if not isfinite(best.losses[best.steps]):
            raise ValueError(
                "training diverged: after no number of steps the loss of held-out rows is finite. Lower lr, or pass "
                "another optimizer."
            )
        return replace(best, losses=[choice.losses for choice in choices])

    def _choose_steps(self, network: Network, folds: Sequence[Fold], table: TrainingTable, seed: int) -> Choice:
        """For each fold, train a network on all other folds, and choose the best number of steps.

        All numbers are tested: the held-out loss may be constant for long, and fall later.
        """
        numbers = STEPS if self.steps is None else (int(self.steps),)
        rows = torch.from_numpy(np.concatenate([held_out for _, held_out in folds]))
        shares = as_tensor(table.weights)[rows]
        curves = zip(*(self._held_out(network, table, fold, seed, numbers) for fold in folds), strict=True)
        best, losses = Choice(network, numbers[0]), dict[int, float]()
        for steps, outputs in zip(numbers, curves, strict=True):
            z = torch.cat(outputs)
            loss = float(shares @ per_sample_losses(table.loss, z, table.targets[rows]) / shares.sum())
            losses[steps] = loss if isfinite(loss) else inf
            if steps == numbers[0] or losses[steps] < losses[best.steps]:
                whole = z.new_full((len(table.weights), z.shape[1]), torch.nan)
                best = Choice(network, steps, losses, whole.index_copy(0, rows, z))
        return best

    def _folds(self, table: TrainingTable, seed: int) -> list[Fold]:
        """Return the training rows and the held-out rows for each fold; rows with weight 0 are in none of them."""
        rows, is_class = np.flatnonzero(table.weights), is_classifier(self)
        y = table.targets.numpy()
        if not isinstance(self.cv, Integral):
            places, splits = np.arange(len(y)), check_cv(self.cv, y, classifier=is_class).split(table.features, y)
            try:
                folds = [tuple(own[table.weights[own] != 0] for own in (places[a], places[b])) for a, b in splits]
            except IndexError as error:
                raise ValueError(f"cv must give positions of the {len(places)} rows: {error}.") from error
            used = [(trained, held_out) for trained, held_out in folds if len(trained) and len(held_out)]
            if not used:
                raise ValueError(
                    "cv must give rows to train on, and others to hold out, of weight above 0: none of its "
                    f"{len(folds)} folds does."
                )
            return used
        # equal rows are in one fold, so that a weight of two equals the row twice, and no row is predicted from its
        # copy
        content = np.column_stack([table.features, y])[rows]
        _, first, group = np.unique(content, axis=0, return_index=True, return_inverse=True)
        distinct = y[rows][first]
        if len(distinct) < 2:
            raise ValueError(
                "folds need samples that differ, of weight above 0: got one sample. Pass steps= and one network."
            )
        most = np.bincount(distinct).max() if is_class else 0  # if it is 1, no fold can have a member of each class
        kind, most = (StratifiedKFold, most) if most > 1 else (KFold, len(first))
        splitter = kind(min(int(self.cv), most), shuffle=True, random_state=seed)
        with warnings.catch_warnings():  # warnings of classes with fewer members than folds
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            folds = [*splitter.split(first, distinct)]
        return [(rows[np.isin(group, trained)], rows[np.isin(group, held_out)]) for trained, held_out in folds]

    def _held_out(
        self, network: Network, table: TrainingTable, fold: Fold, seed: int, numbers: Sequence[int]
    ) -> Iterator[Tensor]:
        """Train on some rows as `fit` does on all, in float32; yield outputs at others after each number of steps."""
        trained, held_out = fold
        own = table.of(trained)
        net, optimizer = self._started(network, own, seed, torch.float32)
        X, new = (net.standardized(as_tensor(rows)).float() for rows in (own.features, table.features[held_out]))
        is_class, (mean, scale) = own.targets.ndim == 1, net.outputs
        y = own.targets if is_class else ((own.targets - mean) / scale).float()
        loss: Loss = CrossEntropy() if is_class else MeanSquaredError()
        factors = as_tensor(own.weights / own.weights.mean()).float()
        generator = torch.Generator().manual_seed(seed)
        sampler = None if self.batch_size is None else EpochSampler(len(X), self.batch_size, generator)
        for step in range(1, numbers[-1] + 1):
            batch = slice(None) if sampler is None else sampler.next_batch()
            optimizer.zero_grad()
            with torch.enable_grad():
                (factors[batch] * per_sample_losses(loss, net.net(X[batch]), y[batch])).mean().backward()
            optimizer.step()
            if step in numbers:
                with torch.no_grad():
                    outputs = _copied(net.net).eval()(new)  # the network keeps its mode
                yield outputs.double() * scale + mean  # outside the mode, which stays active while the generator waits

    def _points(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return as_tensor(validate_data(self, plain_frame(X), dtype=np.float64, reset=False))

    def _outputs(self, X: ArrayLike) -> Float[Tensor, "n C"]:
        points = self._points(X)  # first checks that there is a run
        return network_outputs(self.trajectory_, points)


def fit_units(values: Float[np.ndarray, "M D"], weights: Float[np.ndarray, " M"]) -> Float[np.ndarray, "2 D"]:
    """Return mean and standard deviation of columns over weighted rows; the deviation of a constant column is 1.

    Invalid weights, which `train` refuses, count as none.
    """
    known = weights if (weights >= 0).all() and weights.any() else None
    scaler = StandardScaler().fit(values, sample_weight=known)
    return np.stack([scaler.mean_, scaler.scale_])


def _squared_error(std: Float[Tensor, " T"], z: Float[Tensor, "n T"], y: Float[Tensor, "n T"]) -> Float[Tensor, " n"]:
    return ((z - y) / std).square().mean(dim=1)


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
    if last >= least > torch.finfo(constant.dtype).eps:  # equal targets leave nothing to improve
        advice = f"Training gave nothing better than a constant: {found} Take more steps, or another lr or network."
        warn_caller(advice, ConvergenceWarning)


def _tried(net: InUnits, table: TrainingTable) -> bool:
    """Return whether a network draws random numbers in training, as with dropout; `train` reports other faults.

    Raises:
        ValueError: It does not have one output per class or target.
    """
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    try:
        with torch.no_grad(), draw_from(generator):
            outputs = net.net(net.standardized(as_tensor(table.features[:2])))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    shape, C = tuple(getattr(outputs, "shape", ())), table.num_outputs
    if len(shape) != 2 or shape[1] != C:
        raise ValueError(
            f"network must have one output per class or target of y, {C}: it maps {len(table.features[:2])} rows to "
            f"shape {shape}. Change its last layer, or pass a function of the numbers of features and outputs."
        )
    return not torch.equal(before, generator.get_state())


def _copied(net: N) -> N:
    """Return a copy of a network, which may store weights that its hooks compute."""
    with CopyingResults():
        return copy.deepcopy(net)
