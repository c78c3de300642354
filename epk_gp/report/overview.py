"""The run as a whole: accuracy over the points, figures with their tables, suspicious labels, the map."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.calibration import calibration, reliability_bins
from epk_gp.analysis.detection import ood_metrics, roc_curve
from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.plots.scores import score_histogram
from epk_gp.plots.style import new_figure, styled
from epk_gp.plots.summaries import reliability_diagram, roc, target_scatter
from epk_gp.report.certainty import Certainty
from epk_gp.report.fixed_point import significant
from epk_gp.report.kernel import kernel_figures
from epk_gp.report.map import map_entry
from epk_gp.report.pictures import figure_entry
from epk_gp.report.request import ReportRequest

MIN_RELIABILITY = 20  # points: of fewer, a bin holds one or two, whose share of right ones says nothing
_BINS = 10  # of the confidence
_SCORE_BINS = 20  # of a histogram's table
_ROC_ROWS = 20  # of the table behind a curve
_MAX_SUSPECTS = 30
_HEIGHT = 3.4  # inches of a figure


def overview(request: ReportRequest, sure: Certainty) -> dict[str, Any]:
    """Return what a report says of all points and of the run."""
    true, X = request.true_classes, request.X
    accuracy = None if true is None else float((request.predicted == true).double().mean())
    figures = []
    if true is not None and sure.probabilities is not None and len(X) >= MIN_RELIABILITY:
        figures.append(_reliability(sure, sure.probabilities, true))
    if request.y is not None and not request.is_classifier:
        figures.append(_targets(request.y.double(), request.network.double()))
    if request.outside is not None and isinstance(request.settings.posterior, UncertainClassifier):
        found = torch.as_tensor(request.settings.posterior.uncertainty(request.outside, 2).out_of_distribution).cpu()
        if sure.out_of_distribution is not None:
            figures += _detection(sure.out_of_distribution.double(), found.double())
    figures += kernel_figures(request)
    suspects, labels = request.settings.suspects, request.training_labels
    listed = None if suspects is None or labels is None else _suspects(suspects, labels, request.class_names)
    m = request.settings.uncertainty_map
    return {
        "accuracy": accuracy,
        "count": len(X),
        "figures": figures,
        "suspects": listed,
        "map": None if m is None else map_entry(request, m),
    }


def samples_of_overview(content: dict[str, Any]) -> set[int]:
    """Return every training sample that the overview names."""
    named = set() if content["suspects"] is None else {row[0] for row in content["suspects"]["rows"]}
    behind = [] if content["map"] is None else content["map"]["behind"]
    return named | {index for cell in behind for index in cell}


def _reliability(sure: Certainty, probabilities: Float[Tensor, "n C"], true: Int64[Tensor, " n"]) -> dict[str, Any]:
    found = calibration(probabilities, true, bins=_BINS)
    bins = reliability_bins(probabilities, true, bins=_BINS)
    filled = bins.count > 0
    columns = (bins.confidence[filled], bins.accuracy[filled], bins.count[filled])

    @styled
    def draw() -> Figure:
        figure = new_figure(_HEIGHT, 5.0)
        reliability_diagram(figure.subplots(), *columns)
        return figure

    whose = {"network": "network alone", "process": "process alone"}.get(sure.source, "network and process together")
    sentence = (
        f"Probabilities of the {whose} at {len(true)} points. On average over the points, confidence and share of "
        f"right predictions differ by {found.ece:.3f} (expected calibration error, {_BINS} bins); "
        f"{100 * found.accuracy:.1f} % of the most probable classes are right, and the mean negative log-probability "
        f"of the true class is {found.nll:.3f}."
    )
    rows = [
        [f"{k / _BINS:.1f} to {(k + 1) / _BINS:.1f}", int(n), significant(float(c), 3), significant(float(a), 3)]
        for k, n, c, a in zip(filled.nonzero()[:, 0].tolist(), columns[2], columns[0], columns[1], strict=True)
    ]
    head = ("confidence", "points", "mean confidence", "share right")
    return figure_entry("reliability", "Is it right as often as it says?", sentence, draw, (head, rows))


def _targets(y: Float[Tensor, "n C"], network: Float[Tensor, "n C"]) -> dict[str, Any]:
    errors = network - y

    @styled
    def draw() -> Figure:
        figure = new_figure(_HEIGHT, 5.0)
        target_scatter(figure.subplots(), y.flatten(), network.flatten())
        return figure

    rmse, spread = float(errors.square().mean().sqrt()), float((y - y.mean(dim=0)).square().mean().sqrt())
    sentence = (
        f"Outputs against known targets at {len(y)} points: root mean squared error {rmse:.4g}, where the targets' own "
        f"standard deviation is {spread:.4g}."
    )
    columns = zip(range(y.shape[1]), y.T, network.T, errors.T, strict=True)
    rows = [
        [c, *(significant(float(v), 4) for v in (t.mean(), f.mean(), e.square().mean().sqrt(), e.abs().max()))]
        for c, t, f, e in columns
    ]
    head = ("output", "mean target", "mean output", "root mean squared error", "largest error")
    return figure_entry("targets", "How close are the outputs?", sentence, draw, (head, rows))


def _detection(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> list[dict[str, Any]]:
    found, curve = ood_metrics(inside, outside), roc_curve(inside, outside)

    @styled
    def histogram() -> Figure:
        figure = new_figure(_HEIGHT, 5.0)
        named = {"points of the report": inside, "points from outside": outside}
        score_histogram(figure.subplots(), named, label="out-of-distribution score")
        return figure

    @styled
    def draw_curve() -> Figure:
        figure = new_figure(_HEIGHT, 4.4)
        roc(figure.subplots(), curve.inside, curve.outside)
        return figure

    edges = torch.linspace(0, 1, _SCORE_BINS + 1, dtype=torch.float64)
    counts = [torch.histogram(scores.clamp(0, 1), bins=edges).hist.long().tolist() for scores in (inside, outside)]
    rows = [
        [f"{float(a):.2f} to {float(b):.2f}", *pair]
        for a, b, pair in zip(edges[:-1], edges[1:], zip(*counts, strict=True), strict=True)
        if any(pair)
    ]
    sentence = (
        f"The score of {len(inside)} points of the report and of {len(outside)} from outside. A point from outside has "
        f"the larger score with probability {found.auroc:.3f} (AUROC; 0.5 is chance)."
    )
    head = ("score", "points of the report", "points from outside")
    chosen = torch.linspace(0, len(curve.inside) - 1, min(_ROC_ROWS, len(curve.inside))).round().long().unique()
    of_curve = [
        ["none" if threshold == torch.inf else significant(float(threshold), 3), *(f"{float(v):.3f}" for v in shares)]
        for threshold, *shares in zip(curve.threshold[chosen], curve.inside[chosen], curve.outside[chosen], strict=True)
    ]
    roc_sentence = (
        f"A threshold that lets 95 % of the points of the report pass misses {100 * found.fpr95:.1f} % of those from "
        "outside."
    )
    roc_head = ("score from", "share of the report's points", "share of points from outside")
    return [
        figure_entry("outside", "Does it tell other inputs?", sentence, histogram, (head, rows)),
        figure_entry("roc", "Every threshold", roc_sentence, draw_curve, (roc_head, of_curve)),
    ]


def expected_classes(suspects: LabelErrors | None) -> dict[int, int]:
    """Return which training samples are listed as suspicious, the worst first, and the class expected of each."""
    if suspects is None:
        return {}
    expected = dict(zip(suspects.points.tolist(), suspects.predicted.tolist(), strict=True))
    return {index: expected[index] for index in suspects.indices[:_MAX_SUSPECTS].tolist()}


def _suspects(found: LabelErrors, labels: Int64[Tensor, " M"], names: tuple[str, ...]) -> dict[str, Any]:
    """List the most suspicious labels."""
    rows = []
    for index, expected in expected_classes(found).items():
        k = int((found.points == index).nonzero()[0, 0])
        numbers = (found.scores[k], found.margin[k], found.aum[k])
        classes = (names[int(labels[index])], names[expected])
        rows.append([index, *classes, *(significant(float(value), 4) for value in numbers)])
    sentence = (
        f"The {len(rows)} most suspicious of {len(found)} labels, the worst first. The score is from 0 to 1 and is a "
        "mean of two ranks: the margin of the label when the process predicts the sample from all others (below 0 "
        "another class is expected), and the network's margin of the label on average over the training."
    )
    head = ["label", "expected", "score", "margin from the others", "margin over training"]
    return {"sentence": sentence, "head": head, "rows": rows}
