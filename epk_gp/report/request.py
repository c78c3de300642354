"""The request for a report: points, outputs and earlier results, checked before everything else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.autodiff.scalars import Function, RowFunction, ask
from epk_gp.core.checks import ComputeOptions, parse_indices, validate_count, validate_labels
from epk_gp.core.graphs import Graph
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, apply_head, resolve_head
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs, validate_trajectory
from epk_gp.datamodels.model import Datamodel
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import Influence

ExplainedOutputs = Literal["predicted", "all"] | int
Process = UncertainClassifier | LogitGP | LogitPosterior
OtherInputs = Shaped[Tensor, "o ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph  # like `Inputs`, for o points

_OUTPUT_NAMES: dict[Head, str] = {"logits": "output", "log_softmax": "log-probability"}

# An influence belongs to the explained outputs if its outputs equal theirs up to this many eps of the largest one: it
# may have been computed in other blocks of points.
_ROUNDING = 2**16

# Earlier results that a report uses, and the origin of each.
_RESULTS: dict[str, tuple[Any, str]] = {
    "influence": (Influence, "a result of epk_gp.influence"),
    "datamodel": (Datamodel, "a result of epk_gp.datamodel"),
    "posterior": (Process, "an UncertainClassifier, a LogitGP or a LogitPosterior of X"),
    "suspects": (LabelErrors, "a result of epk_gp.label_errors"),
    "uncertainty_map": (UncertaintyMap, "a result of uncertainty_on_plane"),
}


@dataclass(frozen=True, eq=False)
class ReportRequest:
    """The points of a report, its explained outputs, and the earlier results that it uses.

    Attributes:
        trajectory: The run, with M training samples and C outputs.
        X: The n points, packed.
        y: Their classes, or targets of a regression; None if they are unknown.
        network: The network's outputs at the points, without the head, or the K numbers of a function.
        head: The head of the explained outputs.
        is_classifier: Whether outputs stand for classes.
        class_names: Names of these outputs or numbers.
        points: Indices of the m points that are explained.
        rows: For each of the k explained outputs, the index of its point among these.
        classes: For each explained output, its index.
        function: The function that is explained instead of outputs; None for outputs.
        influence, datamodel, posterior, outside, suspects, uncertainty_map, kernel_points: Arguments of `write_report`.
        options: Options of the computation.
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
    function: RowFunction | None = None
    influence: Influence | None = None
    datamodel: Datamodel | None = None
    posterior: Process | None = None
    outside: Shaped[Tensor, "o ..."] | None = None
    suspects: LabelErrors | None = None
    uncertainty_map: UncertaintyMap | None = None
    kernel_points: int = 0
    options: ComputeOptions = ComputeOptions()

    @property
    def name(self) -> str:
        """The word for the explained numbers."""
        return _OUTPUT_NAMES[self.head] if self.function is None else name_of(self.function)

    def function_of(self, points: Int64[Tensor, " k"]) -> RowFunction | None:
        """Return the function with the data of some of the n points."""
        if self.function is None:
            return None
        data = (value[points.to(value.device)] if value.ndim else value for value in self.function.data)
        return RowFunction(self.function.function, *data)

    def asked(self, name: str, points: Int64[Tensor, " k"], classes: Int64[Tensor, " k"]) -> dict[str, Any]:
        """Return the arguments of `attribute` for some of the n points, with a checkpoint of this name."""
        options, function = self.options, self.function_of(points)
        checkpoint = None if options.checkpoint is None else Path(options.checkpoint) / name
        explained = {"head": self.head, "classes": classes} if function is None else {"function": function}
        settings = {"memory_budget": options.memory_budget, "progress": options.progress, "executor": options.executor}
        return {"X": self.X[points.to(self.X.device)], "checkpoint": checkpoint, **explained, **settings}

    @property
    def explained(self) -> Shaped[Tensor, "m ..."]:
        """The explained points."""
        return self.X[self.points.to(self.X.device)]

    @property
    def true_classes(self) -> Int64[Tensor, " n"] | None:
        """The true classes, if they are known."""
        return self.y if self.is_classifier else None

    @property
    def training_labels(self) -> Int64[Tensor, " M"] | None:
        """The classes of the training samples, if they have one each."""
        targets = self.trajectory.targets
        is_label = targets.ndim == 1 and not targets.is_floating_point() and self.is_classifier
        return targets.cpu().long() if is_label else None


