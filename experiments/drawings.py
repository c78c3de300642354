"""Drawings of experiments: kernel machines against their networks, rules by cost and error, terms of an output."""

import itertools
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from epk_gp.plots.style import (
    DOWN,
    GREY,
    INK,
    LOWERED,
    PALETTE,
    RAISED,
    REST,
    SMALL,
    UP,
    Numbers,
    as_numpy,
    class_colour,
    plain,
    require_shape,
    short,
)

_MARKERS = "osD^v"
_MEMBER = re.compile(r"^(.+?),? (tol \S+|\d+)$")  # "left Riemann 10": a rule of a family


def compare_outputs(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    show: Literal["outputs", "differences", "errors"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw a kernel machine against its network, with the largest error in the legend.

    Call it once per rule to compare rules in one figure, the coarsest first. The errors' logarithmic axis has a band at
    the bottom, which float64 cannot represent: half a unit in the last place of the largest output. An error of exactly
    0 is drawn inside the band.

    Args:
        ax: Axes to draw into.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        show: The machine's outputs, as in Figure 4 of Bell et al. (2023); what they miss, to scale; or its size.
        label: Label of `machine` in the legend, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = as_numpy("network", network), as_numpy("machine", machine)
    if x.shape != y.shape or x.size == 0:
        raise ValueError(f"network and machine must have one shape and an output: got {x.shape} and {y.shape}.")
    x, y = x.ravel(), y.ravel()
    index, error = len(ax.collections), np.abs(y - x)
    place: Literal["best", "upper left", "center right"] = "best"
    kind, drawn, name = "largest", y - x, "kernel machine − network"
    if show == "outputs":
        kind, drawn, place, name = "largest |error|", y, "upper left", "kernel machine output"
        ax.set(aspect="equal", adjustable="datalim")
    elif show == "errors":
        floor = np.finfo(np.float64).eps / 2 * max(float(np.abs(x).max()), np.finfo(np.float64).tiny)
        drawn, place, name = error.clip(min=floor / 5), "center right", "|kernel machine − network|"
        if index == 0:
            band = "below the rounding of float64"
            ax.axhspan(floor / 30, floor, color=REST, linewidth=0, zorder=0, label=band)
    if index == 0 and show != "errors":
        origin, slope = ((0.0, 0.0), 1.0) if show == "outputs" else ((float(x[0]), 0.0), 0.0)
        ax.axline(origin, slope=slope, color=GREY, linewidth=1, zorder=1)
    ax.scatter(
        x, drawn, s=16, color=class_colour(index), marker=_MARKERS[index % 5], alpha=0.75, linewidth=0, zorder=2,
        label=plain(f"{label}: {kind} {short(error.max())}"),
    )  # fmt: skip
    if show == "errors":
        ax.set(yscale="log")
        ax.set_ylim(floor / 30, None)
        few_decades(ax)
    ax.set(xlabel="network output", ylabel=name)
    ax.legend(loc=place, fontsize=SMALL)
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


def _write_right_of(ax: Axes, row: int, x: float, text: str) -> None:
    ax.annotate(text, (x, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=SMALL, color=INK)
