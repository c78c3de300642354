"""Measure epk_gp beside its peers, and write the tables: JSON and Markdown. Usage: make bench.

The contenders of a problem take turns, round by round, so that a busy machine slows down all of them. One contender is
a matrix product; all times are given as ratios to the time that the unavoidable products would take at its rate.
"""

import itertools
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from contenders.architectures import ARCHITECTURES, make_network, make_points
from processes import HERE, SETUP_SECONDS, Worker, current_python, environment, interpreter
from table import markdown
from tqdm import tqdm

from problems import Problem, epk_problems, growth_problems, ntk_problems

FLOOR_SIZE = 1500
PEERS = {
    "neural-tangents": ["jax==0.4.20", "jaxlib==0.4.20", "neural-tangents==0.6.5", "numpy<2", "scipy<1.13"],
    "nngeometry": ["torch==2.13.0", "nngeometry==0.4", "numpy"],
    "explaind": ["torch==2.13.0", "explaind==0.1.0"],
}
LATER_PYTHONS = {"explaind": (3, 12)}  # others are run by this Python; where torch has no CPU build: 5 GB of CUDA
CONTENDERS = {  # script, environment
    "floor": ("floor.py", None),
    "epk_gp": ("epk_gp_block.py", None),
    "epk.ntk": ("tangent_epk_gp.py", None),
    "epk.NTKKernel": ("tangent_epk_gp.py", None),
    "torch.func recipe": ("torch_func.py", None),
    "neural-tangents 1": ("neural_tangents_block.py", "neural-tangents"),
    "neural-tangents 2": ("neural_tangents_block.py", "neural-tangents"),
    "neural-tangents 3": ("neural_tangents_block.py", "neural-tangents"),
    "nngeometry (X, X)": ("nngeometry_block.py", "nngeometry"),
    "attribute": ("attribution.py", None),
    "algorithm 1": ("attribution.py", None),
    "algorithm 1, points together": ("attribution.py", None),
    "attribute, its example": ("modulo_attribution.py", None),
    "explaind": ("explaind_attribution.py", "explaind"),
}
NEURAL_TANGENTS = [f"neural-tangents {number}" for number in (1, 2, 3)]
BLOCKS = ["floor", "epk_gp", "torch.func recipe", *NEURAL_TANGENTS, "nngeometry (X, X)"]
TANGENT = {  # what is computed -> by whom; its second implementation is never the fastest among BLOCKS
    "full": ["epk.ntk", "epk.NTKKernel", "torch.func recipe", "neural-tangents 1", "neural-tangents 3"],
    "trace": ["epk.ntk", "epk.NTKKernel", "torch.func recipe", "neural-tangents 1", "neural-tangents 3"],
    "predictions": ["epk.ntk", "neural-tangents 3"],
}
ATTRIBUTION = {
    "name": "M = 300, d = 100, h = 64, 20 steps, 30 test points",
    "dtype": "float64",
    "width": 64,
    "steps": 20,
    "optimizer": "gradient descent",
}
# ExPLAIND's own example, smaller (its own has p = 113 and 5000 steps); learning rate and decay are its own
PRIME = 17
MODULO = {
    "name": f"a + b mod {PRIME}, one block of attention, AdamW with decay, M = 120, 10 steps, 10 test points",
    "dtype": "float32",
    "tokens": PRIME + 2,
    "dim": 32,
    "hidden": 64,
    "steps": 10,
    "lr": 1e-3,
    "decay": 1.0,
    "tol": 1e-6,
    "optimizer": "AdamW",
}

RUN_SECONDS = {"attribution": 900, "tangent": 20, "other": 120}  # a contender whose run takes longer is stopped
SLOW_SECONDS, SLOW_ROUNDS = 5, 3  # contenders slower than that take part in fewer rounds

PARTS = ("ntk", "tangent", "epk", "attribution", "explaind", "grid", "growth")
PEERS_OF = {"ntk": ("neural-tangents", "nngeometry"), "tangent": ("neural-tangents",), "explaind": ("explaind",)}

Pythons = dict[str | None, Path | str]  # by environment: its interpreter, or why there is none


