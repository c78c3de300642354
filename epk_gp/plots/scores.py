"""Pictures of scores: the risk of the predictions that are kept, distributions, and suspicious labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.plots.common import Numbers, as_images, as_numpy, plain, short
from epk_gp.plots.contributions import training_image
from epk_gp.plots.style import (
    GREY,
    IN_DISTRIBUTION,
    OUT_OF_DISTRIBUTION,
    PALETTE,
    RIGHT,
    SMALL,
    WRONG,
    new_figure,
    styled,
)

_SHOWN = 10  # images in a row
_IMAGE_ROW = 1.35  # inches of a row of images, with its title
_MIN_KEPT = 0.02  # the share of points from which a curve is drawn: the risk of a few points is 0 or 1


def risk_coverage(ax: Axes, risks: Mapping[str, Float[Numbers, " n"]]) -> Axes:
    """Draw risk-coverage curves: the share of wrong predictions among those that a score keeps.

    Args:
        ax: Axes to draw into.
        risks: By name of the score, the share of wrong ones among the 1 .. n surest predictions.

    Returns:
        The Axes.

    Raises:
        ValueError: There is no curve, or one is empty or not finite.
    """
    if not risks:
        raise ValueError("risks must hold at least one curve: got none.")
    for (name, values), colour in zip(risks.items(), PALETTE, strict=False):
        risk = as_numpy(name, values)
        if not len(risk):
            raise ValueError(f"{name} must have a risk for each number of points that are kept: got none.")
        coverage = np.arange(1, len(risk) + 1) / len(risk)
        drawn = coverage >= _MIN_KEPT
        ax.plot(100 * coverage[drawn], 100 * risk[drawn], color=colour, label=plain(name), linewidth=1.6)
    ax.set(xlabel="predictions kept, the surest first, %", ylabel="wrong among them, %", xlim=(0, 100))
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=SMALL)
    return ax


def score_histogram(ax: Axes, scores: Mapping[str, Float[Numbers, " n"]], *, label: str) -> Axes:
    """Draw the distributions of a score that lies between 0 and 1, each with the same area.

    Args:
        ax: Axes to draw into.
        scores: By name of the points, at most three: ordinary ones first, which are filled, then others.
        label: Name of the score.

    Returns:
        The Axes.

    Raises:
        ValueError: A score is not finite.
    """
    colours = (IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, PALETTE[6]) if len(scores) > 1 else (OUT_OF_DISTRIBUTION,)
    for number, ((name, values), colour) in enumerate(zip(scores.items(), colours, strict=False)):
        array = as_numpy(name, values)
        # The first is filled and the others are outlines: they are told apart where they overlap, and without colours.
        ax.hist(
            array.clip(0, 1), bins=40, range=(0, 1), weights=np.full(len(array), 1 / len(array)), color=colour,
            histtype="stepfilled" if number == 0 else "step", alpha=0.75 if number == 0 else 1, label=plain(name),
            linewidth=0.5 if number == 0 else 1.6, linestyle=("-", "-", "--")[number],
        )  # fmt: skip
    ax.set(xlabel=plain(label), ylabel="share of points", xlim=(0, 1))
    ax.legend(fontsize=SMALL)
    return ax


def suspicion_bars(ax: Axes, margins: Float[Numbers, " m"], names: Sequence[str]) -> Axes:
    """Draw the margins of suspicious labels, the worst on top: below 0 another class is expected.

    Args:
        ax: Axes to draw into.
        margins: Margin of each label.
        names: What each label is.

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one name per margin, or a margin is not finite.
    """
    values = as_numpy("margins", margins)
    if len(names) != len(values):
        raise ValueError(f"names must name each label: got {len(names)} names for {len(values)} margins.")
    colours = [WRONG if value < 0 else IN_DISTRIBUTION for value in values]
    ax.barh(range(len(values)), values, color=colours, edgecolor=GREY, linewidth=0.6, height=0.78)
    ax.axvline(0, color=GREY, linewidth=1)
    ax.set_yticks(range(len(values)), [plain(name) for name in names], fontsize=SMALL)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.set(xlabel="margin of the label: below 0 another class is expected")
    return ax


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
                right = None if scored.right is None else bool(scored.right[n])
                mark, sign = {None: ("", 0.0), True: (" ✓", 1.0), False: (" ✗", -1.0)}[right]
                training_image(ax, images[n], f"{short(float(values[n]))}{mark}", sign, colours=(RIGHT, WRONG))
                words = f"#{int(scored.rows[n])}\nclass {int(scored.predicted[n])}"
                ax.set_xlabel(words, fontsize=SMALL, labelpad=2)
    return figure


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
    images, title = as_images(inputs), "most suspicious first: label → expected class"
    if images is None:
        figure = new_figure(1.0 + 0.24 * len(chosen))
        words = [f"#{i}:  {name}" for i, name in zip(chosen, names, strict=True)]
        suspicion_bars(figure.subplots(), found.margin[places], words).set_title(title)
        return figure
    rows = math.ceil(len(chosen) / _SHOWN)
    figure = new_figure(0.35 + 1.0 * rows)
    figure.suptitle(title, x=0.01, ha="left")
    axes = list(figure.subplots(rows, _SHOWN, squeeze=False).flat)
    for ax, i, name in zip(axes, chosen, names, strict=False):
        training_image(ax, images[i], f"#{i}\n{name}")
    for ax in axes[len(chosen) :]:
        ax.set_axis_off()
    return figure
