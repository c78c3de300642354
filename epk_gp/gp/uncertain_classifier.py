"""A trained network with a Gaussian process on its training labels that judges it, and the files of both."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from safetensors.torch import save
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from torch import Tensor, nn

from epk_gp.core.checks import MEMORY_BUDGET, ComputeOptions, SupportsSubmit, door, validate_count, validate_labels
from epk_gp.core.losses import CrossEntropy
from epk_gp.core.model import NUM_FINGERPRINT_POINTS, fingerprint_outputs
from epk_gp.core.show import warn_caller
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory, network_outputs, validate_trajectory, warn_unless_live
from epk_gp.gp import data as gp_data
from epk_gp.gp.label_process import InputFeatures, InputsKernel, LabelKernel, LabelProcess, LabelSettings, fit_labels
from epk_gp.gp.posterior import LogitPosterior, isotropic_softmax_uncertainty
from epk_gp.gp.stacking import ClassUncertainty, Judgement, Stacking, calibrate, classes_in_every_set, conformal_sets
from epk_gp.gram.sketch import is_one_state
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.kernels.blocks import BlockCache
from epk_gp.quadrature.rules import WeightPath, chords, straight
from epk_gp.storage import files
from epk_gp.storage.rows import TrainingInputs, map_data
from epk_gp.storage.run import recorded_model
from epk_gp.storage.schema import Count, Positive, Record, RunDescription, run_header, validated
from epk_gp.trained.ntk import as_trajectory

_CACHE_BYTES = 64 * 2**20  # size of cached predictions: all scores of the same points cost one evaluation

FORMAT, FORMAT_VERSION = "epk_gp uncertain classifier", 2
DESCRIPTION, TENSORS = "classifier.json", "classifier.safetensors"
_ROUNDING_POWER = 3 / 8  # of eps: allowed distance of another machine's posterior; 1e-6, and 2e-3 in float32
_NUMBERS = ("noise", "outputscale", "negative_log_likelihood")  # fields of a process
_DAMAGED = "must be what UncertainClassifier.save wrote: it is damaged. Restore it from a copy."


class _Fitted(NamedTuple):
    """The run, settings and names of classes of the last `fit`, which `set_params` does not change."""

    trajectory: Trajectory
    settings: LabelSettings
    classes: Any


@door
@final
class UncertainClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """A trained network with a Gaussian process on the labels of all its training points.

    The process has one kernel for all classes, a power of the cosine of the path kernel's trace times an RBF kernel on
    the inputs, and is conditioned on the labels, with the most likely noise. The network keeps its own prediction; the
    process judges it. Labels of points that neither has seen determine the weights of the two (stacking, which includes
    a temperature),

        p(x) = softmax(a_1 f(x) + a_2 m(x))

    with the network's logits f and the process's mean m. These labels are those of n validation points; with
    `out_of_fold` also those of the N training points, which the process predicts from each other. A prior stabilises
    both weights if there are few labels; from 500 labels on it hardly counts. No class gets a probability above 1 - (1
    - 1/C) v / (N + n + 1), with the process's variance v. Error bars are those of the process alone, and do not vanish
    with a_2 (`Stacking`, `ClassUncertainty`). Print `stacking_` to see whether the process gains anything. Sets of
    classes have separate weights, by the training labels of `out_of_fold`, and all validation labels calibrate them;
    without `out_of_fold` half of the validation labels determine the weights, and half calibrate.

    Up to 5000 conditioning points the process is conditioned through its kernel matrix, if that takes at most 10^13
    multiplications; otherwise it is a Bayesian linear regression on sketched features (`path_features`), linear in the
    number of points. A few nodes of the path represent all its steps (docs/theory.md, section 6).

    It follows scikit-learn's conventions. Points may be tensors as the network takes them; results are then tensors. Or
    points may be arrays with one row per point; results are then arrays. `fit` takes validation points, which neither
    the network nor a choice about it has seen.

    For a network that was trained without a recorder, `UncertainClassifier.of(model, X, y).fit(X_val, y_val)` is the
    same with the kernel of its last weights instead of the path's. The process is computed on the device of the
    validation points; results are on the device of the points.

    Args:
        trajectory: Run of a classifier with C outputs, trained on class labels with cross entropy.
        nodes: Number of nodes of the path that represent all its steps (`epk_gp.gram.sketch.nodes_trajectory`),
            preferably at least the number of outputs; None for 20, or for as many as there are outputs, up to 256. At
            each node one combination of the outputs is used; for a run of one state None uses each output, and 1 costs
            least.
        features: Number of sketched features of each point; "exact" for none; None chooses as described above.
        inputs_kernel: "rbf" or None. It is left out for integer inputs, which have no distances.
        points: Indices of the training points to condition on; all by default.
        classes: Names of the C classes in the order of the outputs, numbers or text; 0 .. C - 1 by default. Labels in
            arguments use these names, and `predict` returns an array of them; the targets of data sets and loaders are
            numbers of outputs, for any names. Columns of probabilities and sets have this order. scikit-learn's scorers
            of probabilities (neg_log_loss, roc_auc_ovr) assume columns for classes in ascending order without regard to
            `classes_`, and are wrong for names that do not ascend.
        feature_names: Names of the columns of the training inputs, in order, if these were a data frame. Data frames
            are compared with them as in scikit-learn; None for the names of the validation points.
        seed: Seed of the sketch, of the division of the validation points, and of Monte Carlo samples.
        power: Power of the product of both kernels; None for 2 with the kernel matrix itself, and for 1 with sketched
            features, whose noise grows with the power.
        path: The path that contains the nodes: `straight()` steps, or `chords(every=k)`.
        out_of_fold: Logits of the M training points in order, each by a network that was trained without that point, as
            in cross-validation, or NaN; only rows of `points` are used.
        memory_budget: Bytes for everything except the points and the result (`ComputeOptions`).
        progress: Show a progress bar.
        executor: Executor whose workers compute (`ComputeOptions`).

    Attributes:
        classes_: The names of the classes, or 0 .. C - 1.
        feature_names_in_: Names of the columns that a data frame must have, in order, if they are known.
        process_: The process, after `fit`.
        stacking_: The weights a_1 and a_2 of probabilities and scores.
        set_stacking_: The weights a_1 and a_2 of sets of classes.
        conformity_scores_: Scores of the validation points that calibrate sets, ascending.
        conformity_labels_: Their classes, as numbers of outputs.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        nodes: int | None = None,
        features: int | Literal["exact"] | None = None,
        inputs_kernel: InputsKernel = "rbf",
        points: Int[Tensor, " N"] | Sequence[int] | None = None,
        classes: Sequence[Any] | np.ndarray | None = None,
        feature_names: Sequence[str] | np.ndarray | None = None,
        seed: int = 0,
        power: int | None = None,
        path: WeightPath = straight(),
        out_of_fold: Float[Tensor, "M C"] | Float[np.ndarray, "M C"] | None = None,
        memory_budget: int = MEMORY_BUDGET,
        progress: bool = False,
        executor: SupportsSubmit | None = None,
    ) -> None:
        validate_trajectory(trajectory)
        warn_unless_live(trajectory)
        self.trajectory = trajectory
        self.nodes = nodes
        self.features = features
        self.inputs_kernel = inputs_kernel
        self.points = points
        self.classes = classes
        self.feature_names = feature_names
        self.seed = seed
        self.power = power
        self.path = path
        self.out_of_fold = out_of_fold
        self.memory_budget = memory_budget
        self.progress = progress
        self.executor = executor
        ComputeOptions(memory_budget, progress, executor=executor)  # raises if they are invalid
        self._cache = BlockCache(_CACHE_BYTES)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        X: TrainingInputs,
        y: object = None,
        *,
        output: Callable[[Any], Tensor] | None = None,
        classes: Sequence[Any] | np.ndarray | None = None,
        **settings: Any,
    ) -> "UncertainClassifier":
        """Return the classifier of a network that was trained without a recorder, with its tangent kernel.

            judged = UncertainClassifier.of(model, train_loader).fit(validation_loader)

        The kernel is that of the present weights, J(x) J(x')^T, instead of the path's: the equivalent run has one step
        of length zero (`tangent_trajectory`). All scores are defined as for a recorded run. Contributions of samples,
        and predictions without a sample, need a recorded run.

        Args:
            model: A trained classifier, which is copied and evaluated in evaluation mode. Its weights are the
                parameters that require gradients: those of the last layer alone cost least.
            X: Its N training inputs, as `epk_gp.Recorder` takes them, including data sets and loaders; or a data frame.
            y: Their classes; None if X is a data set whose items contain them, as numbers of outputs.
            output: Maps the network's result to the logits (n, C), if it has another form: for one logit z for two
                classes, `lambda z: torch.nn.functional.pad(z.reshape(-1, 1), (1, 0))`, which is [0, z].
            classes: Names of the classes, in the order of the outputs.
            settings: Other arguments of `UncertainClassifier`.

        Returns:
            The classifier, to be fitted on validation points.

        Raises:
            TypeError, ValueError: Network and data do not fit, or a setting cannot be used.
        """
        weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        if weight is not None and gp_data.is_array(X):
            settings = {"feature_names": gp_data.compare_columns(BaseEstimator(), X, is_first=True), **settings}
            X = gp_data.float_inputs(gp_data.as_numbers(X), weight.dtype).to(weight.device)
        if not isinstance(y, str | None) or (y is None and isinstance(X, Tensor | tuple | Mapping)):
            names = None if classes is None else gp_data.class_names(classes, len(np.asarray(classes)))
            y = gp_data.as_labels(y, names)
            validate_labels(y, len(y), name="y")
            y = y.to(None if weight is None else weight.device)
        # a loss would be tested on the network's result, but the logits are the result of `output`
        run = replace(as_trajectory(model, X, y, output=output), loss=CrossEntropy())
        gp_data.validate_classifier(run)
        return cls(tangent_trajectory(run), classes=classes, **settings)

    def fit(self, X: object, y: object = None) -> "UncertainClassifier":
        """Condition the process on the training labels, and determine its weight by validation points.

        Args:
            X: n validation points, at least 20, with the distribution of later points; or a data set or loader.
            y: Their classes; None if X is a data set whose items contain them, as numbers of outputs.

        Raises:
            TypeError: Points, labels or names of classes have a wrong type.
            ValueError: The run is not a classifier's; there are too few validation points, or the network has seen most
                of them; points or labels do not fit the network; a setting is invalid; or the classifier was read from
                a file, which contains no training data.
        """
        trajectory, classes_of_y = self.trajectory, self.classes
        if self.feature_names is not None:
            self.feature_names_in_ = np.asarray(self.feature_names, dtype=object)
        gp_data.compare_columns(self, X, is_first=self.feature_names is None)
        if y is None and (rows := map_data(X, None, None)) is not None:
            (X, y), classes_of_y = rows.mapped(), None
        points, own = gp_data.labelled_points(trajectory, self.points, "UncertainClassifier")
        settings = LabelSettings(self.nodes, self.features, self.inputs_kernel, self.seed, self.power, self.path)
        held_out = gp_data.class_inputs(trajectory, X)
        names = gp_data.class_names(self.classes, trajectory.num_outputs)
        classes = gp_data.class_labels(trajectory, y, len(held_out), classes=classes_of_y).to(held_out.device)
        if len(held_out) < (fewest := gp_data.MIN_VALIDATION_POINTS):
            raise ValueError(f"there must be at least {fewest} validation points: got {len(held_out)}.")
        gp_data.count_seen(held_out, trajectory, points)
        options = ComputeOptions(self.memory_budget, self.progress, executor=self.executor)
        folds = gp_data.out_of_fold_logits(self.out_of_fold, trajectory, points)
        process = fit_labels(trajectory, settings, points.to(held_out.device), options)
        left_out, own = process.leave_one_out()[0].to(classes.device), own.to(classes.device)
        judged = _judge(trajectory, process, held_out)
        calibrated = calibrate(judged, classes, left_out, own, folds, self.seed)
        self._cache = BlockCache(_CACHE_BYTES)
        self._fitted = _Fitted(trajectory, settings, self.classes)
        self.classes_: np.ndarray = names
        self.process_: LabelProcess = process
        self.stacking_, self.set_stacking_, self.conformity_scores_, self.conformity_labels_ = calibrated
        return self

    def predict_proba(self, X: object) -> Float[Tensor, "n C"] | Float[np.ndarray, "n C"]:
        """Return the class probabilities of network and process together, float64."""
        return gp_data.like_inputs(self._probability(X), X)

    def predict(self, X: object) -> Int64[Tensor, " n"] | Shaped[np.ndarray, " n"]:
        """Return the most likely class of each point, which need not be the network's own."""
        predicted = self._probability(X).argmax(1)
        if self._fitted.classes is None:
            return gp_data.like_inputs(predicted, X)
        return self.classes_[predicted.cpu().numpy()]  # type: ignore[no-any-return]  # NumPy's index

    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Return the share of points whose most likely class is the true one; weighted by `sample_weight` if given."""
        predicted = self._probability(X).argmax(1)
        labels = gp_data.class_labels(self._fitted.trajectory, y, len(predicted), classes=self._fitted.classes)
        return float(accuracy_score(labels.cpu(), predicted.cpu(), sample_weight=sample_weight))

    def uncertainty(self, X: object, num_samples: int = 1024) -> ClassUncertainty:
        """Return uncertainty scores of the classes of points; see `ClassUncertainty` for the use of each.

        Args:
            X: n points.
            num_samples: Monte Carlo samples through the softmax, the same for all points and calls.

        Raises:
            TypeError, ValueError: The network cannot take the points, or there are fewer than 2 samples.
            RuntimeError: The classifier is not fitted.
        """
        validate_count(num_samples, "num_samples, for a standard deviation,", minimum=2)
        judged = self._judged(X)
        p = self.stacking_.probability(judged)
        of_network = p.gather(1, judged.logits.argmax(1)[:, None])[:, 0]
        generator = torch.Generator(p.device).manual_seed(self._fitted.settings.seed)
        u = isotropic_softmax_uncertainty(self.stacking_.mean(judged), self._variance(judged), num_samples, generator)
        entropy, largest = torch.special.entr(p).sum(1), p.amax(1)
        share = (u.mutual_information / u.entropy.clamp_min(torch.finfo(p.dtype).tiny)).clamp(0, 1)
        by_process = u.std.gather(1, p.argmax(1)[:, None])[:, 0]
        scores = (
            1 - of_network,
            judged.variance,
            entropy,
            share * entropy,
            (by_process.square() + largest * (1 - largest) / (self.stacking_.num_held_out / 2 + 2)).sqrt(),
        )
        as_given = ClassUncertainty(*(gp_data.like_inputs(values, X) for values in scores))
        return as_given.labelled(point=gp_data.row_labels(X))

    def logit_posterior(self, X: object) -> LogitPosterior:
        """Return the posterior of the logits whose softmax is the probabilities, with the process's error bars.

        Args:
            X: n points.

        Returns:
            Mean (n, C), a_1 f + a_2 m limited to the certainty that the labels support, and covariances (n, C, C),
            max(a_2, b)^2 times those of m with b the weight of the process alone; float64.

        Raises:
            TypeError, ValueError: The network cannot take the points.
            RuntimeError: The classifier is not fitted.
        """
        judged = self._judged(X)
        mean = self.stacking_.mean(judged)
        posterior = LogitPosterior(mean, torch.diag_embed(self._variance(judged)[:, None].expand_as(mean)))
        return posterior.labelled(point=gp_data.row_labels(X), output=self.classes_)

    def predict_set(
        self, X: object, alpha: float = 0.1, *, by_class: bool = False, allow_empty: bool = False
    ) -> Bool[Tensor, "n C"] | Bool[np.ndarray, "n C"]:
        """Return, for each point, a set of classes that contains the true one with probability 1 - alpha.

        Split conformal prediction: see `epk_gp.gp.stacking.conformal_sets` for the guarantee and its limits.

        Args:
            X: n points.
            alpha: Allowed share of sets without the true class.
            by_class: Whether the guarantee holds within each class, by a separate threshold. A class with fewer than 1
                / alpha - 1 calibrating labels (`conformity_labels_`) is in every set, and a warning reports it.
            allow_empty: Whether sets may be empty if no class is likely enough. By default they contain the most likely
                class, so that more sets than promised may contain the true one.

        Raises:
            TypeError, ValueError: The network cannot take the points, or `alpha` is not a number between 0 and 1.
            RuntimeError: The classifier is not fitted.
        """
        judged = self._judged(X)
        calibrating = self.conformity_scores_.cpu(), alpha, self.conformity_labels_.cpu() if by_class else None
        sets = conformal_sets(self.set_stacking_.probability(judged), *calibrating)
        if by_class and (few := classes_in_every_set(len(self.classes_), *calibrating)):
            warn_caller(f"Classes of which too few labels calibrate are in every set: {self.classes_[few].tolist()}.")
        if not allow_empty:
            empty = ~sets.any(1)
            sets[empty, self.stacking_.probability(judged).argmax(1)[empty]] = True
        return gp_data.like_inputs(sets, X)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to a new or empty folder: nodes, process, and the weights of both.

        Raises:
            FileExistsError: The folder is not empty.
            OSError: The folder cannot be written.
            RuntimeError: The classifier is not fitted.
        """
        self._require_fitted()
        place, (trajectory, settings, classes), process = Path(folder), self._fitted, self.process_
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise FileExistsError(f"folder must be a new or empty folder: {place} holds something. Choose another.")
        kernel, nodes, model = process.kernel, process.kernel.nodes, trajectory.model
        probes, statistics = trajectory.inputs[:NUM_FINGERPRINT_POINTS], nodes.statistics
        names = getattr(self, "feature_names_in_", None)
        first_statistics = None if statistics is None else statistics[0]
        num_states = 1 if is_one_state(nodes) else len(nodes.states)
        tensors = {
            "states": torch.stack([nodes.states[s] for s in range(num_states)]),
            "probe_inputs": probes,
            "targets": trajectory.targets[:NUM_FINGERPRINT_POINTS],
            "probe": fingerprint_outputs(model, nodes.states[0], probes, first_statistics),
            "factor": process.factor,
            "weights": process.weights,
            "scores": self.conformity_scores_,
            "score_labels": self.conformity_labels_,
            "posterior": self._said(probes),
        }
        if statistics is not None:
            tensors["statistics"] = torch.stack([statistics[s] for s in range(num_states)])
        if isinstance(kernel, LabelKernel):
            tensors |= {"inputs": process.training, "process_targets": process.targets}
        tensors |= {f"constant.{name}": value for name, value in model.frozen_state().items()}
        tensors |= model.signature.stored_tensors()
        content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
        of_settings = {name: value for name, value in asdict(settings).items() if name != "path"}
        if settings.path.every != 1:
            of_settings["chords_every"] = settings.path.every
        of_process: dict[str, Any] = {name: getattr(process, name) for name in _NUMBERS}
        of_process["kind"] = "exact" if isinstance(kernel, LabelKernel) else "sketched"
        described: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "run": run_header(
                model,
                trajectory.loss,
                nodes.update_rule,
                num_points=trajectory.num_points,
                num_outputs=trajectory.num_outputs,
                data_digest=trajectory.data_digest,
            ),
            "digest": nodes.digest,
            "step_size": nodes.steps[0].lr,
            "settings": of_settings,
            "process": of_process | {"lengthscale": kernel.lengthscale, "power": kernel.power},
            "stacking": asdict(self.stacking_),
            "set_stacking": asdict(self.set_stacking_),
            "classes": None if classes is None else self.classes_.tolist(),
            "has_units": isinstance(model.module, gp_data.InUnits),
            "feature_names": None if names is None else [str(name) for name in names],
            "tensor_bytes": len(content),
        }
        files.atomic_write(place / TENSORS, content)
        described["tensor_blake2b"] = files.checksum(content, files.checksum_json(described))
        files.atomic_write(place / DESCRIPTION, files.checksummed_json(described))

    @classmethod
    @door
    def load(
        cls, folder: str | os.PathLike[str], net: nn.Module, *, output: Callable[[Any], Tensor] | None = None
    ) -> "UncertainClassifier":
        """Read a classifier from the files of `save`.

        Args:
            folder: The folder.
            net: A network of the recorded architecture; its weights are ignored and not changed. If an `EPKClassifier`
                recorded the run, it has the architecture of that estimator's network.
            output: The function from the network's result to its outputs, needed if the run was recorded with one.

        Raises:
            FileNotFoundError: The folder contains no classifier.
            ValueError: A file is damaged, or the network differs.
        """
        description, data = _read_files(Path(folder))
        header = dict(description.run)
        with _damage_named(folder):
            scores, labels = data["scores"], data["score_labels"]
            validate_labels(labels, len(scores), header["num_outputs"])
            is_finite = data["states"].isfinite().all() and scores.isfinite().all()
            if not (is_finite and scores.ndim == 1 and len(scores) and (scores.diff() >= 0).all()):
                raise TypeError("a state or score is not finite, or the scores are not ascending")
            probes = {**data, "inputs": data["probe_inputs"]}
            if description.has_units and not isinstance(net, gp_data.InUnits):
                net = gp_data.InUnits(net, data["constant.columns"], data["constant.outputs"])
        model = recorded_model(header, probes, net, output)
        with _damage_named(folder):
            of_settings = dict(description.settings)
            every = of_settings.pop("chords_every")
            settings = LabelSettings(**of_settings, path=chords(every))
            count, length = settings.num_nodes(header["num_outputs"], is_one_state=True), description.step_size
            nodes = gp_data.read_nodes(header, data, model, count, length, description.digest)
            names = description.feature_names
            classifier = cls(nodes, classes=description.classes, feature_names=names, **vars(settings))
            if names is not None:
                classifier.feature_names_in_ = np.asarray(names, dtype=object)
            classifier._fitted = _Fitted(nodes, settings, description.classes)
            classifier.process_ = _read_process(description.process, data, nodes, settings.seed)
            classifier.stacking_ = Stacking(**description.stacking)  # type: ignore[arg-type]  # numbers
            classifier.set_stacking_ = Stacking(**description.set_stacking)  # type: ignore[arg-type]
            classifier.conformity_scores_, classifier.conformity_labels_ = scores, labels
            classifier.classes_ = gp_data.class_names(description.classes, nodes.num_outputs)
            classifier._validate_said(data["posterior"])
        return classifier

    def _said(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n columns"]:
        """Return the logits of probabilities and of sets, and their variance: they identify a stored classifier."""
        posterior, of_sets = self.logit_posterior(X), self.set_stacking_.mean(self._judged(X))
        return torch.cat([posterior.mean, of_sets, posterior.covariance[:, 0, :1]], dim=1).cpu()

    def _validate_said(self, stored: Tensor) -> None:
        """Raise if the classifier's results differ from those when it was saved, beyond the rounding of its dtype.

        Means are compared with the largest mean, variances with the largest and, for rounding, with the prior one.
        """
        process, actual = self.process_, self._said(self._fitted.trajectory.inputs)
        is_double = isinstance(process.kernel, LabelKernel) and process.training.dtype == torch.float64
        eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
        size = stored.abs().amax(0)
        size[:-1] = size[:-1].max()
        limit = eps**_ROUNDING_POWER * size
        limit[-1] += 8 * eps * self.stacking_.process**2 * process.outputscale
        if actual.shape != stored.shape or not ((actual - stored).abs() <= limit).all():
            raise TypeError("its tensors do not give the logits that were stored with them")

    def __sklearn_clone__(self) -> "UncertainClassifier":
        return UncertainClassifier(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "conformity_scores_")

    def _require_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise RuntimeError("the classifier must be fitted first: call fit(X, y) with held-out points.")

    def _judged(self, X: object) -> Judgement:
        """Evaluate network and process, once for the same points."""
        self._require_fitted()
        gp_data.compare_columns(self, X)
        trajectory = self._fitted.trajectory
        points = gp_data.class_inputs(trajectory, X)

        def joined() -> Tensor:
            judged = _judge(trajectory, self.process_, points)
            return torch.cat([judged.logits, judged.mean, judged.variance[:, None]], dim=1)

        stored, C = self._cache.computed(content_key(points), joined), trajectory.num_outputs
        return Judgement(stored[:, :C], stored[:, C : 2 * C], stored[:, -1])

    def _probability(self, X: object) -> Float[Tensor, "n C"]:
        judged = self._judged(X)
        return self.stacking_.probability(judged)

    def _variance(self, judged: Judgement) -> Tensor:
        """Return the variance of each logit of the points that the process causes."""
        return max(self.stacking_.process, self.stacking_.alone) ** 2 * self.process_.outputscale * judged.variance


def _judge(trajectory: Trajectory, process: LabelProcess, X: Shaped[Tensor, "n ..."]) -> Judgement:
    """Evaluate network and process on the process's device; results are on the device of the points."""
    with torch.no_grad():
        points = gp_data.float_inputs(X.to(process.factor.device), torch.float64)
        logits = network_outputs(trajectory, points).to(torch.float64)
        mean, variance = process.predict(points)
    return Judgement(logits.to(X.device), mean.to(X.device), variance.to(X.device))


class _Settings(Record):
    """`LabelSettings`; chords by their length."""

    nodes: Positive | None
    features: Positive | Literal["exact"] | None
    inputs_kernel: Literal["rbf"] | None
    seed: int
    power: Positive | None
    chords_every: Positive = 1


class _Process(Record):
    """The numbers of a process."""

    kind: Literal["exact", "sketched"]
    noise: float
    outputscale: float
    negative_log_likelihood: float
    lengthscale: float | None
    power: Positive


class _Description(Record):
    """The content of the JSON file."""

    format: Literal["epk_gp uncertain classifier"]
    version: Literal[2]
    run: RunDescription
    digest: str
    step_size: float
    settings: _Settings
    process: _Process
    stacking: dict[str, int | float]
    set_stacking: dict[str, int | float]
    classes: list[Any] | None
    has_units: bool = False  # whether the network is inside `InUnits`
    feature_names: list[str] | None = None
    tensor_bytes: Count
    tensor_blake2b: str


@contextmanager
def _damage_named(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors of tensors of a wrong kind into one clear error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"{Path(folder) / DESCRIPTION} {_DAMAGED} ({reason})") from error


def _read_process(description: _Process, data: Mapping[str, Tensor], nodes: Trajectory, seed: int) -> LabelProcess:
    factor, weights = data["factor"], data["weights"]
    numbers = {name: getattr(description, name) for name in _NUMBERS}
    options = ComputeOptions()
    if description.kind == "exact":
        kernel = LabelKernel(nodes, description.lengthscale, options, seed, description.power)
        return LabelProcess(kernel, data["inputs"], data["process_targets"], factor, weights, **numbers)
    features = InputFeatures(nodes, len(factor), seed, description.lengthscale, options, description.power)
    none = factor.new_zeros(0, len(factor)), weights.new_zeros(0, nodes.num_outputs)
    return LabelProcess(features, *none, factor, weights, **numbers)


def _read_files(folder: Path) -> tuple[_Description, dict[str, Tensor]]:
    """Read both files, checked against their checksums."""
    file, tensors = folder / DESCRIPTION, folder / TENSORS
    if not file.is_file():
        raise FileNotFoundError(f"folder must be one that UncertainClassifier.save wrote: {file} does not exist.")
    message = f"{file} {_DAMAGED}"
    entries = files.read_checksummed_json(files.read_bytes(file, files.MAX_JSON_BYTES, str(file)), message)
    if entries.get("version") != FORMAT_VERSION:
        raise ValueError(f"{file} must have version {FORMAT_VERSION}: another epk_gp wrote {entries.get('version')}.")
    description = validated(_Description, entries, message)
    del entries["tensor_blake2b"]
    size, suffix = description.tensor_bytes, files.checksum_json(entries)
    content = files.read_checked(tensors, size, description.tensor_blake2b, str(tensors), suffix)
    return description, files.load_tensors(content, str(tensors))
