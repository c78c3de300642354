"""Scores of other libraries on one recorded run, and of the same libraries with planted faults, judged by check_scores.

Usage: python benchmarks/attribution/judged.py [--out PATH] [--only REGEX] [--rows FOLDER]

Each library computes in an environment of its own, which is made here. Scores are saved one by one; the verdicts are
made anew.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))

from processes import HERE
from report import judged_markdown
from retraining import retraining_seconds
from rows import WAITING, Row, Rows
from run import Pythons, python_of
from scores import HALVES, PACKAGES, Trained, peer_process
from settings import IGNORED, JUDGED, TINY_JUDGED, Problem
from torch import Tensor
from truth import problem_key

import epk_gp as epk
from epk_gp.analysis.score_check import ScoreCheck
from epk_gp.provenance import Stopwatch, provenance

FAULTS = {  # by name: what was done
    "bfloat16": "weights and inputs in bfloat16",
    "no Adam state": "Adam's averages are forgotten half-way",
    "shuffled": "training samples in the order of a shuffling loader",
    "padding": "padding counts as letters",
}


@dataclass(frozen=True)
class System:
    """Scores of one library.

    Attributes:
        name: Their name in the tables.
        environment: The environment in which they are computed.
        script: The script that computes them.
        method: Its method.
        option: The option that is taken; "" for methods without any.
        faults: What is planted in them.
        texts: Whether they explain texts with padding too.
        networks: Networks that are trained for them besides the recorded one.
    """

    name: str
    environment: str
    script: str
    method: str
    option: str = ""
    faults: tuple[str, ...] = ()
    texts: bool = False
    networks: int = 0


SYSTEMS = [
    System("TracInCP (captum)", "captum", "captum_scores.py", "TracInCP", faults=("bfloat16", "shuffled")),
    System(
        "TracIn (dattri)", "dattri", "dattri_scores.py", "TracIn",
        faults=("bfloat16", "shuffled", "padding"), texts=True,
    ),
    System("influence functions by EK-FAC (dattri)", "dattri", "dattri_scores.py", "EK-FAC", "damping 0.01"),
    System(
        "influence functions by CG (dattri)", "dattri", "dattri_scores.py", "conjugate gradients", "damping 0.01"
    ),
    System(
        "TRAK-10 (traker)", "trak", "trak_scores.py", "TRAK-10", "128 projections",
        faults=("bfloat16", "shuffled"), networks=HALVES,
    ),
    System("TracInCP, last layer (quanda)", "quanda", "quanda_scores.py", "TracInCPFast"),
    System("TRAK-1 (quanda)", "quanda", "quanda_scores.py", "TRAK"),
    System("influence functions by EK-FAC (kronfluence)", "kronfluence", "kronfluence_scores.py", "EK-FAC"),
    System("contributions (ExPLAIND)", "explaind", "explaind_scores.py", "contributions"),
    System(
        "unrolled training (TorchOpt)", "torchopt", "torchopt_scores.py", "unrolled",
        faults=("bfloat16", "no Adam state", "shuffled", "padding"), texts=True,
    ),
    System(
        "MAGIC (bergson)", "bergson", "bergson_scores.py", "MAGIC",
        faults=("bfloat16", "shuffled", "padding"), texts=True,
    ),
]  # fmt: skip
EXACT, RANDOM = ("exact contributions", "exact derivatives"), "random numbers"
NOT_ASKED = "not asked for"
WARM_SECONDS = 10  # as peers/job.py has it: a shorter computation is made twice, and the second one counts
Options = dict[str, Any]
T = TypeVar("T")


def main(
    out: Annotated[Path, typer.Option(help="Path of the tables, without a suffix.")] = HERE / "attribution" / "judged",
    rows: Annotated[Path, typer.Option(help="Folder of the scores.")] = HERE / "attribution" / ".rows",
    only: Annotated[str, typer.Option(help="Regular expression: names of the scores that are computed.")] = "",
    environments: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = HERE / ".venvs",
    peers: Annotated[bool, typer.Option(help="Whether peers run.")] = True,
    retrainings: Annotated[int, typer.Option(help="Random halves on which the network is trained again.")] = 50,
    tiny: Annotated[bool, typer.Option(help="A problem of a second, for the tests.")] = False,
) -> None:
    """Judge all scores and write the tables."""
    torch.set_num_threads(1)
    timer, saved = Stopwatch(), Rows(rows, only)
    needed = list(dict.fromkeys(system.environment for system in SYSTEMS))
    pythons: Pythons = dict.fromkeys(needed, NOT_ASKED)
    if peers:
        pythons = {name: python_of(environments / name, PACKAGES[name]) for name in needed}
    results = [judge(Problem(setting, 0), saved, pythons, retrainings) for setting in (TINY_JUDGED if tiny else JUDGED)]
    config = {"retrainings": retrainings, "packages": {name: PACKAGES[name][1] for name in needed}}
    if (file := out.with_suffix(".json")).is_file() and (earlier := json.loads(file.read_text()))["config"] == config:
        _fill(results, earlier["results"]["runs"])
    content = {
        "experiment": "judged_scores",
        "config": config,
        "results": {"runs": results},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(content | provenance(timer), allow_nan=False, indent=1) + "\n")
    out.with_suffix(".md").write_text(judged_markdown(results))
    typer.echo(f"written: {out.with_suffix('.json')}, {out.with_suffix('.md')}")


def _fill(runs: list[Options], earlier: list[Options]) -> None:
    """Put what earlier tables hold about a peer in the place of what was not asked for: the run is the same."""
    for run, before in zip(runs, earlier, strict=True):
        known = {(row["system"], row["fault"]): row for row in before["systems"]}
        run["systems"] = [
            known.get((row["system"], row["fault"]), row) if row.get("failure") in (WAITING, NOT_ASKED) else row
            for row in run["systems"]
        ]


def judge(problem: Problem, saved: Rows, pythons: Pythons, retrainings: int) -> Options:
    """Return the verdicts on all scores of one run, with and without faults."""
    training = min(retraining_seconds(problem) for _ in range(5))
    trained, recording = _timed(lambda: Trained(problem, problem.setting.num_test))
    texts = trained.data.y.ndim > 1
    asked = [(system, "") for system in SYSTEMS if system.texts or not texts]
    asked += [(system, fault) for system, _ in asked for fault in system.faults if (fault == "padding") == texts]
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(trained, Path(folder))
        found = {key: _scores(*key, jobs, saved, pythons) for key in tqdm(asked, desc=problem.name, disable=None)}
    scores = {_name(*key): row["scores"][key[0].option] for key, row in found.items() if "scores" in row}
    explained: Options = (
        {"function": epk.RowFunction.log_probability(trained.y_test)} if texts else {"classes": trained.y_test}
    )
    ours, costs = _ours(trained, explained)
    own: dict[str, Options] = {name: {"seconds": cost} for name, cost in costs.items()} | {RANDOM: {}}
    scores |= {name: values for name, values in ours.items() if name not in EXACT}
    scores[RANDOM] = torch.randn(ours[EXACT[0]].shape, generator=problem.generator(6))
    before = time.process_time()
    check = epk.check_scores(trained.run, scores, trained.X_test, retrainings=retrainings, **explained)
    seconds = time.process_time() - before
    judged = [
        {"system": system.name, "fault": fault}
        | _own_words(row, found[system, ""], system.option)
        | _numbers(_name(system, fault), check)
        for (system, fault), row in found.items()
    ]
    judged += [{"system": name, "fault": ""} | row | _numbers(name, check) for name, row in own.items()]
    networks = {system.name: system.networks for system in SYSTEMS} | dict.fromkeys(own, recording / training - 1)
    for row in judged:
        if "seconds" in row:
            row["trainings"] = row["seconds"] / training + networks[row["system"]]
    weights = sum(value.numel() for value in trained.run.weights(0).values())
    sizes = [problem.setting.num_train, problem.setting.num_test, trained.run.num_steps, weights]
    return {
        "run": problem.setting.name,
        "sizes": dict(zip(("samples", "test samples", "steps", "weights"), sizes, strict=True)),
        "systems": judged,
        "training seconds": training,
        "recording seconds": recording,
        "costs": {name: [cost.seconds, cost.trainings] for name, cost in check.costs.items()},
        "notes": list(check.notes),
        "check_seconds": seconds,
    }


def _ours(trained: Trained, explained: Options) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Compute the package's own scores of a run, by name, and what they cost."""
    attribute, influence = (
        partial(each, trained.run, trained.X_test, **explained) for each in (epk.attribute, epk.influence)
    )
    ways: dict[str, Callable[[], Tensor]] = {
        EXACT[0]: lambda: attribute().samples,
        EXACT[1]: lambda: influence().values,
        "first-order In-Run Shapley (epk_gp)": lambda: attribute(rule=epk.QuadratureRule.left_endpoint()).samples,
        "datamodel (epk_gp)": lambda: epk.datamodel(trained.run, trained.X_test, trained.y_test).scores[:, None],
        "smoothed influence (epk_gp)": lambda: influence(smoothing=epk.Smoothing()).values,
        "smoothed influence, weights 0 to 1 (epk_gp)": lambda: influence(smoothing=epk.Smoothing(high=1.0)).values,
    }
    scores, costs = dict[str, Tensor](), dict[str, float]()
    for name, compute in ways.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", epk.CertificateWarning)  # a rule that is coarse on purpose
            values, costs[name] = _timed(compute)
        scores[name] = values[:, 0]
    return scores, costs


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    """Compute something, and return it with its processor seconds."""
    for _ in range(2):
        before = time.process_time()
        found = compute()
        if (seconds := time.process_time() - before) > WARM_SECONDS:
            break
    return found, seconds


