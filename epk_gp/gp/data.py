"""Points, labels and targets on which processes are conditioned."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from epk_gp.core.checks import as_tensor, parse_indices, validate_labels, validate_texts
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, ignored_class
from epk_gp.core.model import FunctionalModel
from epk_gp.core.show import warn_caller
from epk_gp.core.step import Step, fingerprint_data
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.storage.rows import map_data
from epk_gp.storage.run import recorded_loss, validate_forward_function

TargetKind = Literal["network", "dirichlet", "labels"]
MIN_VALIDATION_POINTS = 20  # they determine two weights, and half or all of them are ranked
ALPHA_EPSILON = 0.01  # concentration of the classes other than the label


class InUnits(nn.Module):
    """A network for the rows of a table: it takes standardised columns, and its outputs are in units of the targets.

        f(x) = scale * net((x - column_mean) / column_scale) + mean

    Args:
        net: The network inside, from (n, D) to (n, C).
        columns: Mean and scale of each column, (2, D).
        outputs: Mean and scale of each output, (2, C).
    """

    columns: Tensor
    outputs: Tensor

    def __init__(self, net: nn.Module, columns: Float[Tensor, "2 D"], outputs: Float[Tensor, "2 C"]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("columns", columns)
        self.register_buffer("outputs", outputs)

    @property
    def epk_gp_output_size(self) -> float:
        """Size of the outputs in the units of the targets: their rounding has this size, even where they are 0."""
        mean, scale = self.outputs
        return float((mean.abs() + scale).max())

    def standardized(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Return rows in the units of the network, in their own dtype."""
        mean, scale = self.columns.to(x)
        return torch.div(x - mean, scale)

    def forward(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n C"]:
        """Evaluate the network."""
        mean, scale = self.outputs
        z: Tensor = self.net(self.standardized(x)) * scale + mean
        return z


def in_network_units(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
    """Return inputs in the form of a network inside `InUnits`, so that columns of different units have one scale."""
    module = trajectory.model.module
    return module.standardized(X) if isinstance(module, InUnits) else X


class NodesWithoutData(Trajectory):
    """The nodes of the path, which replace the run of a classifier that was read from a file.

    Its inputs are a few training points by which the network is recognised, not the training data.
    """


def read_nodes(
    header: Mapping[str, Any], data: Mapping[str, Tensor], model: FunctionalModel, count: int, lr: float, digest: str
) -> NodesWithoutData:
    """Build the run of nodes that a file describes.

    Args:
        header: The run's description by `run_header`.
        data: The tensors of the file.
        model: The network.
        count: Number of nodes, if all have one state.
        lr: Length of a step.
        digest: Digest of the run of nodes.
    """
    states = tuple(data["states"])
    statistics = tuple(data["statistics"]) if "statistics" in data else None
    if len(states) == 1:  # all nodes share it
        states, statistics = states * (1 + count), None if statistics is None else statistics * (1 + count)
    coefficients = stack_coefficients([LinearStep(lr=lr)] * len(model.sizes), model.sizes)
    trajectory = NodesWithoutData(
        model=model,
        inputs=data["probe_inputs"],
        targets=data["targets"],
        loss=recorded_loss(header, None),
        update_rule=header["law"]["name"],
        states=states,
        updates=(coefficients,) * (len(states) - 1),
        steps=tuple(Step(index=j, lr=lr, batch=None) for j in range(len(states) - 1)),
        num_outputs=header["num_outputs"],
        digest=digest,
        data_digest=fingerprint_data(data["probe_inputs"], data["targets"]),
        statistics=statistics,
    )
    validate_forward_function(trajectory, data["probe"])
    return trajectory


def parse_train_indices(points: Int[Tensor, " N"] | Sequence[int] | None, trajectory: Trajectory) -> Int[Tensor, " N"]:
    """Return the indices of the training points on which a GP is conditioned.

    Args:
        points: N distinct indices; None for all training points.
        trajectory: The run.

    Raises:
        TypeError: `points` is not a list or tensor of integers.
        ValueError: An index is out of range or repeated, or there are none; or the run has no training data.
    """
    if isinstance(trajectory, NodesWithoutData):
        raise ValueError(
            "a recorded run with its training data is needed: a classifier that was read from a file holds no training "
            "data. Read the run itself, load_trajectory(path, net)."
        )
    if points is None:
        return torch.arange(trajectory.num_points, device=trajectory.device)
    return parse_indices(points, trajectory.num_points, "points", trajectory.device)


def make_targets(
    trajectory: Trajectory,
    train_indices: Int[Tensor, " N"],
    targets: TargetKind,
    head: Head,
    *,
    prior_is_zero: bool = True,
) -> tuple[Float[Tensor, "N C"], Float[Tensor, "N C"] | None, Float[Tensor, " C"]]:
    """Return the regression targets of the GP.

    Args:
        trajectory: The run.
        train_indices: Indices of N training points.
        targets: "network" - the trained network's outputs (section 4.2, Bell et al. 2023); "dirichlet" - transformed
            labels; "labels" - the run's own targets, centred (`label_values`).
        head: The network's head.
        prior_is_zero: Whether the prior mean is zero: the mean of real targets is then subtracted. Any other prior mean
            determines their location.

    Returns:
        Targets; for "dirichlet" the variances of their noise; and the mean that was subtracted from "labels". Float64.

    Raises:
        ValueError: `targets` is unknown, "dirichlet" is requested and the run has no class labels, or "labels" is
            requested and the run's targets are neither class labels nor one number per output.
    """
    zero = torch.zeros(trajectory.num_outputs, dtype=torch.float64, device=trajectory.device)
    if targets == "network":
        X = float_inputs(trajectory.inputs[train_indices], torch.float64)
        return network_outputs(trajectory, X, state=-1, head=head).to(torch.float64), None, zero
    if targets == "labels":
        values, mean = label_values(trajectory, train_indices)
        mean = mean if prior_is_zero or not trajectory.targets.is_floating_point() else zero
        return values - mean, None, mean
    if targets != "dirichlet":
        raise ValueError(f"targets must be 'network', 'dirichlet' or 'labels': got {targets!r}.")
    labels = _class_labels(trajectory, "targets='dirichlet'", " Use targets='network'.")[train_indices]
    validate_known((labels >= 0) & (labels < trajectory.num_outputs), train_indices)
    return *dirichlet_targets(labels, trajectory.num_outputs), zero


def label_values(
    trajectory: Trajectory, train_indices: Int[Tensor, " N"]
) -> tuple[Float[Tensor, "N C"], Float[Tensor, " C"]]:
    """Return the run's own targets as one number per output, and the mean around which a process is centred.

    Args:
        trajectory: The run.
        train_indices: Indices of N training points.

    Returns:
        For class labels, one-hot vectors and 1 / C; for real targets, as in `MeanSquaredError`, themselves and their
        mean over the N points. Float64.

    Raises:
        ValueError: The targets are neither class labels nor one number per output, a label is out of range, or a number
            is missing.
    """
    targets, C = trajectory.targets[train_indices], trajectory.num_outputs
    if targets.ndim == 1 and C > 1 and not targets.is_floating_point():
        validate_known((targets >= 0) & (targets < C), train_indices)
        values = torch.nn.functional.one_hot(targets.long(), C).to(torch.float64)
        return values, values.new_full((C,), 1 / C)
    if targets[0].numel() != C or (C > 1 and not targets.is_floating_point()):
        raise ValueError(
            f"targets='labels' needs one class label per point, or a real number for each of the {C} outputs: the run "
            f"has {targets.dtype} targets of shape {tuple(trajectory.targets.shape)}. Use targets='network'."
        )
    values = targets.reshape(len(targets), C).to(torch.float64)
    validate_known(values.isfinite(), train_indices)
    return values, values.mean(0)


def validate_known(is_known: Bool[Tensor, "N ..."], points: Int[Tensor, " N"]) -> None:
    """Raise if a process's target is missing at one of N training points.

    Args:
        is_known: Whether each point's numbers exist.
        points: The points' indices in the run.

    Raises:
        ValueError: One is missing.
    """
    is_missing = ~is_known.reshape(len(points), -1).all(1)
    if is_missing.any():
        row = int(points[is_missing][0])
        raise ValueError(f"each point must have a target: row {row} of the data has none. Leave it out of points=.")


def dirichlet_targets(labels: Int[Tensor, " n"], num_classes: int) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
    """Transform class labels to regression targets with known noise.

    Milios et al. (2018), as in GPyTorch's `DirichletClassificationLikelihood`: the label's Dirichlet concentration
    alpha = 0.01 + [class is the label] gives Gamma variables, which log-normals match in mean and variance:

        sigma^2 = log(1 / alpha + 1),   y = log(alpha) - sigma^2 / 2

    Args:
        labels: Class of each of n points.
        num_classes: C. GPyTorch infers it from the largest label, and misses classes without points.

    Returns:
        Targets y and variances sigma^2, float64.

    Raises:
        TypeError: The labels are not integers.
        ValueError: A label is out of range.
    """
    validate_labels(labels, len(labels), num_classes)
    alpha = torch.nn.functional.one_hot(labels.long(), num_classes).double() + ALPHA_EPSILON
    variances = (1 / alpha).log1p()
    return alpha.log() - variances / 2, variances


def _class_labels(trajectory: Trajectory, caller: str, advice: str = "") -> Tensor:
    labels = trajectory.targets
    if labels.is_floating_point() or labels.ndim != 1:
        raise ValueError(f"{caller} needs class labels: the targets are {labels.dtype}, {tuple(labels.shape)}.{advice}")
    return labels


def training_labels(trajectory: Trajectory, caller: str) -> Int64[Tensor, " M"]:
    """Return the class labels of a run; labels that its loss ignores are not classes.

    Raises:
        ValueError: The run does not have one class label per point, or its outputs are not logits.
    """
    loss = trajectory.loss
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            f"{caller} needs the run of a classifier, with cross entropy as its loss: this one was trained on {loss}. "
            "For one logit of two classes see UncertainClassifier.of, for regression LogitGP(run, targets='labels')."
        )
    labels = _class_labels(trajectory, caller)
    given = labels[labels != ignored_class(loss)]
    validate_labels(given, len(given), trajectory.num_outputs, name="the run's labels")
    return labels.long()


def validate_classifier(run: Trajectory) -> None:
    """Raise if a network that was not recorded does not have one logit per class, or its targets are not classes.

    Raises:
        ValueError: It returns one number per point, or probabilities; or a target is not one of its classes.
    """
    z = network_outputs(run, run.inputs[:64]).double()
    if z.shape[1] == 1:
        raise ValueError(
            "there must be a logit for each class: got one number per point. If it is the logit z of class 1, pass "
            "output=lambda z: torch.nn.functional.pad(z.reshape(-1, 1), (1, 0)); of its probability p, z is p.logit()."
        )
    if (z >= 0).all() and ((z.sum(1) - 1).abs() < 1e-3).all():
        raise ValueError("outputs must be logits: got probabilities, which sum to 1. Pass output=lambda p: p.log().")
    training_labels(run, "UncertainClassifier.of")


def labelled_points(
    trajectory: Trajectory, points: Int[Tensor, " N"] | Sequence[int] | None, caller: str
) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
    """Return the indices of the training points on which a process on labels is conditioned, and their labels.

    Args:
        trajectory: The run.
        points: Indices; None for all points whose labels the loss uses. For a graph, whose points are all nodes, only
            those on which a step was trained: the labels of the others may be the ones to predict.
        caller: Name of the calling function, for messages.

    Raises:
        TypeError: `points` are not indices.
        ValueError: The run has no class labels (`training_labels`); an index is out of range or repeated, its point has
            no label, or there are none.
    """
    labels = training_labels(trajectory, caller)
    has_label = (labels >= 0) & (labels < trajectory.num_outputs)
    if points is None and trajectory.model.signature.graph is not None:
        has_label &= _is_trained_on(trajectory)
    indices = parse_train_indices(points, trajectory)
    if points is None:
        indices = indices[has_label]
    elif not has_label[indices].all():
        missing = int(indices[~has_label[indices]][0])
        raise ValueError(f"points must have labels: that of {missing} is {int(labels[missing])}, left out by the loss.")
    if not len(indices):
        raise ValueError("there must be training points with labels: the loss leaves all of them out.")
    return indices, labels[indices]


def _is_trained_on(trajectory: Trajectory) -> Bool[Tensor, " M"]:
    """Return a mask of the points that are in the batch of any step, with a weight other than 0."""
    trained = torch.zeros(trajectory.num_points, dtype=torch.bool)
    for step in trajectory.steps:
        rows = torch.arange(len(trained)) if step.batch is None else step.batch.cpu()
        weights = torch.ones(len(rows)) if step.sample_weights is None else step.sample_weights.cpu()
        trained[rows[(weights != 0) & (rows >= 0)]] = True
        if trained.all():
            break
    return trained.to(trajectory.device)


def out_of_fold_logits(
    logits: object, trajectory: Trajectory, points: Int64[Tensor, " N"]
) -> Float[Tensor, "N C"] | None:
    """Return logits of training points by networks that have not seen them, float64; None if there are fewer than 20.

    Args:
        logits: Logits of all M training points; a row of NaN for points without any.
        trajectory: The run.
        points: The points that are used.

    Raises:
        TypeError: They are not an array of numbers.
        ValueError: They have another shape, a used one is not finite, or they are those of the run's network.
    """
    if logits is None:
        return None
    needed, advice = (trajectory.num_points, trajectory.num_outputs), "Pass a row for each training point, in order."
    try:
        z = as_tensor(logits if isinstance(logits, Tensor) else np.asarray(logits, dtype=np.float64), torch.float64)
    except ValueError as error:
        raise TypeError(f"out_of_fold must be an array of logits: got {logits!r}.") from error
    if z.shape != needed:
        raise ValueError(f"out_of_fold must be logits of shape {needed}: got shape {tuple(z.shape)}. {advice}")
    z = z.detach().to(points.device)[points]
    known = z.isfinite().all(1)
    if (is_wrong := ~(known | z.isnan().all(1))).any():
        row = int(points[is_wrong][0])
        raise ValueError(f"out_of_fold must be finite, or NaN for all outputs of a point: row {row} is not. {advice}")
    if known.sum() < MIN_VALIDATION_POINTS:
        return None
    if torch.allclose(z[known], network_outputs(trajectory, trajectory.inputs[points[known]]).to(z)):
        raise ValueError(
            "out_of_fold must be logits of networks that have not seen the point: these are the run's own."
        )
    return z


def class_inputs(trajectory: Trajectory, X: object, name: str = "X") -> Shaped[Tensor, "n ..."]:
    """Return points as one tensor; points from an array are moved to the run's device.

    Args:
        trajectory: The run.
        X: n inputs as the run takes them, or a data set or loader of them; or an array with one row per point, whose
            columns are the flattened input.
        name: Name of the points in messages.

    Raises:
        TypeError, ValueError: The network cannot take the points.
    """
    if not is_array(X):
        X = X if (rows := map_data(X, None, None)) is None else rows.mapped()[0]
        return parse_inputs(trajectory, X, name)  # type: ignore[arg-type]  # checked there
    points = as_numbers(X, name).to(trajectory.device)
    kind, shape = trajectory.inputs.dtype, trajectory.input_shape
    if kind.is_floating_point:
        points = points.to(kind)
    elif not points.is_floating_point() or bool((points == points.round()).all()):
        integers = points.to(kind)
        is_changed = (integers.to(points.dtype) != points).reshape(len(points), -1).any(1)
        if is_changed.any():
            raise ValueError(
                f"{name} must hold numbers of the training inputs' kind, {kind}: row {int(is_changed.nonzero()[0])} of "
                f"the array, of {points.dtype}, holds one that is too large or too small for it."
            )
        points = integers
    if points.ndim == 2 and len(shape) > 1 and points.shape[1] == torch.Size(shape).numel():
        points = points.reshape(-1, *shape)
    return parse_inputs(trajectory, points, name)


def as_numbers(X: object, name: str = "X") -> Shaped[Tensor, "n ..."]:
    """Return an array, a list of rows or a data frame as a tensor.

    Raises:
        TypeError: It contains other values than real numbers, or is sparse.
        ValueError: A column of a data frame has a missing or infinite value.
    """
    if hasattr(X, "toarray"):
        raise TypeError(f"{name} must be dense: got {type(X).__name__}. Pass {name}.toarray().")
    X = plain_frame(X, name)
    try:
        points = as_tensor(np.asarray(X))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of numbers: got {type(X).__name__}.") from error
    if points.is_complex():
        raise TypeError(f"{name} must be real numbers: got an array of {points.dtype}.")
    return points


def plain_frame(X: Any, name: str = "X") -> Any:
    """Return a data frame with columns of NumPy numbers, for any storage of its columns; other objects unchanged.

    Args:
        X: A pandas data frame with numeric, Boolean, nullable, sparse or categorical columns; or another object.
        name: Its name in messages.

    Raises:
        TypeError: A column contains other values than real numbers, such as text or dates.
        ValueError: A column has a missing or infinite value.
    """
    if not (hasattr(X, "iloc") and hasattr(X, "columns")) or not len(X.columns):
        return X
    columns = []
    for j, label in enumerate(X.columns):
        column = X.iloc[:, j]
        try:
            values = np.asarray(column)
            columns.append(values if values.dtype.kind in "biuf" else np.asarray(column.tolist(), np.float64))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"column {label!r} of {name} must hold real numbers: got {column.dtype}. Make numbers of categories, "
                "as scikit-learn's OneHotEncoder does in a pipeline."
            ) from error
        if not np.isfinite(columns[j]).all():
            raise ValueError(
                f"column {label!r} of {name} must hold finite numbers: values are missing, or infinite. Fill them, as "
                "scikit-learn's SimpleImputer does in a pipeline, or drop the rows."
            )
    return type(X)(np.column_stack(columns), index=X.index, columns=X.columns)