def main(
    out: Annotated[Path, typer.Option(help="Path of the tables, without a suffix.")] = HERE / "results",
    rounds: Annotated[int, typer.Option(help="Rounds in which the contenders take turns.")] = 7,
    environments: Annotated[Path, typer.Option(help="Folder of the peers' environments.")] = HERE / ".venvs",
    parts: Annotated[str, typer.Option(help="Parts that are measured; others keep their numbers.")] = ",".join(PARTS),
) -> None:
    """Run the parts and write the tables."""
    chosen, stored = parts.split(","), out.with_suffix(".json")
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"must be of {', '.join(PARTS)}: got {', '.join(sorted(unknown))}.")
    numbers: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    pythons: Pythons = {None: current_python()}
    for name in (name for part in chosen for name in PEERS_OF.get(part, ())):
        found = pythons[name] = _environment(environments / name, name)
        versions = found if isinstance(found, str) else " ".join(PEERS[name])
        numbers["peers"] = {**numbers.get("peers", {}), name: versions}
    if (
        not set(chosen) <= {"tangent", "explaind"} or "machine" not in numbers
    ):  # their rows say themselves how many threads they had
        numbers["machine"] = _machine()
    without_peers = ["floor", "epk_gp"]
    work: dict[str, Callable[[], Any]] = {
        "ntk": lambda: [row for problem in ntk_problems() for row in _blocks(problem, BLOCKS, pythons, rounds)],
        "tangent": lambda: _tangent(pythons, min(rounds, 3), numbers.get("tangent", [])),
        "epk": lambda: [row for problem in epk_problems() for row in _blocks(problem, without_peers, pythons, rounds)],
        "attribution": lambda: _attribution(pythons, rounds),
        "explaind": lambda: _explaind(pythons, rounds),
        "grid": _grid,
        "growth": lambda: _growth(pythons, rounds),
    }
    for name in chosen:
        found = work[name]()
        for numbers[name] in found if isinstance(found, Iterator) else [found]:
            stored.write_text(json.dumps(numbers, indent=1) + "\n")
            out.with_suffix(".md").write_text(markdown(numbers))
    typer.echo(f"written: {stored}, {out.with_suffix('.md')}")


def _blocks(problem: Problem, names: list[str], pythons: Pythons, rounds: int) -> list[dict[str, Any]]:
    """Let contenders compute a Gram block, and compare their results with the recipe's in float64."""
    return _compare(problem.description(floor_size=FLOOR_SIZE), problem.arrays(), names, pythons, rounds, problem)


def _compare(
    described: dict[str, Any],
    arrays: dict[str, np.ndarray],
    names: list[str],
    pythons: Pythons,
    rounds: int,
    problem: Problem | None = None,
) -> list[dict[str, Any]]:
    same = {"problem": described["name"], "dtype": described["dtype"]} | {
        k: described[k] for k in ("of",) if k in described
    }
    rows = [{**same, "contender": name} for name in names]
    label = f"{described['name']}, {described['dtype']}"
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "arrays.npz", **arrays)
        workers: dict[str, Worker] = {}
        try:
            for row in rows:
                _start(row, workers, {**described, "arrays": f"{folder}/arrays.npz"}, pythons, Path(folder))
            limit = RUN_SECONDS["tangent" if "of" in described else "attribution" if problem is None else "other"]
            for number in tqdm(range(1 + rounds), desc=label, disable=None):
                for row in rows:
                    _take_turn(row, workers, number, limit)
            results = {name: worker.result() for name, worker in workers.items() if name != "floor"}
        finally:
            for worker in workers.values():
                worker.close()
    rate = 0.0
    if "floor" in workers and problem is not None:
        rate = 2 * FLOOR_SIZE**3 / min(workers["floor"].seconds)
    reference = results.get("torch.func recipe", results.get("neural-tangents 3"))
    for row in rows:
        if row["contender"] not in workers:
            continue
        worker = workers[row["contender"]]
        times = worker.seconds[1:]  # the first warms up
        quartiles = np.percentile(times, [25, 50, 75])
        row |= {"median": quartiles[1], "spread": quartiles[2] - quartiles[0], "fastest": min(times)}
        row |= {"rounds": len(times), "peak_bytes": worker.peak_bytes, "bytes_before": worker.bytes_before}
        if "of" in described:
            row["first"] = worker.setup_seconds
        if rate and problem is not None and row["contender"] != "floor":
            row["floors"] = min(times) * rate / problem.operations
        block = results.get(row["contender"])
        if block is not None and block.ndim == 0:
            row["error"] = float(block)
        elif block is not None and reference is not None and "(X, X)" not in row["contender"]:
            row["error"] = float(np.abs(block - reference).max() / np.abs(reference).max())
    return rows


