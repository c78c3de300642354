"""Pictures of what training points and steps added to an output, and of how outputs depend on points' weights."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.patheffects as effects
import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch
from torch import Tensor

from epk_gp.analysis.breakdown import PredictionBreakdown
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.influence import Influence
from epk_gp.plots.common import (
    Numbers,
    as_images,
    as_numpy,
    class_labels,
    class_name,
    output_name,
    plain,
    require_names,
    require_shape,
    short,
)
from epk_gp.plots.style import (
    DOWN,
    EXACT,
    GREY,
    INK,
    LOWERED,
    PALETTE,
    RAISED,
    REST,
    SMALL,
    UP,
    WIDTH,
    new_figure,
    styled,
)

_CUT = 2.5  # a bar is cut where it is longer than this many times the longest bar of a single point
_IMAGES_PER_ROW = 6
_IMAGE_ROW = 0.98  # inches of a row of training images, with captions
_CURVE = 2.3  # inches of width of a curve beside contributions


def attribution_bars(
    ax: Axes,
    contributions: Float[Numbers, " m"],
    labels: Int[Numbers, " m"] | None,
    *,
    names: Sequence[str] | None = None,
    top: int = 10,
    title: str = "Exact contributions of training points",
    output: str = "output",
) -> Axes:
    """Draw the training points that raised an output most and those that lowered it most.

    Bars to the right raised the output, bars to the left lowered it. Every bar is labelled with its value. The points
    that are not shown share one bar, so that the bars sum to the total. If that bar is far longer than the others, it
    is drawn cut and labelled as cut.

    Args:
        ax: Axes to draw into.
        contributions: Signed contribution of each of M training points to one output of one prediction.
        labels: Class of each training point, which gives the bar's colour; None where points have no class: then the
            colour is the sign's.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        top: Largest number of points drawn of either sign.
        title: Title.
        output: What the contributions sum to, such as "logit of class 2".

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one label per contribution, or a contribution is not finite, or a name is missing, or
            top < 1.
    """
    values = as_numpy("contributions", contributions)
    classes = None if labels is None else as_numpy("labels", labels)
    if top < 1:
        raise ValueError(f"top must be at least 1: got {top}. Ask for one point of either sign or more.")
    if len(values) == 0:
        raise ValueError("contributions must hold at least one entry: got none. Pass one per training point.")
    if classes is not None:
        require_shape("labels", classes, values.shape)
        require_names(names, classes)
    order = np.argsort(-values, kind="stable")
    helpful, harmful = order[values[order] > 0][:top], order[values[order] < 0][-top:]
    others = np.setdiff1d(np.arange(len(values)), np.concatenate([helpful, harmful]))
    rest = float(values[others].sum())

    # Rows run from the top down; the rest stands between the two signs.
    rows = [*helpful.tolist(), *([None] if len(others) else []), *harmful.tolist()]
    heights = np.array([rest if i is None else values[i] for i in rows])
    longest = max((abs(values[i]) for i in rows if i is not None), default=abs(rest))
    drawn = np.clip(heights, -_CUT * longest, _CUT * longest)
    signs = [RAISED if height > 0 else LOWERED for height in heights]
    of_class = signs if classes is None else [PALETTE[classes[i or 0] % len(PALETTE)] for i in rows]
    colours = [REST if i is None else colour for i, colour in zip(rows, of_class, strict=True)]
    ax.barh(range(len(rows)), drawn, color=colours, edgecolor=GREY, linewidth=0.6, height=0.78)
    for row, (height, width) in enumerate(zip(heights, drawn, strict=True)):
        _write_beside_bar(ax, row, height, width)
    ax.axvline(0, color=GREY, linewidth=1)

    low, high = min(0.0, float(drawn.min())), max(0.0, float(drawn.max()))
    room = 0.28 * (high - low or 1.0)  # for the numbers beside the bars
    ax.set_xlim(low - room if low < 0 else -0.02 * room, high + room if high > 0 else 0.02 * room)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    words = [f"#{i}" if classes is None or i is None else f"#{i}, {class_name(int(classes[i]), names)}" for i in rows]
    rest_name = f"{len(others)} others" if len(others) != 1 else "1 other"
    ticks = [rest_name if i is None else word for i, word in zip(rows, words, strict=True)]
    ax.set_yticks(range(len(rows)), ticks, fontsize=SMALL)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    total = f"all bars together: {short(values.sum(), sign=True)}"
    ax.set_xlabel(f"{DOWN} lowered     contribution to the {plain(output)}     {UP} raised\n{total}")
    ax.set_title(plain(title))
    ax.set_ylabel("training point")
    seen = [] if classes is None else np.unique(classes[[i for i in rows if i is not None]]).tolist()
    handles = [Patch(facecolor=PALETTE[c % len(PALETTE)], edgecolor=GREY, label=class_name(c, names)) for c in seen]
    if handles:
        ax.legend(handles=handles, loc="best", fontsize=SMALL, frameon=True, framealpha=0.9, edgecolor="none")
    return ax


def _write_beside_bar(ax: Axes, row: int, height: float, width: float) -> None:
    side, cut = (1 if width >= 0 else -1), height != width
    text = short(height, sign=True) + (" (bar cut)" if cut else "")
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if side > 0 else "right", "va": "center"}
    ax.annotate(text, (width, row), xytext=(3 * side, 0), fontsize=SMALL, color=INK, **place)
    if cut:
        gap = [effects.withStroke(linewidth=6, foreground=GREY)]
        edges = [row + 0.45, row - 0.45]
        ax.plot([0.84 * width, 0.87 * width], edges, color="white", linewidth=4, path_effects=gap)


def training_image(
    ax: Axes,
    image: Float[Numbers, "H W *rgb"],
    caption: str,
    contribution: float = 0.0,
    *,
    colours: tuple[str, str] = (RAISED, LOWERED),
) -> Axes:
    """Draw an image with a frame that shows a sign: solid if it is positive, dashed if it is negative.

    Args:
        ax: Axes to draw into.
        image: Grey (H, W) or colour (H, W, 3) image.
        caption: Text above the image.
        contribution: Contribution of the image; the frame is thin and grey if it is 0.
        colours: Colours of the frame of a positive and of a negative contribution.

    Returns:
        The Axes.
    """
    values = as_numpy("image", image)
    low, high = float(values.min()), float(values.max())
    ax.imshow((values - low) / ((high - low) or 1.0), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.set_title(plain(caption), fontsize=SMALL, loc="center", pad=3)
    colour = GREY if contribution == 0 else colours[0] if contribution > 0 else colours[1]
    for spine in ax.spines.values():
        spine.set(edgecolor=colour, linewidth=1.8 if contribution else 0.8, visible=True)
        spine.set_linestyle((0, (2.2, 1.2)) if contribution < 0 else "-")
    return ax


@styled
def attribution_figure(
    breakdown: PredictionBreakdown,
    trajectory: Trajectory,
    X: Tensor,
    chosen: Sequence[int],
    top: int,
    *,
    head: Head | None = None,
    labels: Int64[Tensor, " n"] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw the contributions of training points and of ranges of steps to the predicted output of chosen points.

    Args:
        breakdown: Contributions to the predicted outputs of n points.
        trajectory: The run.
        X: The n points.
        chosen: Indices of the points that are drawn, one below the other.
        top: Number of training points drawn of either sign.
        head: What the outputs are, for their names.
        labels: True classes of the n points, where they are known.
        names: Names of the classes, in order.
    """
    images, points, known = as_images(trajectory.inputs), as_images(X), class_labels(trajectory.targets)
    shown = min(top, trajectory.num_points)
    image_height = 2 * math.ceil(shown / _IMAGES_PER_ROW) * _IMAGE_ROW + 0.75
    figure = new_figure((1.3 + 0.36 * shown if images is None or points is None else image_height) * len(chosen))
    for part, n in zip(figure.subfigures(len(chosen), 1, squeeze=False)[:, 0], chosen, strict=True):
        c, samples = int(breakdown.output[n]), breakdown.samples[n]
        output = output_name(c, head, names, is_class=known is not None)
        title = f"point {n}, output {c}" if known is None else f"point {n}: predicted class {_name(c, names)}"
        if known is not None and labels is not None:
            title += f", true label {_name(int(labels[n]), names)}"
        part.suptitle(title, x=0.01, ha="left", weight="bold")
        left, right = part.subfigures(1, 2, width_ratios=(WIDTH - _CURVE, _CURVE))
        if images is None or points is None:
            attribution_bars(left.subplots(), samples, known, names=names, top=top, title="", output=output)
        else:
            _draw_images(left, samples, points[n], images, known, names, output, shown)
        start, end = (short(float(v[n]), sign=True).removeprefix("+") for v in (breakdown.initial, breakdown.network))
        ax, ends = right.subplots(), [0, *breakdown.range_ends]
        curve = float(breakdown.initial[n]) + np.concatenate([[0.0], as_numpy("steps", breakdown.steps[n]).cumsum()])
        ax.axhline(curve[0], color=GREY, linewidth=0.8, linestyle="--")
        ax.plot(ends, curve, color=EXACT, linewidth=1.6)
        ax.plot([0, ends[-1]], curve[[0, -1]], "o", color=EXACT, markersize=4)
        ax.set(xlabel="training step", ylabel=f"{output} so far")
        ax.set_title(f"{start} → {end}")
    return figure


