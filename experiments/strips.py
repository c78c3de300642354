"""Pictures of large tables: a method a line, a dot for every trained network, a bar for the mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from epk_gp.plots import PALETTE

Row = dict[str, Any]
DECADE = 10
NETWORK = ("data", "network", "num_train", "share", "kind", "seeds")  # entries that say what a row is about
BARS = "a bar is the mean of what all methods have"


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


def strips(table: Sequence[Row], panels: Sequence[Panel], label: str) -> Figure:
    """Draw all panels side by side, with the methods in the order in which they come and a colour for each data set.

    Panels that no row has a value for are left out, unless all are.
    """
    panels = [panel for panel in panels if any(panel.values(row) for row in table)] or panels[:1]
    methods = list(dict.fromkeys(row["method"] for row in table))
    data = list(dict.fromkeys(row["data"] for row in table))
    height = 1.3 + 0.3 * len(methods)
    figure = Figure(figsize=(2.2 + 2.2 * len(panels), height), layout="constrained")
    for i, (ax, panel) in enumerate(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)):
        _strip(ax, table, panel, methods, data)
        ax.set_yticks(range(len(methods)), methods if i == 0 else [], fontsize="small")
        ax.set_ylim(len(methods) - 0.5, -0.5)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize="small", frameon=False)
    figure.supxlabel(label, fontsize="small")
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
        ax.plot(x, y, "o", color=PALETTE[k], markersize=3, alpha=0.8, label=name)
    found = [value for row in table for value in panel.values(row)]
    common = _common(table, panel)
    for place, method in enumerate(methods):
        values = [
            value for row in table if row["method"] == method and _network(row) in common for value in panel.values(row)
        ]
        if values:
            ax.plot([sum(values) / len(values)] * 2, [place - 0.36, place + 0.36], color="black", linewidth=1.6)
    ax.set_title(panel.title, fontsize="small")
    ax.tick_params(axis="x", labelsize="small")
    if panel.log and found and max(found) > DECADE * min(found) > 0:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _common(table: Sequence[Row], panel: Panel) -> set[tuple[Any, ...]]:
    """Return the networks, with their numbers of seeds, that all methods of a panel have: others make means unequal."""
    networks: dict[str, set[tuple[Any, ...]]] = {}
    for row in table:
        if panel.values(row):
            networks.setdefault(row["method"], set()).add(_network(row))
    return set.intersection(*networks.values()) if networks else set()


def _network(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in NETWORK)
