"""dattri judges: its three metrics on its own MNIST settings, with its own retrainings and their fresh seeds.

Usage: python benchmarks/attribution/dattri_judges.py [--out PATH] [--rows FOLDER] [--removed 100]

Writes rows {system, judge, data, number, deviation, unit, cost_seconds, note}.
Scores and retrainings are saved one by one.
"""

import json
import re
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer

sys.path.append(str(Path(__file__).parents[1]))

from processes import HERE
from retraining import retraining_seconds
from rows import Row, Rows
from run import Pythons, python_of, scores_of
from scores import PACKAGES, SCORES, Score, Trained, computed, peer_process
from settings import SETTINGS, Problem, Setting
from torch import Tensor

import epk_gp as epk
from epk_gp.provenance import Stopwatch, provenance

GROUP = 20  # networks that dattri retrains in one process; those of all groups have the seeds of one long run
MISLABELLED = 1000  # samples, a tenth of them with a wrong label, as in dattri's example
LDS, LOO, MISLABEL = "dattri, LDS (fresh seeds)", "dattri, leave-one-out correlation", "dattri, AUC of wrong labels"
UNITS = {LDS: "Spearman's correlation", LOO: "Pearson's correlation", MISLABEL: "area under the curve"}
ASKED = (
    "influence (epk_gp)", "smoothed influence, weights 0 to 1 (epk_gp)", "contributions (epk_gp)", "TracIn (dattri)",
    "TRAK-1 (dattri)", "TRAK-10 (dattri)", "influence functions by EK-FAC (dattri)",
    "influence functions by CG (dattri)", "random",
)  # fmt: skip
TOO_SLOW = {  # half an hour and more on dattri's MLP
    "mlp": (
        "smoothed influence, weights 0 to 1 (epk_gp)", "contributions (epk_gp)", "influence functions by CG (dattri)",
    )
}  # fmt: skip
Judged = list[dict[str, Any]]