class Jobs:
    """The files that peers read, one for each fault."""

    def __init__(self, trained: Trained, folder: Path) -> None:
        self.trained, self.folder = trained, folder

    def file(self, fault: str) -> Path:
        """Return a fault's file, which is written when it is first asked for."""
        file = self.folder / f"{fault or 'sound'}.pt"
        if not file.exists() and not fault:
            self.trained.save_job(file)
        elif not file.exists():
            stored = torch.load(self.file("")) | {"fault": fault}
            if fault == "padding":
                stored |= {name: stored[name].where(stored[name] != IGNORED, 0) for name in ("y", "y_test")}
            torch.save(stored, file)
        return file


def _scores(system: System, fault: str, jobs: Jobs, saved: Rows, pythons: Pythons) -> Row:
    problem = jobs.trained.problem
    python = pythons[system.environment]
    if isinstance(python, str):
        return {"failure": python}
    compute: Callable[[], Row] = lambda: peer_process(python, system.script, system.method, jobs.file(fault))  # noqa: E731
    key = problem_key(problem) | {"package": PACKAGES[system.environment]}
    return saved.get(f"{problem.name}: judged {_name(system, fault)}", key, compute) or {"failure": WAITING}


def _name(system: System, fault: str) -> str:
    return f"{system.name}, {fault}" if fault else system.name


