"""Drawings of maps over a plane."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int, Shaped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from scipy.interpolate import RectBivariateSpline, RegularGridInterpolator
from scipy.ndimage import convolve, distance_transform_edt, gaussian_filter
from torch import Tensor

from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.plots import style

_MAX_POINTS = 600  # training points drawn on the maps of a figure
_MOST_COLUMNS = 6  # of a legend of one row
_COORDINATES = ("$x_1$", "$x_2$")
_FINE = 241  # nodes per side between which a map is drawn: a node is a pixel or two
_LEVELS = 12  # shades, about
_BLUR = 0.012  # of the side: the width over which the steps of a boundary between nodes are rounded off
_VISIBLE = 0.015  # of the side: half the width of the narrowest region that is named
_FEW = 5  # classes whose colours are enough; the regions of more are named
_SMOOTHINGS = 20  # of what is continued beyond a region: it is drawn up to a node's distance from it
_NEIGHBOURS = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]]) / 4
_PALE = 0.22  # share of a class's colour in that of its region
_HALO: list[effects.AbstractPathEffect] = [effects.withStroke(linewidth=2.8, foreground="white")]


def uncertainty_map(
    ax: Axes,
    grid_x: Float[style.Numbers, " nx"],
    grid_y: Float[style.Numbers, " ny"],
    values: Float[style.Numbers, "ny nx"],
    *,
    title: str,
    points: Float[style.Numbers, "n 2"] | None = None,
    labels: Int[style.Numbers, " n"] | None = None,
    boundary: Int[style.Numbers, "fine_y fine_x"] | None = None,
    regions: Int[style.Numbers, "ny nx"] | None = None,
    colorbar_label: str = "standard deviation",
    names: Sequence[str] | None = None,
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
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
        regions: Class that the network predicts at each node of the grid, where the values jump at the boundary, as all
            do that are of the predicted class: they are interpolated in the region of each class by itself.
        colorbar_label: Name and unit of `values`.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        limits: Smallest and largest value of the shades; None means those of `values`.
        colorbar: Whether a colour bar is drawn.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes do not match, or the grid is not evenly spaced, or a value is not finite, or labels are
            given without points, or regions without a boundary, or a named region's class has no name.
    """
    x, y, z = _even("grid_x", grid_x), _even("grid_y", grid_y), style.as_numpy("values", values)
    style.require_shape("values", z, (len(y), len(x)))
    borders = None if boundary is None else _Borders(x, y, style.as_numpy("boundary", boundary))
    if (regions is not None and borders is None) or (labels is not None and points is None):
        raise ValueError("regions must come with a boundary, and labels with points. Pass both of them.")
    if regions is None or borders is None:
        fine = _interpolated(x, y, z)
    else:
        fine = _by_region(x, y, z, style.as_numpy("regions", regions), borders)
    shades = _draw_shades(ax, x, y, fine, limits or (float(z.min()), float(z.max())))
    if colorbar:
        draw_colorbar([ax], shades, colorbar_label)
    if borders is not None:
        _draw_boundary(ax, borders, names)
    if points is not None:
        _draw_points(ax, style.as_numpy("points", points), labels)
    _frame(ax, x, y)
    ax.set_title(style.plain(title))
    return ax


def class_regions(
    ax: Axes,
    grid_x: Float[style.Numbers, " nx"],
    grid_y: Float[style.Numbers, " ny"],
    classes: Int[style.Numbers, "ny nx"],
) -> Axes:
    """Draw where the network predicts which class, in pale colours: a background for points.

    Args:
        ax: Axes to draw into.
        grid_x: Evenly spaced, increasing coordinates of the columns.
        grid_y: Evenly spaced, increasing coordinates of the rows.
        classes: Class that the network predicts at each node.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes do not match, or the grid is not evenly spaced.
    """
    x, y = _even("grid_x", grid_x), _even("grid_y", grid_y)
    borders = _Borders(x, y, style.as_numpy("classes", classes))
    for c, lead in zip(borders.present.tolist(), borders.leads, strict=True):
        ax.contourf(borders.x, borders.y, lead, levels=[0, 2], colors=[_pale(c)], zorder=0)
    _frame(ax, x, y)
    return ax


def region_handles(classes: Sequence[int], *, names: Sequence[str] | None = None) -> list[Artist]:
    """Return the entries of a legend of `class_regions`.

    Args:
        classes: Classes that are drawn.
        names: Names of the classes, in order; None means "class 0", "class 1", …
    """
    return [
        Patch(facecolor=_pale(c), edgecolor=style.GREY, linewidth=0.6, label=f"network: {style.class_name(c, names)}")
        for c in classes
    ]