def row_labels(X: Any) -> Any:
    """Return the labels of a data frame's rows, or None."""
    return X.index.to_flat_index() if hasattr(X, "iloc") and hasattr(X, "index") else None


def compare_columns(model: BaseEstimator, X: object, *, is_first: bool = False) -> Any:
    """Compare a data frame's columns with those of a model, as scikit-learn does, and return their names.

    Args:
        model: The object with `feature_names_in_`, if it knows names.
        X: The points. Tensors have no names.
        is_first: Whether the model takes over the names of these points.
    """
    if is_first or is_array(X):
        validate_data(model, X, reset=is_first, skip_check_array=True, ensure_2d=False)
    return getattr(model, "feature_names_in_", None)


def class_names(classes: object, num_outputs: int) -> Shaped[np.ndarray, " C"]:
    """Return the names of the classes, in the order of the outputs: 0 .. C - 1 if `classes` is None.

    Raises:
        TypeError: They are neither numbers nor text.
        ValueError: There is not one name per output, or one name occurs twice.
    """
    if classes is None:
        return np.arange(num_outputs)
    names = np.asarray(classes)
    if names.dtype == object and all(isinstance(name, str) for name in names.ravel()):
        names = names.astype(str)
    if names.dtype.kind not in "biufU":
        raise TypeError(f"classes must be numbers or text: got an array of {names.dtype}.")
    if names.dtype.kind == "U":
        validate_texts(names.ravel().tolist(), "classes")
    if names.shape != (num_outputs,) or len(np.unique(names)) != num_outputs:
        raise ValueError(f"classes must name each of the {num_outputs} outputs once, in order: got {names.tolist()}.")
    return names


