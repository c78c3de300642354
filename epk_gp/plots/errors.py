"""Drawings of the error of a kernel machine: against the network, and against the cost of its quadrature rule."""

import itertools
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from epk_gp.plots.common import Numbers, as_numpy, plain, require_shape, short
from epk_gp.plots.style import GREY, PALETTE, REST, SMALL

_IDENTITY = "identity"
_PLACES = ((0, 1), (1, 0), (1, 1), (0, -1), (-1, 0), (-1, -1))  # of a name beside its point, the best one first
_MARKERS = "osD^v"
_MEMBER = re.compile(r"^(.+?),? (tol \S+|\d+)$")  # "left Riemann 10": a rule of a family


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
    x, y = _outputs(network, machine)
    if not any(line.get_gid() == _IDENTITY for line in ax.lines):
        ax.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=1, gid=_IDENTITY)
    _scatter(ax, x, y, f"{label}: largest |error| {short(np.abs(y - x).max())}")
    ax.set(xlabel="network output", ylabel="kernel machine output", aspect="equal", adjustable="datalim")
    ax.legend(loc="upper left", fontsize=SMALL)
    return ax


def reconstruction_differences(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw kernel machine minus network, to scale, against the network's outputs: an exact machine lies on the line 0.

    Call it once per rule to compare rules in one figure, the coarsest first.

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
    x, y = _outputs(network, machine)
    if not any(line.get_gid() == _IDENTITY for line in ax.lines):
        ax.axhline(0, color=GREY, linewidth=1, zorder=1, gid=_IDENTITY)
    _scatter(ax, x, y - x, f"{label}: largest {short(np.abs(y - x).max())}")
    ax.set(xlabel="network output", ylabel="kernel machine − network")
    ax.legend(loc="best", fontsize=SMALL)
    return ax


def reconstruction_errors(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw the size of the kernel machine's errors on a logarithmic axis, against the network's outputs.

    The band at the bottom is what float64 cannot represent: half a unit in the last place of the largest output. An
    error of exactly 0 is drawn inside the band. Call it once per rule to compare rules in one figure.

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
    x, y = _outputs(network, machine)
    error = np.abs(y - x)
    floor = np.finfo(np.float64).eps / 2 * max(float(np.abs(x).max()), np.finfo(np.float64).tiny)
    if not any(patch.get_gid() == _IDENTITY for patch in ax.patches):
        words = "below the rounding of float64"
        ax.axhspan(floor / 30, floor, color=REST, linewidth=0, zorder=0, gid=_IDENTITY, label=words)
    _scatter(ax, x, error.clip(min=floor / 5), f"{label}: largest {short(error.max())}")
    ax.set(yscale="log", xlabel="network output", ylabel="|kernel machine − network|")
    ax.set_ylim(floor / 30, None)
    few_decades(ax)
    ax.legend(loc="center right", fontsize=SMALL)
    return ax


def few_decades(ax: Axes) -> None:
    """Mark every few decades of a logarithmic ordinate, written as 1e−6."""
    ax.yaxis.set_major_locator(LogLocator(numticks=7))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def error_against_evaluations(
    ax: Axes,
    rules: Sequence[str],
    evaluations: Sequence[int | float] | Float[Numbers, " r"],
    errors: Sequence[int | float] | Float[Numbers, " r"],
) -> Axes:
    """Draw the error of each quadrature rule against its cost, on logarithmic axes, with the names of the rules.

    Rules whose names differ in the last number or the tolerance alone are a family: they share a colour and a mark, are
    joined by a line, and are named by what differs; the legend names the family. The others are named in full.

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
    families, names = _families([plain(rule) for rule in rules])
    for k, (family, members) in enumerate(families.items()):
        colour, marker = PALETTE[k % len(PALETTE)], _MARKERS[k % len(_MARKERS)]
        order = sorted(members, key=lambda i: x[i])
        label = None if len(members) == 1 else family + (", n nodes" if names[members[0]].isdigit() else "")
        ax.plot(x[order], shown[order], color=colour, marker=marker, linewidth=1.1, markersize=6, label=label)
        for i in members:
            if exact[i]:
                ax.plot(x[i], shown[i], "v", markersize=8, markerfacecolor="white", markeredgecolor=colour)
    ax.grid(visible=True, which="major")
    ax.set_axisbelow(True)
    spread = max(np.log10(shown.max() / shown.min()), 1.0)
    ax.set_xlim(x.min() / 1.6, x.max() * 1.9)
    ax.set_ylim(shown.min() / 10 ** (0.1 * spread), shown.max() * 10 ** (0.1 * spread))
    few_decades(ax)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    if any(len(members) > 1 for members in families.values()):
        ax.legend(loc="best", fontsize=SMALL)
    words = [f"{name} (error 0)" if zero else name for name, zero in zip(names, exact, strict=True)]
    _place_names(ax, words, x, shown)
    return ax


def _outputs(network: Numbers, machine: Numbers) -> tuple[np.ndarray, np.ndarray]:
    x, y = as_numpy("network", network), as_numpy("machine", machine)
    if x.shape != y.shape:
        raise ValueError(
            f"network and machine must have one shape: got {x.shape} and {y.shape}. Pass the same points and outputs."
        )
    if x.size == 0:
        raise ValueError("network must hold at least one output: got none. Pass one test point or more.")
    return x.ravel(), y.ravel()


def _scatter(ax: Axes, x: np.ndarray, y: np.ndarray, label: str) -> None:
    """Draw points with the next colour and mark; the last ones to come are on top."""
    index = len(ax.collections)
    ax.scatter(
        x, y, s=16, color=PALETTE[index % len(PALETTE)], marker=_MARKERS[index % 5], alpha=0.75, linewidth=0, zorder=2,
        label=plain(label),
    )  # fmt: skip


def _families(rules: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the rules of each family, and what each rule is called where its family's name is in the legend."""
    parts = [_MEMBER.match(rule) for rule in rules]
    families: dict[str, list[int]] = {}
    for i, (rule, part) in enumerate(zip(rules, parts, strict=True)):
        families.setdefault(part[1] if part else rule, []).append(i)
    sizes = {i: len(members) for members in families.values() for i in members}
    names = [part[2] if part and sizes[i] > 1 else rules[i] for i, part in enumerate(parts)]
    return families, [re.sub(r"e[-−]0*", "e−", name) for name in names]


def _place_names(ax: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray) -> None:
    """Write a name beside each point, at the first position that overlaps no name, no point and not the frame."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax must belong to a figure: got one that was removed. Make it with plt.subplots().")
    figure.draw_without_rendering()
    half = 5 * figure.dpi / 72  # of a point's mark, in pixels
    centres = ax.transData.transform(np.column_stack([x, y]))
    taken = [Bbox.from_extents(a - half, b - half, a + half, b + half) for a, b in centres]
    for line in ax.lines:
        ends = ax.transData.transform(line.get_xydata())
        for (a, b), (c, d) in itertools.pairwise(ends):
            for t in np.linspace(0, 1, max(2, int(np.hypot(c - a, d - b) / half))):
                u, v = a + t * (c - a), b + t * (d - b)
                taken.append(Bbox.from_extents(u - 1, v - 1, u + 1, v + 1))
    legend = ax.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    frame = ax.get_window_extent()
    for name, a, b in zip(names, x, y, strict=True):
        best: Text | None = None
        for distance, (dx, dy) in itertools.product(
            (6, 9, 16, 24), ((0, 1), (1, 0), (1, 1), (0, -1), (-1, 0), (-1, -1))
        ):
            text = ax.annotate(
                name,
                (a, b),
                xytext=(dx * distance, dy * distance),
                textcoords="offset points",
                ha=("right", "center", "left")[dx + 1],
                va=("top", "center", "bottom")[dy + 1],
                fontsize=SMALL,
            )
            box = text.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(neighbour) for neighbour in taken):
                best = text
                break
            text.remove()
        if best is None:
            best = ax.annotate(name, (a, b), xytext=(9, 0), textcoords="offset points", va="center", fontsize=SMALL)
        taken.append(best.get_window_extent())
