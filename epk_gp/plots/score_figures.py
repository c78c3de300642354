"""The figures of scores and of suspicious labels that commands write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float, Int64, Shaped
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.plots.attributions import training_image
from epk_gp.plots.figures import as_images
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars

_DPI = 100
_SHOWN = 10  # images in a row


@dataclass(frozen=True, eq=False)
class ScoredPoints:
    """n points and their scores.

    Attributes:
        X: Inputs.
        rows: Their rows in the source.
        error: Error score.
        out_of_distribution: Out-of-distribution score.
        predicted: The network's class, which the error score is about.
        right: Whether that is the true class; None where no labels are known.
        risks: Risk-coverage curves by name of the score; empty where no labels are known.
    """

    X: Shaped[Tensor, "n ..."]
    rows: Int64[Tensor, " n"]
    error: Float[Tensor, " n"]
    out_of_distribution: Float[Tensor, " n"]
    predicted: Int64[Tensor, " n"]
    right: Bool[Tensor, " n"] | None
    risks: Mapping[str, Float[Tensor, " n"]]


def draw_scores(path: Path, scored: ScoredPoints, ordinary: Float[Tensor, " m"]) -> None:
    """Draw the risk of the predictions kept, or error scores; scores beside ordinary points'; and images, if they are.

    A green frame means that the network's class is right, a red one that it is wrong.

    Args:
        path: File that is written.
        scored: The points.
        ordinary: Out-of-distribution scores of the validation points.
    """
    images = as_images(scored.X)
    ratios = (4.2,) if images is None else (4.0, 4.6)
    figure = Figure(figsize=(11, sum(ratios)), layout="constrained")
    parts = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    left, right = parts[0].subplots(1, 2)
    if scored.risks:
        risk_coverage(left, scored.risks)
        left.set_title("abstaining from the least sure predictions of the network", fontsize="medium")
    else:
        score_histogram(left, {"scored points": scored.error}, label="error score")
        left.set_title("probability that the network's class is wrong", fontsize="medium")
    pairs = {"validation points": ordinary, "scored points": scored.out_of_distribution}
    score_histogram(right, pairs, label="out-of-distribution score")
    right.set_title("unlike the training data", fontsize="medium")
    if images is not None:
        orders = {
            "surest (smallest error score)": (scored.error, False),
            "least sure (largest error score)": (scored.error, True),
            "least like the training data (largest out-of-distribution score)": (scored.out_of_distribution, True),
        }
        for row, (title, (values, descending)) in zip(parts[1].subfigures(3, 1), orders.items(), strict=True):
            row.suptitle(title, fontsize="medium")
            axes = row.subplots(1, _SHOWN)
            for ax in axes:
                ax.set_axis_off()
            chosen = values.argsort(descending=descending, stable=True)[:_SHOWN].tolist()
            for ax, n in zip(axes, chosen, strict=False):
                ax.set_axis_on()
                mark = 0.0 if scored.right is None else 1.0 if scored.right[n] else -1.0
                caption = f"#{int(scored.rows[n])}: class {int(scored.predicted[n])}\n{values[n]:.2g}"
                training_image(ax, images[n], caption, mark)
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_suspicious_labels(
    path: Path, found: LabelErrors, inputs: Shaped[Tensor, "M ..."], labels: Int64[Tensor, " M"], top: int
) -> None:
    """Draw the most suspicious labels: the images, with label and expected class, or else their margins.

    Args:
        path: File that is written.
        found: Training points, judged.
        inputs: Their inputs.
        labels: Their labels.
        top: How many are drawn.
    """
    chosen = found.indices[:top].tolist()
    places = [int((found.points == i).nonzero()) for i in chosen]
    names = [f"{int(labels[i])} → {int(found.predicted[k])}" for i, k in zip(chosen, places, strict=True)]
    images = as_images(inputs)
    if images is None:
        figure = Figure(figsize=(7, 1.2 + 0.3 * len(chosen)), layout="constrained")
        ax = suspicion_bars(
            figure.subplots(),
            found.margin[places],
            [f"#{i}:  {name}" for i, name in zip(chosen, names, strict=True)],
        )
        ax.set_title("training point:  label → expected class", fontsize="medium")
    else:
        figure = _image_grid(images[chosen], [f"#{i}\n{name}" for i, name in zip(chosen, names, strict=True)])
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _image_grid(images: Float[Tensor, "n H W *rgb"], captions: Sequence[str]) -> Figure:
    rows = -(-len(images) // _SHOWN)
    figure = Figure(figsize=(11, 0.4 + 1.5 * rows), layout="constrained")
    figure.suptitle("most suspicious first: label → expected class", fontsize="medium")
    axes = figure.subplots(rows, _SHOWN, squeeze=False).flat
    for n, ax in enumerate(axes):
        if n < len(images):
            training_image(ax, images[n], captions[n])
        else:
            ax.set_axis_off()
    return figure
