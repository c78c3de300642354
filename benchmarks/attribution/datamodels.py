"""What networks say after training on other samples, predicted from one recorded run, and by peers: JSON and Markdown.

Usage: python benchmarks/attribution/datamodels.py [--out PATH] [--rows FOLDER] [--only REGEX]

Every row (a group of retrained networks, or one system on one trained network) is saved as soon as it is computed. The
tables hold what is saved, or else what they held before, and say what is not there.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

from agreement import bootstrap_interval, mean_rank_correlation
from datamodel_systems import SYSTEMS, Asked, System, computed
from processes import HERE
from report import datamodels_markdown
from rows import WAITING, Row, Rows
from run import Pythons, python_of
from scores import PACKAGES
from settings import DATAMODELS, TINY_DATAMODELS, Problem, Setting
from torch import Tensor
from truth import outcomes, problem_key

from epk_gp.provenance import Stopwatch, provenance

HALF, MOST, SINGLE, FRESH = "half", "90 %", "leave-one-out", "half, fresh seeds"
FIRST = "half, first questions"  # those whose derivatives are computed
NUM_SINGLE = 60  # samples that are left out alone, drawn at random
WITH_FRESH = ("digits",)
Truth = dict[str, tuple[Tensor, Tensor | None]]  # by kind: sample weights (s, M), and outcomes (s, n) where they are


def main(
    out: Annotated[Path, typer.Option(help="Path of the tables, without a suffix.")] = HERE
    / "attribution"
    / "datamodels",
    rows: Annotated[Path, typer.Option(help="Folder of the rows.")] = HERE / "attribution" / ".rows",
    only: Annotated[str, typer.Option(help="Regular expression: names of the rows that are computed.")] = "",
    subsets: Annotated[int, typer.Option(help="Random subsets of each size.")] = 100,
    environments: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = HERE / ".venvs",
    peers: Annotated[bool, typer.Option(help="Whether peers run.")] = True,
    tiny: Annotated[bool, typer.Option(help="Problems of a second, for the tests.")] = False,
) -> None:
    """Compute the rows that are asked for, and write the tables of all that are saved."""
    torch.set_num_threads(1)
    timer, saved = Stopwatch(), Rows(rows, only)
    needed = list(dict.fromkeys(system.peer[0] for system in SYSTEMS if system.peer))
    pythons: Pythons = dict.fromkeys(needed, "not asked for")
    if peers:
        pythons = {name: python_of(environments / name, PACKAGES[name]) for name in needed}
    settings = TINY_DATAMODELS if tiny else DATAMODELS
    judged = [
        row
        for setting, seeds in settings.items()
        for seed in range(seeds)
        for row in _rows(Problem(setting, seed), subsets, saved, pythons)
    ]
    config = {"subsets": subsets, "single": NUM_SINGLE, "packages": {name: PACKAGES[name][1] for name in needed}}
    table = _with_earlier(judged, out.with_suffix(".json"), config)
    content = {
        "experiment": "datamodels",
        "config": config,
        "results": {"problems": [_sizes(setting) for setting in settings], "table": table},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(content | provenance(timer), allow_nan=False, indent=1) + "\n")
    out.with_suffix(".md").write_text(datamodels_markdown(content["results"]))
    typer.echo(f"written: {out.with_suffix('.json')}, {out.with_suffix('.md')}")


def sample_weights(problem: Problem, subsets: int) -> dict[str, Tensor]:
    """Return the weights of the samples in the networks of each truth, (s, M)."""
    size = problem.setting.num_train
    single = torch.randperm(size, generator=problem.generator(8))[:NUM_SINGLE]
    halves = problem.subsets(0.5, subsets)
    found = {HALF: halves, MOST: problem.subsets(0.9, subsets), SINGLE: 1 - torch.eye(size)[single]}
    return found | ({FRESH: halves} if problem.setting.name in WITH_FRESH else {})


def _rows(problem: Problem, subsets: int, saved: Rows, pythons: Pythons) -> list[Row]:
    """Return the judged systems of one trained network."""
    weights = sample_weights(problem, subsets)
    fresh = [1000 * (problem.seed + 1) + k for k in range(subsets)]
    truth = {
        kind: (W, outcomes(problem, kind, W, saved, seeds=fresh if kind == FRESH else None))
        for kind, W in weights.items()
    }
    asked = Asked(problem, weights)
    systems = [system for system in SYSTEMS if not system.left_out(problem)]
    return [_judged(system, asked, truth, saved, pythons) for system in tqdm(systems, desc=problem.name, disable=None)]


def _judged(system: System, asked: Asked, truth: Truth, saved: Rows, pythons: Pythons) -> Row:
    """Return what one system's predictions are worth, and what they cost."""
    problem = asked.problem
    row: Row = {"problem": problem.setting.name, "seed": problem.seed, "system": system.name}
    key = problem_key(problem) | {"subsets": len(truth[HALF][0])}
    if system.peer:
        key |= {"package": PACKAGES[system.peer[0]]}
    found = saved.get(f"{problem.name}: {system.name}", key, lambda: computed(system, asked, pythons))
    if found is None or "failure" in found:
        return row | {"failure": WAITING if found is None else found["failure"]}
    predicted = {option: _predictions(found, option, truth) for option in found["seconds"]}
    option = _best(predicted, truth)
    seconds = found["seconds"][option]
    row |= {"option": option, "questions": len(predicted[option][HALF]), "seconds": seconds}
    row |= {"training": found["training"], "trainings": seconds / found["training"] + system.networks}
    row |= {name: found[name] for name in ("parts",) if name in found}
    for kind, (_, true) in truth.items():
        if true is not None:
            own = predicted[option][kind]
            row[kind] = _agreement(own, true)
            if kind == HALF and asked.few < problem.setting.num_test:
                row[FIRST] = _agreement(own[: asked.few], true)
    return row