def class_labels(
    trajectory: Trajectory, y: object, count: int, name: str = "y", *, classes: object = None
) -> Int64[Tensor, " n"]:
    """Return labels of points as a tensor on the run's device.

    Args:
        trajectory: The run.
        y: The labels.
        count: Number of points.
        name: Name of the labels in messages.
        classes: Names of the classes in the labels; None for the numbers 0 .. C - 1.

    Raises:
        TypeError: The labels are not integers, although classes have no names.
        ValueError: There is not one label per point, or a label is not a class of the network.
    """
    names = None if classes is None else class_names(classes, trajectory.num_outputs)
    labels = as_labels(y, names, name)
    validate_labels(labels, count, trajectory.num_outputs, name=name)
    return labels.to(device=trajectory.device, dtype=torch.int64)


def as_labels(y: object, names: Shaped[np.ndarray, " C"] | None, name: str = "y") -> Shaped[Tensor, "..."]:
    """Return labels as a tensor; names of classes become their numbers.

    Raises:
        TypeError: The labels are not numbers, although classes have no names.
        ValueError: A label is not a name of a class.
    """
    if names is None:
        try:
            return y if isinstance(y, Tensor) else as_tensor(np.asarray(y))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} must be whole numbers, the classes of the network: got {type(y).__name__}. Pass "
                "UncertainClassifier(..., classes=...) if classes have names."
            ) from error
    index = {value: c for c, value in enumerate(names.tolist())}
    given = (y.cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)).tolist()
    listed = given if isinstance(given, list) else [given]
    unknown = [value for value in listed if isinstance(value, list) or value not in index]
    if unknown:
        raise ValueError(f"{name} must hold classes of the network, {list(index)}: got {unknown[0]!r}.")
    numbers = torch.tensor([index[value] for value in listed], dtype=torch.int64)
    return numbers if isinstance(given, list) else numbers[0]


