"""Who knows when a trained network is wrong, and when an image is none of its kind: our process beside its peers."""

from matplotlib.figure import Figure

from harness import Experiment, main
from judging import Columns, Counts, Grid, GridConfig, GridResult, run_grids
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


GRIDS = (
    Grid(FAR, NETWORKS[:6], (0, 1, 2)),
    Grid(NEAR, NETWORKS[:2], (0, 1, 2)),
    Grid(FAR, NETWORKS[6:], (0, 1, 2)),
)


def run(config: GridConfig) -> GridResult:
    """Train every network, and let every method judge it."""
    return run_grids(config, COLUMNS)


def means(result: GridResult, *columns: str, near: bool | None = None) -> Panel:
    """Return the panel of the mean of some columns, of far or of near data sets alone where told."""

    def values(row: Row) -> list[float]:
        if near is not None and near != row["data"].endswith("-low"):
            return []
        return result.values(row, columns)

    title = {"outside 0: AUROC": "near classes, AUROC" if near else "other images, AUROC"}
    return Panel(title.get(columns[0], f"{columns[0]}"), values, log=columns[0] in ("NLL", "ECE", "AURC"))


def draw(result: GridResult) -> Figure:
    """Draw how well each method tells other images, near classes and errors, and its probabilities."""
    panels = [
        means(result, "outside 0: AUROC", "outside 1: AUROC", near=False),
        means(result, "outside 0: AUROC", near=True),
        means(result, "error AUROC"),
        means(result, "AURC"),
        means(result, "NLL"),
        means(result, "ECE"),
    ]
    return strips(result.table, panels, "a dot is a trained network, mean of its seeds")


TINY = Problem(network="mlp", width=8, num_train=60, steps=20, batch_size=10)
EXPERIMENT = Experiment(
    "judged_networks",
    GridConfig(GRIDS),
    GridConfig((Grid(("digits",), (TINY,), (0, 1)),), Counts(40, 20, 20, 20)),
    GridResult,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
