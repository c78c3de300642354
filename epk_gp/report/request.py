"""What a report is asked to hold: the run, the points, and results computed before; checked before anything else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.checks import validate_count, validate_integer, validate_labels
from epk_gp.core.inputs import Graph, Inputs
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, apply_head, resolve_head
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs, validate_trajectory
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import Influence
from epk_gp.plots.common import class_name
from epk_gp.quadrature.paths import WeightPath, validate_path
from epk_gp.quadrature.rules import Rule, validate_rule
from epk_gp.report.given import influence_on, validate_map, validate_process, validate_suspects
from epk_gp.report.inputs import Decode

ExplainedOutputs = Literal["predicted", "all"] | int
Process = UncertainClassifier | LogitGP | LogitPosterior
OtherInputs = Shaped[Tensor, "o ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph  # as `Inputs`, of o points


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportSettings:
    """The keyword arguments of `write_report`, which says what they are."""

    title: str | None
    head: Head | None
    rule: Rule
    path: WeightPath
    outputs: ExplainedOutputs
    explained: int | Sequence[int]
    class_names: Sequence[str] | None
    names: Sequence[str] | None
    decode: Decode | None
    top: int
    by_layers: bool
    influence: Influence | None
    posterior: Process | None
    outside: OtherInputs | None
    suspects: LabelErrors | None
    uncertainty_map: UncertaintyMap | None
    kernel_points: int
    options: ComputeOptions


@dataclass(frozen=True, eq=False)
class ReportRequest:
    """A report that can be written.

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
        influence: Derivatives of each of them in the samples' weights; None where they are not known.
        training_labels: The classes of the training samples, where they have one each.
        outside: Points unlike the training data, packed; None if there are none.
        settings: Everything else.
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
    influence: Sequence[Float[Tensor, " M"] | None]
    training_labels: Int64[Tensor, " M"] | None
    outside: Shaped[Tensor, "o ..."] | None
    settings: ReportSettings

    @property
    def predicted(self) -> Int64[Tensor, " n"]:
        """The network's class of every point; 0 where outputs stand for no classes."""
        return self.network.argmax(dim=1) if self.is_classifier else torch.zeros(len(self.X), dtype=torch.int64)

    @property
    def training_targets(self) -> Float[Tensor, "M C"] | None:
        """The targets of a regression's training samples, where they have one for each output."""
        targets, (M, C) = self.trajectory.targets, (self.trajectory.num_points, self.trajectory.num_outputs)
        return None if self.is_classifier or targets.numel() != M * C else targets.cpu().double().reshape(M, C)

    @property
    def true_classes(self) -> Int64[Tensor, " n"] | None:
        """The true classes, where they are known."""
        return self.y if self.is_classifier else None


def parse_request(trajectory: Trajectory, X: Inputs, y: object, settings: ReportSettings) -> ReportRequest:
    """Return what a report is asked to hold, after checking that it can be computed and goes together.

    Raises:
        TypeError, ValueError: As `write_report`.
    """
    validate_trajectory(trajectory)
    X = parse_inputs(trajectory, X)
    head = resolve_head(settings.head, trajectory.loss, trajectory.num_outputs)
    validate_rule(settings.rule)
    validate_path(settings.path)
    validate_count(settings.top, "top")
    validate_count(settings.kernel_points, "kernel_points", minimum=0)
    is_classifier = _is_classifier(trajectory, y)
    targets = _parse_targets(trajectory, y, len(X), is_classifier)
    network = network_outputs(trajectory, X).cpu()
    points = _parse_points(settings.explained, len(X))
    true = targets[points] if targets is not None and is_classifier else None
    wanted = _wanted(settings.outputs, network[points], true, is_classifier)
    rows, classes = wanted.nonzero(as_tuple=True)
    outside = None if settings.outside is None else parse_inputs(trajectory, settings.outside, "outside")
    if outside is not None and not isinstance(settings.posterior, UncertainClassifier):
        raise ValueError(
            "outside needs scores that tell such inputs: pass posterior=UncertainClassifier(trajectory).fit(X, y) too."
        )
    labels = _training_labels(trajectory, is_classifier)
    validate_process(settings.posterior, trajectory, len(X))
    validate_suspects(settings.suspects, labels)
    validate_map(settings.uncertainty_map, trajectory)
    outputs = apply_head(network, head)
    return ReportRequest(
        trajectory=trajectory,
        X=X,
        y=targets,
        network=network,
        head=head,
        is_classifier=is_classifier,
        class_names=_parse_class_names(settings.class_names, trajectory.num_outputs, is_classifier),
        points=points,
        rows=rows,
        classes=classes,
        influence=influence_on(settings.influence, outputs, points, rows, classes),
        training_labels=labels,
        outside=outside,
        settings=settings,
    )


def _training_labels(trajectory: Trajectory, is_classifier: bool) -> Int64[Tensor, " M"] | None:
    targets = trajectory.targets
    is_label = targets.ndim == 1 and not targets.is_floating_point() and is_classifier
    return targets.cpu().long() if is_label else None


def _is_classifier(trajectory: Trajectory, y: object) -> bool:
    if trajectory.num_outputs < 2:
        return False
    has_labels = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
    return has_labels or isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood)


def _parse_targets(trajectory: Trajectory, y: object, count: int, is_classifier: bool) -> Tensor | None:
    if y is None:
        return None
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a torch.Tensor: got {type(y).__name__}. Convert it with torch.as_tensor.")
    if is_classifier:
        validate_labels(y, count, trajectory.num_outputs, name="y")
        return y.detach().cpu().long()
    if len(y) != count or y[0].numel() != trajectory.num_outputs:
        raise ValueError(
            f"y must have the {trajectory.num_outputs} target values of each of the {count} points: got shape "
            f"{tuple(y.shape)}."
        )
    return y.detach().cpu().reshape(count, -1)


def _parse_points(explained: object, count: int) -> Int64[Tensor, " m"]:
    if isinstance(explained, bool) or not isinstance(explained, Sequence | Tensor):
        validate_count(explained, "explained")
        return torch.arange(min(int(explained), count))  # type: ignore[call-overload]  # validated
    indices = [int(i) for i in _integers(explained)]
    if not indices or len(set(indices)) < len(indices) or not 0 <= min(indices) <= max(indices) < count:
        raise ValueError(
            f"explained must be a number of points, or different indices of X, 0..{count - 1}: got {indices}."
        )
    return torch.tensor(indices)


def _integers(values: object) -> list[int]:
    found = values.tolist() if isinstance(values, Tensor) else list(values)  # type: ignore[call-overload]
    for value in found:
        validate_integer(value, "an index in explained")
    return found


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


def _parse_class_names(names: Sequence[str] | None, count: int, is_classifier: bool) -> tuple[str, ...]:
    if names is None:
        return tuple(class_name(c, None) if is_classifier else f"output {c}" for c in range(count))
    if isinstance(names, str) or len(names) != count:
        raise ValueError(f"class_names must name each of the {count} outputs: got {names!r}.")
    return tuple(map(str, names))
