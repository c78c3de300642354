"""The figures of scores and of suspicious labels that commands write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float, Int64, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.plots.attributions import training_image
from epk_gp.plots.common import short
from epk_gp.plots.figures import as_images
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars
from epk_gp.plots.style import RIGHT, SMALL, WRONG, new_figure, save_figure, styled

_SHOWN = 10  # images in a row
_IMAGE_ROW = 1.35  # inches of a row of images, with its title


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


@styled
def scores_figure(scored: ScoredPoints, ordinary: Float[Tensor, " m"]) -> Figure:
    """Draw the risk of the predictions kept, or error scores; scores beside ordinary points'; and images, if they are.

    A frame of an image is solid and dark, with a tick, where the network's class is right; dashed and pink, with a
    cross, where it is wrong; and grey where no label is known.

    Args:
        scored: The points.
        ordinary: Out-of-distribution scores of the validation points.
    """
    images = as_images(scored.X)
    ratios = (3.1,) if images is None else (3.1, 3 * _IMAGE_ROW)
    figure = new_figure(sum(ratios))
    parts = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    left, right = parts[0].subplots(1, 2)
    if scored.risks:
        risk_coverage(left, scored.risks)
        left.set_title("abstaining from the least sure predictions")
    else:
        score_histogram(left, {"scored points": scored.error}, label="error score")
        left.set_title("probability that the network's class is wrong")
    pairs = {"validation points": ordinary, "scored points": scored.out_of_distribution}
    score_histogram(right, pairs, label="out-of-distribution score")
    right.set_title("unlike the training data")
    if images is not None:
        orders = {
            "surest: smallest error score": (scored.error, False),
            "least sure: largest error score": (scored.error, True),
            "least like the training data: largest out-of-distribution score": (scored.out_of_distribution, True),
        }
        for row, (title, (values, descending)) in zip(parts[1].subfigures(3, 1), orders.items(), strict=True):
            row.suptitle(title, x=0.01, ha="left")
            chosen = values.argsort(descending=descending, stable=True)[:_SHOWN].tolist()
            axes = row.subplots(1, _SHOWN)
            for ax in axes[len(chosen) :]:
                ax.set_axis_off()
            for ax, n in zip(axes, chosen, strict=False):
                _draw_scored(ax, images[n], scored, n, float(values[n]))
    return figure


def draw_scores(file: Path, scored: ScoredPoints, ordinary: Float[Tensor, " m"]) -> None:
    """Write `scores_figure` to a file."""
    save_figure(scores_figure(scored, ordinary), file)


@styled
def suspicious_labels_figure(
    found: LabelErrors, inputs: Shaped[Tensor, "M ..."], labels: Int64[Tensor, " M"], top: int
) -> Figure:
    """Draw the most suspicious labels: the images, with label and expected class, or else their margins.

    Args:
        found: Training points, judged.
        inputs: Their inputs.
        labels: Their labels.
        top: How many are drawn.
    """
    chosen = found.indices[:top].tolist()
    places = [int((found.points == i).nonzero()) for i in chosen]
    names = [f"{int(labels[i])} → {int(found.predicted[k])}" for i, k in zip(chosen, places, strict=True)]
    images = as_images(inputs)
    title = "most suspicious first: label → expected class"
    if images is not None:
        return _image_grid(images[chosen], [f"#{i}\n{name}" for i, name in zip(chosen, names, strict=True)], title)
    figure = new_figure(1.0 + 0.24 * len(chosen))
    words = [f"#{i}:  {name}" for i, name in zip(chosen, names, strict=True)]
    suspicion_bars(figure.subplots(), found.margin[places], words).set_title(title)
    return figure


def draw_suspicious_labels(
    file: Path, found: LabelErrors, inputs: Shaped[Tensor, "M ..."], labels: Int64[Tensor, " M"], top: int
) -> None:
    """Write `suspicious_labels_figure` to a file."""
    save_figure(suspicious_labels_figure(found, inputs, labels, top), file)


def _draw_scored(ax: Axes, image: Float[Tensor, "H W *rgb"], scored: ScoredPoints, n: int, score: float) -> None:
    sign, mark = 0.0, ""
    if scored.right is not None:
        sign, mark = (1.0, " ✓") if scored.right[n] else (-1.0, " ✗")
    training_image(ax, image, f"{short(score)}{mark}", sign, colours=(RIGHT, WRONG))
    ax.set_xlabel(f"#{int(scored.rows[n])}\nclass {int(scored.predicted[n])}", fontsize=SMALL, labelpad=2)


def _image_grid(images: Float[Tensor, "n H W *rgb"], captions: Sequence[str], title: str) -> Figure:
    rows = -(-len(images) // _SHOWN)
    figure = new_figure(0.35 + 1.0 * rows)
    figure.suptitle(title, x=0.01, ha="left")
    axes = figure.subplots(rows, _SHOWN, squeeze=False).flat
    for n, ax in enumerate(axes):
        if n < len(images):
            training_image(ax, images[n], captions[n])
        else:
            ax.set_axis_off()
    return figure