def _draw_images(
    figure: FigureBase,
    contributions: Tensor,
    point: Tensor,
    training: Tensor,
    labels: Tensor | None,
    names: Sequence[str] | None,
    output: str,
    shown: int,
) -> None:
    """Draw the point, the training images that raised its output most, and below those that lowered it most."""
    values, order = contributions.sort(descending=True)
    ranked = list(zip(order.tolist(), values.tolist(), strict=True))
    raised, lowered = [entry for entry in ranked if entry[1] > 0], [entry for entry in ranked[::-1] if entry[1] < 0]
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 4.3))[0]
    training_image(left.subplots(), point, "explained")
    titles = {f"{UP} raised the {output} most": raised[:shown], f"{DOWN} lowered it most": lowered[:shown]}
    for part, (title, entries) in zip(right.subfigures(2, 1, squeeze=False)[:, 0], titles.items(), strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=SMALL)
        columns = min(shown, _IMAGES_PER_ROW)
        axes = list(part.subplots(math.ceil(shown / _IMAGES_PER_ROW), columns, squeeze=False).flat)
        for ax in axes[len(entries) :]:
            ax.set_axis_off()
        for ax, (index, value) in zip(axes, entries, strict=False):
            training_image(ax, training[index], short(value, sign=True), value)
            label = "" if labels is None else f"\n{'label ' * (names is None)}{_name(int(labels[index]), names)}"
            ax.set_xlabel(f"#{index}{label}", fontsize=SMALL, labelpad=2)


