"""Drawings of the contributions of training points and of training steps."""

from collections.abc import Sequence

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from epk_gp.plots.common import Numbers, as_numpy, class_name, plain, require_shape, short
from epk_gp.plots.style import DOWN, EXACT, GREY, INK, LOWERED, PALETTE, RAISED, REST, SMALL, UP

_CUT = 2.5  # a bar is cut where it is longer than this many times the longest bar of a single point


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
        _require_classes(classes, values, names)
    order = np.argsort(-values, kind="stable")
    helpful, harmful = order[values[order] > 0][:top], order[values[order] < 0][-top:]
    others = np.setdiff1d(np.arange(len(values)), np.concatenate([helpful, harmful]))
    rest = float(values[others].sum())

    # Rows run from the top down; the rest stands between the two signs.
    rows = [*helpful.tolist(), *([None] if len(others) else []), *harmful.tolist()]
    heights = np.array([rest if i is None else values[i] for i in rows])
    longest = max((abs(values[i]) for i in rows if i is not None), default=abs(rest))
    drawn = np.clip(heights, -_CUT * longest, _CUT * longest)
    colours = [REST if i is None else _bar_colour(values, classes, i) for i in rows]
    ax.barh(range(len(rows)), drawn, color=colours, edgecolor=GREY, linewidth=0.6, height=0.78)
    for row, (height, width) in enumerate(zip(heights, drawn, strict=True)):
        _write_beside_bar(ax, row, height, width)
    ax.axvline(0, color=GREY, linewidth=1)

    low, high = min(0.0, float(drawn.min())), max(0.0, float(drawn.max()))
    room = 0.28 * (high - low or 1.0)  # for the numbers beside the bars
    ax.set_xlim(low - room if low < 0 else -0.02 * room, high + room if high > 0 else 0.02 * room)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    words = [_count(len(others)) if i is None else _name_of_point(i, classes, names) for i in rows]
    ax.set_yticks(range(len(rows)), words, fontsize=SMALL)
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
    curve = initial + np.concatenate([[0.0], values.cumsum()])
    ax.axhline(initial, color=GREY, linewidth=0.8, linestyle="--")
    ax.plot([0, *range_ends], curve, color=EXACT, linewidth=1.6)
    ends = [0, range_ends[-1]] if len(range_ends) else [0]
    ax.plot(ends, curve[[0, -1]][: len(ends)], "o", color=EXACT, markersize=4)
    ax.set(xlabel="training step", ylabel="output so far")
    return ax


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


def term_bars(ax: Axes, terms: Sequence[str], values: Float[Numbers, " t"], *, output: str = "output") -> Axes:
    """Draw the terms of an output one after the other: each bar starts where the one above it ends.

    Args:
        ax: Axes to draw into.
        terms: Name of each term.
        values: Value of each term.
        output: Name of their sum, which is drawn as the last bar.

    Returns:
        The Axes.

    Raises:
        ValueError: There is not one value per term, or a value is not finite.
    """
    added = as_numpy("values", values)
    require_shape("values", added, (len(terms),))
    ends = added.cumsum()
    starts, total = ends - added, float(added.sum())
    widths, lefts = [*added, total], [*starts, 0.0]
    colours = [*(RAISED if value >= 0 else LOWERED for value in added), GREY]
    ax.barh(range(len(widths)), widths, left=lefts, color=colours, height=0.66)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ax.plot([end, end], [row - 0.33, row + 1.33], color=GREY, linewidth=0.7)
        mark = f"{UP} " if end > start else f"{DOWN} " if end < start else ""
        _write_right_of(ax, row, max(start, end), mark + short(end - start, sign=True))
    _write_right_of(ax, len(terms), max(0.0, total), short(total, sign=True).removeprefix("+"))
    low, high = min(0.0, float(ends.min(initial=0.0))), max(0.0, float(ends.max(initial=0.0)))
    spread = high - low or 1.0
    ax.set_xlim(low - 0.03 * spread, high + 0.42 * spread)  # with room for the numbers
    ax.set_ylim(len(widths) - 0.4, -0.6)
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(widths)), [plain(name) for name in (*terms, output)], fontsize=SMALL)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    return ax


def _require_classes(classes: np.ndarray, values: np.ndarray, names: Sequence[str] | None) -> None:
    require_shape("labels", classes, values.shape)
    num_classes = int(classes.max()) + 1
    if names is not None and len(names) < num_classes:
        raise ValueError(
            f"names must name each class: got {len(names)} names for labels up to {num_classes - 1}. Add the others."
        )


def _bar_colour(values: np.ndarray, classes: np.ndarray | None, index: int) -> str:
    if classes is not None:
        return PALETTE[classes[index] % len(PALETTE)]
    return RAISED if values[index] > 0 else LOWERED


def _name_of_point(index: int, classes: np.ndarray | None, names: Sequence[str] | None) -> str:
    return f"#{index}" if classes is None else f"#{index}, {class_name(int(classes[index]), names)}"


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
        fontsize=SMALL,
        color=INK,
    )
    if cut:
        gap = [effects.withStroke(linewidth=6, foreground=GREY)]
        edges = [row + 0.45, row - 0.45]
        ax.plot([0.84 * width, 0.87 * width], edges, color="white", linewidth=4, path_effects=gap)


def _write_right_of(ax: Axes, row: int, x: float, text: str) -> None:
    ax.annotate(text, (x, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK)
