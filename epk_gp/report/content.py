"""The content of a report, as the page takes it: numbers, texts and pictures; and the same content with less detail."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.influence import Influence
from epk_gp.provenance import versions
from epk_gp.report.certificate import describe_certificate
from epk_gp.report.explanations import Divisions, Explanations, is_margin, shorten, significant
from epk_gp.report.overview import expected_classes, samples_of_overview
from epk_gp.report.points import Appearance, Certainty
from epk_gp.report.request import ReportRequest

VERSION = 1  # of the content that the page's scripts read

_OUTPUT_NAMES: dict[Head, str] = {"logits": "output", "log_softmax": "log-probability"}
_MAX_PARAMETERS = 60  # more are counted, not listed
_UNSAID = ("params", "foreach", "capturable", "differentiable", "fused", "maximize")  # options that are no arithmetic
_SAMPLES_NAMED = "samples named"  # the row of the card after which it says what is left out

Rows = list[tuple[str, str]]


def report_content(
    request: ReportRequest,
    title: str | None,
    divisions: Divisions,
    found: Explanations,
    sure: Certainty,
    look: Appearance,
    *,
    overview: dict[str, Any],
    influence: Influence | None,
    suspects: LabelErrors | None,
    how: Rows,
) -> dict[str, Any]:
    """Return all that a report can hold; `how` says how it was made."""
    points = [_point(request, number, found, sure, look) for number in range(len(request.points))]
    content: dict[str, Any] = {
        "version": VERSION,
        "title": title or f"Report of run {request.trajectory.digest[:12]}",
        "quantum": found.quantum,
        "outputs": {
            "head": request.head,
            "name": _OUTPUT_NAMES[request.head],
            "classes": list(request.class_names),
            "are_classes": request.is_classifier,
            "probabilities_of": sure.source,
        },
        "layers": list(divisions.layers),
        "ranges": [list(ends) for ends in divisions.ranges],
        "card": run_card(request.trajectory, how),
        "certificate": describe_certificate(
            found.certificate, len(found.outputs), found.largest_rounding * found.quantum, influence
        ),
        "samples": {"count": request.trajectory.num_points, "shown": {}},
        "points": points,
        "overview": overview,
    }
    expected = expected_classes(suspects)
    content["samples"]["shown"] = {
        str(index): _sample(request, look, index, expected) for index in sorted(_named(content))
    }
    return content


def lessen(content: dict[str, Any], top: int, most: int) -> dict[str, Any]:
    """Return a content without the views of one layer and one range, which says so in its card.

    Args:
        content: All that a report can hold.
        top: Number of samples named of either sign, in all views but those of all layers and steps.
        most: This number in the content.
    """
    left = "the views of one layer and one range of steps are left out"
    if top < most:
        left += f", and the views of one layer or one range name {top} samples of either sign"
    *sections, report = content["card"]
    place = 1 + [name for name, _ in report["rows"]].index(_SAMPLES_NAMED)
    row = ["left out to keep the file small", f"{left}; the sums of the rest still add up"]
    rows = [*report["rows"][:place], row, *report["rows"][place:]]
    points = []
    for point in content["points"]:
        kept = {}
        for output, explanation in point["explanations"].items():
            views = {key: view for key, view in explanation["views"].items() if is_margin(key)}
            views |= {key: shorten(view, top) for key, view in views.items() if key != "*|*"}
            kept[output] = explanation | {"views": views}
        points.append(point | {"explanations": kept})
    less = content | {"card": [*sections, report | {"rows": rows}], "points": points}
    named = _named(less)
    shown = {index: sample for index, sample in content["samples"]["shown"].items() if int(index) in named}
    return less | {"samples": content["samples"] | {"shown": shown}}


def _named(content: dict[str, Any]) -> set[int]:
    """Return every training sample that a view or the overview names."""
    explained = (explanation for point in content["points"] for explanation in point["explanations"].values())
    views = (view for explanation in explained for view in explanation["views"].values())
    named = {entry[0] for view in views for side in ("raised", "lowered") for entry in view[side]}
    return named | samples_of_overview(content["overview"])


def _point(
    request: ReportRequest, number: int, found: Explanations, sure: Certainty, look: Appearance
) -> dict[str, Any]:
    n = int(request.points[number])
    values = None
    if not request.is_classifier:  # what is predicted of each output, its target and the difference
        f, y = request.network[n].double(), request.y
        columns = (f,) if y is None else (f, y[n].double(), f - y[n].double())
        values = [[significant(float(value)) for value in row] for row in zip(*columns, strict=True)]
    band = None if sure.band is None else sure.band[:, number].T.tolist()
    return {
        "name": f"point {n}",
        "label": None if request.true_classes is None else int(request.true_classes[n]),
        "predicted": int(request.predicted[n]),
        "values": values,
        "input": look.show(request.X[n]),
        "probabilities": None if sure.probabilities is None else list(map(significant, sure.probabilities[n].tolist())),
        "band": None if band is None else [[significant(low), significant(high)] for low, high in band],
        "scores": [[name, significant(float(scores[n])), text] for name, scores, text in sure.scores],
        "explanations": {str(c): content for row, c, content in found.outputs if row == number},
    }


def _sample(request: ReportRequest, look: Appearance, index: int, expected: dict[int, int]) -> dict[str, Any]:
    labels, targets, num_outputs = request.training_labels, request.training_targets, request.trajectory.num_outputs
    label = None if labels is None else int(labels[index])
    suspected = expected.get(index, label)
    return look.show(request.trajectory.inputs[index], is_sample=True) | {
        "label": label if label is not None and 0 <= label < num_outputs else None,  # the loss leaves others out: -100
        "target": None if targets is None else [significant(value, 4) for value in targets[index].tolist()],
        "suspected": None if suspected == label else suspected,
    }


def run_card(trajectory: Trajectory, how: Rows) -> list[dict[str, Any]]:
    """Return the run card: what was trained, on what, and how, and how the report was made, as names with text."""
    identity = [
        ("digest of the run", trajectory.digest),
        ("digest of the data", trajectory.data_digest),
        ("type of the weights", _dtype(trajectory.dtype)),
        *versions().items(),
    ]
    sections = {
        "Network": _network(trajectory),
        "Data": _data(trajectory),
        "Training": _training(trajectory),
        "Identity": identity,
        "This report": how,
    }
    return [{"title": title, "rows": [list(row) for row in rows]} for title, rows in sections.items()]


def _network(trajectory: Trajectory) -> Rows:
    model = trajectory.model
    rows = [("network", type(model.module).__name__), ("weights", f"{trajectory.num_weights:,}")]
    if model.statistics:
        rows.append(("moving statistics", f"{model.num_statistics:,} in {len(model.statistics)} tensors"))
    rows.append(("outputs", str(trajectory.num_outputs)))
    parameters = list(zip(model.names, model.shapes, model.sizes, strict=True))
    for name, shape, size in parameters[:_MAX_PARAMETERS]:
        rows.append((name, f"{' × '.join(map(str, shape)) or 'one number'}, {size:,} weights"))
    if rest := parameters[_MAX_PARAMETERS:]:
        rows.append((f"{len(rest)} more tensors", f"{sum(size for _, _, size in rest):,} weights"))
    frozen = [p.numel() for name, p in model.module.named_parameters() if name not in model.names]
    if frozen:
        rows.append(("frozen, not trained", f"{sum(frozen):,} weights in {len(frozen)} tensors"))
    return rows


def _data(trajectory: Trajectory) -> Rows:
    layout, targets = trajectory.model.signature.layout, trajectory.targets
    rows = [("training samples", f"{trajectory.num_points:,}")]
    if layout is None:
        rows.append(("input", _kind(trajectory.inputs)))
    else:
        rows += [(f"input {t.key}", f"shape {t.shape}, {_dtype(t.dtype)}") for t in layout.tensors]
    rows.append(("target", _kind(targets)))
    if targets.ndim == 1 and not targets.is_floating_point():
        classes, counts = targets.unique(return_counts=True)
        rows.append(("classes", f"{len(classes)}, with {int(counts.min())} to {int(counts.max())} samples each"))
    return rows


def _training(trajectory: Trajectory) -> Rows:
    run, M = trajectory.trained, trajectory.num_points
    rows = [("loss", str(run.loss)), ("update rule", run.update_rule)]
    for number, group in enumerate(run.optimizer_groups, start=1):
        said = {key: v for key, v in group.options.items() if key not in _UNSAID and v is not None and v is not False}
        options = ", ".join(f"{key}={value}" for key, value in said.items())
        name = "optimizer" if len(run.optimizer_groups) == 1 else f"optimizer, group {number}"
        rows.append((name, f"{group.rule or 'update rule of one’s own'}: {options}"))
    rows.append(("steps", f"{run.num_steps:,}"))
    rows.append(("samples per step", _range([M if step.batch is None else len(step.batch) for step in run.steps])))
    rows.append(("learning rate", _range([step.lr for step in run.steps])))
    passes = [forward for step in run.steps for forward in step.passes]
    if passes:
        drew = sum(forward.random_state is not None or forward.device_random_state is not None for forward in passes)
        seen = sum(forward.inputs is not None for forward in passes)
        words = f"{len(passes):,}; {drew:,} drew random numbers, {seen:,} saw other rows than the data's"
        rows.append(("recorded forward passes", words))
    if trajectory.average is not None:
        rows.append(("explained weights", "an average of the weights over the run"))
    if run.unexplained is not None:
        rows.append(("unexplained", f"up to {run.unexplained:g} of a step is accepted as unexplained"))
    return rows


def _kind(values: Tensor) -> str:
    return f"shape {' × '.join(map(str, values.shape[1:])) or 'one number'}, {_dtype(values.dtype)}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _range(values: Sequence[int] | Sequence[float]) -> str:
    low, high = min(values, default=math.nan), max(values, default=math.nan)
    if math.isnan(low):
        return "none"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