def main(
    out: Annotated[Path, typer.Option(help="Path of the rows.")] = HERE / "outside" / "dattri.json",
    rows: Annotated[Path, typer.Option(help="Folder of what is saved.")] = HERE / "attribution" / ".rows",
    environments: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = HERE / ".venvs",
    subsets: Annotated[int, typer.Option(help="Random halves.")] = 100,
    removed: Annotated[int, typer.Option(help="Samples that are left out, one at a time; 0 for none.")] = 100,
    points: Annotated[int, typer.Option(help="Test samples, the first ones.")] = 20,
    runs: Annotated[int, typer.Option(help="Recorded runs over which the derivative is averaged as well.")] = 3,
    networks: Annotated[str, typer.Option(help="Which of dattri's two networks.")] = "logistic mlp",
    only: Annotated[str, typer.Option(help="Regular expression: names of what is computed; all is, by default.")] = "",
) -> None:
    """Ask dattri about scores of both networks, and write its answers."""
    torch.set_num_threads(1)
    timer, saved, repeats = Stopwatch(), Rows(rows, only), "one recorded run"
    pythons: Pythons = {name: python_of(environments / name, PACKAGES[name]) for name in ("dattri",)}
    if isinstance(dattri := pythons["dattri"], str):
        raise typer.BadParameter(f"dattri must be installed to judge: {dattri}")
    asked_for = [setting for setting in SETTINGS if setting.network in networks.split()]
    names = [setting.name for setting in asked_for]
    before = json.loads(out.read_text())["rows"] if out.is_file() else []
    judged: Judged = [row for row in before if row["data"] not in names]
    config = {"points": points, "runs": runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    for setting in asked_for:
        judged += by_retraining(setting, saved, pythons, dattri, subsets, removed, points, runs)
        judged += by_wrong_labels(setting, saved, pythons, dattri)
        head = provenance(timer) | {"date": datetime.now(UTC).date().isoformat(), "repeats": repeats, "config": config}
        content = {"head": head | {"packages": PACKAGES["dattri"]}, "rows": judged}
        out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        typer.echo(f"written: {out}")


def asked(setting: Setting) -> list[Score]:
    """Return the scores that are computed for a setting."""
    slow = TOO_SLOW.get(setting.network, ())
    return [score for score in SCORES if score.name in ASKED and score.name not in slow]


def by_retraining(
    setting: Setting, saved: Rows, pythons: Pythons, dattri: Path, subsets: int, removed: int, points: int, runs: int
) -> Judged:
    """Return LDS and leave-one-out correlation of scores for the first test samples."""
    problem = Problem(setting, 0)
    scores = "|".join(re.escape(score.name) for score in asked(setting))
    only = saved if saved.only else replace(saved, only=f": ({scores})$")
    found = {name: row for name, row in scores_of(problem, points, only, pythons).items() if "scores" in row}
    once = saved.get(f"{problem.name}: seconds", _key(setting), lambda: {"seconds": retraining_seconds(problem)})
    retrainings = {score.name: score.retrainings * (once or {})["seconds"] for score in SCORES}
    if runs > 1 and setting.network not in TOO_SLOW:
        found[f"influence, mean of {runs} runs (epk_gp)"] = _mean_of_runs(setting, saved, pythons, points, runs)
    data = problem.data()
    job = {"network": setting.network, "X": data.X, "y": data.y, "X_test": data.X_test, "y_test": data.y_test}
    truths = {
        LDS: _truth(setting, saved, dattri, job, "lds truth", list(range(0, subsets, GROUP)), min(GROUP, subsets)),
    }
    if removed:
        truths[LOO] = _truth(
            setting, saved, dattri, job, "loo truth", list(range(0, removed, GROUP)), min(GROUP, removed)
        )
    judged = []
    for judge, truth in truths.items():
        options = {(name, o): s for name, row in found.items() for o, s in row["scores"].items()}
        answers = _metrics(dattri, "lds" if judge == LDS else "loo", [*options.values()], {"truth": truth})
        for name, row in found.items():
            own = {o: a for (other, o), a in zip(options, answers, strict=True) if other == name}
            best = max(own, key=lambda option: float(own[option].nanmean()))
            values = own[best].nan_to_num(0.0)[:points].tolist()
            cost = row["seconds"][best] + retrainings.get(name, 0.0)
            error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            trained = f"{subsets} halves" if judge == LDS else f"{removed} networks without one image"
            note = f"± {error:.3f} over {len(values)} test images; {trained}"
            note += f"; {best}, the best of its options" if best else ""
            judged.append(_row(name, judge, setting.name, mean(values), cost, note))
    return judged


def by_wrong_labels(setting: Setting, saved: Rows, pythons: Pythons, dattri: Path) -> Judged:
    """Return the area under the curve of scores of the samples for themselves: a tenth of the labels is wrong."""
    setting = replace(setting, name=f"{setting.name}, wrong labels", num_train=MISLABELLED)
    problem = Problem(setting, 0, flipped=True)
    names = ["self-influence (epk_gp)", *(s.name for s in SCORES if s.name in ("TracIn (dattri)", "TRAK-1 (dattri)"))]
    rows = {name: f"{problem.name}: own {name}" for name in names}
    kept = {name: saved.saved(row, _key(setting)) for name, row in rows.items()}
    if any(kept[name] is None and saved.asked_for(row) for name, row in rows.items()):
        trained = Trained(problem, 1)
        trained.X_test, trained.y_test = trained.data.X, trained.data.y
        with tempfile.TemporaryDirectory() as folder:
            trained.save_job(job := Path(folder) / "job.pt")
            for name, row in rows.items():
                kept[name] = saved.get(row, _key(setting), lambda name=name: _own(name, trained, pythons, job))
    found = {name: row for name, row in kept.items() if row is not None and "scores" in row}
    answers = _metrics(dattri, "mislabel", [row["scores"] for row in found.values()], {"wrong": problem.wrong()})
    note = f"{MISLABELLED} images, a tenth with a wrong label"
    return [
        _row(name, MISLABEL, setting.name.removesuffix(", wrong labels"), float(answer), row["seconds"], note)
        for (name, row), answer in zip(found.items(), answers, strict=True)
    ]


def _own(name: str, trained: Trained, pythons: Pythons, job: Path) -> Row:
    """Return scores of the samples for themselves, larger where a sample owes its output to itself alone."""
    if name.startswith("self-influence"):
        before = time.process_time()
        own = epk.influence(trained.run, own=True).values[:, 0, 0]
        return {"scores": -own, "seconds": time.process_time() - before}
    row = computed(next(score for score in SCORES if score.name == name), trained, pythons, job)
    if "failure" in row:
        return row
    option = next(iter(row["scores"]))
    return {"scores": row["scores"][option].diagonal().clone(), "seconds": row["seconds"][option]}


def _mean_of_runs(setting: Setting, saved: Rows, pythons: Pythons, points: int, runs: int) -> Row:
    """Average the derivative over recorded runs of other seeds: dattri's retrainings have seeds of their own."""
    only = replace(saved, only=r": influence \(epk_gp\)$")
    found = [scores_of(Problem(setting, seed), points, only, pythons)["influence (epk_gp)"] for seed in range(runs)]
    scores = torch.stack([row["scores"][""] for row in found]).mean(0)
    return {"scores": {"": scores}, "seconds": {"": sum(row["seconds"][""] for row in found)}}


def _truth(
    setting: Setting, saved: Rows, dattri: Path, job: Row, method: str, starts: list[int], count: int
) -> dict[str, Tensor]:
    """Return dattri's outcomes of retraining, group by group."""
    parts = []
    for start in starts:
        seeds = {"start": start, "count": count} if method == "lds truth" else {"start": 0}
        group = job | seeds | {"removed": list(range(start, start + count))}
        name = f"{setting.name}: dattri's {method} from {start}"
        row = saved.get(name, _key(setting) | {"count": count}, lambda group=group: _asked(dattri, method, group))
        if row is None or "failure" in row:
            raise RuntimeError(f"{name}: {row}")
        parts.append(row)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if key != "seconds"}


def _metrics(dattri: Path, metric: str, scores: list[Tensor], truth: Row) -> list[Tensor]:
    named = {str(number): (own.T if own.ndim > 1 else own).contiguous() for number, own in enumerate(scores)}
    answers = _asked(dattri, "metrics", {"metric": metric, "scores": named} | truth)
    return [answers[str(number)] for number in range(len(scores))]


def _asked(dattri: Path, method: str, job: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(job, file := Path(folder) / "job.pt")
        return peer_process(dattri, "dattri_metrics.py", method, file)


def _key(setting: Setting) -> Row:
    return {"setting": repr(setting)}


def _row(system: str, judge: str, data: str, number: float, cost: float, note: str) -> dict[str, Any]:
    return {
        "system": system, "judge": judge, "data": data, "number": round(number, 4), "deviation": None,
        "unit": UNITS[judge], "cost_seconds": round(cost, 2), "note": note,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
