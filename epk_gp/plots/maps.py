"""Drawings of maps over a plane."""

import matplotlib.patheffects as effects
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from epk_gp.plots.common import COLORMAP, PALETTE, Numbers, as_numpy, require_shape


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
    """Draw a scalar over a plane, dark where it is large, with training points and the decision boundary.

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

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes do not match, or the grid is not evenly spaced, or a value is not finite, or labels are
            given without points.
    """
    x, y, z = as_numpy("grid_x", grid_x), as_numpy("grid_y", grid_y), as_numpy("values", values)
    step_x, step_y = _spacing("grid_x", x), _spacing("grid_y", y)
    require_shape("values", z, (len(y), len(x)))
    edges = (x[0] - step_x / 2, x[-1] + step_x / 2, y[0] - step_y / 2, y[-1] + step_y / 2)
    image = ax.imshow(z, origin="lower", extent=edges, cmap=COLORMAP, interpolation="nearest", aspect="equal")
    formatter = ScalarFormatter()
    formatter.set_powerlimits((-2, 3))
    bar = ax.figure.colorbar(image, ax=ax, format=formatter, fraction=0.046, pad=0.03)
    bar.set_label(colorbar_label)
    if boundary is not None:
        _draw_boundary(ax, x, y, as_numpy("boundary", boundary))
    if points is not None:
        _draw_points(ax, as_numpy("points", points), None if labels is None else as_numpy("labels", labels))
    elif labels is not None:
        raise ValueError("labels must come with points: got labels alone. Pass points too.")
    ax.set(xlim=edges[:2], ylim=edges[2:], xlabel="$x_1$", ylabel="$x_2$", title=title)
    return ax


def _spacing(name: str, grid: np.ndarray) -> float:
    steps = np.diff(grid)
    if grid.ndim != 1 or len(grid) < 2 or steps.min() <= 0 or np.ptp(steps) > 1e-3 * steps.mean():
        raise ValueError(
            f"{name} must be 1-dimensional, increasing and evenly spaced: got {_describe(grid)}. Make it with linspace."
        )
    return float(steps.mean())


def _describe(grid: np.ndarray) -> str:
    return f"{len(grid)} coordinates that are not" if grid.ndim == 1 else f"shape {grid.shape}"


def _draw_boundary(ax: Axes, x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> None:
    if classes.ndim != 2 or classes.shape[0] < len(y) or classes.shape[1] < len(x):
        raise ValueError(f"boundary must have shape {(len(y), len(x))}, or be finer: got {classes.shape}.")
    y, x = (np.linspace(axis[0], axis[-1], size) for axis, size in zip((y, x), classes.shape, strict=True))
    present = np.unique(classes)
    # Every border of the last class is a border of another class too.
    for c in present[:-1]:
        lines = ax.contour(x, y, (classes == c).astype(float), levels=[0.5], colors="black", linewidths=1.1, zorder=3)
        lines.set_path_effects([effects.withStroke(linewidth=2.6, foreground="white")])


def _draw_points(ax: Axes, points: np.ndarray, labels: np.ndarray | None) -> None:
    require_shape("points", points, (len(points), 2))
    if labels is None:
        labels = np.zeros(len(points), dtype=int)
        handles = []
    else:
        require_shape("labels", labels, (len(points),))
        handles = [
            Line2D([], [], color=PALETTE[c % len(PALETTE)], marker="o", linestyle="", markersize=5, label=f"class {c}")
            for c in np.unique(labels)
        ]
    colours = [PALETTE[c % len(PALETTE)] for c in labels]
    ax.scatter(points[:, 0], points[:, 1], s=9, c=colours, edgecolors="white", linewidths=0.3, zorder=4)
    if handles:
        # Below the map, where the legend covers neither points nor boundaries.
        ax.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            ncols=min(len(handles), 5),
            fontsize="small",
            frameon=False,
            title="training points",
        )
