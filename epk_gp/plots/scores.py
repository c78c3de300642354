"""Pictures of scores: the risk of the kept predictions, and distributions."""

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Bool, Float, Int64, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.score_check import CheckedScores, ScoreCheck
from epk_gp.core.show import count
from epk_gp.datamodels.model import Verification
from epk_gp.plots import style
from epk_gp.plots.contributions import image_row

_SHOWN = 10  # images in a row
_IMAGE_ROW = 1.35  # height in inches of a row of images, with its title
_NAMED = len(style.PALETTE)  # number of questions with separate colours
_FEW_DOTS = 500  # largest number of dots that are drawn large
_MIN_KEPT = 0.02  # share of points at which a curve starts: the risk of a few points is 0 or 1


def risk_coverage(ax: Axes, risks: Mapping[str, Float[style.Numbers, " n"]]) -> Axes:
    """Draw risk-coverage curves: the share of wrong predictions among those that a score keeps.

    Args:
        ax: Axes to draw into.
        risks: By name of the score, the share of wrong predictions among the 1 .. n most certain ones.

    Returns:
        The Axes.

    Raises:
        ValueError: There is no curve, or one is not finite.
    """
    if not risks:
        raise ValueError("risks must hold at least one curve: got none.")
    for (name, values), colour in zip(risks.items(), style.PALETTE, strict=False):
        risk = style.as_numpy(name, values)
        coverage = np.arange(1, len(risk) + 1) / len(risk)
        drawn = coverage >= _MIN_KEPT
        ax.plot(100 * coverage[drawn], 100 * risk[drawn], color=colour, label=style.plain(name), linewidth=1.6)
    ax.set(xlabel="predictions kept, the surest first, %", ylabel="wrong among them, %", xlim=(0, 100))
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=style.SMALL)
    return ax


def score_histogram(ax: Axes, scores: Mapping[str, Float[style.Numbers, " n"]], *, label: str) -> Axes:
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
    colours = (style.IN_DISTRIBUTION, style.OUT_OF_DISTRIBUTION, style.PALETTE[6])[len(scores) == 1 :]
    for number, ((name, values), colour) in enumerate(zip(scores.items(), colours, strict=False)):
        array = style.as_numpy(name, values)
        # The first is filled and the others are outlines, so that they can be distinguished in overlaps and without
        # colours.
        ax.hist(
            array.clip(0, 1), bins=40, range=(0, 1), weights=np.full(len(array), 1 / len(array)), color=colour,
            histtype="stepfilled" if number == 0 else "step", alpha=0.75 if number == 0 else 1, label=style.plain(name),
            linewidth=0.5 if number == 0 else 1.6, linestyle=("-", "-", "--")[number],
        )  # fmt: skip
    ax.set(xlabel=style.plain(label), ylabel="share of points", xlim=(0, 1))
    ax.legend(fontsize=style.SMALL)
    return ax


@style.styled
def scores_figure(
    X: Shaped[Tensor, "n ..."],
    *,
    rows: Int64[Tensor, " n"],
    error: Float[Tensor, " n"],
    far: Float[Tensor, " n"],
    ordinary: Float[Tensor, " m"],
    predicted: Int64[Tensor, " n"],
    right: Bool[Tensor, " n"] | None,
    risks: Mapping[str, Float[Tensor, " n"]],
) -> Figure:
    """Draw the risk of the kept predictions, or error scores; scores compared with ordinary points; and images, if any.

    The frame of an image is solid and dark, with a tick, if the network's class is right; dashed and pink, with a
    cross, if it is wrong; and grey if no label is known.

    Args:
        X: n points.
        rows: Their rows in the source.
        error: Their error scores.
        far: Their out-of-distribution scores.
        ordinary: Out-of-distribution scores of the validation points.
        predicted: The network's class, to which the error score refers.
        right: Whether this is the true class; None if no labels are known.
        risks: Risk-coverage curves by name of the score; empty if no labels are known.
    """
    images = style.as_images(X)
    ratios = (3.1,) if images is None else (3.1, 3 * _IMAGE_ROW)
    figure = style.new_figure(sum(ratios))
    parts = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    of_error, of_shift = parts[0].subplots(1, 2)
    if risks:
        risk_coverage(of_error, risks)
        of_error.set_title("abstaining from the least sure predictions")
    else:
        score_histogram(of_error, {"scored points": error}, label="error score")
        of_error.set_title("probability that the network's class is wrong")
    score_histogram(of_shift, {"validation points": ordinary, "scored points": far}, label="out-of-distribution score")
    of_shift.set_title("unlike the training data")
    if images is None:
        return figure
    orders = {
        "surest: smallest error score": (error, False),
        "least sure: largest error score": (error, True),
        "least like the training data: largest out-of-distribution score": (far, True),
    }
    for row, (title, (values, descending)) in zip(parts[1].subfigures(3, 1), orders.items(), strict=True):
        row.suptitle(title, x=0.01, ha="left")
        entries = []
        for n in values.argsort(descending=descending, stable=True)[:_SHOWN].tolist():
            mark, sign = ("", 0.0) if right is None else (" ✓", 1.0) if right[n] else (" ✗", -1.0)
            words = f"#{int(rows[n])}\nclass {int(predicted[n])}"
            entries.append((images[n], style.short(float(values[n])) + mark, sign, words))
        image_row(row.subplots(1, _SHOWN), entries, (style.RIGHT, style.WRONG))
    return figure


