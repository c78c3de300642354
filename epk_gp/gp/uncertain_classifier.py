"""The trained network beside a Gaussian process on the labels of its training points, which judges it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from torch import Tensor, nn

from epk_gp.core.checks import validate_count
from epk_gp.core.model import NUM_FINGERPRINT_POINTS
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory, network_outputs, validate_trajectory
from epk_gp.gp.data import (
    class_inputs,
    class_labels,
    class_names,
    count_seen,
    float_inputs,
    labelled_points,
    like_inputs,
    training_labels,
)
from epk_gp.gp.label_process import InputsKernel, LabelProcess, LabelSettings, fit_labels
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.saved_classifier import SavedClassifier, damage_named, read_classifier, write_classifier
from epk_gp.gp.softmax import isotropic_softmax_uncertainty
from epk_gp.gp.stacking import (
    ClassUncertainty,
    Stacking,
    conformal_sets,
    conformity_scores,
    most_likely_temperature,
    stack_logits,
)
from epk_gp.kernels.blocks import BlockCache
from epk_gp.quadrature.rules import WeightPath, straight

MIN_VALIDATION_POINTS = 20  # half of them weigh two numbers, the other half are ranked
_CACHE_BYTES = 64 * 2**20  # of predictions: all scores of the same points cost one evaluation
_PARAMETERS = ("trajectory", "nodes", "features", "inputs_kernel", "points", "classes", "seed", "power", "path")
_UNSUPPORTED = ("checkpoint", "accumulate")
_OPTIONS = ("memory_budget", "progress", "executor")


@dataclass(frozen=True, eq=False)
class _Judgement:
    """What network and process say of n points: logits and mean (n, C), and the process's variance (n,)."""

    logits: Float[Tensor, "n C"]
    mean: Float[Tensor, "n C"]
    variance: Float[Tensor, " n"]

    def __getitem__(self, rows: Int64[Tensor, " m"]) -> "_Judgement":
        return _Judgement(self.logits[rows], self.mean[rows], self.variance[rows])


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The run, settings and names of classes that the last `fit` used, which `set_params` does not change."""

    trajectory: Trajectory
    settings: LabelSettings
    classes: object


@final
class UncertainClassifier:
    """A trained network beside a Gaussian process on the labels of all its training points.

    The process has one kernel for all classes, a power of the cosine of the path kernel's trace times an RBF kernel on
    the inputs, and is conditioned on the labels, with the most likely noise. The network keeps its own prediction; the
    process judges it. On held-out points, half of them weigh the two (stacking, which includes a temperature),

        p(x) = softmax(a_1 f(x) + a_2 m(x))

    with the network's logits f and the process's mean m, and the other half calibrate sets of classes. A prior keeps
    both weights where these labels are few; from some hundred on it plays no part. No class gets a probability above
    1 - (1 - 1/C) v / (N + n + 1), with the process's variance v, N training labels and n that weigh the two. Error bars
    are those of the process alone, and do not vanish with a_2 (`Stacking`, `ClassUncertainty`).

    Up to 5000 conditioning points the process is conditioned through its kernel matrix, if that takes at most 10^13
    multiplications; else it is Bayesian linear regression on sketched features (`path_features`), linear in the number
    of points. Some nodes of the path stand for all its steps (docs/theory.md, section 6).

    It follows scikit-learn's conventions: `fit`, `predict`, `predict_proba`, `score`, `classes_`; points may be tensors
    as the network takes them, and results are tensors then, or arrays with a row per point, and results are arrays.
    `fit` takes validation points, which neither the network nor a choice about it has seen.

    The process is computed on the device of the validation points; results are on that of the points.

    Args:
        trajectory: Run of a classifier with C outputs, trained on class labels with cross entropy.
        nodes: Nodes of the path that stand for all its steps (`epk_gp.gram.sketch.nodes_trajectory`), at best no
            fewer than outputs; None for 20, or for as many as there are outputs, up to 256.
        features: Sketched features of each point; "exact" for none; None decides as said above.
        inputs_kernel: "rbf" or None. It is left out for integers as inputs: they have no distances.
        points: Indices of the training points to condition on; all by default.
        classes: Names of the C classes in the order of the outputs, numbers or text; 0 .. C - 1 by default. Labels
            that are passed in are of these, and `predict` returns an array of them. Columns of probabilities and sets
            have this order. scikit-learn's scorers of probabilities (neg_log_loss, roc_auc_ovr) take columns for
            classes in ascending order whatever `classes_` says, and are wrong with names that do not ascend.
        seed: Seed of the sketch, of the division of the validation points, and of Monte Carlo samples.
        power: Of the product of both kernels; None for 2 with the kernel matrix itself, and for 1 with sketched
            features, whose noise grows with the power.
        path: Which the nodes lie on: `straight()` steps, or `chords(every=k)`.
        options: `memory_budget`, `progress` and `executor`; see `ComputeOptions`.

    Attributes:
        classes_: The names of the classes, or 0 .. C - 1.
        process_: The process, after `fit`.
        stacking_: The weights a_1 and a_2.
        conformity_scores_: Of the second half of the validation points, ascending.
    """

    _estimator_type = "classifier"

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        nodes: int | None = None,
        features: int | Literal["exact"] | None = None,
        inputs_kernel: InputsKernel = "rbf",
        points: Int[Tensor, " N"] | Sequence[int] | None = None,
        classes: Sequence[Any] | np.ndarray | None = None,
        seed: int = 0,
        power: int | None = None,
        path: WeightPath = straight(),
        **options: Unpack[ComputeSettings],
    ) -> None:
        validate_trajectory(trajectory)
        self.trajectory = trajectory
        self.nodes = nodes
        self.features = features
        self.inputs_kernel = inputs_kernel
        self.points = points
        self.classes = classes
        self.seed = seed
        self.power = power
        self.path = path
        self.options = options
        parse_options("UncertainClassifier", _UNSUPPORTED, **options)
        self._cache = BlockCache(_CACHE_BYTES)

    def fit(self, X: object, y: object) -> "UncertainClassifier":
        """Condition the process on the training labels, and weigh it against the network on validation points.

        Args:
            X: n validation points, at least 20, drawn as the points that will be asked about.
            y: Their classes.

        Raises:
            TypeError: Points, labels or names of classes are of the wrong kind.
            ValueError: The run is no classifier's; there are too few validation points, or the network has seen most of
                them; points or labels are not those of the network; a setting cannot be used; or the classifier was
                read from a file, which holds no training data.
        """
        trajectory = self.trajectory
        labels = training_labels(trajectory, "UncertainClassifier")
        settings = self._settings()
        settings.validate()
        points = labelled_points(trajectory, labels, self.points)
        held_out = class_inputs(trajectory, X)
        names = class_names(self.classes, trajectory.num_outputs)
        classes = class_labels(trajectory, y, len(held_out), classes=self.classes).to(held_out.device)
        if len(held_out) < MIN_VALIDATION_POINTS:
            raise ValueError(
                f"there must be at least {MIN_VALIDATION_POINTS} validation points: got {len(held_out)}. Hold more "
                "points out of the training."
            )
        count_seen(held_out, trajectory)
        options = parse_options("UncertainClassifier", _UNSUPPORTED, **self.options)
        process = fit_labels(trajectory, labels, settings, points.to(held_out.device), options)
        judged = _judge(trajectory, process, held_out)
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(self.seed)).to(classes.device)
        first, second = order.tensor_split(2)
        own = labels[points].to(process.values.device)
        alone = most_likely_temperature(process.leave_one_out()[0], own, unknown=1)
        stacking = stack_logits(judged.logits[first], judged.mean[first], classes[first], alone, len(own))
        probability = torch.softmax(_stacked(stacking, judged[second]), dim=1)
        self._cache = BlockCache(_CACHE_BYTES)
        self._fitted = _Fitted(trajectory, settings, self.classes)
        self.classes_: np.ndarray = names
        self.process_: LabelProcess = process
        self.stacking_: Stacking = stacking
        self.conformity_scores_: Tensor = conformity_scores(probability, classes[second])
        return self

    def predict_proba(self, X: object) -> Float[Tensor, "n C"] | Float[np.ndarray, "n C"]:
        """Return the class probabilities of network and process together, float64."""
        return like_inputs(self._probability(self._judged(X)), X)

    def predict(self, X: object) -> Int64[Tensor, " n"] | Shaped[np.ndarray, " n"]:
        """Return the most likely class of each point, which need not be the network's own."""
        predicted = self._probability(self._judged(X)).argmax(1)
        return like_inputs(predicted, X) if self._fitted.classes is None else self.classes_[predicted.cpu().numpy()]

    def score(self, X: object, y: object) -> float:
        """Return the share of points whose most likely class is the true one."""
        predicted = self._probability(self._judged(X)).argmax(1)
        labels = class_labels(self._fitted.trajectory, y, len(predicted), classes=self._fitted.classes)
        return float((predicted == labels.to(predicted.device)).double().mean())

    def uncertainty(self, X: object, num_samples: int = 1024) -> ClassUncertainty:
        """Return scores of how unsure the classes of points are; see `ClassUncertainty` for what each is for.

        Args:
            X: n points.
            num_samples: Monte Carlo samples through the softmax, the same for all points and calls.

        Raises:
            TypeError, ValueError: The network cannot take the points, or there are fewer than 2 samples.
            RuntimeError: The classifier is not fitted.
        """
        validate_count(num_samples, "num_samples, for a standard deviation,", minimum=2)
        judged = self._judged(X)
        p = self._probability(judged)
        of_network = p.gather(1, judged.logits.argmax(1)[:, None])[:, 0]
        variance = self._variance(judged)
        generator = torch.Generator(p.device).manual_seed(self._fitted.settings.seed)
        u = isotropic_softmax_uncertainty(_stacked(self.stacking_, judged), variance, num_samples, generator)
        largest = p.amax(1)
        by_process = u.std.gather(1, p.argmax(1)[:, None])[:, 0]
        scores = (
            1 - of_network,
            judged.variance,
            torch.special.entr(p).sum(1),
            u.mutual_information,
            (by_process.square() + largest * (1 - largest) / (self.stacking_.num_labels + 2)).sqrt(),
        )
        return ClassUncertainty(*(like_inputs(values, X) for values in scores))

    def logit_posterior(self, X: object) -> LogitPosterior:
        """Return the posterior of the logits whose softmax are the probabilities, with the process's error bars.

        Args:
            X: n points.

        Returns:
            Mean (n, C), a_1 f + a_2 m where no class is surer than the labels support, and covariances (n, C, C),
            max(a_2, b)^2 times those of m with b the weight of the process alone; float64, for `softmax_uncertainty`.

        Raises:
            TypeError, ValueError: The network cannot take the points.
            RuntimeError: The classifier is not fitted.
        """
        judged = self._judged(X)
        mean = _stacked(self.stacking_, judged)
        return LogitPosterior(mean, torch.diag_embed(self._variance(judged)[:, None].expand_as(mean)))

    def predict_set(self, X: object, alpha: float = 0.1) -> Bool[Tensor, "n C"] | Bool[np.ndarray, "n C"]:
        """Return, for each point, which classes a set must hold to be right with probability 1 - alpha.

        Split conformal prediction: see `epk_gp.gp.stacking.conformal_sets` for what is guaranteed, and what is not.

        Args:
            X: n points.
            alpha: Allowed share of sets without the true class.

        Raises:
            TypeError, ValueError: The network cannot take the points, or `alpha` is no number between 0 and 1.
            RuntimeError: The classifier is not fitted.
        """
        sets = conformal_sets(self._probability(self._judged(X)), self.conformity_scores_.cpu(), alpha)
        return like_inputs(sets, X)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to a new or empty folder: nodes, process, and the weights of both.

        Raises:
            FileExistsError: The folder holds something.
            OSError: The folder cannot be written.
            RuntimeError: The classifier is not fitted.
        """
        self._check_is_fitted()
        fitted = self._fitted
        names = None if fitted.classes is None else self.classes_.tolist()
        posterior = self._posterior(fitted.trajectory.inputs[:NUM_FINGERPRINT_POINTS])
        scores = self.conformity_scores_
        saved = SavedClassifier(fitted.settings, self.process_, self.stacking_, scores, posterior, names)
        write_classifier(folder, saved, fitted.trajectory)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], net: nn.Module, *, output: Callable[[Any], Tensor] | None = None
    ) -> "UncertainClassifier":
        """Read a classifier that `save` wrote.

        Args:
            folder: The folder.
            net: A network of the recorded architecture; its weights do not matter and are not changed.
            output: The function from what the network returns to its outputs, needed if the run was recorded with one.

        Raises:
            FileNotFoundError: The folder holds no classifier.
            ValueError: A file is damaged, or the network is another one.
        """
        saved, trajectory = read_classifier(folder, net, output)
        settings = saved.settings
        model = cls(
            trajectory,
            nodes=settings.nodes,
            features=settings.features,
            inputs_kernel=settings.inputs_kernel,
            classes=saved.classes,
            seed=settings.seed,
            power=settings.power,
            path=settings.path,
        )
        model.process_, model.stacking_, model.conformity_scores_ = saved.process, saved.stacking, saved.scores
        model._fitted = _Fitted(trajectory, settings, saved.classes)
        with damage_named(folder):
            model.classes_ = class_names(saved.classes, trajectory.num_outputs)
            saved.validate_posterior(model._posterior(trajectory.inputs))
        return model

    def _posterior(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n columns"]:
        """Return mean and variance of the logits, by which a stored classifier is recognised."""
        posterior = self.logit_posterior(X)
        return torch.cat([posterior.mean, posterior.covariance[:, 0, :1]], dim=1).cpu()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments that the classifier was made with, as scikit-learn asks for them."""
        return {name: getattr(self, name) for name in _PARAMETERS} | self.options

    def set_params(self, **params: Any) -> "UncertainClassifier":
        """Change arguments; they take effect in the next `fit`.

        Raises:
            ValueError: There is no such argument.
        """
        known = self.get_params().keys() | set(_OPTIONS)
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"a parameter must be one of {sorted(known)}: got {name!r}.")
            if name in _OPTIONS:
                self.options[name] = value  # type: ignore[literal-required]  # one of its fields
            else:
                setattr(self, name, value)
        return self

    def __sklearn_clone__(self) -> "UncertainClassifier":
        return UncertainClassifier(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "conformity_scores_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags  # noqa: PLC0415  only scikit-learn asks

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=True, three_d_array=True),
        )

    def __repr__(self) -> str:
        changed = {name: value for name, value in self.get_params().items() if name not in ("trajectory", "points")}
        return f"UncertainClassifier({self.trajectory!r}, {', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    def _settings(self) -> LabelSettings:
        return LabelSettings(self.nodes, self.features, self.inputs_kernel, self.seed, self.power, self.path)

    def _check_is_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise RuntimeError(
                "the classifier must be fitted before it is asked: call fit(X, y) with validation points that the "
                "network has not seen."
            )

    def _judged(self, X: object) -> _Judgement:
        """Evaluate network and process, once for the same points."""
        self._check_is_fitted()
        trajectory = self._fitted.trajectory
        points = class_inputs(trajectory, X)
        C, key = trajectory.num_outputs, content_key(points)
        stored = self._cache.get(key)
        if stored is None:
            judged = _judge(trajectory, self.process_, points)
            stored = torch.cat([judged.logits, judged.mean, judged.variance[:, None]], dim=1)
            self._cache.put(key, stored)
        return _Judgement(stored[:, :C], stored[:, C : 2 * C], stored[:, -1])

    def _variance(self, judged: _Judgement) -> Tensor:
        """Return the variance of each logit of the points that the process causes."""
        return self.stacking_.bar_factor() ** 2 * self.process_.outputscale * judged.variance

    def _probability(self, judged: _Judgement) -> Tensor:
        return torch.softmax(_stacked(self.stacking_, judged), dim=1)


def _stacked(stacking: Stacking, judged: _Judgement) -> Float[Tensor, "n C"]:
    return stacking.without_certainty(stacking.logits(judged.logits, judged.mean), judged.variance)


def _judge(trajectory: Trajectory, process: LabelProcess, X: Shaped[Tensor, "n ..."]) -> _Judgement:
    """Evaluate network and process on the process's device; results are on that of the points."""
    with torch.no_grad():
        points = float_inputs(X.to(process.values.device), torch.float64)
        logits = network_outputs(trajectory, points).to(torch.float64)
        mean, variance = process.predict(points)
    return _Judgement(logits.to(X.device), mean.to(X.device), variance.to(X.device))
