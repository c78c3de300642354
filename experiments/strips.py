"""Pictures of large tables: a method a line, a dot for every trained network, a bar for the mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from epk_gp.plots.style import INK, PALETTE, SMALL, new_figure, styled

Row = dict[str, Any]
DECADE = 10
NETWORK = ("data", "network", "num_train", "share", "kind", "seeds")  # entries that say what a row is about
BARS = "mean, where a method has all networks"
PER_ROW = 3  # panels
MARKERS = "os^D"  # of the data sets


@dataclass(frozen=True)
class Panel:
    """One column of a picture.

    Attributes:
        title: Its title.
        values: The means that a row of the table has for it.
        log: Whether its axis is logarithmic where the values span a decade.
    """

    title: str
    values: Callable[[Row], list[float]]
    log: bool = False


@styled
def strips(table: Sequence[Row], panels: Sequence[Panel], label: str) -> Figure:
    """Draw panels of three a row, with the methods in the order in which they come and a colour for each data set.

    Panels that no row has a value for are left out, unless all are.
    """
    panels = [panel for panel in panels if any(panel.values(row) for row in table)] or panels[:1]
    methods = list(dict.fromkeys(row["method"] for row in table))
    data = list(dict.fromkeys(row["data"] for row in table))
    rows, columns = -(-len(panels) // PER_ROW), min(len(panels), PER_ROW)
    figure = new_figure(0.75 + rows * (0.55 + 0.2 * len(methods)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for i, (ax, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        _strip(ax, table, panel, methods, data)
        ax.set_yticks(range(len(methods)), methods if i % columns == 0 else [])
        ax.set_ylim(len(methods) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
    handles, names = figure.axes[0].get_legend_handles_labels()
    mean = Line2D([], [], color=INK, marker="|", markersize=9, markeredgewidth=1.8, linestyle="", label=BARS)
    entries = [*handles, mean]
    figure.legend(entries, [*names, BARS], loc="outside upper left", ncols=len(entries))
    figure.supxlabel(label, fontsize=SMALL)
    return figure


def _strip(ax: Axes, table: Sequence[Row], panel: Panel, methods: list[str], data: list[str]) -> None:
    for k, name in enumerate(data):
        dots = [
            (value, methods.index(row["method"]) + 0.5 * ((k + 0.5) / len(data) - 0.5))
            for row in table
            if row["data"] == name
            for value in panel.values(row)
        ]
        x, y = zip(*dots, strict=True) if dots else ((), ())
        ax.plot(x, y, MARKERS[k % 4], color=PALETTE[k], markersize=3.2, markeredgewidth=0, alpha=0.8, label=name)
    found = [value for row in table for value in panel.values(row)]
    networks = {
        method: {_network(row) for row in table if row["method"] == method and panel.values(row)} for method in methods
    }
    whole = max(networks.values(), key=len)
    for place, method in enumerate(methods):
        values = [value for row in table if row["method"] == method for value in panel.values(row)]
        if values and networks[method] == whole:  # means over other networks are not comparable
            ax.plot([sum(values) / len(values)] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=1.8)
    ax.set_title(panel.title)
    if panel.log and found and max(found) > DECADE * min(found) > 0:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1,) if max(found) > DECADE**2 * min(found) else (1, 3)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))


def _network(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in NETWORK)
