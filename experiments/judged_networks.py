"""Who knows when a trained network is wrong, and when an image is none of its kind: our process beside its peers."""

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from harness import Experiment, main
from judging import Columns, Counts, Grid, table_of
from peers import PEERS
from strips import Panel, Row, strips
from uncertainty_problems import Problem

FAR = ("mnist", "fashion-mnist")
NEAR = ("mnist-low", "fashion-mnist-low")  # trained on the classes 0 … 4; 5 … 9 are from outside
NETWORKS = tuple(
    Problem("mnist", network, width, num_train, steps, batch_size, lr, decay=True, double=False)
    for num_train, steps, batch_size in ((2000, 600, 100), (10_000, 2000, 100), (59_000, 3000, 200))
    for network, width, lr in (("mlp", 64, 0.3), ("cnn", 0, 0.2), ("mlp", 512, 0.3))
)
COLUMNS: Columns = {
    "outside 0: AUROC": ("outside 0", "score 0: AUROC"),
    "outside 0: FPR95": ("outside 0", "score 0: FPR95"),
    "outside 1: AUROC": ("outside 1", "score 0: AUROC"),
    "outside 1: FPR95": ("outside 1", "score 0: FPR95"),
    "outside 0, second score: AUROC": ("outside 0", "score 1: AUROC"),
    "outside 1, second score: AUROC": ("outside 1", "score 1: AUROC"),
    "error AUROC": ("test", "error AUROC"),
    "AURC": ("test", "AURC"),
    "accuracy": ("test", "accuracy"),
    "NLL": ("test", "NLL"),
    "ECE": ("test", "ECE"),
    "own AURC": ("test", "own AURC"),
}


@dataclass(frozen=True)
class Config:
    """Networks and numbers of images, the most important ones first."""

    grids: tuple[Grid, ...] = (
        Grid(FAR, NETWORKS[:6], (0, 1, 2)),
        Grid(NEAR, NETWORKS[:2], (0, 1, 2)),
        Grid(FAR, NETWORKS[6:], (0, 1, 2)),
    )
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


def means(result: Result, *columns: str, near: bool | None = None) -> Panel:
    """Return the panel of the mean of some columns, of far or of near data sets alone where told."""
    places = [result.columns.index(column) for column in columns]

    def values(row: Row) -> list[float]:
        if near is not None and near != row["data"].endswith("-low"):
            return []
        return [row["values"][place][0] for place in places if row["values"][place]]

    title = {"outside 0: AUROC": "near classes, AUROC" if near else "other images, AUROC"}
    return Panel(title.get(columns[0], f"{columns[0]}"), values, log=columns[0] in ("NLL", "ECE", "AURC"))


def draw(result: Result) -> Figure:
    """Draw how well each method tells other images, near classes and errors, and its probabilities."""
    panels = [
        means(result, "outside 0: AUROC", "outside 1: AUROC", near=False),
        means(result, "outside 0: AUROC", near=True),
        means(result, "error AUROC"),
        means(result, "AURC"),
        means(result, "NLL"),
        means(result, "ECE"),
    ]
    return strips(result.table, panels, "a dot is a trained network, mean of its seeds; a bar is the mean of the dots")


TINY = Problem(network="mlp", width=8, num_train=60, steps=20, batch_size=10)
EXPERIMENT = Experiment(
    "judged_networks",
    Config(),
    Config((Grid(("digits",), (TINY,), (0, 1)),), Counts(40, 20, 20, 20)),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
