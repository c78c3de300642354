"""The run as a whole: accuracy over the points, figures with their tables, suspicious labels, and the map."""

import math
import re
import threading
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import matplotlib
import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap, grid_coordinates, lift
from epk_gp.analysis.measures import ROCCurve, calibration, gram_spectrum, ood_metrics, reliability_bins, roc_curve
from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.datamodels.model import Datamodel
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory
from epk_gp.plots import style
from epk_gp.plots.maps import draw_colorbar, draw_panel, held_columns, map_handles, shades_of
from epk_gp.plots.scores import score_histogram
from epk_gp.quadrature.rules import QuadratureRule
from epk_gp.report.explanations import significant
from epk_gp.report.points import Certainty
from epk_gp.report.request import ReportRequest

REPORT_INK = "#1a1a1a"  # colour of text: the page replaces it in the dark theme
MIN_RELIABILITY = 20  # least number of points: with fewer, a bin has one or two, which show nothing
MAX_OUTPUTS = 100  # outputs in a kernel matrix: each output of each sample costs a backward pass at each node
COARSE = 12  # cells per side of a map for which the nearest samples are computed

_BINS = 10  # bins of the confidence
_SCORE_BINS = 20  # bins in a histogram's table
_ROC_ROWS = 20  # rows of a curve's table
_EIGENVALUES = 20  # eigenvalues in the table
_MAX_SUSPECTS = 30
_MOST_MISSED = 3  # samples listed for each number of a datamodel
_BEHIND = 3  # samples listed for a cell of a map
_MAX_POINTS = 400  # training samples drawn in a map
_ROOM = 40  # characters of all classes' names in a row below a matrix
Draw = Callable[[Axes], object]
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # head and rows
_AXES = ("first direction of the plane", "second direction of the plane")

# Matplotlib's settings belong to the process: threads that write reports draw one after the other.
_DRAWING = threading.Lock()


def overview(request: ReportRequest, sure: Certainty) -> dict[str, Any]:
    """Return the content of a report about all points and the run."""
    true, p, labels = request.true_classes, sure.probabilities, request.training_labels
    figures = []
    if true is not None and p is not None and len(true) >= MIN_RELIABILITY:
        figures.append(_reliability(sure.source, p, true))
    if request.y is not None and not request.is_classifier:
        figures.append(_targets(request.y.double(), request.network.double()))
    if request.outside is not None and isinstance(request.posterior, UncertainClassifier):
        outside = torch.as_tensor(request.posterior.uncertainty(request.outside, 2).out_of_distribution).cpu()
        inside = next(values for name, values, _ in sure.scores if name == "out-of-distribution score")
        figures += _detection(inside.double(), outside.double())
    if reason_without_kernel(request) is None:
        figures += _kernel(request)
    m, suspects, model = request.uncertainty_map, request.suspects, request.datamodel
    if m is not None and m.out_of_distribution is not None:
        figures.append(_far(request, m, m.out_of_distribution))
    return {
        "accuracy": None if true is None else float((request.network.argmax(dim=1) == true).double().mean()),
        "count": len(request.X),
        "figures": figures,
        "suspects": None if suspects is None or labels is None else _suspects(suspects, labels, request.class_names),
        "datamodel": None if model is None else _datamodel(request, model),
        "map": None if m is None else _map(request, m),
    }


def reliability_diagram(ax: Axes, x: Float[Tensor, " B"], y: Float[Tensor, " B"], n: Int64[Tensor, " B"]) -> None:
    """Draw the share y of right predictions of the n points of each bin against their mean confidence x."""
    ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--", label="confidence = accuracy")
    ax.plot(x.numpy(), y.numpy(), color=style.EXACT, linewidth=1.2)
    sizes, label = 20 + 180 * n.double() / int(n.max()), "points of a bin; larger: more of them"
    ax.scatter(x.numpy(), y.numpy(), s=sizes.numpy(), color=style.EXACT, zorder=3, label=label)
    ax.set(xlabel="confidence: probability of the predicted class", ylabel="share predicted rightly")
    ax.set(xlim=(-0.02, 1.04), ylim=(-0.02, 1.06))
    ax.legend(fontsize=style.SMALL, loc="lower right")


