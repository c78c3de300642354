"""OpenDataVal's task of noisy labels on scikit-learn's tables: its evaluators beside our scores of labels.

Usage: python benchmarks/outside/noisy_labels.py [--seeds N] [--models N] [--out FILE]

Data, wrong labels, evaluators and F1 score are the library's own, which runs in an environment of its own: it needs an
older torch than epk_gp. A fifth of the labels are wrong. Ours are computed from a recorded `EPKClassifier`, a network
of 32 tanh units that takes 100 steps of gradient descent, behind a `StandardScaler`; its evaluators have their default
settings, and its logistic regression.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from sklearn.preprocessing import StandardScaler
from torch import nn

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from processes import HERE, environment
from saved import FOLDER, Seconds, row, run_library, save

import epk_gp as epk
from epk_gp.estimators import EPKClassifier
from epk_gp.provenance import Stopwatch

PACKAGES = ["opendataval", "transformers<4.45"]  # later ones do not import beside its torch 2.1
TABLES = {"iris": 100, "breast_cancer": 400, "digits": 500}  # training points
OURS = ("label_errors, suspicion", "label_errors, margin", "self_influence")


def one_hidden_layer(num_features: int, num_classes: int) -> nn.Module:
    """Build the network of a recorded run."""
    return nn.Sequential(nn.Linear(num_features, 32), nn.Tanh(), nn.Linear(32, num_classes))


def our_values(X: np.ndarray, y: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the values of training points, larger where the label looks right, and the seconds, training included."""
    with Seconds() as training:
        scaled = StandardScaler().fit_transform(X)
        descent = partial(torch.optim.SGD, lr=0.5)
        run = (
            EPKClassifier(one_hidden_layer, steps=100, optimizer=descent, random_state=seed).fit(scaled, y).trajectory_
        )
    with Seconds() as labels:
        found = epk.label_errors(run)
    with Seconds() as influence:
        own = epk.influence(run, own=True).values[:, 0, 0]
    values = dict(zip(OURS, (1 - found.scores, found.margin, own), strict=True))
    seconds = {name: training.value + (influence if name == "self_influence" else labels).value for name in OURS}
    return {name: value.numpy() for name, value in values.items()}, seconds


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")] = FOLDER / "noisy_labels.json",
    seeds: Annotated[int, typer.Option(help="Repeats: other points, other wrong labels.")] = 3,
    models: Annotated[int, typer.Option(help="Models of Data-OOB and of influence by subsets.")] = 200,
    environments: Annotated[Path, typer.Option(help="Folder of the library's environment.")] = HERE / ".venvs",
) -> None:
    """Make the data, compute, judge, and write the rows."""
    torch.set_num_threads(1)
    timer, libraries, rows = Stopwatch(), {}, []
    python = environment(environments / "opendataval", PACKAGES)
    for table, count in TABLES.items():
        results: dict[str, list[dict[str, float]]] = {}
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                made, given, judged = (Path(folder) / name for name in ("made.npz", "given.npz", "judged.json"))
                run_library(python, "opendataval_task.py", "make", table, str(count), str(seed), made)
                with np.load(made) as data:
                    values, seconds = our_values(data["X"], data["y"], seed)
                np.savez(given, **values)
                arguments = ("judge", table, str(count), str(seed), str(models), given, judged)
                run_library(python, "opendataval_task.py", *arguments)
                content = json.loads(judged.read_text())
            libraries = content["versions"]
            for name, found in content["found"].items():
                results.setdefault(name, []).append({"seconds": seconds.get(name, 0.0), **found})
            print(f"{table}, seed {seed}: { ({name: found[-1] for name, found in results.items()}) }", flush=True)
        for name, found in results.items():
            system = f"{'epk_gp' if name in OURS else 'OpenDataVal'}, {name}"
            cost = [repeat["seconds"] for repeat in found]
            for unit in ("F1", "AUROC"):
                numbers = [repeat[unit] for repeat in found]
                data = f"{table}, {count} points"
                rows.append(row(system, "OpenDataVal's noisy labels", data, numbers, f"{unit} of wrong labels", cost))
        save(out, rows, f"{seeds} seeds", timer, libraries)  # after each table: a run that is stopped keeps them


if __name__ == "__main__":
    typer.run(main)
