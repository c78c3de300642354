"""Draw datamodels.svg: LDS on halves beside cost, from benchmarks/attribution/datamodels.json (a second)."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from comparison import apart, mark
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epk_gp.plots import new_figure, save_figure
from epk_gp.plots.style import SMALL, styled

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "attribution" / "datamodels.json"
SHOWN = {"digits": "600 digits, MLP", "MNIST, CNN": "400 digits, CNN"}
LEFT_OUT = ("ridge datamodel",)  # two thousand trainings
HEIGHT = 5.8  # inches
LIMITS, APART = (0.18, 1.0), 0.051  # of LDS, and between names
COSTS = (1, 3, 10, 30, 100)


@styled
def draw(table: list[dict[str, Any]]) -> Figure:
    """Draw a panel for each problem: a mark for each system, its seeds as a bar, and its name in a column."""
    figure = new_figure(HEIGHT)
    panels = figure.subplots(len(SHOWN), 2, width_ratios=(4, 3), sharex="col")
    for (ax, names), (problem, title) in zip(panels, SHOWN.items(), strict=True):
        names.sharey(ax)
        names.set_axis_off()
        _panel(ax, names, [row for row in table if row["problem"] == problem and "half" in row])
        ax.set_title(title, fontsize=SMALL, loc="left")
        ax.set(ylabel="LDS on halves")
    panels[-1, 0].set(xlabel="cost of 100 questions and 100 subsets, in trainings of the network")
    return figure


def _panel(ax: Axes, names: Axes, rows: list[dict[str, Any]]) -> None:
    systems = [name for name in dict.fromkeys(row["system"] for row in rows) if name not in LEFT_OUT]
    seeds = {name: [row["half"][0] for row in rows if row["system"] == name] for name in systems}
    costs = {name: mean(row["trainings"] for row in rows if row["system"] == name) for name in systems}
    systems.sort(key=lambda name: (mean(seeds[name]), -costs[name]))
    questions = {row["system"]: row["questions"] for row in rows}
    ax.set(xscale="log", xlim=(1, 100), ylim=LIMITS)
    ax.set_xticks(COSTS, [str(cost) for cost in COSTS])
    ax.minorticks_off()
    places = apart([mean(seeds[name]) for name in systems], APART)
    for name, place in zip(systems, places, strict=True):
        ours, point = name.startswith(("path ", "exact")), (costs[name], mean(seeds[name]))
        few = f", {questions[name]} questions" * (questions[name] < max(questions.values()))
        words = f"{name}{few} (epk_gp)" if ours else name
        mark(ax, names, point, [min(seeds[name]), max(seeds[name])], words, place, ours=ours)


def main() -> None:
    """Draw both problems."""
    save_figure(draw(json.loads(RESULTS.read_text())["results"]["table"]), HERE / "datamodels.svg")


if __name__ == "__main__":
    main()
