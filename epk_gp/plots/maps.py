"""Drawings of maps over a plane."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.patheffects as effects
import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
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

from epk_gp.analysis.maps import Plane, UncertaintyMap, project, validate_columns
from epk_gp.core.show import count, shortened
from epk_gp.gp.data import as_numbers
from epk_gp.plots import style

_MAX_POINTS = 600  # training points drawn in the maps of a figure
_MOST_COLUMNS, _LEGEND, _HANDLE = 6, 88, 6  # columns of a legend, its width in characters, and that of a marker
_ROW = 0.18  # height in inches of a row of a legend
_FINE = 241  # nodes per side of the drawn map: a node is one or two pixels
_LEVELS = 12  # approximate number of shades
_BLUR = 0.012  # of the side: width for smoothing the steps of a boundary between nodes
_VISIBLE = 0.015  # of the side: half the width of the narrowest named region
_FEW = 5  # classes that colours distinguish; with more classes, regions are named
_SMOOTHINGS = 20  # smoothings of the continuation beyond a region, which is drawn up to one node outside
_NEIGHBOURS = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]]) / 4
_PALE = 0.22  # share of a class's colour in its region's colour
_EVEN = 0.7548777, 0.5698403  # multiples of these are spread evenly over a square (Roberts 2018)
_SPREAD = 0.7  # of a cell: width of the area in which a category's points are drawn
_LONGEST = 20  # characters in the name of a class, a category or another column
_AXIS = 32  # characters in the name of an axis
_ROOM = 40  # characters of all categories' names in a row below a map
_MOST_NAMES = 24  # names of categories along an axis
_LINE = 80  # characters of other columns and their values above a map
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
    in_cells: tuple[bool, bool] = (False, False),
) -> Axes:
    """Draw a scalar over a plane, dark where it is large, with training points and the decision boundary.

    The values between the nodes are interpolated by cubic splines, limited to the smallest and the largest value, and
    drawn in about ten shades whose edges are contour lines. The boundary is smoothed over 1 % of the side. If the
    network predicts more than five classes, their regions are named in the map.

    Args:
        ax: Axes to draw into; a colour bar is added to its figure.
        grid_x: Evenly spaced, increasing coordinates of the columns.
        grid_y: Evenly spaced, increasing coordinates of the rows.
        values: The scalar, one row per entry of grid_y.
        title: Title.
        points: Training points in the plane; points outside the grid are not visible.
        labels: Class of each point, which sets its colour.
        boundary: Class predicted by the network at each node of the grid, or of a finer grid over the same extent;
            lines are drawn at its changes.
        regions: Class predicted by the network at each node of the grid, for values that jump at the boundary, such as
            values of the predicted class: they are interpolated separately in the region of each class.
        colorbar_label: Name and unit of `values`.
        names: Names of the classes, in order; None means "class 0", "class 1", …
        limits: Smallest and largest value of the shades; None means those of `values`.
        colorbar: Whether to draw a colour bar.
        in_cells: Whether columns, and rows, form cells of many equal ones: the boundary is then not smoothed.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes do not match, or the grid is not evenly spaced, or a value is not finite, or labels are
            given without points, or regions without a boundary, or a named region's class has no name.
    """
    x, y, z = _even("grid_x", grid_x), _even("grid_y", grid_y), style.as_numpy("values", values)
    style.require_shape("values", z, (len(y), len(x)))
    borders = None if boundary is None else _Borders(x, y, style.as_numpy("boundary", boundary), in_cells)
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
    """Draw the network's predicted classes in pale colours: a background for points.

    Args:
        ax: Axes to draw into.
        grid_x: Evenly spaced, increasing coordinates of the columns.
        grid_y: Evenly spaced, increasing coordinates of the rows.
        classes: Class predicted by the network at each node.

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
        classes: The drawn classes.
        names: Names of the classes, in order; None means "class 0", "class 1", …
    """
    return [
        Patch(facecolor=_pale(c), edgecolor=style.GREY, linewidth=0.6, label=f"network: {style.class_name(c, names)}")
        for c in classes
    ]


def map_handles(
    labels: Int[style.Numbers, " n"] | Sequence[int], *, names: Sequence[str] | None = None
) -> list[Artist]:
    """Return the entries of a legend for several maps: one per class of training points, and the boundary.

    Args:
        labels: Classes of the drawn points.
        names: Names of the classes, in order; None means "class 0", "class 1", …
    """
    handles: list[Artist] = [
        Line2D([], [], color=style.class_colour(c), marker="o", linestyle="", label=style.class_name(c, names))
        for c in np.unique(style.as_numpy("labels", labels)).tolist()
    ]
    return [*handles, Line2D([], [], color=style.INK, linewidth=1.2, label="decision boundary of the network")]


@style.styled
def map_figure(
    m: UncertaintyMap, axis_names: tuple[str, str] | None = None, *, plane: str | None = None, validation: object = None
) -> Figure:
    """Draw the maps of a process over a plane, with the training points that it uses.

    For an `UncertainClassifier` these are the error score and the out-of-distribution score; for a `LogitGP` the
    probability that the network's class is wrong, its standard deviation, the entropy and the kernel.

    Args:
        m: The map.
        axis_names: Names of the two directions; None for the map's own.
        plane: Description of the plane and of the other coordinates; None for the values of other columns.
        validation: Validation points, as a tensor, an array or a data frame: they are drawn as crosses.
    """
    panels: list[tuple[Any, str, str, Any]] = [
        (m.error, "probability that the network's class is wrong", "probability", m.network_class),
        (m.std, "standard deviation of that probability", "standard deviation", None),
        (m.entropy, "entropy of the expected probabilities", "nats", None),
        (m.kernel, "kernel value k(x, x)", "relative to the training points' mean", None),
    ]
    if m.out_of_distribution is not None:
        panels = [(m.error, "error score", "probability of an error", m.network_class)]
        panels += [(m.out_of_distribution, "out-of-distribution score", "0 near, 1 far", None)]
    plane = held_columns(m.plane) if plane is None else plane
    words = [shortened(name, _AXIS) for name in axis_names or m.plane.names]
    names = None if m.class_names is None else [shortened(str(name), _LONGEST) for name in m.class_names]
    drawn = m.points[:: math.ceil(len(m.points) / _MAX_POINTS)]
    classes = style.class_labels(m.labels)
    training: dict[str, Any] = {"points": m.training[drawn], "labels": None if classes is None else classes[drawn]}
    handles = [] if classes is None else map_handles(classes[drawn], names=names)
    if handles and validation is not None:
        handles.insert(-1, Line2D([], [], color=style.INK, marker="x", linestyle="", label="validation points"))
    columns = legend_columns(handles)
    more_rows = max(0, math.ceil(len(handles) / columns) - 2)
    figure = style.new_figure(0.5 + 3.15 * len(panels) / 2 + 0.3 * bool(plane) + _ROW * more_rows)
    axes = figure.subplots(len(panels) // 2, 2, sharex=True, sharey=True)
    for ax, (values, title, unit, regions) in zip(axes.flat, panels, strict=True):
        draw_panel(ax, m, values, title=title, colorbar_label=unit, regions=regions, names=names, **training)
        if validation is not None:
            validate_columns(m.plane, getattr(validation, "columns", None), "validation")
            x, y = _in_cells(m, project(m.plane, as_numbers(validation, "validation").double())).T.tolist()
            ax.scatter(x, y, s=12, c=style.INK, marker="x", linewidths=0.7, zorder=4)
        ax.set(xlabel=style.plain(words[0]), ylabel=style.plain(words[1]))
        ax.label_outer()
    if plane:
        figure.suptitle(style.plain(plane), x=0.01, ha="left", fontsize=style.SMALL)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title="training points, projected")
    return figure


def legend_columns(handles: Sequence[Artist]) -> int:
    """Return the number of columns that fit into a legend below a figure."""
    lengths = [_HANDLE + len(str(handle.get_label())) for handle in handles]
    widths = {n: sum(map(max, np.array_split(lengths, n))) for n in range(1, min(len(lengths), _MOST_COLUMNS) + 1)}
    return max((n for n, width in widths.items() if width <= _LEGEND), default=1)


def draw_panel(
    ax: Axes, m: UncertaintyMap, values: Float[Tensor, "ny nx"], points: Float[Tensor, "n 2"], **options: Any
) -> None:
    """Draw a scalar of a map; white is 0, so that a map of almost equal values has a single shade.

    The darkest shade is the largest value, or 1 for the out-of-distribution score. Categories are cells without
    interpolation between them, and their points are spread inside them.
    """
    axes, regions = [m.x, m.y], options.pop("regions", None)
    limits = (0.0, 1.0 if values is m.out_of_distribution else float(values.max()))
    drawn = {"values": values, "boundary": m.boundary_classes} | ({} if regions is None else {"regions": regions})
    of_x, of_y = (names is not None for names in m.plane.categories)
    for k, names in enumerate(m.plane.categories):
        if names is not None:
            size = math.ceil(_FINE / len(names))
            axes[k] = torch.linspace(-0.5, len(names) - 0.5, size * len(names))
            drawn = {name: array.repeat_interleave(size, dim=1 - k) for name, array in drawn.items()}
    options |= {"points": _in_cells(m, points), "in_cells": (of_x, of_y), "limits": limits, **drawn}
    uncertainty_map(ax, axes[0], axes[1], **options)
    for axis, names in zip((ax.xaxis, ax.yaxis), m.plane.categories, strict=True):
        if names is not None:
            _name_cells(axis, [*names.values()])


def _in_cells(m: UncertaintyMap, points: Float[Tensor, "n 2"]) -> Float[Tensor, "n 2"]:
    """Return the positions at which points are drawn; points of a category are spread evenly in its cell."""
    places, number = points.clone(), torch.arange(len(points), dtype=points.dtype)
    for k, (axis, names) in enumerate(zip((m.x, m.y), m.plane.categories, strict=True)):
        if names is not None:
            is_cell = points[:, k, None] == axis.to(points)
            if not is_cell.any(1).all():
                raise ValueError(f"points must have values of {m.plane.names[k]!r} that have a name: some have not.")
            places[:, k] = is_cell.double().argmax(1) + _SPREAD * (number * _EVEN[k] % 1 - 0.5)
    return places


def _name_cells(axis: Axis, names: Sequence[str]) -> None:
    """Write the names of categories at their cells, and draw lines between the cells."""
    words, is_x = [shortened(name, _LONGEST) for name in names], axis is axis.axes.xaxis
    step, is_long = math.ceil(len(words) / _MOST_NAMES), sum(len(word) + 2 for word in words) > _ROOM
    labels = [style.plain(word) for word in words[::step]]
    axis.set_ticks(range(0, len(words), step), labels, rotation=90 if is_x and is_long else 0)
    axis.set_tick_params(length=0)
    for edge in range(1, len(words)):
        (axis.axes.axvline if is_x else axis.axes.axhline)(edge - 0.5, color=style.GRID, linewidth=0.8, zorder=2)
    axis.axes.set_aspect("auto")


def held_columns(plane: Plane) -> str:
    """Describe the values of other columns than the two of a plane, as a sentence; empty if there are none."""
    words = [f"{shortened(name, _LONGEST)} {value:.5g}" for name, value in plane.others.items()]
    shown = sum(length <= _LINE for length in itertools.accumulate(len(word) + 2 for word in words))
    held = words[:shown] + [f"and {count(len(words) - shown, 'more column')}"] * (shown < len(words))
    return f"Other columns: {', '.join(held)}." if held else ""


def draw_colorbar(axes: Sequence[Axes], shades: ContourSet | AxesImage, label: str) -> None:
    """Draw the colour bar of one or several maps next to them, with few ticks."""
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-3, 4))
    ticks = np.asarray(shades.levels)[::2] if isinstance(shades, ContourSet) else None
    bar = axes[0].figure.colorbar(shades, ax=list(axes), format=formatter, fraction=0.046, pad=0.03, ticks=ticks)
    bar.set_label(style.plain(label))
    bar.outline.set_visible(False)


def shades_of(ax: Axes) -> ContourSet:
    """Return the shades of a map, for a colour bar shared by several maps."""
    return next(artist for artist in ax.collections if isinstance(artist, ContourSet) and artist.filled)


class _Borders:
    """The network's classes on a fine grid, smoothed so that their borders have no steps.

    Attributes:
        x: Columns of the fine grid.
        y: Rows of the fine grid.
        classes: Class at each node.
        present: Classes that occur, ascending.
        leads: Lead of each class over the best other one (class, y, x): neighbours change sign on one line.
    """

    def __init__(
        self, x: np.ndarray, y: np.ndarray, classes: np.ndarray, in_cells: tuple[bool, bool] = (False, False)
    ) -> None:
        if classes.ndim != 2 or classes.shape[0] < len(y) or classes.shape[1] < len(x):
            raise ValueError(f"boundary must have shape {(len(y), len(x))}, or be finer: got {classes.shape}.")
        self.y, self.x = (np.linspace(a[0], a[-1], size) for a, size in zip((y, x), classes.shape, strict=True))
        self.classes, self.present = classes, np.unique(classes)
        blur = max(1.5, _BLUR * max(classes.shape)) * (1 - np.array(in_cells[::-1]))
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
    """Interpolate the values of each class separately, with a harmonic continuation to the other nodes."""
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
    half = (levels[1] - levels[0]) / 2  # a shade represents its middle: the first is white, the last the darkest
    shown = fine.clip(levels[0], levels[-1])
    ends: dict[str, Any] = {"vmin": levels[0] + half, "vmax": levels[-1] - half}
    shades = ax.contourf(*_fine_axes(x, y), shown, levels=levels, cmap=style.COLORMAP, zorder=0, **ends)
    shades.set_edgecolor("face")  # avoids light seams between the shades
    return shades


def _frame(ax: Axes, x: np.ndarray, y: np.ndarray) -> None:
    is_square = np.isclose(x[1] - x[0], y[1] - y[0])  # otherwise the axes have different units
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
    """Write each class of the network where its region is widest, if it is wide enough to be visible."""
    for c, lead in zip(borders.present.tolist(), borders.leads, strict=True):
        depth = distance_transform_edt(np.pad(lead > 0, 1))[1:-1, 1:-1]  # the frame is also a border
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
