"""Pictures of the contributions of training points and steps."""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch
from torch import Tensor

from epk_gp.analysis.breakdown import PredictionBreakdown
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory
from epk_gp.plots import style

_SIGNS = (style.RAISED, style.LOWERED)  # colours of the signs
_CUT = 2.5  # a bar is cut at this many times the length of the longest bar of a single point
_IMAGES_PER_ROW = 6
_IMAGE_ROW = 0.98  # height in inches of a row of training images, with captions
_CURVE = 2.3  # width in inches of a curve next to contributions


def attribution_bars(
    ax: Axes,
    contributions: Float[style.Numbers, " m"],
    labels: Int[style.Numbers, " m"] | None,
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
        labels: Class of each training point, which sets the bar's colour; None if points have no class: the sign then
            sets the colour.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        top: Largest number of points drawn for each sign.
        title: Title.
        output: Name of the sum of the contributions, such as "logit of class 2".

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one label per contribution, or a contribution is not finite, or a name is missing, or
            top < 1.
    """
    values = style.as_numpy("contributions", contributions)
    classes = None if labels is None else style.as_numpy("labels", labels)
    if top < 1 or len(values) == 0:
        raise ValueError(f"top and contributions must hold at least one entry: got {top} of {len(values)}.")
    if classes is not None:
        style.require_shape("labels", classes, values.shape)
    order = np.argsort(-values, kind="stable")
    helpful, harmful = order[values[order] > 0][:top], order[values[order] < 0][-top:]
    others = np.setdiff1d(np.arange(len(values)), np.concatenate([helpful, harmful]))
    rest = float(values[others].sum())

    # Rows run from the top down; the bar of the other points is between the two signs.
    rows = [*helpful.tolist(), *([None] if len(others) else []), *harmful.tolist()]
    heights = np.array([rest if i is None else values[i] for i in rows])
    longest = max((abs(values[i]) for i in rows if i is not None), default=abs(rest))
    drawn = np.clip(heights, -_CUT * longest, _CUT * longest)
    ticks, colours = [], []
    for i, height in zip(rows, heights, strict=True):
        if i is None:
            ticks.append(f"{len(others)} others" if len(others) != 1 else "1 other")
            colours.append(style.REST)
        else:
            ticks.append(f"#{i}" if classes is None else f"#{i}, {style.class_name(int(classes[i]), names)}")
            sign_colour = style.RAISED if height > 0 else style.LOWERED
            colours.append(sign_colour if classes is None else style.class_colour(int(classes[i])))
    bars, cut = style.signed_bars(ax, drawn, colours, ticks), heights != drawn
    words = [style.short(h, sign=True) + (" (bar cut)" if c else "") for h, c in zip(heights, cut, strict=True)]
    ax.bar_label(bars, words, padding=3, color=style.INK, fontsize=style.SMALL)
    for row in np.flatnonzero(cut):
        ax.plot([0.84 * drawn[row], 0.87 * drawn[row]], [row + 0.45, row - 0.45], color="white", linewidth=4)

    low, high = min(0.0, float(drawn.min())), max(0.0, float(drawn.max()))
    room = 0.28 * (high - low or 1.0)  # for the numbers next to the bars
    ax.set_xlim(low - room if low < 0 else -0.02 * room, high + room if high > 0 else 0.02 * room)
    total = f"all bars together: {style.short(values.sum(), sign=True)}"
    ax.set_xlabel(f"{style.DOWN} lowered     contribution to the {style.plain(output)}     {style.UP} raised\n{total}")
    ax.set_title(style.plain(title))
    ax.set_ylabel("training point")
    seen = [] if classes is None else np.unique(classes[[i for i in rows if i is not None]]).tolist()
    named = [(style.class_colour(c), style.class_name(c, names)) for c in seen]
    if handles := [Patch(facecolor=colour, edgecolor=style.GREY, label=name) for colour, name in named]:
        ax.legend(handles=handles, loc="best", fontsize=style.SMALL, frameon=True, framealpha=0.9, edgecolor="none")
    return ax


def training_image(
    ax: Axes,
    image: Float[style.Numbers, "H W *rgb"],
    caption: str,
    contribution: float = 0.0,
    *,
    colours: tuple[str, str] = _SIGNS,
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
    values = style.as_numpy("image", image)
    low, high = float(values.min()), float(values.max())
    ax.imshow((values - low) / ((high - low) or 1.0), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.set_title(style.plain(caption), fontsize=style.SMALL, loc="center", pad=3)
    colour = style.GREY if contribution == 0 else colours[0] if contribution > 0 else colours[1]
    for spine in ax.spines.values():
        spine.set(edgecolor=colour, linewidth=1.8 if contribution else 0.8, visible=True)
        spine.set_linestyle((0, (2.2, 1.2)) if contribution < 0 else "-")
    return ax


def image_row(
    axes: Iterable[Axes], entries: Iterable[tuple[style.Numbers, str, float, str]], colours: tuple[str, str] = _SIGNS
) -> None:
    """Draw images, each with the text above it, its sign and the text below it; unused Axes are empty."""
    for ax, entry in itertools.zip_longest(axes, entries):
        if entry is None:
            ax.set_axis_off()
            continue
        image, caption, sign, words = entry
        training_image(ax, image, caption, sign, colours=colours)
        ax.set_xlabel(words, fontsize=style.SMALL, labelpad=2)


@style.styled
def attribution_figure(
    breakdown: PredictionBreakdown,
    trajectory: Trajectory,
    X: Tensor,
    chosen: Sequence[int],
    top: int,
    *,
    head: Head | None = None,
    number: str | None = None,
    labels: Int64[Tensor, " n"] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw the contributions of training points and of ranges of steps to the predicted output of chosen points.

    Args:
        breakdown: Contributions to the predicted outputs of n points.
        trajectory: The run.
        X: The n points.
        chosen: Indices of the drawn points, one below the other.
        top: Number of training points drawn for each sign.
        head: The head of the outputs, for their names.
        number: Word for a point's number, if it is not an output.
        labels: True classes of the n points, if they are known.
        names: Names of the classes, in order.
    """
    images, points = style.as_images(trajectory.inputs), style.as_images(X)
    known = style.class_labels(trajectory.targets)
    shown = min(top, trajectory.num_points)
    image_height = 2 * math.ceil(shown / _IMAGES_PER_ROW) * _IMAGE_ROW + 0.75
    figure = style.new_figure((1.3 + 0.36 * shown if images is None or points is None else image_height) * len(chosen))
    for part, n in zip(figure.subfigures(len(chosen), 1, squeeze=False)[:, 0], chosen, strict=True):
        c, samples = int(breakdown.output[n]), breakdown.samples[n]
        output = number or style.output_name(c, head, names, is_class=known is not None)
        title = f"point {n}, {number or f'output {c}'}"
        if known is not None and number is None:
            title = f"point {n}: predicted class {style.class_name(c, names, '')}"
            title += "" if labels is None else f", true label {style.class_name(int(labels[n]), names, '')}"
        left, ax = _sides(part, title)
        if images is None or points is None:
            attribution_bars(left.subplots(), samples, known, names=names, top=top, title="", output=output)
        else:
            below, word = [f"#{i}" for i in range(len(images))], "label " if names is None else ""
            if known is not None:
                below = [f"#{i}\n{word}{style.class_name(c, names, '')}" for i, c in enumerate(known.tolist())]
            _draw_images(left, samples, points[n], images, below, output, shown)
        ends, added = [0, *breakdown.range_ends], style.as_numpy("steps", breakdown.steps[n]).cumsum()
        curve = float(breakdown.initial[n]) + np.concatenate([[0.0], added])
        ax.axhline(curve[0], color=style.GREY, linewidth=0.8, linestyle="--")
        ax.plot(ends, curve, color=style.EXACT, linewidth=1.6)
        ax.plot([0, ends[-1]], curve[[0, -1]], "o", color=style.EXACT, markersize=4)
        ax.set(xlabel="training step", ylabel=f"{output} so far")
        values = (float(value[n]) for value in (breakdown.initial, breakdown.network))
        ax.set_title(" → ".join(style.short(value, sign=True).removeprefix("+") for value in values))
    return figure


def _sides(part: FigureBase, title: str) -> tuple[FigureBase, Axes]:
    """Return the area for contributions to an output, and Axes for a curve on its right."""
    part.suptitle(title, x=0.01, ha="left", weight="bold")
    left, right = part.subfigures(1, 2, squeeze=False, width_ratios=(style.WIDTH - _CURVE, _CURVE))[0]
    return left, right.subplots()


def _draw_images(
    figure: FigureBase, samples: Tensor, point: Tensor, training: Tensor, below: list[str], output: str, shown: int
) -> None:
    """Draw the point, the training images that raised its output most, and below them those that lowered it most."""
    values, order = samples.sort(descending=True)
    ranked = list(zip(order.tolist(), values.tolist(), strict=True))
    raised, lowered = [entry for entry in ranked if entry[1] > 0], [entry for entry in ranked[::-1] if entry[1] < 0]
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 4.3))[0]
    training_image(left.subplots(), point, "explained")
    titles = {f"{style.UP} raised the {output} most": raised[:shown], f"{style.DOWN} lowered it most": lowered[:shown]}
    for part, (title, entries) in zip(right.subfigures(2, 1, squeeze=False)[:, 0], titles.items(), strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=style.SMALL)
        axes = part.subplots(math.ceil(shown / _IMAGES_PER_ROW), min(shown, _IMAGES_PER_ROW), squeeze=False)
        image_row(axes.flat, [(training[i], style.short(value, sign=True), value, below[i]) for i, value in entries])