def _own_words(row: Row, sound: Row, option: str) -> Options:
    """Return what the library itself says: its error, or what it warns of only with the fault."""
    if "failure" in row:
        return {"failure": row["failure"]}
    return {
        "option": option,
        "seconds": row["seconds"][option],
        "said": [words for words in row["warnings"] if words not in sound.get("warnings", ())]
        if row is not sound
        else [],
    }


def _numbers(name: str, check: ScoreCheck) -> Options:
    """Return what check_scores found about one system's scores; nothing where there are none."""
    each = {**check.systems, **check.references}.get(name)
    if each is None:
        return {}
    found: Options = {"findings": list(each.findings), "sum misses": float(each.miss.norm() / check.change.norm())}
    for kind, like in each.likeness.items():
        found[kind] = [_mean(like["cosine"]), _mean(like["spearman"])]
    if each.lds is not None:
        found |= {"LDS": each.lds.mean, "LDS interval": list(each.lds_interval)}
    if each.left_out is not None:
        found["left out"] = each.left_out.mean
    if each.predicted is not None and each.measured is not None:
        found["without the top"] = [_mean(each.predicted), _mean(each.measured)]
    return {key: value for key, value in found.items() if value is not None}


def _mean(values: Tensor) -> float | None:
    """Return the mean of what is a number; None where nothing is."""
    mean = float(values.nanmean())
    return mean if mean == mean else None


if __name__ == "__main__":
    typer.run(main)
