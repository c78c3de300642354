"""Data attribution on the field's own problems, beside its own packages: JSON and Markdown.

Usage: python benchmarks/attribution/run.py [--out PATH] [--rows FOLDER] [--only REGEX]

Every row (a group of retrained networks, or one score of one trained network) is saved as soon as it is computed. The
tables hold what is saved, or else what they held before, and say what is not there.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

from agreement import area_under_roc, linear_datamodeling_score, mean_rank_correlation
from processes import HERE, environment
from report import markdown
from retraining import retraining_seconds
from rows import WAITING, Row, Rows
from scores import PACKAGES, SCORES, Score, Trained, computed, peer_process
from settings import SETTINGS, TINY, Problem, Setting
from truth import ALPHAS, brittleness, leave_one_out, outcomes, problem_key

from epk_gp.provenance import Stopwatch, provenance

Pythons = dict[str, Path | str]  # by environment: its interpreter, or why there is none


def main(
    out: Annotated[Path, typer.Option(help="Path of the tables, without a suffix.")] = HERE / "attribution" / "results",
    rows: Annotated[Path, typer.Option(help="Folder of the rows.")] = HERE / "attribution" / ".rows",
    only: Annotated[str, typer.Option(help="Regular expression: names of the rows that are computed.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds.")] = 3,
    subsets: Annotated[int, typer.Option(help="Random subsets of each size.")] = 100,
    environments: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = HERE / ".venvs",
    peers: Annotated[bool, typer.Option(help="Whether peers run.")] = True,
    tiny: Annotated[bool, typer.Option(help="Problems of a second, for the tests.")] = False,
) -> None:
    """Compute the rows that are asked for, and write the tables of all that are saved."""
    torch.set_num_threads(1)
    timer, saved = Stopwatch(), Rows(rows, only)
    pythons: Pythons = dict.fromkeys(PACKAGES, "not asked for")
    if peers:
        pythons = {name: python_of(environments / name, packages) for name, packages in PACKAGES.items()}
    settings = TINY if tiny else SETTINGS
    judged = [
        row for setting in settings for seed in range(seeds) for row in _rows(setting, seed, subsets, saved, pythons)
    ]
    explained = {setting.name: Problem(setting, 0).num_explained for setting in settings}
    config = {"seeds": seeds, "subsets": subsets, "points": explained}
    content = {
        "experiment": "attribution_benchmarks",
        "config": config,
        "results": {"table": _with_earlier(judged, out.with_suffix(".json"), config)},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(content | provenance(timer), allow_nan=False, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(content["results"]["table"]))
    typer.echo(f"written: {out.with_suffix('.json')}, {out.with_suffix('.md')}")


def _with_earlier(judged: list[dict[str, Any]], file: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Put what an earlier table holds in the place of what is not computed: retraining gives the same truth."""
    if not file.is_file():
        return judged
    content = json.loads(file.read_text())
    before = content["config"]
    if before["subsets"] != config["subsets"]:
        return judged
    earlier = {
        (row["setting"], row["seed"], row["score"]): row
        for row in content["results"]["table"]
        if before["points"].get(row["setting"]) == config["points"].get(row["setting"]) and "seconds" in row
    }
    return [
        earlier.get((row["setting"], row["seed"], row["score"]), row) if row.get("failure") == WAITING else row
        for row in judged
    ]


