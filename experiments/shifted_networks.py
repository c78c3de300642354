"""What becomes of confidence when images are rotated, noisy, blurred or attacked: our process beside its peers."""

from matplotlib.figure import Figure

from harness import Experiment, main
from judged_networks import FAR, NETWORKS, TINY
from judging import Columns, Counts, Grid, GridConfig, GridResult, run_grids
from strips import Panel, strips
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


def run(config: GridConfig) -> GridResult:
    """Train every network, and let every method judge it; the rows are those of judged_networks.py."""
    return run_grids(config, COLUMNS)


def draw(result: GridResult) -> Figure:
    """Draw errors found and likelihoods under shifts, and errors and attacks found under attack."""

    def panel(title: str, *columns: str) -> Panel:
        return Panel(title, lambda row: result.values(row, columns), log="NLL" in title)

    names = list(SHIFTS)
    panels = [
        *(panel(f"{name}, NLL", f"{name}, NLL") for name in (names[1], names[3], names[4])),
        panel("shifts, error AUROC", *(f"{name}, error AUROC" for name in names)),
        panel("PGD, error AUROC", *(f"PGD {eps}, error AUROC" for eps in EPS)),
        panel("PGD, detection AUROC", *(f"PGD {eps}, detection AUROC" for eps in EPS)),
    ]
    return strips(result.table, panels, "a dot is a trained network and shift, mean of its seeds")


EXPERIMENT = Experiment(
    "shifted_networks",
    GridConfig((Grid(FAR, NETWORKS, (0, 1, 2)),)),
    GridConfig((Grid(("digits",), (TINY,), (0, 1)),), Counts(40, 20, 20, 20)),
    GridResult,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
