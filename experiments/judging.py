"""Judge a trained network by a method: one row of the tables of judged and of shifted networks."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from epk_gp.analysis.measures import calibration, error_detection, ood_metrics
from peers import PEERS, Judge, Judgement, logits, why_not
from saved_rows import WAITING, Row, asked_for, reasons_once, rounded, save_row, saved_row
from uncertainty_problems import EPS, OUTSIDE, SHIFTS, Judged, Problem, fgsm, judged, network_of, outside_images, pgd


@dataclass(frozen=True)
class Counts:
    """Numbers of images that are judged: of the test files, of each other set, of each shift and of each attack."""

    test: int = 2000
    outside: int = 1000
    shifted: int = 1000
    attacked: int = 500


@dataclass(frozen=True)
class ImageSets:
    """All images on which every method is asked, and what the network says there.

    Attributes:
        images: By name: "test", "outside …", "shift …" and "attack …".
        labels: True classes, where there are any.
        wrong: Whether the network is wrong, where there are labels.
    """

    images: dict[str, Tensor]
    labels: dict[str, Tensor]
    wrong: dict[str, Tensor]


def rows_of(problem: Problem, counts: Counts, methods: Sequence[str]) -> tuple[dict[str, Row], list[str]]:
    """Return the rows of one trained network by method, and what was left out and why.

    Rows that are saved are read; the network is trained once if any other is asked for.
    """
    rows: dict[str, Row] = {}
    left_out, missing = [], []
    for method in methods:
        name, key = _identity(problem, counts, method)
        reason = why_not(method, problem)
        if (row := saved_row(name, key)) is not None:
            rows[method] = row
        elif reason is not None:
            left_out.append(reason)
        elif asked_for(name):
            missing.append(method)
        else:
            left_out.append(WAITING)
    if missing:
        with judged(problem, counts.test) as network:
            sets = _image_sets(network, counts)
            for method in missing:
                name, key = _identity(problem, counts, method)
                try:
                    rows[method] = _row(network, sets, method)
                except (RuntimeError, ValueError) as error:  # of one method: the other rows take hours and are kept
                    left_out.append(f"{name}: failed, {type(error).__name__}: {error}")
                else:
                    save_row(name, key, rows[method])
                    seconds = rows[method]["seconds"]
                    print(f"{name}: {seconds['fit']:.0f} + {seconds['judge']:.0f} processor seconds", flush=True)
    return {method: rows[method] for method in methods if method in rows}, left_out


def _identity(problem: Problem, counts: Counts, method: str) -> tuple[str, Row]:
    return f"{problem.name}, {method}", {"problem": asdict(problem), "counts": asdict(counts), "method": method}


def _image_sets(network: Judged, counts: Counts) -> ImageSets:
    problem, test = network.problem, network.test
    net, generator = network_of(network), network.generator()
    images, labels = {"test": test.inputs}, {"test": test.labels}
    for name in OUTSIDE[problem.data]:
        images[f"outside {name}"] = outside_images(name, counts.outside, problem)
    for name, shift in SHIFTS.items():
        images[f"shift {name}"] = shift(test.inputs[: counts.shifted], generator)
        labels[f"shift {name}"] = test.labels[: counts.shifted]
    X, y = test.inputs[: counts.attacked], test.labels[: counts.attacked]
    for eps in EPS:
        images[f"attack FGSM {eps}"] = fgsm(net, X, y, eps)
        images[f"attack PGD {eps}"] = pgd(net, X, y, eps, generator)
        labels |= {f"attack {kind} {eps}": y for kind in ("FGSM", "PGD")}
    wrong = {name: logits(network, images[name]).argmax(1) != classes for name, classes in labels.items()}
    return ImageSets(images, labels, wrong)


def _row(network: Judged, sets: ImageSets, method: str) -> Row:
    start = time.process_time()
    judge = PEERS[method](network)
    fitted = time.process_time()
    said = _in_one_go(judge, sets.images)
    seconds = {"fit": fitted - start, "judge": time.process_time() - fitted}
    row: Row = {"seconds": seconds, "images": sum(map(len, sets.images.values())), "scores": list(said["test"].outside)}
    row["sets"] = {name: _measures(name, said, sets) for name in sets.images}
    return rounded(row)


def _in_one_go(judge: Judge, images: dict[str, Tensor]) -> dict[str, Judgement]:
    """Judge all images in one call, so that what a method computes per call is computed once."""
    whole, sizes = judge(torch.cat(list(images.values()))), [len(X) for X in images.values()]
    p = [None] * len(sizes) if whole.probability is None else whole.probability.split(sizes)
    outside = {name: score.split(sizes) for name, score in whole.outside.items()}
    return {
        name: Judgement(error, {score: parts[i] for score, parts in outside.items()}, p[i])
        for i, (name, error) in enumerate(zip(images, whole.error.split(sizes), strict=True))
    }


def _measures(name: str, said: dict[str, Judgement], sets: ImageSets) -> dict[str, Any]:
    """Measure how well a method tells these images from test images, finds errors on them, and predicts them."""
    here, measures = said[name], {}
    if name != "test":
        for score, values in here.outside.items():
            metrics = ood_metrics(said["test"].outside[score], values)
            measures |= {f"{score}: AUROC": metrics.auroc, f"{score}: FPR95": metrics.fpr95}
    if name in sets.wrong:
        errors = error_detection(here.error, sets.wrong[name])
        measures |= {"error AUROC": errors.auroc, "AURC": errors.aurc}
        measures["network's accuracy"] = 1 - float(sets.wrong[name].double().mean())
        if here.probability is not None:
            quality = calibration(here.probability, sets.labels[name])
            measures |= {"accuracy": quality.accuracy, "NLL": min(quality.nll, 1e3), "ECE": quality.ece}
            confidence, own = here.probability.max(1)
            measures["own AURC"] = error_detection(1 - confidence, own != sets.labels[name]).aurc
    return measures


@dataclass(frozen=True)
class Grid:
    """The trained networks of a table: every data set with every network and size, and every seed.

    Attributes:
        data: Names of data sets.
        problems: Networks and sizes; data set and seed are set from the others.
        seeds: Seeds.
    """

    data: tuple[str, ...]
    problems: tuple[Problem, ...]
    seeds: tuple[int, ...]

    def cells(self) -> list[list[Problem]]:
        """Return one list per data set, network and size: the problem with every seed."""
        return [
            [replace(problem, data=data, seed=seed) for seed in self.seeds]
            for problem in self.problems
            for data in self.data
        ]


# A column of a table: images, and what is measured there. "outside 0" is the first of the other data sets, and
# "score 0" the method's main score.
Columns = dict[str, tuple[str, str]]


def table_of(
    grids: Sequence[Grid], counts: Counts, methods: Sequence[str], columns: Columns
) -> tuple[list[Row], list[str]]:
    """Compute the rows of every trained network, and average them over the seeds.

    Returns:
        One entry per data set, network, size and method: mean and standard deviation of each column; None where a
        method has no such number, or where all predictions are wrong. And what was left out, and why.
    """
    table, left_out = [], []
    for cell in (cell for grid in grids for cell in grid.cells()):
        found: dict[str, list[Row]] = {method: [] for method in methods}
        for problem in cell:
            rows, reasons = rows_of(problem, counts, methods)
            left_out += reasons
            for method, row in rows.items():
                found[method].append(row)
        table += [_entry(cell[0], method, rows, columns) for method, rows in found.items() if rows]
    return table, reasons_once(left_out)


@dataclass(frozen=True)
class GridConfig:
    """Networks and numbers of images, the most important ones first."""

    grids: tuple[Grid, ...]
    counts: Counts = field(default_factory=Counts)
    methods: tuple[str, ...] = tuple(PEERS)


@dataclass(frozen=True)
class GridResult:
    """The table.

    Attributes:
        columns: What is measured.
        table: One entry per data set, network, size and method: mean and standard deviation over seeds of each column.
        left_out: What could not be run, and why.
    """

    columns: list[str]
    table: list[Row]
    left_out: list[str]

    def values(self, row: Row, columns: Sequence[str]) -> list[float]:
        """Return the means of some columns in an entry of the table, where it has them."""
        entries = [row["values"][self.columns.index(column)] for column in columns]
        return [entry[0] for entry in entries if entry]


def run_grids(config: GridConfig, columns: Columns) -> GridResult:
    """Train every network, and let every method judge it."""
    table, left_out = table_of(config.grids, config.counts, config.methods, columns)
    return GridResult(list(columns), table, left_out)


def network_name(problem: Problem) -> str:
    """Name a network as tables do."""
    return f"MLP {problem.width}" if problem.network == "mlp" else problem.network.upper()


def _entry(problem: Problem, method: str, rows: list[Row], columns: Columns) -> Row:
    return {
        "data": problem.data,
        "network": network_name(problem),
        "num_train": problem.num_train,
        "method": method,
        "seeds": len(rows),
        "seconds": round(sum(sum(row["seconds"].values()) for row in rows) / len(rows), 1),
        "values": [mean_and_std([_value(problem, row, *column) for row in rows]) for column in columns.values()],
    }


def _value(problem: Problem, row: Row, images: str, measure: str) -> float | None:
    kind, _, number = images.partition(" ")
    name = f"outside {OUTSIDE[problem.data][int(number)]}" if kind == "outside" else images
    score, _, rest = measure.partition(": ")
    if rest:
        number = int(score.removeprefix("score "))
        measure = f"{row['scores'][number]}: {rest}" if number < len(row["scores"]) else ""
    value: float | None = row["sets"][name].get(measure)
    return value


def mean_and_std(values: list[float | None]) -> list[float] | None:
    """Return mean and standard deviation (0 of one value), or None if a seed has no value."""
    if None in values:
        return None
    known = torch.tensor(values, dtype=torch.float64)
    return [float(f"{known.mean():.4g}"), float(f"{known.std(correction=min(1, len(known) - 1)):.2g}")]
