"""What a report is asked to hold: the points and outputs, and results computed before; checked before anything else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.checks import validate_count, validate_integer, validate_labels
from epk_gp.core.inputs import Graph, Inputs
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, apply_head, resolve_head
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs, validate_trajectory
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import Influence

ExplainedOutputs = Literal["predicted", "all"] | int
Process = UncertainClassifier | LogitGP | LogitPosterior
OtherInputs = Shaped[Tensor, "o ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph  # as `Inputs`, of o points

# An influence is of the explained outputs where its outputs are theirs to so many eps of the largest one: it may have
# been computed in other blocks of points.
_ROUNDING = 2**16


@dataclass(frozen=True, eq=False)
class ReportRequest:
    """The points of a report, and which of their outputs it explains.

    Attributes:
        trajectory: The run, with M training samples and C outputs.
        X: The n points, packed.
        y: Their classes, or targets of a regression; None if they are not known.
        network: The network's outputs at the points, without the head.
        head: What the explained outputs are.
        is_classifier: Whether outputs stand for classes.
        class_names: Names of the C outputs.
        points: Indices of the m points that are explained.
        rows: Of each of the k explained outputs, which of these points it is an output of.
        classes: Its index.
    """

    trajectory: Trajectory
    X: Shaped[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."] | None
    network: Float[Tensor, "n C"]
    head: Head
    is_classifier: bool
    class_names: tuple[str, ...]
    points: Int64[Tensor, " m"]
    rows: Int64[Tensor, " k"]
    classes: Int64[Tensor, " k"]

    @property
    def explained(self) -> Shaped[Tensor, "m ..."]:
        """The explained points."""
        return self.X[self.points.to(self.X.device)]

    @property
    def predicted(self) -> Int64[Tensor, " n"]:
        """The network's class of every point; 0 where outputs stand for no classes."""
        return self.network.argmax(dim=1) if self.is_classifier else torch.zeros(len(self.X), dtype=torch.int64)

    @property
    def true_classes(self) -> Int64[Tensor, " n"] | None:
        """The true classes, where they are known."""
        return self.y if self.is_classifier else None

    @property
    def training_labels(self) -> Int64[Tensor, " M"] | None:
        """The classes of the training samples, where they have one each."""
        targets = self.trajectory.targets
        is_label = targets.ndim == 1 and not targets.is_floating_point() and self.is_classifier
        return targets.cpu().long() if is_label else None

    @property
    def training_targets(self) -> Float[Tensor, "M C"] | None:
        """The targets of a regression's training samples, where they have one for each output."""
        targets, (M, C) = self.trajectory.targets, (self.trajectory.num_points, self.trajectory.num_outputs)
        return None if self.is_classifier or targets.numel() != M * C else targets.cpu().double().reshape(M, C)


def parse_request(
    trajectory: Trajectory,
    X: Inputs,
    y: object,
    *,
    head: Head | None = None,
    outputs: ExplainedOutputs = "predicted",
    explained: int | Sequence[int] = 6,
    class_names: Sequence[str] | None = None,
) -> ReportRequest:
    """Return the points and outputs that a report is asked to explain; arguments and errors as `write_report`."""
    validate_trajectory(trajectory)
    X = parse_inputs(trajectory, X)
    C = trajectory.num_outputs
    has_labels = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
    is_classifier = C > 1 and (has_labels or isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood))
    targets = None if y is None else _parse_targets(y, len(X), C, is_classifier)
    network = network_outputs(trajectory, X).cpu()
    points = _parse_points(explained, len(X))
    true = targets[points] if targets is not None and is_classifier else None
    rows, classes = _wanted(outputs, network[points], true, is_classifier).nonzero(as_tuple=True)
    if class_names is not None and (isinstance(class_names, str) or len(class_names) != C):
        raise ValueError(f"class_names must name each of the {C} outputs: got {class_names!r}.")
    names = class_names or [f"{'class' if is_classifier else 'output'} {c}" for c in range(C)]
    return ReportRequest(
        trajectory=trajectory,
        X=X,
        y=targets,
        network=network,
        head=resolve_head(head, trajectory.loss, C),
        is_classifier=is_classifier,
        class_names=tuple(map(str, names)),
        points=points,
        rows=rows,
        classes=classes,
    )


def _parse_targets(y: object, count: int, num_outputs: int, is_classifier: bool) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a torch.Tensor: got {type(y).__name__}. Convert it with torch.as_tensor.")
    if is_classifier:
        validate_labels(y, count, num_outputs, name="y")
        return y.detach().cpu().long()
    if len(y) != count or y[0].numel() != num_outputs:
        raise ValueError(
            f"y must have the {num_outputs} target values of each of the {count} points: got shape {tuple(y.shape)}."
        )
    return y.detach().cpu().reshape(count, -1)


def _parse_points(explained: object, count: int) -> Int64[Tensor, " m"]:
    if isinstance(explained, bool) or not isinstance(explained, Sequence | Tensor):
        validate_count(explained, "explained")
        return torch.arange(min(int(explained), count))  # type: ignore[call-overload]  # validated
    indices = explained.tolist() if isinstance(explained, Tensor) else list(explained)
    for index in indices:
        validate_integer(index, "an index in explained")
    indices = list(map(int, indices))
    if not indices or len(set(indices)) < len(indices) or not 0 <= min(indices) <= max(indices) < count:
        raise ValueError(
            f"explained must be a number of points, or different indices of X, 0..{count - 1}: got {indices}."
        )
    return torch.tensor(indices)


