"""Wrong labels planted in the training data: which method finds them?"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure

from epk_gp.analysis.measures import ood_metrics
from harness import Experiment, main
from judging import mean_and_std, network_name
from label_suspicion import METHODS, precision_at_k, why_not
from saved_rows import WAITING, Row, asked_for, reasons_once, rounded, row_of, saved_row
from strips import Panel, strips
from uncertainty_problems import Problem, judged, splits, train_unrecorded, wrong_labels

KINDS = ("uniform", "confusing")


@dataclass(frozen=True)
class Config:
    """Networks, the most important ones first, and what is planted."""

    problems: tuple[Problem, ...] = (
        Problem("mnist"),
        Problem("fashion-mnist"),
        Problem("mnist", "cnn", lr=0.2, double=False),
        Problem("fashion-mnist", "cnn", lr=0.2, double=False),
    )
    shares: tuple[float, ...] = (0.1, 0.05, 0.2)
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[str, ...] = tuple(METHODS)


@dataclass(frozen=True)
class Result:
    """The table.

    Attributes:
        table: One entry per data set, network, share, kind and method: mean and standard deviation over seeds of the
            share of planted labels among as many of the most suspicious ones, and of the AUROC.
        left_out: What could not be run, and why.
    """

    table: list[dict[str, Any]]
    left_out: list[str]


def run(config: Config) -> Result:
    """Plant wrong labels, train on them, and rank all labels by every method."""
    table, left_out = [], []
    for share in config.shares:
        for problem in config.problems:
            for kind in KINDS:
                found: dict[str, list[Row]] = {method: [] for method in config.methods}
                for seed in config.seeds:
                    rows, reasons = _rows(replace(problem, seed=seed), share, kind, config.methods)
                    left_out += reasons
                    for method, row in rows.items():
                        found[method].append(row)
                about = {"data": problem.data, "network": network_name(problem), "num_train": problem.num_train}
                about |= {"share": share, "kind": kind}
                table += [about | {"method": method} | _summary(rows) for method, rows in found.items() if rows]
    return Result(table, reasons_once(left_out))


def _summary(rows: list[Row]) -> Row:
    spreads = {name: mean_and_std([row[name] for row in rows]) for name in ("precision", "AUROC")}
    return {"seeds": len(rows), "seconds": round(sum(row["seconds"] for row in rows) / len(rows), 1)} | spreads


def _rows(problem: Problem, share: float, kind: str, methods: tuple[str, ...]) -> tuple[dict[str, Row], list[str]]:
    """Return the rows of one trained network by method, and what was left out and why."""
    about = f"{problem.name}, {share:.0%} {kind},"
    keys = {m: {"problem": asdict(problem), "share": share, "kind": kind, "method": m} for m in methods}
    rows = {m: row for m in methods if (row := saved_row(f"{about} {m}", keys[m])) is not None}
    missing = [m for m in methods if m not in rows and not why_not(m) and asked_for(f"{about} {m}")]
    left_out = [why_not(m) or WAITING for m in methods if m not in rows and m not in missing]
    if missing:
        for method, row in _computed(problem, share, kind, missing):
            rows[method] = row_of(f"{about} {method}", keys[method], lambda row=row: row) or row
            print(f"{about} {method}: precision {row['precision']:.3f}, {row['seconds']:.0f} seconds", flush=True)
    return {m: rows[m] for m in methods if m in rows}, left_out


def _computed(problem: Problem, share: float, kind: str, methods: list[str]) -> Iterator[tuple[str, Row]]:
    train, validation, _ = splits(problem, 0)
    clean = train_unrecorded(problem, validation)  # says which classes are alike, and is not seen by any method
    with torch.no_grad():
        outputs = clean(train.inputs)
    generator = torch.Generator().manual_seed(problem.seed)
    given = wrong_labels(train.labels, share, kind, outputs, generator)
    planted = given != train.labels
    with judged(problem, 0, given) as network:
        for method in methods:
            start = time.process_time()
            scores = METHODS[method](network).double()
            seconds = time.process_time() - start
            yield (
                method,
                rounded(
                    {
                        "precision": precision_at_k(scores, planted),
                        "AUROC": ood_metrics(scores[~planted], scores[planted]).auroc,
                        "seconds": seconds,
                    }
                ),
            )


def draw(result: Result) -> Figure:
    """Draw the share of planted labels found, for every kind and share."""

    def panel(kind: str, share: float) -> Panel:
        title = f"{share * 100:g} % {kind}, precision"
        return Panel(title, lambda row: [row["precision"][0]] if (row["kind"], row["share"]) == (kind, share) else [])

    shares = sorted({row["share"] for row in result.table})
    panels = [panel(kind, share) for kind in KINDS for share in shares]
    return strips(result.table, panels, "a dot is a trained network, mean of its seeds")


TINY = Problem("digits", width=8, num_train=100, steps=30, batch_size=10)
EXPERIMENT = Experiment("label_noise", Config(), Config((TINY,), (0.1,), (0, 1)), Result, run, draw)

if __name__ == "__main__":
    main(EXPERIMENT)