def map_handles(
    labels: Int[style.Numbers, " n"] | Sequence[int], *, names: Sequence[str] | None = None
) -> list[Artist]:
    """Return the entries of a legend that several maps share: one per class of training points, and the boundary.

    Args:
        labels: Classes of the points that are drawn.
        names: Names of the classes, in order; None means "class 0", "class 1", …
    """
    handles: list[Artist] = [
        Line2D([], [], color=style.class_colour(c), marker="o", linestyle="", label=style.class_name(c, names))
        for c in np.unique(style.as_numpy("labels", labels)).tolist()
    ]
    return [*handles, Line2D([], [], color=style.INK, linewidth=1.2, label="decision boundary of the network")]


@style.styled
def map_figure(
    m: UncertaintyMap, labels: Shaped[Tensor, "M ..."], axis_names: tuple[str, str] = _COORDINATES, *, plane: str = ""
) -> Figure:
    """Draw the misclassification probability, its standard deviation, the entropy and the kernel over a plane.

    Args:
        m: The map.
        labels: Targets of the training points, which give their colours if they are classes.
        axis_names: Names of the two directions.
        plane: Which plane is shown, and what the other coordinates are there.
    """
    panels = (
        (1 - m.probability, "probability that the network's class is wrong", "probability", m.network_class),
        (m.std, "standard deviation of that probability", "standard deviation", None),
        (m.entropy, "entropy of the expected probabilities", "nats", None),
        (m.kernel, "kernel value k(x, x)", "relative to the training points' mean", None),
    )
    stride = math.ceil(len(m.training) / _MAX_POINTS)
    classes = style.class_labels(labels)
    shown = None if classes is None else classes[::stride]
    training = {"points": m.training[::stride], "labels": shown}
    figure = style.new_figure(7.1 if plane else 6.8)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    words = [name if name in _COORDINATES else style.plain(name) for name in axis_names]
    for ax, (values, title, unit, regions) in zip(axes.flat, panels, strict=True):
        draw_panel(ax, m, values, title=title, colorbar_label=unit, regions=regions, **training)
        ax.set(xlabel=words[0], ylabel=words[1])
        ax.label_outer()
    if plane:
        figure.suptitle(style.plain(plane), x=0.01, ha="left", fontsize=style.SMALL)
    if shown is not None:
        handles = map_handles(shown)
        columns = len(handles) if len(handles) <= _MOST_COLUMNS else math.ceil(len(handles) / 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title="training points, projected")
    return figure


def draw_panel(ax: Axes, m: UncertaintyMap, values: Float[Tensor, "ny nx"], **options: Any) -> None:
    """Draw a scalar of a map; white is 0, so that a map of almost equal values is all of one shade."""
    limits = (0.0, float(values.max()))
    uncertainty_map(ax, m.x, m.y, values, boundary=m.boundary_classes, limits=limits, **options)


def draw_colorbar(axes: Sequence[Axes], shades: ContourSet | AxesImage, label: str) -> None:
    """Draw the colour bar of one or several maps beside them, with few ticks."""
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-3, 4))
    ticks = np.asarray(shades.levels)[::2] if isinstance(shades, ContourSet) else None
    bar = axes[0].figure.colorbar(shades, ax=list(axes), format=formatter, fraction=0.046, pad=0.03, ticks=ticks)
    bar.set_label(style.plain(label))
    bar.outline.set_visible(False)


def shades_of(ax: Axes) -> ContourSet:
    """Return the shades of a map, for a colour bar that several maps share."""
    return next(artist for artist in ax.collections if isinstance(artist, ContourSet) and artist.filled)


class _Borders:
    """The network's classes on a fine grid, smoothed so that their borders have no steps.

    Attributes:
        x: Columns of the fine grid.
        y: Its rows.
        classes: Class at each of its nodes.
        present: Classes that occur, ascending.
        leads: How far each of them is ahead of the best other one (class, y, x): neighbours change sign on one line.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> None:
        if classes.ndim != 2 or classes.shape[0] < len(y) or classes.shape[1] < len(x):
            raise ValueError(f"boundary must have shape {(len(y), len(x))}, or be finer: got {classes.shape}.")
        self.y, self.x = (np.linspace(a[0], a[-1], size) for a, size in zip((y, x), classes.shape, strict=True))
        self.classes, self.present = classes, np.unique(classes)
        blur = max(1.5, _BLUR * max(classes.shape))
        shares = np.stack([gaussian_filter((classes == c).astype(float), blur, mode="nearest") for c in self.present])
        first, second = np.sort(shares, axis=0)[[-1, -2]] if len(shares) > 1 else (shares[0], 0 * shares[0])
        self.leads = np.where(shares == first, shares - second, shares - first)

    def region_at(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the class at each node of another grid over the same extent."""
        nodes = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1)
        leads = [RegularGridInterpolator((self.y, self.x), lead)(nodes) for lead in self.leads]
        return np.asarray(self.present[np.argmax(leads, axis=0)])


def _fine_axes(*axes: np.ndarray) -> list[np.ndarray]:
    return [np.linspace(axis[0], axis[-1], max(_FINE, len(axis))) for axis in axes]