def _reliability(source: str, probabilities: Float[Tensor, "n C"], true: Int64[Tensor, " n"]) -> dict[str, Any]:
    found, bins = calibration(probabilities, true, bins=_BINS), reliability_bins(probabilities, true, bins=_BINS)
    filled = bins.count > 0
    columns = (bins.confidence[filled], bins.accuracy[filled], bins.count[filled])
    whose = {"network": "network alone", "process": "process alone"}.get(source, "network and process together")
    sentence = (
        f"Probabilities of the {whose} at {len(true)} points. On average over the points, confidence and share of "
        f"right predictions differ by {found.ece:.3f} (expected calibration error, {_BINS} bins); "
        f"{100 * found.accuracy:.1f} % of the most probable classes are right, and the mean negative log-probability "
        f"of the true class is {found.nll:.3f}."
    )
    rows = [
        [f"{k / _BINS:.1f} to {(k + 1) / _BINS:.1f}", int(n), significant(float(c), 3), significant(float(a), 3)]
        for k, c, a, n in zip(filled.nonzero()[:, 0].tolist(), *columns, strict=True)
    ]
    table = (("confidence", "points", "mean confidence", "share right"), rows)
    title = "Is it right as often as it says?"
    return _figure("reliability", title, sentence, lambda ax: reliability_diagram(ax, *columns), table)


def target_scatter(ax: Axes, targets: Float[Tensor, " n"], outputs: Float[Tensor, " n"]) -> None:
    """Draw the outputs of a regression against their targets."""
    x, y = targets.numpy(), outputs.numpy()
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    ax.plot(ends, ends, color=style.GREY, linewidth=1, linestyle="--", label="output = target")
    ax.scatter(x, y, s=12, color=style.EXACT, alpha=0.7, linewidths=0, label="points")
    ax.set(xlabel="target", ylabel="output of the network")
    ax.legend(fontsize=style.SMALL)


def _targets(y: Float[Tensor, "n C"], network: Float[Tensor, "n C"]) -> dict[str, Any]:
    errors = network - y
    rmse, spread = float(errors.square().mean().sqrt()), float((y - y.mean(dim=0)).square().mean().sqrt())
    sentence = (
        f"Outputs against known targets at {len(y)} points: root mean squared error {rmse:.4g}, where the targets' own "
        f"standard deviation is {spread:.4g}."
    )
    rows = [
        [c, *(significant(float(v), 4) for v in (t.mean(), f.mean(), e.square().mean().sqrt(), e.abs().max()))]
        for c, (t, f, e) in enumerate(zip(y.T, network.T, errors.T, strict=True))
    ]
    table = (("output", "mean target", "mean output", "root mean squared error", "largest error"), rows)
    title, flat = "How close are the outputs?", (y.flatten(), network.flatten())
    return _figure("targets", title, sentence, lambda ax: target_scatter(ax, *flat), table)


def roc(ax: Axes, curve: ROCCurve) -> None:
    """Draw the share of other points that each threshold calls unlike the data, against that of ordinary ones."""
    ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--", label="chance")
    shares = curve.inside.numpy(), curve.outside.numpy()
    ax.plot(*shares, color=style.OUT_OF_DISTRIBUTION, label="out-of-distribution score")
    ax.set(xlabel="share of ordinary points called unlike", ylabel="share of other points called unlike")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.legend(fontsize=style.SMALL, loc="lower right")