def _start(
    row: dict[str, Any], workers: dict[str, Worker], described: dict[str, Any], pythons: Pythons, folder: Path
) -> None:
    name = row["contender"]
    script, needed = CONTENDERS[name]
    python = pythons[needed]
    if isinstance(python, str):
        row["failure"] = python
        return
    variant = name.removeprefix("neural-tangents ")
    try:
        limit = RUN_SECONDS["tangent"] * 3 if "of" in described else SETUP_SECONDS
        workers[name] = Worker(python, script, {**described, "variant": variant}, folder, str(len(workers)), limit)
    except RuntimeError as error:
        row["failure"] = str(error)


def _take_turn(row: dict[str, Any], workers: dict[str, Worker], number: int, limit: float) -> None:
    worker = workers.get(row["contender"])
    if worker is None or (number > SLOW_ROUNDS and min(worker.seconds) > SLOW_SECONDS):
        return
    try:
        worker.take_turn(limit)
    except (RuntimeError, OSError) as error:
        row["failure"] = str(error)
        workers.pop(row["contender"]).close()


def _tangent(pythons: Pythons, rounds: int, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Let contenders compute blocks, traces and predictions of five networks on the same weights, and yield all rows.

    Rows that were measured earlier are replaced problem by problem, so that a run that is stopped keeps its numbers.
    """
    for of, name in itertools.product(TANGENT, ARCHITECTURES):
        (X, Y), net = make_points(name), make_network(name)
        with torch.no_grad():
            y = torch.sin(10 * net(X))
        arrays = {name: value.numpy() for name, value in {**net.state_dict(), "X": X, "Y": Y, "targets": y}.items()}
        described = {"name": f"{len(X)} x {len(Y)}, {name}", "dtype": "float64", "kind": name, "outputs": y.shape[1]}
        measured = _compare({**described, "of": of}, arrays, TANGENT[of], pythons, rounds)
        measured = [row | {"threads": _machine()["threads"]} for row in measured]
        rows = [row for row in rows if (row["problem"], row["of"]) != (described["name"], of)] + measured
        yield rows


def _attribution(pythons: Pythons, rounds: int) -> list[dict[str, Any]]:
    names = ["attribute", "algorithm 1", "algorithm 1, points together"]
    return _compare(ATTRIBUTION, _three_gaussians(), names, pythons, min(rounds, 3))


def _explaind(pythons: Pythons, rounds: int) -> list[dict[str, Any]]:
    """Compare with ExPLAIND on the problem of its kind that is measured here anyway, and on its own example."""
    rounds = min(rounds, 3)
    rng = np.random.default_rng(0)
    pairs = np.array([(b, PRIME, a, PRIME + 1) for a in range(PRIME) for b in range(a, PRIME)])
    rng.shuffle(pairs)
    labels = (pairs[:, 0] + pairs[:, 2]) % PRIME
    sums = {"Y": pairs[:120], "labels": labels[:120], "X": pairs[120:130]}
    rows = [
        *_compare(ATTRIBUTION, _three_gaussians(), ["attribute", "explaind"], pythons, rounds),
        *_compare(MODULO, sums, ["attribute, its example", "explaind"], pythons, rounds),
    ]
    return [row | {"threads": _machine()["threads"]} for row in rows]


def _three_gaussians() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 100))
    return {name: centres[np.arange(n) % 3] + rng.normal(size=(n, 100)) for name, n in (("X", 30), ("Y", 300))}


def _environment(folder: Path, name: str) -> Path | str:
    """Return the interpreter of a peer's environment, or why there is none."""
    try:
        python = interpreter(LATER_PYTHONS[name]) if name in LATER_PYTHONS else None
        return environment(folder, PEERS[name], python)
    except RuntimeError as error:
        return str(error)


def _grid() -> dict[str, Any]:
    """Run the uncertainty map of 100 x 100 nodes, 3000 training points and 300 steps."""
    command = [str(current_python()), str(HERE / "uncertainty_grid.py"), "--num-train", "3000", "--steps", "300"]
    command += ["--outputs", "independent", "--json"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    numbers: dict[str, Any] = json.loads(printed)
    return numbers


def _growth(pythons: Pythons, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for size, problems in growth_problems().items():
        measured = []
        for value, problem in problems:
            ((_, ours),) = (_blocks(problem, ["floor", "epk_gp"], pythons, min(rounds, 5)),)
            measured.append(
                {"value": value, **{key: ours[key] for key in ("fastest", "median", "peak_bytes", "floors")}}
            )
        values, times = ([entry[key] for entry in measured] for key in ("value", "fastest"))
        slope = np.polyfit(np.log(values), np.log(times), 1)[0]
        rows.append({"size": size, "measured": measured, "exponent": float(slope)})
    return rows


def _machine() -> dict[str, Any]:
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": threads}


if __name__ == "__main__":
    typer.run(main)