def _interpolated(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    fine_x, fine_y = _fine_axes(x, y)
    spline = RectBivariateSpline(y, x, z, kx=min(3, len(y) - 1), ky=min(3, len(x) - 1))
    return np.asarray(spline(fine_y, fine_x).clip(z.min(), z.max()))


def _by_region(x: np.ndarray, y: np.ndarray, z: np.ndarray, regions: np.ndarray, borders: _Borders) -> np.ndarray:
    """Interpolate the values of each class by themselves, continued to the other nodes harmonically."""
    style.require_shape("regions", regions, z.shape)
    fine, at = _interpolated(x, y, z), borders.region_at(*_fine_axes(x, y))
    for c in np.unique(regions):
        others = regions != c
        rows, columns = distance_transform_edt(others, return_distances=False, return_indices=True)
        own = z[rows, columns]
        for _ in range(_SMOOTHINGS):
            own = np.where(others, convolve(own, _NEIGHBOURS, mode="nearest"), z)
        fine[at == c] = _interpolated(x, y, own)[at == c]
    return fine


def _draw_shades(ax: Axes, x: np.ndarray, y: np.ndarray, fine: np.ndarray, limits: tuple[float, float]) -> ContourSet:
    low, high = limits
    if high <= low:  # all values are equal: one shade
        high = low + max(abs(low), 1.0) * 1e-6
    levels = MaxNLocator(_LEVELS, steps=[1, 2, 2.5, 4, 5, 10]).tick_values(low, high)
    half = (levels[1] - levels[0]) / 2  # a shade stands for its middle: the first is white, the last the darkest
    shown = fine.clip(levels[0], levels[-1])
    ends: dict[str, Any] = {"vmin": levels[0] + half, "vmax": levels[-1] - half}
    shades = ax.contourf(*_fine_axes(x, y), shown, levels=levels, cmap=style.COLORMAP, zorder=0, **ends)
    shades.set_edgecolor("face")  # no light seams between the shades
    return shades


def _frame(ax: Axes, x: np.ndarray, y: np.ndarray) -> None:
    is_square = np.isclose(x[1] - x[0], y[1] - y[0])  # else the axes have a unit each
    limits: dict[str, Any] = {"xlim": (x[0], x[-1]), "ylim": (y[0], y[-1])}
    ax.set(**limits, xlabel="$x_1$", ylabel="$x_2$", aspect="equal" if is_square else "auto")
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(True)


def _pale(c: int) -> str:
    """Return the colour of a class, mixed with white."""
    red, green, blue = (_PALE * part + 1 - _PALE for part in to_rgb(style.class_colour(c)))
    return to_hex((red, green, blue))


def _even(name: str, values: style.Numbers) -> np.ndarray:
    grid = style.as_numpy(name, values)
    steps = np.diff(grid)
    if grid.ndim != 1 or len(grid) < 2 or steps.min() <= 0 or np.ptp(steps) > 1e-3 * steps.mean():
        raise ValueError(f"{name} must be increasing and evenly spaced, as linspace gives: got shape {grid.shape}.")
    return grid


def _draw_boundary(ax: Axes, borders: _Borders, names: Sequence[str] | None) -> None:
    for lead in borders.leads[:-1]:  # every border of the last class is a border of another class too
        lines = ax.contour(borders.x, borders.y, lead, levels=[0.0], colors=style.INK, linewidths=1.2, zorder=3)
        lines.set_path_effects(_HALO)
    if len(borders.present) > _FEW:
        _name_regions(ax, borders, names)


def _name_regions(ax: Axes, borders: _Borders, names: Sequence[str] | None) -> None:
    """Write each class of the network where its region is widest, if it is wide enough to be seen."""
    for c, lead in zip(borders.present.tolist(), borders.leads, strict=True):
        depth = distance_transform_edt(np.pad(lead > 0, 1))[1:-1, 1:-1]  # the frame is a border too
        row, column = divmod(int(depth.argmax()), depth.shape[1])
        if depth[row, column] >= _VISIBLE * max(depth.shape):
            frame = {"facecolor": "white", "edgecolor": style.class_colour(c), "linewidth": 1.6}
            ax.text(
                borders.x[column], borders.y[row], style.class_name(c, names, ""), fontsize=style.SMALL, weight="bold",
                color=style.INK, bbox=frame | {"boxstyle": "round,pad=0.25"}, ha="center", va="center", zorder=5,
            )  # fmt: skip


def _draw_points(ax: Axes, points: np.ndarray, labels: style.Numbers | None) -> None:
    style.require_shape("points", points, (len(points), 2))
    classes = np.zeros(len(points), dtype=int) if labels is None else style.as_numpy("labels", labels)
    style.require_shape("labels", classes, (len(points),))
    colours = [style.class_colour(c) for c in classes.tolist()]
    ax.scatter(points[:, 0], points[:, 1], s=10, c=colours, edgecolors="white", linewidths=0.35, zorder=4)
