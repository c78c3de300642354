"""Draw benchmarks.svg: how much longer peers take than epk_gp, from benchmarks/results.json (a second)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from epk_gp.plots import new_figure, save_figure
from epk_gp.plots.style import EXACT, GREY, INK, PALETTE, SMALL, styled

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results.json"
OURS = ("epk_gp", "attribute", "attribute, its example")
MARKS = {"float32": ("o", EXACT), "float64": ("s", PALETTE[4])}
ROW = 0.23  # inches


@dataclass(frozen=True)
class Panel:
    """One problem.

    Attributes:
        title: What is computed.
        ratios: By contender and dtype, its median time over that of epk_gp; None where it was stopped.
    """

    title: str
    ratios: dict[str, dict[str, float | None]]


def panels(numbers: dict[str, Any]) -> list[Panel]:
    """Return the problems of a benchmark's results."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in numbers["ntk"]:
        add(found, f"One NTK block, {row['problem']}", row, numbers["ntk"])
    for part in ("attribution", "explaind"):
        for row in numbers[part]:
            problem = ", ".join(row["problem"].split(", ")[:3])  # the rest is in the tables
            add(found, f"Contributions, {problem}", row, numbers[part])
    return [Panel(title, ratios) for title, ratios in found.items()]


def add(
    found: dict[str, dict[str, dict[str, float | None]]], title: str, row: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Add the ratio of a contender to those of its problem."""
    if row["contender"] in (*OURS, "floor"):
        return
    dtype = row.get("dtype", "float64")
    same = [r for r in rows if (r["problem"], r.get("dtype", "float64")) == (row["problem"], dtype)]
    ours = next(r for r in same if r["contender"] in OURS)["median"]
    ratio = row["median"] / ours if "median" in row else None
    found.setdefault(title, {}).setdefault(row["contender"], {})[dtype] = ratio


@styled
def draw(numbers: dict[str, Any]) -> Figure:
    """Draw a panel for each problem, all with one logarithmic axis."""
    shown = panels(numbers)
    rows = [len(panel.ratios) for panel in shown]
    figure = new_figure(ROW * sum(rows) + 0.36 * len(rows) + 0.8)
    axes = figure.subplots(len(shown), 1, sharex=True, height_ratios=[count + 1 for count in rows])
    for ax, panel in zip(axes, shown, strict=True):
        draw_panel(ax, panel)
    largest = max(value for panel in shown for by in panel.ratios.values() for value in by.values() if value)
    axes[0].set(xscale="log", xlim=(0.7, 1.6 * largest))
    axes[-1].set_xticks([1, 10, 100], ["1", "10×", "100×"])
    axes[-1].set_xlabel("time, in multiples of epk_gp's (further right is slower; the line is epk_gp)")
    handles = [axes[0].plot([], [], mark, color=colour, label=name)[0] for name, (mark, colour) in MARKS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return figure


def draw_panel(ax: Axes, panel: Panel) -> None:
    """Draw the ratios of one problem, a row for each contender."""
    ax.axvline(1, color=INK)
    for y, by_dtype in enumerate(panel.ratios.values()):
        for dtype, ratio in by_dtype.items():
            mark, colour = MARKS[dtype]
            if ratio is not None:
                ax.plot(ratio, y, mark, color=colour, markersize=6)
        words = [written(ratio) for ratio in by_dtype.values()]
        ax.text(
            1.01, y, ", ".join(dict.fromkeys(words)), transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL
        )
    ax.set_yticks(range(len(panel.ratios)), [name.replace("algorithm", "Algorithm") for name in panel.ratios])
    ax.set_ylim(len(panel.ratios) - 0.5, -0.5)
    ax.set_title(panel.title)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.tick_params(axis="x", labelcolor=GREY)


def written(ratio: float | None) -> str:
    """Return a ratio with two digits or more."""
    if ratio is None:
        return "stopped"
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def words_of(figure: Figure) -> list[str]:
    """List the words of the figure, which its file keeps, so that a test can compare them."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]


if __name__ == "__main__":
    picture = draw(json.loads(RESULTS.read_text()))
    save_figure(picture, HERE / "benchmarks.svg", description=json.dumps(words_of(picture)))
