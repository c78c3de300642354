"""Drawings of maps over a plane."""

from collections.abc import Sequence

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from scipy.interpolate import RectBivariateSpline
from scipy.ndimage import distance_transform_edt, gaussian_filter

from epk_gp.plots.common import Numbers, as_numpy, class_name, require_shape
from epk_gp.plots.style import COLORMAP, INK, PALETTE, SMALL

_FINE = 241  # nodes per side between which a map is drawn: a node is a pixel or two
_LEVELS = 12  # shades, about
_BLUR = 0.012  # of the side: the width over which the steps of a boundary between nodes are rounded off
_FEW = 5  # classes whose colours are enough; the regions of more are named
_HALO: list[effects.AbstractPathEffect] = [effects.withStroke(linewidth=2.8, foreground="white")]


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
    names: Sequence[str] | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
    legend: bool = True,
) -> Axes:
    """Draw a scalar over a plane, dark where it is large, with training points and the decision boundary.

    The values between the nodes are interpolated by cubic splines, cut at the smallest and the largest value, and drawn
    in about ten shades whose edges are contour lines. The boundary is smoothed over 1 % of the side. Where the network
    predicts more than five classes, their regions are named in the map.

    Args:
        ax: Axes to draw into; a colour bar is added to its figure.
        grid_x: Evenly spaced, increasing coordinates of the columns.
        grid_y: Evenly spaced, increasing coordinates of the rows.
        values: The scalar, one row per entry of grid_y.
        title: Title.
        points: Training points in the plane; those outside the grid are not visible.
        labels: Class of each point, which gives its colour.
        boundary: Class that the network predicts at each node of the grid, or of a finer grid over the same extent;
            lines are drawn where it changes.
        colorbar_label: Name and unit of `values`.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        limits: Smallest and largest value of the shades; None means those of `values`.
        colorbar: Whether a colour bar is drawn.
        legend: Whether a legend is drawn below the map; several maps share one, made of `map_handles`.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes do not match, or the grid is not evenly spaced, or a value is not finite, or labels are
            given without points, or a class has no name.
    """
    x, y, z = as_numpy("grid_x", grid_x), as_numpy("grid_y", grid_y), as_numpy("values", values)
    _require_even("grid_x", x)
    _require_even("grid_y", y)
    require_shape("values", z, (len(y), len(x)))
    classes = None if labels is None else as_numpy("labels", labels)
    regions = None if boundary is None else as_numpy("boundary", boundary)
    _require_names(names, classes, regions)
    shades = _draw_shades(ax, x, y, z, limits)
    if colorbar:
        draw_colorbar([ax], shades, colorbar_label)
    if regions is not None:
        _draw_boundary(ax, x, y, regions, names)
    if points is not None:
        _draw_points(ax, as_numpy("points", points), classes)
    elif labels is not None:
        raise ValueError("labels must come with points: got labels alone. Pass points too.")
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), xlabel="$x_1$", ylabel="$x_2$", title=title, aspect="equal")
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(True)
    if legend and classes is not None:
        handles = map_handles(classes, names=names, boundary=regions is not None)
        # Below the map, where the legend covers neither points nor boundaries.
        below: tuple[float, float] = (0.5, -0.16)
        columns = min(len(handles), 4)
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=below, ncols=columns, fontsize=SMALL)
    return ax


def map_handles(
    labels: Int[Numbers, " n"] | Sequence[int], *, names: Sequence[str] | None = None, boundary: bool = True
) -> list[Artist]:
    """Return the entries of a legend that several maps share: one per class of training points, and the boundary.

    Args:
        labels: Classes of the points that are drawn.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        boundary: Whether the decision boundary is drawn.
    """
    present = np.unique(as_numpy("labels", labels)).tolist()
    handles: list[Artist] = [
        Line2D([], [], color=PALETTE[c % len(PALETTE)], marker="o", linestyle="", label=class_name(c, names))
        for c in present
    ]
    line = Line2D([], [], color=INK, linewidth=1.2, label="decision boundary of the network")
    return [*handles, line] if boundary else handles


def draw_colorbar(axes: Sequence[Axes], shades: ContourSet, label: str) -> None:
    """Draw the colour bar of one or several maps beside them, with few ticks."""
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-2, 4))
    figure = axes[0].figure
    bar = figure.colorbar(
        shades, ax=list(axes), format=formatter, fraction=0.046, pad=0.03, ticks=np.asarray(shades.levels)[::2]
    )
    bar.set_label(label)
    bar.outline.set_visible(False)


def shades_of(ax: Axes) -> ContourSet:
    """Return the shades of a map, for a colour bar that several maps share."""
    return next(artist for artist in ax.collections if isinstance(artist, ContourSet) and artist.filled)