def _name(c: int, names: Sequence[str] | None) -> str:
    return str(c) if names is None else plain(names[c])


@styled
def influence_figure(
    effect: Influence,
    predicted: Int64[Tensor, " n"],
    chosen: Sequence[int],
    top: int,
    trajectory: Trajectory,
    *,
    head: Head | None = None,
) -> Figure:
    """Draw the training points on whose weights predicted outputs depend most, and the adjoint along the run.

    The adjoint, the derivative of the output in the weights of each state, is relative to that at the run's end.

    Args:
        effect: The derivatives of all outputs of n points, or of the predicted ones.
        predicted: The predicted class of each point.
        chosen: Indices of the points that are drawn, one below the other.
        top: Number of training points drawn of either sign.
        trajectory: The run.
        head: What the outputs are, for their names.
    """
    columns = torch.zeros_like(predicted) if effect.outputs.shape[1] == 1 else predicted
    known = class_labels(trajectory.targets)
    figure = new_figure((1.3 + 0.36 * min(top, trajectory.num_points)) * len(chosen))
    for part, n in zip(figure.subfigures(len(chosen), 1, squeeze=False)[:, 0], chosen, strict=True):
        k = int(columns[n])
        output = output_name(int(predicted[n]), head, is_class=known is not None)
        value, std = short(float(effect.outputs[n, k])), short(float(effect.std[n, k]))
        part.suptitle(f"point {n}: {output} {value} ± {std} (jackknife)", x=0.01, ha="left", weight="bold")
        left, right = part.subfigures(1, 2, width_ratios=(WIDTH - _CURVE, _CURVE))
        ax = attribution_bars(left.subplots(), effect.values[n, k], known, top=top, title="", output=output)
        total = f"all bars together: {short(float(effect.values[n, k].sum()), sign=True)}"
        ax.set_xlabel(f"{DOWN} its weight lowers     derivative in the sample's weight     {UP} raises\n{total}")
        curve, norms = right.subplots(), as_numpy("norms", effect.adjoint_norms[n, k])
        curve.plot(np.arange(len(norms)), norms / (norms[-1] or 1.0), color=EXACT, linewidth=1.6)
        curve.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
        curve.set(xlabel="training step", ylabel="adjoint, relative to its end", yscale="log")
    return figure