def _rows(setting: Setting, seed: int, subsets: int, saved: Rows, pythons: Pythons) -> list[dict[str, Any]]:
    """Return the judged scores of one trained network."""
    clean, flipped = Problem(setting, seed), Problem(setting, seed, flipped=True)
    truths = {}
    for alpha in ALPHAS:
        drawn = clean.subsets(alpha, subsets)
        truths[alpha] = drawn, outcomes(clean, f"LDS {alpha}", drawn, saved)
    without = leave_one_out(clean, saved) if setting.small else None
    retraining = saved.get(f"{clean.name}: seconds", problem_key(clean), lambda: _seconds(clean))
    found = scores_of(clean, clean.num_explained, saved, pythons)
    on_flipped = scores_of(flipped, setting.num_train, saved, pythons) if setting.small else {}
    options = {name: _best(row["scores"], truths[ALPHAS[0]]) for name, row in found.items() if "scores" in row}
    detection = _class_detection(
        clean, {name: found[name]["scores"][best] for name, best in options.items()}, saved, pythons
    )
    judged = []
    for score in SCORES:
        row: dict[str, Any] = {"setting": setting.name, "seed": seed, "score": score.name}
        row |= {"retrainings": score.retrainings, "retraining": retraining and retraining["seconds"]}
        own = found[score.name]
        if "failure" in own:
            judged.append(row | own)
            continue
        option = options[score.name]
        values = own["scores"][option]
        row |= {"option": option, "seconds": own["seconds"][option]}
        most = min(clean.num_explained, setting.num_test)
        few = min(score.num_explained(clean, most) for score in SCORES)
        for alpha, (drawn, true) in truths.items():
            if true is not None:
                if len(values) == most:
                    row[f"LDS {alpha}"] = linear_datamodeling_score(values, drawn, true)
                if few < most:
                    row[f"LDS {alpha} of few"] = linear_datamodeling_score(values[:few], drawn, true)
        row["leave-one-out"] = None if without is None else mean_rank_correlation(values, without.T[: len(values)])
        row["brittleness"] = brittleness(clean, score.name, values, saved) if setting.small else None
        row["class detection"] = detection.get(score.name)
        noisy = on_flipped.get(score.name, {"failure": WAITING})
        if "scores" in noisy and option in noisy["scores"]:
            suspected = flipped.suspected()
            own_values = noisy["scores"][option].gather(1, suspected[:, None]).squeeze(1)
            row["wrong labels"] = area_under_roc(own_values, flipped.wrong()[suspected])
        judged.append(row)
    return judged


def _best(scores: dict[str, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor | None]) -> str:
    """Choose the option on the answer, as dattri's own benchmark does: in favour of whoever has options."""
    drawn, true = truth
    if true is None:
        return next(iter(scores))
    return max(scores, key=lambda option: linear_datamodeling_score(scores[option], drawn, true))


def scores_of(problem: Problem, points: int, saved: Rows, pythons: Pythons) -> dict[str, Row]:
    """Return all scores of a trained network: those that are saved, and those that are asked for."""
    problem_is = problem_key(problem)
    keys = {score.name: problem_is | {"points": score.num_explained(problem, points)} for score in SCORES}
    found: dict[str, Row] = {}
    needed: list[Score] = []
    for score in SCORES:
        name = f"{problem.name}: {score.name}"
        row = saved.saved(name, keys[score.name])
        if why := score.left_out(problem):
            found[score.name] = {"failure": why}
        elif row is not None:
            found[score.name] = row
        elif not saved.asked_for(name):
            found[score.name] = {"failure": WAITING}
        elif score.peer is not None and isinstance(why := pythons[score.peer[0]], str):
            found[score.name] = {"failure": why}
        else:
            needed.append(score)
    if not needed:
        return found
    trained = Trained(problem, points)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pt"
        if any(score.peer for score in needed):
            trained.save_job(job)
        for score in tqdm(needed, desc=problem.name, disable=None):
            name = f"{problem.name}: {score.name}"
            row = saved.get(name, keys[score.name], lambda score=score: computed(score, trained, pythons, job))
            found[score.name] = row or {"failure": WAITING}
    return found


def _class_detection(
    problem: Problem, scores: dict[str, torch.Tensor], saved: Rows, pythons: Pythons
) -> dict[str, float]:
    """Return quanda's share of the five highest samples that have the test sample's class."""
    data, python = problem.data(), pythons["quanda"]
    if not scores or isinstance(python, str) or data.y.ndim > 1:
        return {}

    def compute() -> Row:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.pt"
            torch.save({"X": data.X, "y": data.y, "y_test": data.y_test, "scores": scores}, job)
            return peer_process(python, "quanda_metrics.py", "", job)

    sums = {name: float(values.double().abs().sum()) for name, values in scores.items()}
    row = saved.get(f"{problem.name}: quanda", problem_key(problem) | {"scores": sums}, compute) or {}
    return row.get("class detection", {})


def _seconds(problem: Problem) -> Row:
    return {"seconds": min(retraining_seconds(problem) for _ in range(2))}


def python_of(folder: Path, packages: list[str]) -> Path | str:
    """Make an environment, and return its interpreter, or why there is none."""
    try:
        return environment(folder, packages)
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    typer.run(main)