def _draw_shades(
    ax: Axes, x: np.ndarray, y: np.ndarray, z: np.ndarray, limits: tuple[float, float] | None
) -> ContourSet:
    low, high = (float(z.min()), float(z.max())) if limits is None else limits
    if high <= low:  # all values are equal: one shade
        high = low + max(abs(low), 1.0) * 1e-6
    levels = MaxNLocator(_LEVELS, steps=[1, 2, 2.5, 4, 5, 10]).tick_values(low, high)
    fine_x, fine_y = (np.linspace(axis[0], axis[-1], max(_FINE, len(axis))) for axis in (x, y))
    spline = RectBivariateSpline(y, x, z, kx=min(3, len(y) - 1), ky=min(3, len(x) - 1))
    fine = spline(fine_y, fine_x).clip(max(z.min(), levels[0]), min(z.max(), levels[-1]))
    half = (levels[1] - levels[0]) / 2  # a shade stands for its middle: the first is white, the last the darkest
    shades = ax.contourf(
        fine_x, fine_y, fine, levels=levels, cmap=COLORMAP, vmin=levels[0] + half, vmax=levels[-1] - half, zorder=0
    )
    shades.set_edgecolor("face")  # no light seams between the shades
    return shades


def _require_even(name: str, grid: np.ndarray) -> None:
    steps = np.diff(grid)
    if grid.ndim != 1 or len(grid) < 2 or steps.min() <= 0 or np.ptp(steps) > 1e-3 * steps.mean():
        raise ValueError(
            f"{name} must be 1-dimensional, increasing and evenly spaced: got {_describe(grid)}. Make it with linspace."
        )


def _describe(grid: np.ndarray) -> str:
    return f"{len(grid)} coordinates that are not" if grid.ndim == 1 else f"shape {grid.shape}"


def _require_names(names: Sequence[str] | None, *of_classes: np.ndarray | None) -> None:
    largest = max((int(classes.max()) for classes in of_classes if classes is not None and classes.size), default=-1)
    if names is not None and largest >= len(names):
        raise ValueError(
            f"names must name each class: got {len(names)} names for classes up to {largest}. Add the others."
        )


def _draw_boundary(ax: Axes, x: np.ndarray, y: np.ndarray, classes: np.ndarray, names: Sequence[str] | None) -> None:
    if classes.ndim != 2 or classes.shape[0] < len(y) or classes.shape[1] < len(x):
        raise ValueError(f"boundary must have shape {(len(y), len(x))}, or be finer: got {classes.shape}.")
    y, x = (np.linspace(axis[0], axis[-1], size) for axis, size in zip((y, x), classes.shape, strict=True))
    present = np.unique(classes)
    if len(present) < 2:
        return
    blur = max(1.5, _BLUR * max(classes.shape))
    shares = np.stack([gaussian_filter((classes == c).astype(float), blur, mode="nearest") for c in present])
    first, second = np.sort(shares, axis=0)[[-1, -2]]
    # How far each class is ahead of the best other one: neighbours change sign on one and the same line.
    leads = np.where(shares == first, shares - second, shares - first)
    for lead in leads[:-1]:  # every border of the last class is a border of another class too
        lines = ax.contour(x, y, lead, levels=[0.0], colors=INK, linewidths=1.2, zorder=3)
        lines.set_path_effects(_HALO)
    if len(present) > _FEW:
        _name_regions(ax, x, y, classes, names)


def _name_regions(ax: Axes, x: np.ndarray, y: np.ndarray, classes: np.ndarray, names: Sequence[str] | None) -> None:
    """Write each class of the network where its region is widest."""
    for c in np.unique(classes).tolist():
        depth = distance_transform_edt(np.pad(classes == c, 1))[1:-1, 1:-1]  # the frame is a border too
        row, column = divmod(int(depth.argmax()), depth.shape[1])
        name, colour = str(c) if names is None else names[c], PALETTE[c % len(PALETTE)]
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
        ax.text(
            x[column], y[row], name, ha="center", va="center", fontsize=SMALL, color=INK, weight="bold", bbox=box,
            zorder=5,
        )  # fmt: skip


def _draw_points(ax: Axes, points: np.ndarray, labels: np.ndarray | None) -> None:
    require_shape("points", points, (len(points), 2))
    if labels is None:
        colours = [PALETTE[0]] * len(points)
    else:
        require_shape("labels", labels, (len(points),))
        colours = [PALETTE[c % len(PALETTE)] for c in labels]
    ax.scatter(points[:, 0], points[:, 1], s=10, c=colours, edgecolors="white", linewidths=0.35, zorder=4)
