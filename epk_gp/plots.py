"""Pictures of numbers that were computed elsewhere: each function draws into an Axes and returns it."""

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import ScalarFormatter
from matplotlib.transforms import Bbox
from torch import Tensor

Numbers: TypeAlias = Tensor | np.ndarray

# Petroff (2021): ten colours that stay apart in each of the three kinds of colour blindness.
PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
GREY, REST = "#4d4d4d", "#e4e4e4"
RAISED, LOWERED = "#1b7837", "#b2182b"
# Shades of grey under the points, so that their colours mean the class and nothing else.
COLORMAP = "Greys"

_IDENTITY = "identity"
_CUT = 2.5  # a bar this many times longer than every other one is cut


def reconstruction_scatter(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw the kernel machine's outputs against the network's, with the largest error in the legend.

    Figure 4 of Bell et al. (2023). Call it once per rule to compare rules in one picture.

    Args:
        ax: Where to draw.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        label: What `machine` is, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: If the two shapes differ, or there is no number or one that is not finite.
    """
    x, y = _numpy("network", network), _numpy("machine", machine)
    if x.shape != y.shape:
        raise ValueError(
            f"network and machine must have one shape: got {x.shape} and {y.shape}. Pass the same points and outputs."
        )
    if x.size == 0:
        raise ValueError("network must hold at least one output: got none. Pass one test point or more.")
    error = np.abs(y - x).max()
    if not any(line.get_gid() == _IDENTITY for line in ax.lines):
        ax.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=1, gid=_IDENTITY)
    index = len(ax.collections)
    ax.scatter(
        x.ravel(),
        y.ravel(),
        s=22,
        color=PALETTE[index % len(PALETTE)],
        marker="osD^v"[index % 5],
        alpha=0.75,
        linewidth=0,
        zorder=2,
        label=f"{label}: largest |error| {_short(error)}",
    )
    ax.set(xlabel="network output", ylabel="kernel machine output", aspect="equal", adjustable="datalim")
    ax.legend(loc="upper left", fontsize="small", framealpha=0.9)
    return ax


def uncertainty_map(
    ax: Axes,
    grid_x: Float[Numbers, " nx"],
    grid_y: Float[Numbers, " ny"],
    values: Float[Numbers, "ny nx"],
    *,
    title: str,
    points: Float[Numbers, "n 2"] | None = None,
    labels: Int[Numbers, " n"] | None = None,
    boundary: Int[Numbers, "fine_y fine_x"] | None = None,
    colorbar_label: str = "standard deviation",
) -> Axes:
    """Draw a scalar over a plane: dark where it is large, with training points and decision boundary on top.

    Args:
        ax: Where to draw; its figure gets a colour bar.
        grid_x: Evenly spaced, increasing coordinates of the columns.
        grid_y: The same for the rows.
        values: The scalar, one row per entry of grid_y.
        title: Title.
        points: Training points in the plane; those outside the grid are not seen.
        labels: Class of each point, which gives its colour.
        boundary: Class that the network predicts at each node of the grid, or of a finer one over the same extent;
            lines are drawn where it changes.
        colorbar_label: What `values` is, with its unit.

    Returns:
        The Axes.

    Raises:
        ValueError: If the shapes do not fit, the grid is not even, a value is not finite or labels come without points.
    """
    x, y, z = _numpy("grid_x", grid_x), _numpy("grid_y", grid_y), _numpy("values", values)
    step_x, step_y = _spacing("grid_x", x), _spacing("grid_y", y)
    _require_shape("values", z, (len(y), len(x)))
    edges = (x[0] - step_x / 2, x[-1] + step_x / 2, y[0] - step_y / 2, y[-1] + step_y / 2)
    image = ax.imshow(z, origin="lower", extent=edges, cmap=COLORMAP, interpolation="nearest", aspect="equal")
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-2, 3))
    bar = ax.figure.colorbar(image, ax=ax, format=formatter, fraction=0.046, pad=0.03)
    bar.set_label(colorbar_label)
    if boundary is not None:
        _draw_boundary(ax, x, y, _numpy("boundary", boundary))
    if points is not None:
        _draw_points(ax, _numpy("points", points), None if labels is None else _numpy("labels", labels))
    elif labels is not None:
        raise ValueError("labels must come with points: got labels alone. Pass points too.")
    ax.set(xlim=edges[:2], ylim=edges[2:], xlabel="$x_1$", ylabel="$x_2$", title=title)
    return ax


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

    Every bar bears its number, and the points that are not shown share one bar, so that the bars sum to the total.
    Where that bar is far longer than the others it is cut, and says so.

    Args:
        ax: Where to draw.
        contributions: Signed contribution of each of M training points to one output of one prediction.
        labels: Class of each training point, which gives the bar's colour.
        names: Names of the classes, in order; None stands for "class 0", "class 1", …
        top: Most points drawn of either sign.
        title: Title.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is not one label per contribution, a contribution is not finite, a name is missing or
            top < 1.
    """
    values, classes = _numpy("contributions", contributions), _numpy("labels", labels)
    _require_shape("labels", classes, values.shape)
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
    ax.set(xlabel=f"contribution to the output (all bars together: {_short(values.sum(), sign=True)})", title=title)
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


def contribution_curve(ax: Axes, ends: Sequence[int], initial: float, contributions: Float[Numbers, " r"]) -> Axes:
    """Draw how an output came about over training: the initial output and the contributions up to each step.

    Args:
        ax: Where to draw.
        ends: The step after which each of R ranges of steps ends, ascending.
        initial: The output at the initial weights.
        contributions: What each range added.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is not one contribution per range.
    """
    values = _numpy("contributions", contributions)
    _require_shape("contributions", values, (len(ends),))
    ax.plot([0, *ends], initial + np.concatenate([[0.0], values.cumsum()]), color=PALETTE[0], linewidth=1.6)
    ax.axhline(initial, color=GREY, linewidth=0.8, linestyle="--")
    ax.set(xlabel="step", ylabel="output so far")
    ax.grid(visible=True, color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    return ax


def training_image(ax: Axes, image: Float[Numbers, "H W *rgb"], caption: str, contribution: float = 0.0) -> Axes:
    """Draw an image, framed in the colour of its contribution's sign.

    Args:
        ax: Where to draw.
        image: Grey (H, W) or colour (H, W, 3) image.
        caption: Words above it.
        contribution: Its sign chooses the frame; 0 leaves it grey.

    Returns:
        The Axes.
    """
    values = _numpy("image", image)
    low, high = float(values.min()), float(values.max())
    ax.imshow((values - low) / ((high - low) or 1.0), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.set_title(caption, fontsize="small")
    colour = GREY if contribution == 0 else RAISED if contribution > 0 else LOWERED
    for spine in ax.spines.values():
        spine.set(edgecolor=colour, linewidth=2.0 if contribution else 1.0)
    return ax


def error_against_evaluations(
    ax: Axes,
    rules: Sequence[str],
    evaluations: Sequence[int | float] | Float[Numbers, " r"],
    errors: Sequence[int | float] | Float[Numbers, " r"],
) -> Axes:
    """Draw what each quadrature rule costs and what it leaves, on logarithmic axes with the rules' names.

    An error of exactly 0 has no place on a logarithmic axis: it is drawn as an open triangle at half the smallest other
    error, and its name says so.

    Args:
        ax: Where to draw; its figure should have its final size, for the names keep clear of each other.
        rules: Name of each rule.
        evaluations: Evaluations of the gradient per point and step, positive.
        errors: Largest |kernel machine − network|.

    Returns:
        The Axes.

    Raises:
        ValueError: If the lengths differ, or a number is negative or not finite, or an evaluation count is 0.
    """
    x, y = _numpy("evaluations", evaluations), _numpy("errors", errors)
    _require_shape("evaluations", x, (len(rules),))
    _require_shape("errors", y, (len(rules),))
    if len(rules) == 0:
        raise ValueError("rules must hold at least one name: got none. Pass one rule or more.")
    if x.min() <= 0 or y.min() < 0:
        raise ValueError(
            f"evaluations must be positive and errors at least 0: got {x.min():g} and {y.min():g} as the smallest. "
            "Pass absolute errors."
        )
    exact = y == 0
    shown = np.where(exact, (y[~exact].min() if not exact.all() else np.finfo(np.float64).eps) / 2, y)
    ax.set(xscale="log", yscale="log", xlabel="gradient evaluations per point and step", ylabel="largest |error|")
    for i, (a, b) in enumerate(zip(x, shown, strict=True)):
        colour = PALETTE[i % len(PALETTE)]
        face = "none" if exact[i] else colour
        ax.plot(a, b, "v" if exact[i] else "o", markersize=8, markerfacecolor=face, markeredgecolor=colour)
    ax.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    spread = max(np.log10(shown.max() / shown.min()), 1.0)
    ax.set_xlim(x.min() / 2, x.max() * 2)
    ax.set_ylim(shown.min() / 10 ** (0.1 * spread), shown.max() * 10 ** (0.1 * spread))
    names = [f"{name} (error 0)" if zero else name for name, zero in zip(rules, exact, strict=True)]
    _place_names(ax, names, x, shown)
    return ax


def _numpy(name: str, values: Numbers | Sequence[int | float]) -> np.ndarray:
    if isinstance(values, Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    array = np.asarray(values)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise ValueError(f"{name} must be finite: got {count} entries that are not. Find them before drawing.")
    return array


def _require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}: got {array.shape}. Check the order of the arguments.")


def _spacing(name: str, grid: np.ndarray) -> float:
    steps = np.diff(grid)
    if grid.ndim != 1 or len(grid) < 2 or steps.min() <= 0 or np.ptp(steps) > 1e-3 * steps.mean():
        raise ValueError(
            f"{name} must be 1-dimensional, increasing and evenly spaced: got {_describe(grid)}. Make it with linspace."
        )
    return float(steps.mean())


def _describe(grid: np.ndarray) -> str:
    return f"{len(grid)} coordinates that are not" if grid.ndim == 1 else f"shape {grid.shape}"


def _short(value: float, *, sign: bool = False) -> str:
    text = f"{value:+.3g}" if sign else f"{value:.2g}"
    return text.replace("-", "−")


def _count(number: int) -> str:
    return f"{number} others" if number != 1 else "1 other"


def _write_beside_bar(ax: Axes, row: int, height: float, width: float) -> None:
    side, cut = (1 if width >= 0 else -1), height != width
    ax.annotate(
        _short(height, sign=True) + (" (bar cut)" if cut else ""),
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


def _draw_boundary(ax: Axes, x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> None:
    if classes.ndim != 2 or classes.shape[0] < len(y) or classes.shape[1] < len(x):
        raise ValueError(f"boundary must have shape {(len(y), len(x))}, or be finer: got {classes.shape}.")
    y, x = (np.linspace(axis[0], axis[-1], size) for axis, size in zip((y, x), classes.shape, strict=True))
    present = np.unique(classes)
    # The last class has no border that the others do not have.
    for c in present[:-1]:
        lines = ax.contour(x, y, (classes == c).astype(float), levels=[0.5], colors="black", linewidths=1.1, zorder=3)
        lines.set_path_effects([effects.withStroke(linewidth=2.6, foreground="white")])


def _draw_points(ax: Axes, points: np.ndarray, labels: np.ndarray | None) -> None:
    _require_shape("points", points, (len(points), 2))
    if labels is None:
        labels = np.zeros(len(points), dtype=int)
        handles = []
    else:
        _require_shape("labels", labels, (len(points),))
        handles = [
            Line2D([], [], color=PALETTE[c % len(PALETTE)], marker="o", linestyle="", markersize=5, label=f"class {c}")
            for c in np.unique(labels)
        ]
    colours = [PALETTE[c % len(PALETTE)] for c in labels]
    ax.scatter(points[:, 0], points[:, 1], s=9, c=colours, edgecolors="white", linewidths=0.3, zorder=4)
    if handles:
        # Below the map, where it covers neither points nor boundaries.
        ax.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            ncols=min(len(handles), 5),
            fontsize="small",
            frameon=False,
            title="training points",
        )


def _place_names(ax: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray) -> None:
    """Write a name beside each point, at the first place around it that is clear of names, points and the frame."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax must belong to a figure: got one that was removed. Make it with plt.subplots().")
    figure.draw_without_rendering()
    half = 5 * figure.dpi / 72  # of a point's mark, in pixels
    centres = ax.transData.transform(np.column_stack([x, y]))
    taken = [Bbox.from_extents(a - half, b - half, a + half, b + half) for a, b in centres]
    frame = ax.get_window_extent()
    for name, a, b in zip(names, x, y, strict=True):
        best: Text | None = None
        for distance, (dx, dy) in itertools.product((9, 16, 24), ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))):
            text = ax.annotate(
                name,
                (a, b),
                xytext=(dx * distance, dy * distance),
                textcoords="offset points",
                ha=("right", "center", "left")[dx + 1],
                va=("top", "center", "bottom")[dy + 1],
                fontsize="small",
            )
            box = text.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                best = text
                break
            text.remove()
        if best is None:
            best = ax.annotate(name, (a, b), xytext=(9, 0), textcoords="offset points", va="center", fontsize="small")
        taken.append(best.get_window_extent())
