"""Drawings of the error of a kernel machine: against the network, and against the cost of its quadrature rule."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from epk_gp.plots.common import GREY, PALETTE, Numbers, as_numpy, require_shape, short

_IDENTITY = "identity"


def reconstruction_scatter(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw the kernel machine's outputs against the network's, with the largest error in the legend.

    This is Figure 4 of Bell et al. (2023). Call it once per rule to compare rules in one figure.

    Args:
        ax: Axes to draw into.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        label: Label of `machine` in the legend, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = as_numpy("network", network), as_numpy("machine", machine)
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
        label=f"{label}: largest |error| {short(error)}",
    )
    ax.set(xlabel="network output", ylabel="kernel machine output", aspect="equal", adjustable="datalim")
    ax.legend(loc="upper left", fontsize="small", framealpha=0.9)
    return ax


def error_against_evaluations(
    ax: Axes,
    rules: Sequence[str],
    evaluations: Sequence[int | float] | Float[Numbers, " r"],
    errors: Sequence[int | float] | Float[Numbers, " r"],
) -> Axes:
    """Draw the error of each quadrature rule against its cost, on logarithmic axes, with the names of the rules.

    An error of exactly 0 cannot be drawn on a logarithmic axis. It is drawn as an open triangle at half the smallest
    other error, and its label contains "error 0".

    Args:
        ax: Axes to draw into. Its figure must have its final size, because the names are placed so that they do not
            overlap.
        rules: Name of each rule.
        evaluations: Evaluations of the gradient per point and step, positive.
        errors: Largest |kernel machine − network|.

    Returns:
        The Axes.

    Raises:
        ValueError: The lengths differ, or a number is negative or not finite, or an evaluation count is 0.
    """
    x, y = as_numpy("evaluations", evaluations), as_numpy("errors", errors)
    require_shape("evaluations", x, (len(rules),))
    require_shape("errors", y, (len(rules),))
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


def _place_names(ax: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray) -> None:
    """Write a name beside each point, at the first position that overlaps no name, no point and not the frame."""
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
            if inside and not any(box.overlaps(neighbour) for neighbour in taken):
                best = text
                break
            text.remove()
        if best is None:
            best = ax.annotate(name, (a, b), xytext=(9, 0), textcoords="offset points", va="center", fontsize="small")
        taken.append(best.get_window_extent())
