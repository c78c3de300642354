"""Drawings of the contributions of training points and of training steps."""

from collections.abc import Sequence

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from epk_gp.plots.common import GREY, LOWERED, PALETTE, RAISED, REST, Numbers, as_numpy, require_shape, short

_CUT = 2.5  # a bar is cut where it is longer than this many times the longest bar of a single point


def attribution_bars(
    ax: Axes,
    contributions: Float[Numbers, " m"],
    labels: Int[Numbers, " m"],
    *,
    names: Sequence[str] | None = None,
    top: int = 10,
    title: str = "Exact contributions of training points",
) -> Axes:
    """Draw the training points that raised an output most and those that lowered it most.

    Every bar is labelled with its value. The points that are not shown share one bar, so that the bars sum to the
    total. If that bar is far longer than the others, it is drawn cut and labelled as cut.

    Args:
        ax: Axes to draw into.
        contributions: Signed contribution of each of M training points to one output of one prediction.
        labels: Class of each training point, which gives the bar's colour.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        top: Largest number of points drawn of either sign.
        title: Title.

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one label per contribution, or a contribution is not finite, or a name is missing, or
            top < 1.
    """
    values, classes = as_numpy("contributions", contributions), as_numpy("labels", labels)
    require_shape("labels", classes, values.shape)
    if top < 1:
        raise ValueError(f"top must be at least 1: got {top}. Ask for one point of either sign or more.")
    if len(values) == 0:
        raise ValueError("contributions must hold at least one entry: got none. Pass one per training point.")
    num_classes = int(classes.max()) + 1
    if names is not None and len(names) < num_classes:
        raise ValueError(
            f"names must name each class: got {len(names)} names for labels up to {num_classes - 1}. Add the others."
        )
    order = np.argsort(-values, kind="stable")
    helpful, harmful = order[values[order] > 0][:top], order[values[order] < 0][-top:]
    others = np.setdiff1d(np.arange(len(values)), np.concatenate([helpful, harmful]))
    rest = float(values[others].sum())

    # Rows run from the top down; the rest stands between the two signs.
    rows = [*helpful, *([None] if len(others) else []), *harmful]
    heights = np.array([rest if i is None else values[i] for i in rows])
    longest = max((abs(values[i]) for i in rows if i is not None), default=abs(rest))
    drawn = np.clip(heights, -_CUT * longest, _CUT * longest)
    colours = [REST if i is None else PALETTE[classes[i] % len(PALETTE)] for i in rows]
    ax.barh(range(len(rows)), drawn, color=colours, edgecolor=GREY, linewidth=0.6, height=0.8)
    for row, (height, width) in enumerate(zip(heights, drawn, strict=True)):
        _write_beside_bar(ax, row, height, width)
    ax.axvline(0, color=GREY, linewidth=1)

    low, high = min(0.0, float(drawn.min())), max(0.0, float(drawn.max()))
    room = 0.28 * (high - low or 1.0)  # for the numbers beside the bars
    ax.set_xlim(low - room if low < 0 else -0.02 * room, high + room if high > 0 else 0.02 * room)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), [_count(len(others)) if i is None else f"#{i}" for i in rows], fontsize="small")
    ax.set(xlabel=f"contribution to the output (all bars together: {short(values.sum(), sign=True)})", title=title)
    ax.set_ylabel("training point")
    seen = np.unique(classes[[i for i in rows if i is not None]])
    handles = [
        Patch(
            facecolor=PALETTE[c % len(PALETTE)], edgecolor=GREY, label=names[c] if names is not None else f"class {c}"
        )
        for c in seen
    ]
    if handles:
        ax.legend(handles=handles, loc="best", fontsize="small", framealpha=0.9)
    return ax


def contribution_curve(
    ax: Axes, range_ends: Sequence[int], initial: float, contributions: Float[Numbers, " r"]
) -> Axes:
    """Draw an output over training: its initial value plus the contributions of all steps so far.

    Args:
        ax: Axes to draw into.
        range_ends: The step after which each of R ranges of steps ends, ascending.
        initial: The output at the initial weights.
        contributions: Contribution of each range.

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one contribution per range.
    """
    values = as_numpy("contributions", contributions)
    require_shape("contributions", values, (len(range_ends),))
    ax.plot([0, *range_ends], initial + np.concatenate([[0.0], values.cumsum()]), color=PALETTE[0], linewidth=1.6)
    ax.axhline(initial, color=GREY, linewidth=0.8, linestyle="--")
    ax.set(xlabel="step", ylabel="output so far")
    ax.grid(visible=True, color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    return ax


def training_image(ax: Axes, image: Float[Numbers, "H W *rgb"], caption: str, contribution: float = 0.0) -> Axes:
    """Draw an image with a frame whose colour is the sign of its contribution.

    Args:
        ax: Axes to draw into.
        image: Grey (H, W) or colour (H, W, 3) image.
        caption: Text above the image.
        contribution: Contribution of the image; the frame is green if it is positive, red if negative, grey if 0.

    Returns:
        The Axes.
    """
    values = as_numpy("image", image)
    low, high = float(values.min()), float(values.max())
    ax.imshow((values - low) / ((high - low) or 1.0), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.set_title(caption, fontsize="small")
    colour = GREY if contribution == 0 else RAISED if contribution > 0 else LOWERED
    for spine in ax.spines.values():
        spine.set(edgecolor=colour, linewidth=2.0 if contribution else 1.0)
    return ax


def _count(number: int) -> str:
    return f"{number} others" if number != 1 else "1 other"


def _write_beside_bar(ax: Axes, row: int, height: float, width: float) -> None:
    side, cut = (1 if width >= 0 else -1), height != width
    ax.annotate(
        short(height, sign=True) + (" (bar cut)" if cut else ""),
        (width, row),
        xytext=(3 * side, 0),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        va="center",
        fontsize="x-small",
    )
    if cut:
        gap = [effects.withStroke(linewidth=6, foreground=GREY)]
        edges = [row + 0.45, row - 0.45]
        ax.plot([0.84 * width, 0.87 * width], edges, color="white", linewidth=4, path_effects=gap)