def is_array(X: object) -> bool:
    """Return whether points are in a form of scikit-learn: an array, a list of rows or a data frame."""
    has_rows = hasattr(X, "__array__") or hasattr(X, "toarray")  # the latter are sparse, refused later
    return isinstance(X, list) or (has_rows and not isinstance(X, Tensor))


def like_inputs(values: Shaped[Tensor, "n ..."], X: object) -> Shaped[Tensor, "n ..."] | Shaped[np.ndarray, "n ..."]:
    """Return values as an array if the points were given as one, otherwise as a tensor."""
    return values.cpu().numpy() if is_array(X) else values


def float_inputs(X: Shaped[Tensor, "n ..."], dtype: torch.dtype) -> Shaped[Tensor, "n ..."]:
    """Return floating-point inputs in a dtype, and integers unchanged."""
    return X.to(dtype) if X.is_floating_point() else X


def count_seen(X: Shaped[Tensor, "n ..."], trajectory: Trajectory, points: Tensor | slice = slice(None)) -> int:
    """Return the number of validation points that are training points, up to the rounding of a narrower dtype.

    Warn if they are more than a twentieth.

    Args:
        X: The validation points.
        trajectory: The run.
        points: The points on which a process is conditioned, in addition to those of the steps; all by default.

    Raises:
        ValueError: Most of the validation points are training points.
    """
    used = _is_trained_on(trajectory)
    used[points] = True
    inputs, narrow = trajectory.inputs[used], trajectory.inputs.dtype
    if narrow.is_floating_point:  # the points' narrowest dtype: a copy in it differs from the data by it
        kinds = (torch.bfloat16, torch.float16, torch.float32)
        narrow = next((kind for kind in kinds if torch.equal(X.to(kind).to(X.dtype), X)), torch.float32)
    known, unseen = ((part.to(narrow).double() + 0.0).cpu().contiguous().numpy() for part in (inputs, X))  # -0 is 0
    rows = {row.tobytes() for row in known}
    seen = sum(row.tobytes() in rows for row in unseen)
    if 2 * seen > len(X):
        raise ValueError(f"validation points must be unseen: {seen} of {len(X)} are training points. Hold others out.")
    if 20 * seen > len(X):
        warn_caller(
            f"{seen} of {len(X)} validation points are equal to training points: if they are the same observations, "
            "scores are too sure of themselves, and sets too small. Hold others out."
        )
    return seen
