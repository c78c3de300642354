"""Draw comparison.svg: LDS of all systems beside what they cost, from benchmarks/attribution/judged.json (a second)."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epk_gp.plots import new_figure, save_figure
from epk_gp.plots.style import EXACT, GREY, SMALL, styled

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "attribution" / "judged.json"
NAMES = {"exact contributions": "contributions (epk_gp)", "exact derivatives": "derivatives (epk_gp)"}
HEIGHT = 4.6  # inches


@styled
def draw(run: dict[str, Any], retrainings: int) -> Figure:
    """Draw a mark for each system, with its interval, and its name in a column on the right."""
    sound = [row for row in run["systems"] if not row["fault"] and "LDS" in row]
    rows = sorted([row for row in sound if "trainings" in row], key=lambda row: (row["LDS"], -row["trainings"]))
    figure = new_figure(HEIGHT)
    ax, names = figure.subplots(1, 2, sharey=True, width_ratios=(4, 3))
    names.set_axis_off()
    (chance,) = (row["LDS"] for row in sound if "trainings" not in row)
    ax.axhline(chance, color=GREY, linewidth=0.8, linestyle=":", label="random numbers")
    low, high = -0.12, 0.08 + max(row["LDS interval"][1] for row in rows)
    places = apart([row["LDS"] for row in rows], (high - low) / (len(rows) + 1))
    costs = [row["trainings"] for row in rows]
    ax.set(xscale="log", xlim=(min(costs) / 2, max(costs) * 2), ylim=(low, high))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="cost in trainings of the network", ylabel=f"LDS, {retrainings} trainings on half")
    for row, place in zip(rows, places, strict=True):
        name = NAMES.get(row["system"], row["system"])
        mark(ax, names, (row["trainings"], row["LDS"]), row["LDS interval"], name, place, ours="epk_gp" in name)
    ax.legend(loc="lower right", fontsize=SMALL)
    return figure


def mark(
    ax: Axes, names: Axes, point: tuple[float, float], bar: list[float], name: str, place: float, *, ours: bool
) -> None:
    """Draw a system's mark and its bar, and its name at a place of the column on the right, with a line to it."""
    colour, x = EXACT if ours else GREY, point[0]
    ax.plot([x, x], bar, color=colour, linewidth=0.8, alpha=0.6)
    ax.plot(*point, "D" if ours else "o", color=colour, markersize=5)
    line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 2, "shrinkB": 4,
            "relpos": (0, 0.5)}  # fmt: skip
    names.annotate(
        name, point, xycoords=ax.transData, arrowprops=line, color=colour, fontsize=SMALL, annotation_clip=False,
        in_layout=False, xytext=(0.02, place), textcoords=names.get_yaxis_transform(), va="center",
    )  # fmt: skip


def apart(places: list[float], least: float) -> list[float]:
    """Move sorted places as little as needed until neighbours are so far apart: groups that touch are spread evenly."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while (
            len(groups) > 1
            and _centre(groups[-1]) - _centre(groups[-2]) < least * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            last = groups.pop()
            groups[-1] += last
    return [_centre(group) + least * (k - (len(group) - 1) / 2) for group in groups for k in range(len(group))]


def _centre(group: list[float]) -> float:
    return sum(group) / len(group)


def main() -> None:
    """Draw the run of digits."""
    content = json.loads(RESULTS.read_text())
    save_figure(draw(content["results"]["runs"][0], content["config"]["retrainings"]), HERE / "comparison.svg")


if __name__ == "__main__":
    main()