def _agreement(predicted: Tensor, true: Tensor) -> list[float]:
    """Return the mean rank correlation of predictions (n, s) and networks (s, n or more), and its interval."""
    pair = predicted, true.T[: len(predicted)]
    return [mean_rank_correlation(*pair), *bootstrap_interval(*pair)]


def _predictions(found: Row, option: str, truth: Truth) -> dict[str, Tensor]:
    """Return what is predicted for the networks of each truth, (n, s): sums of scores where they are linear."""
    if "predictions" in found:
        return {kind: values.T for kind, values in found["predictions"][option].items()}
    return {kind: found["scores"][option] @ W.T for kind, (W, _) in truth.items()}


def _best(predicted: dict[str, dict[str, Tensor]], truth: Truth) -> str:
    """Choose the option on the answer, as run.py does: in favour of whoever has options."""
    true = truth[HALF][1]
    if true is None or len(predicted) == 1:
        return next(iter(predicted))
    return max(predicted, key=lambda option: mean_rank_correlation(own := predicted[option][HALF], true.T[: len(own)]))


def _with_earlier(judged: list[Row], file: Path, config: Row) -> list[Row]:
    """Put what an earlier table holds in the place of what is not computed: retraining gives the same truth."""
    if not file.is_file() or (content := json.loads(file.read_text()))["config"] != config:
        return judged
    identity = ("problem", "seed", "system")
    earlier = {tuple(row[name] for name in identity): row for row in content["results"]["table"] if "seconds" in row}
    rows = []
    for row in judged:
        before = earlier.get(tuple(row[name] for name in identity), {})
        rows.append(before if before and row.get("failure") == WAITING else before | row)
    return rows


def _sizes(setting: Setting) -> dict[str, Any]:
    problem = Problem(setting, 0)
    weights = sum(value.numel() for value in problem.network().parameters())
    sizes = [setting.num_train, setting.num_test, len(problem.batches()), weights]
    return {"problem": setting.name} | dict(zip(("samples", "questions", "steps", "weights"), sizes, strict=True))


if __name__ == "__main__":
    typer.run(main)