def _wanted(
    outputs: ExplainedOutputs, network: Float[Tensor, "m C"], true: Int64[Tensor, " m"] | None, is_classifier: bool
) -> Bool[Tensor, "m C"]:
    """Return which outputs of each point are explained."""
    wanted = torch.zeros_like(network, dtype=torch.bool)
    if isinstance(outputs, str):
        if outputs not in ("predicted", "all"):
            raise ValueError(f"outputs must be 'predicted', 'all' or a number of classes: got {outputs!r}.")
        if outputs == "all" or not is_classifier:
            return ~wanted
        wanted.scatter_(1, network.argmax(dim=1, keepdim=True), True)
        return wanted if true is None else wanted.scatter_(1, true[:, None], True)
    validate_count(outputs, "outputs")
    if not is_classifier or outputs > network.shape[1]:
        raise ValueError(
            f"outputs must be 'predicted', 'all' or a number of the {network.shape[1]} classes of a classifier: got "
            f"{outputs}."
        )
    return wanted.scatter_(1, network.topk(int(outputs), dim=1).indices, True)


def validate_results(
    request: ReportRequest, posterior: object, outside: object, suspects: object, uncertainty_map: object
) -> None:
    """Raise if results that were computed before the report are not of its run and points.

    Raises:
        TypeError: One is of another kind.
        ValueError: It is of another run, or of other points; a process is not fitted; or no process tells other inputs.
    """
    trajectory, shape = request.trajectory, (len(request.X), request.trajectory.num_outputs)
    if posterior is not None and not isinstance(posterior, Process):
        raise TypeError(
            "posterior must be an UncertainClassifier, a LogitGP or a LogitPosterior of X: got "
            f"{type(posterior).__name__}."
        )
    if isinstance(posterior, LogitPosterior) and posterior.mean.shape != shape:
        raise ValueError(
            f"posterior must be that of X, {shape}: got {tuple(posterior.mean.shape)}. "
            "Compute it as gp.logit_posterior(X)."
        )
    if isinstance(posterior, UncertainClassifier) and not posterior.__sklearn_is_fitted__():
        raise ValueError("posterior must be fitted: call fit(X, y) with validation points first.")
    if isinstance(posterior, UncertainClassifier | LogitGP):
        own = posterior.trajectory
        if own.trained.digest != trajectory.trained.digest:
            raise ValueError(
                f"posterior must be of the run that is reported, {trajectory.digest[:12]}: it is of {own.digest[:12]}."
            )
    if outside is not None and not isinstance(posterior, UncertainClassifier):
        raise ValueError(
            "outside needs scores that tell such inputs: pass posterior=UncertainClassifier(trajectory).fit(X, y) too."
        )
    if suspects is not None:
        labels = request.training_labels
        if not isinstance(suspects, LabelErrors):
            raise TypeError(f"suspects must be a result of epk_gp.label_errors: got {type(suspects).__name__}.")
        if labels is None or int(suspects.points.max()) >= len(labels):
            raise ValueError(
                "suspects must be labels of this run: it has fewer, or none. Pass label_errors(trajectory)."
            )
    if uncertainty_map is not None:
        if not isinstance(uncertainty_map, UncertaintyMap):
            kind = type(uncertainty_map).__name__
            raise TypeError(f"uncertainty_map must be a result of uncertainty_on_plane: got {kind}.")
        if len(uncertainty_map.training) != trajectory.num_points:
            raise ValueError(
                f"uncertainty_map must be one of this run: it has {len(uncertainty_map.training)} training points, the "
                f"run {trajectory.num_points}."
            )


def influence_on(request: ReportRequest, influence: object) -> Sequence[Float[Tensor, " M"] | None]:
    """Return the influence on each explained output; None for one that it was not computed for.

    Args:
        request: The explained outputs.
        influence: Of all points or of those explained, and of all their outputs or of the largest one of each.

    Raises:
        TypeError: It is no `Influence`.
        ValueError: It is that of other points or outputs, or not split by samples.
    """
    points, outputs = request.points, apply_head(request.network, request.head)
    if influence is None:
        return (None,) * len(request.rows)
    if not isinstance(influence, Influence):
        raise TypeError(f"influence must be a result of epk_gp.influence: got {type(influence).__name__}.")
    is_by_sample = [axis.kind for axis in influence.axes] == ["sample"] and influence.values.ndim == 3
    if not is_by_sample or influence.values.shape[2] != len(influence.axes[0].group):
        raise ValueError("influence must be split by training samples alone: leave by= of epk_gp.influence out.")
    given = influence.outputs.detach().cpu().to(outputs)
    of_all = len(given) == len(outputs)
    f = outputs if of_all else outputs[points]
    expected = f.amax(dim=1, keepdim=True) if given.shape[1] == 1 else f
    limit = _ROUNDING * torch.finfo(outputs.dtype).eps * float(f.abs().max().clamp(min=1.0))
    if given.shape != expected.shape or not float((given - expected).abs().max()) <= limit:
        raise ValueError(
            f"influence must be on all outputs, or on the predicted one, of the {len(points)} explained points or of "
            f"all {len(outputs)}: its own outputs are others, of shape {tuple(given.shape)}. Compute it as "
            "epk_gp.influence(trajectory, X[explained]), with the report's head."
        )
    values, is_whole = influence.values.detach().cpu(), given.shape[1] == f.shape[1]
    found: list[Tensor | None] = []
    for row, output in zip(request.rows.tolist(), request.classes.tolist(), strict=True):
        n = int(points[row]) if of_all else row
        if is_whole:
            found.append(values[n, output])
        else:  # of the largest output alone
            found.append(values[n, 0] if output == int(f[n].argmax()) else None)
    return tuple(found)
