"""The content of a report, as the page takes it: numbers, texts and pictures."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from epk_gp.core.losses import Head
from epk_gp.core.show import count
from epk_gp.quadrature.paths import ChordPath, LayerwisePath, ManhattanPath, StraightPath
from epk_gp.report.card import run_card
from epk_gp.report.certainty import Certainty, band, certainty, scores_of
from epk_gp.report.certificate import describe_certificate
from epk_gp.report.divisions import Divisions, divide
from epk_gp.report.explanations import Asked, Explanations, explain
from epk_gp.report.fixed_point import significant
from epk_gp.report.inputs import Appearance, appearance, describe_cut, show
from epk_gp.report.kernel import reason_without_kernel
from epk_gp.report.overview import expected_classes, overview, samples_of_overview
from epk_gp.report.request import ReportRequest
from epk_gp.report.views import is_margin, shorten

VERSION = 1
_OUTPUT_NAMES: dict[Head, str] = {"logits": "output", "log_softmax": "log-probability"}
_PATHS = {
    StraightPath: "straight steps",
    ChordPath: "straight lines, each over {steps}",
    ManhattanPath: "one module after another, in each step",
    LayerwisePath: "derivatives averaged operation by operation, each over {steps}",
}


@dataclass(frozen=True)
class Detail:
    """How much of the views a report holds.

    Attributes:
        pairs: Whether it holds the views of one layer and one range of steps.
        top: Number of samples named of either sign, in all views but those of all layers and steps.
    """

    pairs: bool
    top: int


class ReportContent:
    """Everything that a report can hold, from which documents of less detail are made.

    Raises:
        TypeError, ValueError: As `write_report`.
    """

    def __init__(self, request: ReportRequest) -> None:
        settings = request.settings
        self.request = request
        self.look: Appearance = appearance(request.trajectory, settings.names, settings.decode)
        self.divisions: Divisions = divide(request.trajectory, by_layers=settings.by_layers)
        asked = Asked(
            trajectory=request.trajectory,
            X=request.X[request.points.to(request.X.device)],
            rows=request.rows,
            classes=request.classes,
            head=request.head,
            rule=settings.rule,
            path=settings.path,
            labels=request.training_labels,
            top=settings.top,
            influence=request.influence,
            options=settings.options,
        )
        self.found: Explanations = explain(asked, self.divisions)
        self.sure: Certainty = certainty(request)
        self.band = band(request)
        self.overview = overview(request, self.sure)
        self._suspected = expected_classes(settings.suspects)
        self._shown = lru_cache(maxsize=None)(self._show_sample)

    def details(self) -> list[Detail]:
        """Return how much a report may hold, from all of it to the least."""
        top, coarser = self.request.settings.top, []
        while top > 1:
            top //= 2
            coarser.append(Detail(pairs=False, top=top))
        top = self.request.settings.top
        return [Detail(pairs=True, top=top), Detail(pairs=False, top=top), *coarser]

    def at(self, detail: Detail) -> dict[str, Any]:
        """Return the content with so much detail."""
        request, found = self.request, self.found
        points = [self._point(number, detail) for number in range(len(request.points))]
        named = _named(points) | samples_of_overview(self.overview)
        return {
            "version": VERSION,
            "title": request.settings.title or f"Report of run {request.trajectory.digest[:12]}",
            "quantum": found.quantum,
            "outputs": {
                "head": request.head,
                "name": _OUTPUT_NAMES[request.head],
                "classes": list(request.class_names),
                "are_classes": request.is_classifier,
                "probabilities_of": self.sure.source,
            },
            "layers": list(self.divisions.layers),
            "ranges": [list(ends) for ends in self.divisions.ranges],
            "card": run_card(request.trajectory, self._describe(detail)),
            "certificate": describe_certificate(
                found.certificate,
                len(found.outputs),
                found.largest_rounding * found.quantum,
                request.settings.influence,
            ),
            "samples": {
                "count": request.trajectory.num_points,
                "shown": {str(index): self._shown(index) for index in sorted(named)},
            },
            "points": points,
            "overview": self.overview,
        }

    def _point(self, number: int, detail: Detail) -> dict[str, Any]:
        request = self.request
        n = int(request.points[number])
        p = None if self.sure.probabilities is None else self.sure.probabilities[n].tolist()
        known = None if request.true_classes is None else int(request.true_classes[n])
        scores = scores_of(self.sure, n)
        outputs = {output: content for row, output, content in self.found.outputs if row == number}
        return {
            "name": f"point {n}",
            "label": known,
            "predicted": int(request.predicted[n]),
            "values": None if request.is_classifier else self._values(n),
            "input": show(self.look, request.X[n]),
            "probabilities": None if p is None else [significant(value) for value in p],
            "band": None if self.band is None else _pairs(self.band[:, number].T.tolist()),
            "scores": scores,
            "explanations": {str(c): content | {"views": _kept(content, detail)} for c, content in outputs.items()},
        }

    def _values(self, n: int) -> list[list[float]]:
        """Return what a regression predicts of each output; and its target and the difference, where it is known."""
        f, y = self.request.network[n].double(), self.request.y
        columns = (f,) if y is None else (f, y[n].double(), f - y[n].double())
        return [[significant(float(value)) for value in row] for row in zip(*columns, strict=True)]

    def _describe(self, detail: Detail) -> list[tuple[str, str]]:
        request, settings, found = self.request, self.request.settings, self.found
        rows = [
            ("explained", f"{len(request.points)} of {len(request.X)} points, {len(found.outputs)} outputs"),
            ("outputs explained", _describe_outputs(settings.outputs, request)),
            ("head", request.head),
            ("path of integration", _PATHS[type(settings.path)].format(steps=count(settings.path.every, "step"))),
            ("quadrature", settings.rule.name),
            ("gradient evaluations", f"{found.certificate.evaluations:.1f} for each point and step, to choose nodes"),
            ("numbers", f"whole multiples of {found.quantum:g}; what they leave is a term of its own, rounding"),
            ("samples named", f"the {settings.top} that raised and the {settings.top} that lowered an output most"),
        ]
        full = self.details()[0]
        if detail != full:
            left = "the views of one layer and one range of steps are left out"
            if detail.top < full.top:
                left += f", and the views of one layer or one range name {detail.top} samples of either sign"
            rows.append(("left out to keep the file small", f"{left}; the sums of the rest still add up"))
        missing = reason_without_kernel(self.request)
        if missing is not None:
            rows.append(("matrix of the path kernel", f"left out: {missing}"))
        cut = describe_cut(self.look)
        return rows if cut is None else [*rows, ("shown of an input", cut)]

    def _show_sample(self, index: int) -> dict[str, Any]:
        labels, num_outputs = self.request.training_labels, self.request.trajectory.num_outputs
        label = None if labels is None else int(labels[index])
        known = label is not None and 0 <= label < num_outputs  # the loss leaves others out, as -100
        shown = show(self.look, self.request.trajectory.inputs[index], is_sample=True)
        target, expected = self.request.training_targets, self._suspected.get(index, label)
        return shown | {
            "label": label if known else None,
            "target": None if target is None else [significant(value, 4) for value in target[index].tolist()],
            "suspected": None if expected == label else expected,
        }


def _kept(content: dict[str, Any], detail: Detail) -> dict[str, Any]:
    views = {key: view for key, view in content["views"].items() if detail.pairs or is_margin(key)}
    return {key: view if key == "*|*" else shorten(view, detail.top) for key, view in views.items()}


def _named(points: Iterable[dict[str, Any]]) -> set[int]:
    """Return every training sample that a view names."""
    views = (
        view for point in points for content in point["explanations"].values() for view in content["views"].values()
    )
    return {entry[0] for view in views for side in ("raised", "lowered") for entry in view[side]}


def _pairs(values: list[list[float]]) -> list[list[float]]:
    return [[significant(low), significant(high)] for low, high in values]


def _describe_outputs(outputs: object, request: ReportRequest) -> str:
    if not request.is_classifier or outputs == "all":
        return "all"
    if outputs == "predicted":
        return "the network's class of each point" + (
            "" if request.y is None else ", and the true one where it differs"
        )
    return f"the {outputs} most probable classes of each point"
