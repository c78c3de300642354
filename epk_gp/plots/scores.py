"""Drawings of scores: the risk of the predictions that are kept, distributions, and suspicious labels."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from epk_gp.plots.common import Numbers, as_numpy, plain
from epk_gp.plots.style import GREY, IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, PALETTE, SMALL, WRONG

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
