"""`epk-gp audit`: the training labels of a run, ranked by how suspicious they are."""

import csv
from pathlib import Path

import typer
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors, label_errors
from epk_gp.cli.manifest import open_run
from epk_gp.cli.parsing import make_folder, memory_bytes, parse_features, parse_path
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.gp.data import training_labels
from epk_gp.plots.scores import suspicious_labels_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_json

_COLUMNS = ("rank", "index", "label", "expected", "score", "margin", "own_label", "log_probability", "aum")


def audit(
    *,
    run: Path,
    out: Path,
    top: int,
    features: str | None,
    nodes: int | None,
    path: str,
    memory: float,
    network: str | None,
    workers: int | None,
    scheduler: str | None,
    seed: int,
    quiet: bool,
) -> None:
    """Write the table of all training labels, print and draw its first rows."""
    require_one_executor(workers, scheduler)
    timer, asked, along = Stopwatch(), parse_features(features), parse_path(path)
    trajectory = open_run(run, network)
    labels = training_labels(trajectory, "audit")
    folder = make_folder(out)
    with open_executor(workers, scheduler) as executor:
        found = label_errors(
            trajectory,
            nodes=nodes,
            features=asked,
            seed=seed,
            path=along,
            memory_budget=memory_bytes(memory),
            progress=not quiet,
            executor=executor,
        )
    rows = _rows(found, labels)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    save_figure(suspicious_labels_figure(found, trajectory.inputs, labels, top), folder / "audit.png")
    others = int((found.predicted != labels[found.points]).sum())
    config = {"run": run, "top": top, "features": features, "nodes": nodes, "path": path, "seed": seed}
    config |= {"workers": workers, "scheduler": scheduler}
    results = {"num_points": len(rows), "another_class_expected": others, "first": rows[:top]}
    write_json(folder / "audit.json", "audit", config, results, timer)
    for line in _table(rows[:top]):
        typer.echo(line)
    typer.echo(f"another class than the label is expected at {others} of {len(rows)} training points")
    typer.echo(f"written to {folder}: labels.csv, audit.json, audit.png ({timer.total:.1f} s)")


def _rows(found: LabelErrors, labels: Tensor) -> list[dict[str, object]]:
    """Return one row per training point, the most suspicious label first."""
    rows, place = [], {point: row for row, point in enumerate(found.points.tolist())}
    values = (found.predicted, found.scores, found.margin, found.own_label, found.log_probability, found.aum)
    for rank, i in enumerate(found.indices.tolist(), start=1):
        own = (rank, i, int(labels[i]), *(value[place[i]].item() for value in values))
        rows.append(dict(zip(_COLUMNS, own, strict=True)))
    return rows


def _table(rows: list[dict[str, object]]) -> list[str]:
    head = f"{'rank':>5}{'index':>8}{'label':>7}{'expected':>10}{'score':>8}{'margin':>9}{'own label':>11}{'AUM':>9}"
    return [head] + [
        f"{r['rank']:>5}{r['index']:>8}{r['label']:>7}{r['expected']:>10}{r['score']:>8.3f}{r['margin']:>9.2f}"
        f"{r['own_label']:>11.2f}{r['aum']:>9.2f}"
        for r in rows
    ]