@style.styled
def check_figure(check: ScoreCheck) -> Figure:
    """Draw the agreement of scores with exact numbers, and with retraining.

    Args:
        check: The result of `epk_gp.check_scores`.
    """
    rows = check.systems | check.references
    values, figure = np.array([list(_agreements(a)) for a in rows.values()]), style.new_figure(1.1 + 0.36 * len(rows))
    ax = figure.subplots()
    for k, label in enumerate(("cosine, contributions", "cosine, derivatives", "LDS, 95 %", "left out, 95 %")):
        (mean, *ends), places = values[:, k].T, np.arange(len(rows)) + 0.17 * (k - 1.5)
        ax.errorbar(mean, places, xerr=abs(ends - mean), fmt="osD^"[k], color=style.class_colour(k), label=label)
    ax.axvline(0, color=style.GREY, linewidth=1)
    ax.set(xlim=(-1.05, 1.05), ylim=(len(rows) - 0.4, -0.6), xlabel="agreement, mean over queries")
    ax.set_yticks(range(len(rows)), list(map(style.plain, rows)), fontsize=style.SMALL)
    figure.legend(loc="outside lower center", ncols=4, fontsize=style.SMALL)
    return figure


def _agreements(each: CheckedScores) -> Iterator[tuple[float, float, float]]:
    """Yield the drawn values of a system, each with its interval; NaN for values that were not computed."""
    for kind in ("contributions", "derivatives"):
        yield (float(each.likeness[kind]["cosine"].nanmean()) if kind in each.likeness else np.nan,) * 3
    for found, interval in ((each.lds, each.lds_interval), (each.left_out, each.left_out_interval)):
        yield np.nan if found is None else found.mean, *interval


@style.styled
def verification_figure(verification: Verification) -> Figure:
    """Draw measured against predicted changes, a dot for each network and question, with the diagonal and the slope.

    Args:
        verification: The result of `Datamodel.verify`.
    """
    x, y = (
        style.as_numpy(name, value - verification.outputs)
        for name, value in (("predicted", verification.predicted), ("measured", verification.measured))
    )
    s, Q = x.shape
    figure = style.new_figure(4.2, 5.3)
    ax = figure.subplots()
    size, alpha = (18, 0.9) if x.size <= _FEW_DOTS else (7, 0.5)
    groups = [slice(q, q + 1) for q in range(Q)] if Q <= _NAMED else [slice(None)]
    for k, questions in enumerate(groups):
        dots = ax.scatter(x[:, questions], y[:, questions], size, style.class_colour(k), alpha=alpha, linewidths=0)
        dots.set(rasterized=x.size > _FEW_DOTS, label=f"question {k}" if Q <= _NAMED else None)
    low, high = min(x.min(), y.min(), 0.0), max(x.max(), y.max(), 0.0)
    ends = np.array([low, high]) + 0.04 * (high - low or 1.0) * np.array([-1, 1])
    ax.plot(ends, ends, color=style.GREY, linewidth=1, linestyle="--", label="diagonal")
    ax.plot(ends, verification.slope * ends, color=style.INK, linewidth=1.2, label=f"slope {verification.slope:.2f}")
    ax.set_title(f"{count(s, 'network')}, {count(Q, 'question')}: correlation {verification.correlation:.2f}")
    ax.set(xlabel="predicted change", ylabel="measured change", xlim=ends, ylim=ends, aspect="equal")
    figure.legend(loc="outside right center", fontsize=style.SMALL)
    return figure