def parse_request(
    trajectory: Trajectory,
    X: Inputs,
    y: object,
    *,
    head: Head | None,
    outputs: ExplainedOutputs = "predicted",
    explained: int | Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    function: Function | None = None,
) -> ReportRequest:
    """Return the points and outputs that a report explains; arguments and errors as in `write_report`."""
    validate_trajectory(trajectory)
    X = parse_inputs(trajectory, X)
    run, asked, noun = trajectory, X, "output"
    if function is not None:
        if y is not None or head is not None or outputs != "predicted":
            raise ValueError("y, head and outputs are of the network's outputs: leave them out beside function.")
        function = function if isinstance(function, RowFunction) else RowFunction(function)
        (run, asked), noun, head = ask(trajectory, X, function), name_of(function), "logits"
    network, C = network_outputs(run, asked).cpu(), run.num_outputs
    has_labels = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
    is_class = has_labels or isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood)
    is_classifier = function is None and C > 1 and is_class
    targets = None if y is None else _parse_targets(y, len(X), C, is_classifier)
    points = _parse_points((6 if function is None else len(X)) if explained is None else explained, len(X))
    true = targets[points] if targets is not None and is_classifier else None
    rows, classes = _wanted(outputs, network[points], true, is_classifier).nonzero(as_tuple=True)
    if class_names is not None and (isinstance(class_names, str) or len(class_names) != C):
        raise ValueError(f"class_names must name each of the {C} outputs: got {class_names!r}.")
    noun = "class" if is_classifier else noun
    names = class_names or ([noun] if function is not None and C == 1 else [f"{noun} {c}" for c in range(C)])
    head, names = resolve_head(head, trajectory.loss, C), tuple(map(str, names))
    return ReportRequest(trajectory, X, targets, network, head, is_classifier, names, points, rows, classes, function)


def name_of(function: RowFunction) -> str:
    """Return the name of a function."""
    named: Any = function.function.func if isinstance(function.function, partial) else function.function
    name = str(getattr(named, "__name__", type(named).__name__)).strip("_").replace("_", " ")
    return "number" if name == "<lambda>" else name


def _parse_targets(y: object, count: int, num_outputs: int, is_classifier: bool) -> Tensor:
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a torch.Tensor: got {type(y).__name__}. Convert it with torch.as_tensor.")
    if is_classifier:
        validate_labels(y, count, num_outputs, name="y")
        return y.detach().cpu().long()
    if len(y) != count or y.numel() != count * num_outputs:
        raise ValueError(f"y must have {num_outputs} target values for each of {count} points: got {tuple(y.shape)}.")
    return y.detach().cpu().reshape(count, -1)


def _parse_points(explained: object, count: int) -> Int64[Tensor, " m"]:
    if not isinstance(explained, Sequence | Tensor):
        validate_count(explained, "explained")
        return torch.arange(min(int(explained), count))  # type: ignore[call-overload]  # validated
    return parse_indices(explained, count, "explained").cpu()


def _wanted(outputs: object, network: Tensor, true: Tensor | None, is_classifier: bool) -> Bool[Tensor, "m C"]:
    """Return a mask of the explained outputs of each point."""
    C = network.shape[1]
    count = None if isinstance(outputs, bool) or not isinstance(outputs, Integral) else int(outputs)
    if outputs not in ("predicted", "all") and (not is_classifier or count is None or not 1 <= count <= C):
        raise ValueError(
            f"outputs must be 'predicted', 'all' or a number of the {C} classes of a classifier: got {outputs!r}."
        )
    if outputs == "all" or not is_classifier:
        return torch.ones_like(network, dtype=torch.bool)
    largest = network.argsort(dim=1, descending=True, stable=True)
    chosen = [largest[:, : count or 1]]
    chosen += [true[:, None]] if outputs == "predicted" and true is not None else []
    return torch.zeros_like(network, dtype=torch.bool).scatter_(1, torch.cat(chosen, dim=1), True)