def _detection(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> list[dict[str, Any]]:
    found, curve = ood_metrics(inside, outside), roc_curve(inside, outside)
    named = {"points of the report": inside, "points from outside": outside}
    edges = torch.linspace(0, 1, _SCORE_BINS + 1, dtype=torch.float64)
    counts = [torch.histogram(scores.clamp(0, 1), bins=edges).hist.long().tolist() for scores in (inside, outside)]
    bins = zip(edges[:-1], edges[1:], *counts, strict=True)
    rows = [[f"{float(a):.2f} to {float(b):.2f}", *pair] for a, b, *pair in bins if any(pair)]
    sentence = (
        f"The score of {len(inside)} points of the report and of {len(outside)} from outside. A point from outside has "
        f"the larger score with probability {found.auroc:.3f} (AUROC; 0.5 is chance)."
    )
    chosen = torch.linspace(0, len(curve.inside) - 1, min(_ROC_ROWS, len(curve.inside))).round().long().unique()
    of_curve = [
        ["none" if threshold == torch.inf else significant(float(threshold), 3), *(f"{float(v):.3f}" for v in shares)]
        for threshold, *shares in zip(curve.threshold[chosen], curve.inside[chosen], curve.outside[chosen], strict=True)
    ]
    roc_sentence = (
        f"A threshold that lets 95 % of the points of the report pass misses {100 * found.fpr95:.1f} % of those from "
        "outside."
    )
    roc_table = (("score from", "share of the report's points", "share of points from outside"), of_curve)
    title, label, table = "Does it tell other inputs?", "out-of-distribution score", (("score", *named), rows)
    return [
        _figure("outside", title, sentence, lambda ax: score_histogram(ax, named, label=label), table),
        _figure("roc", "Every threshold", roc_sentence, lambda ax: roc(ax, curve), roc_table, width=4.4),
    ]


def expected_classes(suspects: LabelErrors | None) -> dict[int, int]:
    """Return the training samples that are listed as suspicious, the worst first, with the class expected for each."""
    if suspects is None:
        return {}
    expected = dict(zip(suspects.points.tolist(), suspects.predicted.tolist(), strict=True))
    return {index: expected[index] for index in suspects.indices[:_MAX_SUSPECTS].tolist()}


def _suspects(found: LabelErrors, labels: Int64[Tensor, " M"], names: tuple[str, ...]) -> dict[str, Any]:
    """List the most suspicious labels."""
    rows, place = [], {index: k for k, index in enumerate(found.points.tolist())}
    for index, expected in expected_classes(found).items():
        values = (column[place[index]] for column in (found.scores, found.margin, found.aum))
        rows.append([index, names[int(labels[index])], names[expected], *(significant(float(v), 4) for v in values)])
    sentence = (
        f"The {len(rows)} most suspicious of {len(found)} labels, the worst first. The score is from 0 to 1 and is a "
        "mean of two ranks: the margin of the label when the process predicts the sample from all others (below 0 "
        "another class is expected), and the network's margin of the label on average over the training."
    )
    head = ["label", "expected", "score", "margin from the others", "margin over training"]
    return {"sentence": sentence, "head": head, "rows": rows}


def _datamodel(request: ReportRequest, model: Datamodel) -> dict[str, Any]:
    """List the samples whose absence would change each explained number most."""
    questions, names, rows = model.questions, request.class_names, list[list[Any]]()
    has_classes = request.is_classifier and questions.run.asked_of is None
    for q, (value, scores) in enumerate(zip(model.outputs.tolist(), model.scores, strict=True)):
        n, k = divmod(q, questions.per_input)
        c = k if questions.classes is None else int(questions.classes[n])
        number = f"{questions.kind} of {names[c]}" if has_classes else f"{questions.kind} {k}"
        explained = [f"point {int(request.points[n])}", number, significant(value, 4)]
        for index in scores.abs().topk(min(_MOST_MISSED, len(scores))).indices.tolist():
            rows.append([index, *explained, significant(float(scores[index]), 4)])
    sentence = (
        "The score is the share of a sample in the change of the number when many samples are left out, by path ridge: "
        "with a positive one its absence lowers the number. For one sample alone, influence is exact. "
    )
    if (forecast := model.forecast) is None:
        sentence += "No forecast was asked for: how well scores predict networks trained again is not known here."
    else:
        low, high = forecast.interval
        sentence += (
            f"On {len(forecast.measured)} networks trained on random halves, predictions by {forecast.method} have the "
            f"linear datamodeling score {forecast.lds:.2f} (95 %: {low:.2f} to {high:.2f})."
        )
    return {"sentence": sentence, "head": ["explained", "number", "of the network", "score"], "rows": rows}


def reason_without_kernel(request: ReportRequest) -> str | None:
    """Return the reason that a report has no matrix of the path kernel between samples; None if it has one."""
    run = request.trajectory
    reasons = {
        "a function of the outputs is explained": request.function is not None,
        "fewer than two samples were asked for": request.kernel_points < 2,
        "there is one training sample only": run.num_points < 2,
        f"the network has more than {MAX_OUTPUTS} outputs, each of which costs a backward pass":
            run.num_outputs > MAX_OUTPUTS,
        "the path of averaged weights has no path kernel": run.average is not None,
        "the learning rates of the first parameter group sum to 0": not float(run.step_sizes.sum()) > 0,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def _path_kernel(request: ReportRequest, run: Trajectory) -> tuple[PathKernel, int]:
    """Return the path kernel of a run at the start of each step, and the memory budget of its computation."""
    kernel = PathKernel(run, request.head, QuadratureRule.left_endpoint())
    return kernel, request.options.memory_budget


def kernel_matrix(ax: Axes, K: Float[Tensor, "n n"], groups: Int64[Tensor, " n"] | None, names: Sequence[str]) -> None:
    """Draw a matrix of cosines, with lines between consecutive groups, and a colour bar.

    Shades begin at the smallest cosine, rounded down to a tenth; if one is negative, colours go from -1 to 1.
    """
    least = float(K.min())
    low, colours = (math.floor(10 * least) / 10, style.COLORMAP) if least >= 0 else (-1.0, style.SIGNED)
    draw_colorbar([ax], ax.imshow(K.numpy(), vmin=low, vmax=1, cmap=colours, interpolation="nearest"), "cosine")
    ax.grid(visible=False)
    ax.set(xticks=[], yticks=[])
    if groups is None:
        return
    present, counts = groups.unique_consecutive(return_counts=True)
    ends = counts.cumsum(dim=0) - 0.5
    for edge in ends[:-1].tolist():
        ax.axhline(edge, color=style.OUT_OF_DISTRIBUTION, linewidth=0.8)
        ax.axvline(edge, color=style.OUT_OF_DISTRIBUTION, linewidth=0.8)
    middles, words = (ends - counts / 2).tolist(), [style.plain(names[c]) for c in present.tolist()]
    ax.set_xticks(middles, words, rotation=90 if sum(map(len, words)) > _ROOM else 0)
    ax.set_yticks(middles, words)
    ax.set(xlabel="class", ylabel="class")
    ax.tick_params(length=0)


def spectrum(ax: Axes, values: Float[Tensor, " n"]) -> None:
    """Draw descending eigenvalues as shares of their sum, on a logarithmic axis, without those that are rounding."""
    shares = values.numpy() / float(values.clamp(min=0).sum())
    drawn = shares[shares > len(shares) * torch.finfo(values.dtype).eps]
    ax.semilogy(range(1, len(drawn) + 1), drawn, color=style.EXACT, marker=".", markersize=4, linewidth=1)
    ax.set(xlabel="number of the eigenvalue", ylabel="share of the sum")


def _kernel(request: ReportRequest) -> list[dict[str, Any]]:
    """Return the path kernel between training samples of all classes, and its spectrum."""
    run, labels, count = request.trajectory, request.training_labels, request.kernel_points
    if labels is None:
        chosen = torch.linspace(0, run.num_points - 1, min(count, run.num_points)).round().long().unique()
    else:  # evenly over the classes, in order
        present = labels[(labels >= 0) & (labels < run.num_outputs)].unique()
        each = max(1, count // len(present))
        chosen = torch.cat([(labels == c).nonzero()[:each, 0] for c in present])[:count]
    groups = None if labels is None else labels[chosen]
    by_nodes = run.num_steps > NUM_NODES
    points = Points(run.inputs[chosen.to(run.inputs.device)], is_train=not by_nodes)
    kernel, budget = _path_kernel(request, nodes_trajectory(run, NUM_NODES) if by_nodes else run)
    K = kernel.trace_block(points, points, memory_budget=budget).cpu()  # in the run's precision: its rounding is judged
    diagonal = K.diagonal()
    if not bool((diagonal > 0).all()):  # a sample with zero gradients has no direction
        return []
    cosines = K / (diagonal[:, None] * diagonal).sqrt()
    how = f"by the midpoint rule with {NUM_NODES} nodes along the path" if by_nodes else "at the start of each step"
    sentence = (
        f"Path kernel between {len(chosen)} of {run.num_points} training samples, "
        f"{'in the order of the data' if groups is None else 'by class'}, as the cosine of the "
        f"angle between them: the sum over the outputs under {request.head}, {how}. Dark: training moves both alike."
    )

    names = [name.removeprefix("class ") for name in request.class_names]
    found = gram_spectrum(K)
    total, leading = float(found.values.clamp(min=0).sum()), found.values[:_EIGENVALUES].tolist()
    rows = [[n, significant(v, 4), significant(v / total, 3)] for n, v in enumerate(leading, start=1)]
    words = (
        f"Eigenvalues of the same matrix, not divided by its diagonal. {found.num_principal} of {len(chosen)} hold "
        f"95 % of their sum; the effective rank, the exponential of their entropy, is {found.effective_rank:.1f}."
    )
    title, table = "How many directions does it use?", (("number", "eigenvalue", "share of the sum"), rows)
    alike, of_classes = "Which samples does training treat alike?", _cosine_table(cosines, groups, request.class_names)
    return [
        _figure("kernel", alike, sentence, lambda ax: kernel_matrix(ax, cosines, groups, names), of_classes, 4.4, 5.2),
        _figure("spectrum", title, words, lambda ax: spectrum(ax, found.values), table),
    ]


def _cosine_table(cosines: Tensor, groups: Tensor | None, names: Sequence[str]) -> Table:
    """Average the cosines between classes; without classes, describe their distribution."""
    off = ~torch.eye(len(cosines), dtype=torch.bool)
    if groups is None:
        levels = torch.linspace(0, 1, 5, dtype=cosines.dtype)
        quantiles = torch.quantile(cosines[off], levels).tolist()
        rows = [[q, significant(v, 3)] for q, v in zip(levels.tolist(), quantiles, strict=True)]
        return ["quantile", "cosine of two samples"], rows
    present = groups.unique().tolist()
    of_classes: list[list[Any]] = []
    for c in present:
        pairs = [(off & (groups[:, None] == c) & (groups == d)) for d in present]
        means = (significant(float(cosines[p].mean()), 3) if bool(p.any()) else "" for p in pairs)
        of_classes.append([names[c], *means])
    return ["mean cosine with", *(names[c] for c in present)], of_classes


def _draw_map(
    ax: Axes, request: ReportRequest, m: UncertaintyMap, values: Float[Tensor, "ny nx"], label: str, **options: Any
) -> None:
    """Draw a scalar of a map, with the training samples in the colours of their classes."""
    drawn, names = _drawn_samples(m), request.class_names
    labels = None if request.training_labels is None else request.training_labels[drawn]
    draw_panel(ax, m, values, m.training[drawn], title="", colorbar_label=label, labels=labels, names=names, **options)
    shades_of(ax).set_rasterized(True)  # as a picture: outlines take ten times as many bytes
    x, y = _AXES if m.plane.columns is None else map(style.plain, m.plane.names)
    ax.set(xlabel=x, ylabel=y)
    if labels is not None:
        handles = map_handles(labels, names=names)
        ax.figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))


def _drawn_samples(m: UncertaintyMap) -> Int64[Tensor, " k"]:
    return m.points[:: math.ceil(len(m.points) / _MAX_POINTS)]


def _map(request: ReportRequest, m: UncertaintyMap) -> dict[str, Any]:
    """Return the map of uncertainty over a plane, with the training samples nearest to each cell."""
    kinds, inputs = [names and [*names.values()] for names in m.plane.categories], request.trajectory.inputs.cpu()
    sides, cells = list[list[float]](), list[Tensor]()
    for nodes, names in zip((m.x, m.y), kinds, strict=True):
        low, high, count = float(nodes[0]), float(nodes[-1]), min(COARSE, len(nodes))
        sides.append([low, high] if names is None else [-0.5, len(names) - 0.5])
        cells.append(low + (torch.arange(count).double() + 0.5) / count * (high - low) if names is None else nodes)
    wrong = "probability that the network's class is wrong"
    figure, picture = _drawn(lambda ax: _draw_map(ax, request, m, m.error, wrong, regions=m.network_class), 5.2, 5.6)
    left, bottom, width, height = figure.axes[0].get_position().bounds  # the position of the axes after saving
    whose, far = "the process", m.out_of_distribution
    if far is not None:
        whose = "network and process together (error score)"
    error = f" The largest Monte Carlo standard error is {m.standard_error:.2g}." if far is None else ""
    sentence = (
        f"Probability that the network's class is wrong, by {whose}: dark is uncertain.{error} {held_columns(m.plane)} "
        f"Behind each cell of a grid of {len(cells[1])} × {len(cells[0])} stand the {_BEHIND} drawn training samples "
        "that training treats most like its middle: those with the largest cosine of the path kernel, by the midpoint "
        f"rule with {NUM_NODES} nodes along the path."
    )
    return {
        "title": "Where is it sure?", "sentence": sentence, "extent": [*sides[0], *sides[1]], "categories": kinds,
        "axes": list(_AXES if m.plane.columns is None else m.plane.names), "shape": list(m.error.shape), "svg": picture,
        "area": [significant(v, 6) for v in (left, 1 - bottom - height, left + width, 1 - bottom)],
        "predicted": m.network_class.flatten().tolist(),
        "wrong": [significant(v, 3) for v in m.error.clamp(min=0).flatten().tolist()],
        "far": None if far is None else [significant(v, 3) for v in far.flatten().tolist()],
        "coarse": [len(own) for own in cells[::-1]], "behind": _behind(request, m, *cells),
        "has_positions": m.training.shape == inputs.shape and torch.equal(m.training, inputs.double()),
    }  # fmt: skip


def _far(request: ReportRequest, m: UncertaintyMap, far: Float[Tensor, "ny nx"]) -> dict[str, Any]:
    """Return the map of the out-of-distribution score."""
    sentence = f"Out-of-distribution score: dark is unlike the training data. {held_columns(m.plane)}"
    levels = torch.linspace(0, 1, 5, dtype=far.dtype)
    scores = zip(levels.tolist(), torch.quantile(far.flatten(), levels).tolist(), strict=True)
    table = ["quantile over the map", "score"], [[level, significant(score, 3)] for level, score in scores]
    name, title, label = "far", "Where is it like the training data?", "from 0 (near) to 1 (far)"
    return _figure(name, title, sentence, lambda ax: _draw_map(ax, request, m, far, label), table, 5.2, 5.6)


def _behind(
    request: ReportRequest, m: UncertaintyMap, x: Float[Tensor, " nx"], y: Float[Tensor, " ny"]
) -> list[list[int]]:
    """Return the drawn samples with the largest cosine to each cell's middle, row by row from the first coordinates."""
    run, drawn = request.trajectory.trained, _drawn_samples(m)
    cells = Points(lift(m.plane, grid_coordinates(x.to(m.x), y.to(m.y))).to(run.inputs), is_train=False)
    samples = Points(run.inputs[drawn.to(run.inputs.device)], is_train=False)
    kernel, budget = _path_kernel(request, nodes_trajectory(run, NUM_NODES))
    K = kernel.trace_block(cells, samples, memory_budget=budget).cpu()
    norms = kernel.diagonal_blocks(samples, memory_budget=budget).diagonal(dim1=1, dim2=2).sum(dim=1).sqrt().cpu()
    cosines = K / norms.clamp(min=torch.finfo(K.dtype).tiny)  # up to a factor that a cell's samples share
    return list(drawn[cosines.topk(min(_BEHIND, len(drawn)), dim=1).indices].tolist())


def _figure(
    name: str, title: str, sentence: str, draw: Draw, table: Table, height: float = 3.4, width: float = 5.0
) -> dict[str, Any]:
    """Return a figure in the page's form: with its title, its sentence, and its table."""
    (_, picture), (head, rows) = _drawn(draw, height, width), table
    return {"id": name, "title": title, "sentence": sentence, "svg": picture, "table": {"head": head, "rows": rows}}


def _drawn(draw: Draw, height: float, width: float) -> tuple[Figure, str]:
    """Return a figure and its SVG element: text as text, no background, and the same bytes in every run."""
    buffer = BytesIO()
    with _DRAWING, style.figure_style(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = style.new_figure(height, width)
        draw(figure.subplots())
        figure.draw_without_rendering()  # computes the layout with which it is saved
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # ids repeat in several figures; nothing refers to them
    text = re.sub(r"\s*\n\s*", "\n", text)
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)  # hundredths of a point
    return figure, text.replace(style.INK, REPORT_INK).strip()
