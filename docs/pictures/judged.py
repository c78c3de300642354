"""Draw judged.svg: what scores of other libraries are like, from benchmarks/attribution/judged.json (a second)."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epk_gp.plots import new_figure, save_figure
from epk_gp.plots.style import EXACT, GREY, INK, PALETTE, SMALL, styled

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "attribution" / "judged.json"
KINDS = {"contributions": ("s", PALETTE[1]), "derivatives": ("o", EXACT)}
ROW = 0.26  # inches


@styled
def draw(run: dict[str, Any]) -> Figure:
    """Draw the systems of a run, those that predict retraining best on top: likeness on the left, LDS on the right."""
    rows = sorted((row for row in run["systems"] if not row["fault"] and "LDS" in row), key=lambda row: -row["LDS"])
    figure = new_figure(ROW * len(rows) + 1.2)
    likeness, lds = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(rows))
    for k, (kind, (mark, colour)) in enumerate(KINDS.items()):
        cosines = [row[kind][0] if row.get(kind) else 0.0 for row in rows]
        levels = [place + (0.32 * k - 0.16) for place in places]  # one above the other: they may be equal
        likeness.plot(cosines, levels, mark, color=colour, label=f"exact {kind}", markersize=4, clip_on=False)
    likeness.set(xlabel="cosine with", xlim=(-0.1, 1), ylim=(len(rows) - 0.5, -0.5))
    likeness.set_yticks(places, [row["system"] for row in rows], fontsize=SMALL)
    figure.legend(fontsize=SMALL, loc="outside upper center", ncols=2)
    for place, row in zip(places, rows, strict=True):
        lds.plot(row["LDS interval"], [place, place], color=GREY, linewidth=1.2)
        lds.plot(row["LDS"], place, "D", color=INK, markersize=4)
    lds.set(xlabel=f"LDS, {run['retrainings']} trainings on half")
    for ax in (likeness, lds):
        ax.axvline(0, color=GREY, linewidth=0.8)
    return figure


def main() -> None:
    """Draw the run of digits."""
    content = json.loads(RESULTS.read_text())
    run = content["results"]["runs"][0] | {"retrainings": content["config"]["retrainings"]}
    save_figure(draw(run), HERE / "judged.svg")


if __name__ == "__main__":
    main()
