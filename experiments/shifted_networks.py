"""What becomes of confidence when images are rotated, noisy, blurred or attacked: our process beside its peers."""

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from harness import Experiment, main
from judged_networks import FAR, NETWORKS, TINY
from judging import Columns, Counts, Grid, table_of
from peers import PEERS
from strips import Panel, Row, strips
from uncertainty_problems import EPS, SHIFTS

COLUMNS: Columns = {
    f"{name}, {measure}": (f"shift {name}", measure)
    for name in SHIFTS
    for measure in ("error AUROC", "accuracy", "NLL", "ECE")
} | {
    f"{kind} {eps}, {name}": (f"attack {kind} {eps}", measure)
    for kind in ("FGSM", "PGD")
    for eps in EPS
    for name, measure in (("error AUROC", "error AUROC"), ("detection AUROC", "score 0: AUROC"))
}


@dataclass(frozen=True)
class Config:
    """Networks and numbers of images, the most important ones first; the rows are those of judged_networks.py."""

    grids: tuple[Grid, ...] = (Grid(FAR, NETWORKS[:6], (0, 1, 2)),)
    counts: Counts = field(default_factory=Counts)
    methods: tuple[str, ...] = tuple(PEERS)


@dataclass(frozen=True)
class Result:
    """The table.

    Attributes:
        columns: What is measured.
        table: One entry per data set, network, size and method: mean and standard deviation over seeds of each column.
        left_out: What could not be run, and why.
    """

    columns: list[str]
    table: list[dict[str, Any]]
    left_out: list[str]


def run(config: Config) -> Result:
    """Train every network, and let every method judge it."""
    table, left_out = table_of(config.grids, config.counts, config.methods, COLUMNS)
    return Result(list(COLUMNS), table, left_out)


def draw(result: Result) -> Figure:
    """Draw errors found and likelihoods under shifts, and errors and attacks found under attack."""

    def panel(title: str, *columns: str) -> Panel:
        places = [result.columns.index(column) for column in columns]

        def values(row: Row) -> list[float]:
            return [row["values"][place][0] for place in places if row["values"][place]]

        return Panel(title, values, log="NLL" in title)

    names = list(SHIFTS)
    panels = [
        *(panel(f"{name}, NLL", f"{name}, NLL") for name in (names[1], names[3], names[4])),
        panel("shifts, error AUROC", *(f"{name}, error AUROC" for name in names)),
        panel("PGD, error AUROC", *(f"PGD {eps}, error AUROC" for eps in EPS)),
        panel("PGD, detection AUROC", *(f"PGD {eps}, detection AUROC" for eps in EPS)),
    ]
    return strips(
        result.table, panels, "a dot is a trained network and shift, mean of seeds; a bar is the mean of the dots"
    )


EXPERIMENT = Experiment(
    "shifted_networks",
    Config(),
    Config((Grid(("digits",), (TINY,), (0, 1)),), Counts(40, 20, 20, 20)),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