def validate_results(request: ReportRequest) -> None:
    """Raise if earlier results do not belong to the run and the points of the report.

    Raises:
        TypeError: A result has a wrong type.
        ValueError: A result belongs to another run or to other points; a process is not fitted; or no process can judge
            `outside`.
    """
    for name, (kind, source) in _RESULTS.items():
        given = getattr(request, name)
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name} must be {source}: got {type(given).__name__}.")
    if request.function is not None and any(x is not None for x in (request.posterior, request.uncertainty_map)):
        raise ValueError("posterior and uncertainty_map are of the network's outputs: leave them out beside function.")
    run, process, shape = request.trajectory, request.posterior, tuple(request.network.shape)
    if isinstance(process, LogitPosterior):
        if process.mean.shape != shape:
            raise ValueError(f"posterior must be that of X, {shape}: got {tuple(process.mean.shape)}.")
    elif process is not None and process.trajectory.trained.digest != run.trained.digest:
        raise ValueError(f"posterior must be of the run {run.digest[:12]}: it is of {process.trajectory.digest[:12]}.")
    if isinstance(process, UncertainClassifier):
        if not process.__sklearn_is_fitted__():
            raise ValueError("posterior must be fitted: call fit(X, y) with validation points first.")
    elif request.outside is not None:
        raise ValueError("outside needs scores of such inputs: pass posterior=UncertainClassifier(run).fit(X, y) too.")
    influence_on(request)
    _validate_datamodel(request)
    labels, suspects, m = request.training_labels, request.suspects, request.uncertainty_map
    if suspects is not None and (labels is None or int(suspects.points.max()) >= len(labels)):
        raise ValueError("suspects must be labels of this run: it has fewer, or none. Pass label_errors(trajectory).")
    if m is not None and len(m.training) != run.num_points:
        raise ValueError(f"uncertainty_map must be one of this run's {run.num_points} points: got {len(m.training)}.")


def _validate_datamodel(request: ReportRequest) -> None:
    if (model := request.datamodel) is None:
        return
    X, expected, is_function = model.questions.X, request.explained, model.questions.run.asked_of is not None
    is_same = len(X) == len(expected) if is_function else torch.equal(X.to(expected), expected)
    if not is_same or model.trajectories[0].data_digest != request.trajectory.data_digest:
        raise ValueError(
            f"datamodel must be of this run and of the {len(expected)} explained points: got another, of {len(X)}. "
            "Compute it as epk_gp.datamodel(trajectory, X[explained], y[explained])."
        )


def influence_on(request: ReportRequest) -> list[Float[Tensor, " M"] | None]:
    """Return the influence on each explained output; None for outputs without one.

    Raises:
        ValueError: It belongs to other points or outputs, or is not split by samples.
    """
    effect, M = request.influence, request.trajectory.num_points
    if effect is None:
        return [None] * len(request.rows)
    f = apply_head(request.network[request.points], request.head)
    given, is_of_largest = effect.outputs.detach().cpu().to(f), effect.outputs.shape[1] == 1
    expected = f.amax(dim=1, keepdim=True) if is_of_largest else f
    limit = _ROUNDING * torch.finfo(f.dtype).eps * float(f.abs().max().clamp(min=1.0))
    is_by_sample = [axis.kind for axis in effect.axes] == ["sample"] and effect.values.shape[2:] == (M,)
    is_same = given.shape == expected.shape and float((given - expected).abs().max()) <= limit
    if not is_by_sample or not is_same:
        raise ValueError(
            "influence must be that of training samples on all outputs, or on the predicted one, of the explained "
            f"points: got values of shape {tuple(effect.values.shape)}. Compute it as "
            "epk_gp.influence(trajectory, X[explained]), with the report's head."
        )
    values, places = effect.values.detach().cpu(), zip(request.rows.tolist(), request.classes.tolist(), strict=True)
    if not is_of_largest:
        return [values[row, output] for row, output in places]
    return [values[row, 0] if output == int(f[row].argmax()) else None for row, output in places]
