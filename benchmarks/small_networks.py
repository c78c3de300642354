"""The cost of questions about small networks, in trainings of the plain loop of the same process, on one thread.

Usage: python benchmarks/small_networks.py questions
       python benchmarks/small_networks.py together
       python benchmarks/small_networks.py programs

Times are the processor's: of one thread for questions, of whole processes for programs.
"""

import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan

HERE = Path(__file__).parent
ROOT = HERE.parent
Out = Annotated[Path, typer.Option(help="Path of the tables, without a suffix.")]
Rounds = Annotated[int, typer.Option(help="Rounds after one that warms up; the medians count.")]
STATES: tuple[int | None, ...] = (1, 4, 16, 64, None)  # that are evaluated together; None: all of a run
app = typer.Typer(help=__doc__)


@dataclass(frozen=True)
class Training:
    """A network and the data that it is trained on.

    Attributes:
        name: In the table.
        make: Makes the network, in float64.
        X: Inputs.
        points: Points that are asked about.
        classes: C.
        batch_size: Points per step.
        steps: Number of steps.
    """

    name: str
    make: Callable[[], nn.Module]
    X: Tensor
    points: Tensor
    classes: int = 3
    batch_size: int = 30
    steps: int = 200

    @property
    def labels(self) -> Tensor:
        """Labels of the inputs."""
        return torch.randint(self.classes, (len(self.X),), generator=torch.Generator().manual_seed(0))

    def run(self, optimizer_of: Callable[..., torch.optim.Optimizer], record: bool = False) -> epk.Trajectory | None:
        """Train with the plain loop, or a recorded one; return the run."""
        torch.manual_seed(0)
        net, y = self.make(), self.labels
        optimizer = optimizer_of(net.parameters())
        recorder = epk.Recorder(net, optimizer, self.X, y) if record else None
        generator = torch.Generator().manual_seed(1)
        if recorder is not None:
            recorder.__enter__()
        for _ in range(self.steps):
            batch = torch.randint(len(self.X), (self.batch_size,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(net(self.X[batch]), y[batch]).backward()
            if recorder is not None:
                recorder.batch(batch)
            optimizer.step()
        if recorder is None:
            return None
        recorder.__exit__(None, None, None)
        return recorder.trajectory


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
}


def normal(*shape: int) -> Tensor:
    """Draw numbers of a normal distribution, the same ones each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def mlp() -> nn.Module:
    """2-32-32-3."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).double()


def questions_of(run: epk.Trajectory, points: Tensor) -> dict[str, Callable[[], object]]:
    """Return the questions about a run by their name in the table."""
    copies = (epk.Points(points[:10], is_train=False), epk.Points(run.inputs[:100], is_train=True))
    of_attribute = {f"attribute of {n}": (lambda n=n: epk.attribute(run, points[:n])) for n in (1, 10, 100)}
    return {
        **of_attribute,
        "gram_block 10 × 100, gauss_legendre(4)": lambda: epk.gram_block(run, *copies),
        "gram_block 10 × 100, adaptive()": lambda: epk.gram_block(run, *copies, rule=epk.adaptive()),
        "influence of 1": lambda: epk.influence(run, points[:1]),
        "reconstruct of 10": lambda: epk.reconstruct(run, points[:10]),
        "path_features of 100": lambda: epk.path_features(run, points),
        "EPKKernel of 100, dense": lambda: epk.EPKKernel(run)(epk.test_copy(points)).to_dense(),
        "retrain of 1 weighting": lambda: epk.retrain(run, torch.ones(1, len(run.inputs))),
    }


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time that a call takes on this thread."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


@app.command()
def questions(
    rounds: Rounds = 5,
    only: Annotated[str, typer.Option(help="Measure questions with these words.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of the training.")] = 200,
    out: Out = HERE / "small_networks",
) -> None:
    """Measure questions about a network 2-32-32-3 with tanh: float64, 300 points, batches of 30, 200 steps."""
    torch.set_num_threads(1)
    training = Training("MLP", mlp, normal(300, 2), normal(100, 2), steps=steps)
    rows = []
    for name, optimizer_of in OPTIMIZERS.items():
        run = training.run(optimizer_of, record=True)
        calls = {"plain": lambda of=optimizer_of: training.run(of)}
        calls |= {question: call for question, call in questions_of(run, training.points).items() if only in question}
        rounds_of = [{question: seconds(call) for question, call in calls.items()} for _ in range(rounds + 1)][1:]
        fastest = {question: min(times[question] for times in rounds_of) for question in calls}
        for question in list(calls)[1:]:
            ratios = [times[question] / times["plain"] for times in rounds_of]
            row = {"question": question, "optimizer": name, "trainings": statistics.median(ratios)}
            rows.append({**row, "fastest": fastest[question] / fastest["plain"], "ms": 1000 * fastest[question]})
            typer.echo(json.dumps(rows[-1], ensure_ascii=False))
        typer.echo(f"{name}: a step of the plain loop takes {1000 * fastest['plain'] / training.steps:.2f} ms")
    _save(out, "questions", rows)


# ---- states together -----------------------------------------------------------------------------------------------


def chosen(call: Callable[[], object]) -> dict[str, Any]:
    """Return how many states the package evaluates together in a call, at most, and why there is one where there is."""
    found, choose = [], MemoryPlan.lines_together

    def lines_together(memory: MemoryPlan, *sizes: int) -> int:
        found.append((choose(memory, *sizes), memory.plan))
        return found[-1][0]

    with patch.object(MemoryPlan, "lines_together", lines_together):
        call()
    count = max((count for count, _ in found), default=1)
    plans = [plan for _, plan in found]
    missing = [name for name in ("supports_stacking", "supports_jvp") if not all(getattr(p, name) for p in plans)]
    return {"chosen": count, "alone": " ".join(missing) if count == 1 else ""}


def states_together(count: int | None) -> AbstractContextManager[None]:
    """Evaluate so many states of a run together where the network allows it; None for all of them."""
    sys.path.insert(0, str(ROOT / "tests"))
    context: AbstractContextManager[None] = importlib.import_module("odd_stretches").states_together(count)
    return context


class Recurrent(nn.Module):
    """A GRU over the entries of a row, and a layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(1, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        states: Tensor = self.gru(x[:, :, None])[0]
        z: Tensor = self.out(states[:, -1])
        return z


class Transformer(nn.Module):
    """One block of attention over the entries of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(1, 12), nn.Linear(12, 3)
        self.places = nn.Parameter(0.1 * torch.randn(8, 12))
        self.block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        z: Tensor = self.out(self.block(self.embed(x[:, :, None]) + self.places).mean(dim=1))
        return z


def cnn() -> nn.Module:
    """Two convolutions, 1-4-8 channels, on 12 × 12 images."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)]
    return nn.Sequential(*layers)


def wide(*between: Callable[[], nn.Module]) -> nn.Module:
    """2-32-32-3 with something before each activation."""
    widths = ((2, 32), (32, 32))
    layers = [layer for n, m in widths for layer in (nn.Linear(n, m), *(make() for make in between), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 3))


def trainings() -> list[Training]:
    """Return the networks of the table *states together × network*: 64 steps, batches of 10."""
    rows, images, words = (normal(100, 2), normal(3, 2)), (normal(100, 1, 12, 12), normal(3, 1, 12, 12)), normal(103, 8)
    inputs: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
        "MLP": (wide, rows),
        "CNN": (cnn, images),
        "GRU": (Recurrent, (words[:100], words[100:])),
        "transformer": (Transformer, (words[:100], words[100:])),
        "BatchNorm": (lambda: wide(lambda: nn.BatchNorm1d(32)), rows),
        "dropout": (lambda: wide(lambda: nn.Dropout(0.3)), rows),
    }
    return [
        Training(name, lambda make=make: make().double(), X, points, batch_size=10)
        for name, (make, (X, points)) in inputs.items()
    ]


@app.command()
def together(
    rounds: Rounds = 3,
    only: Annotated[str, typer.Option(help="Measure networks with these words.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of the trainings.")] = 64,
    out: Out = HERE / "small_networks",
) -> None:
    """Measure questions with 1, 4, 16, 64 and all states of a run evaluated together, on networks of several kinds."""
    torch.set_num_threads(1)
    rows = []
    for training in trainings():
        if only not in training.name:
            continue
        training = replace(training, steps=steps)
        run = training.run(OPTIMIZERS["Adam"], record=True)
        copies = (epk.Points(training.points, is_train=False), epk.Points(training.X[:30], is_train=True))
        calls: dict[str, Callable[[], object]] = {
            "attribute of 3": lambda run=run, X=training.points: epk.attribute(run, X),
            "gram_block 3 × 30": lambda run=run, copies=copies: epk.gram_block(run, *copies),
        }
        plain = min(seconds(lambda t=training: t.run(OPTIMIZERS["Adam"])) for _ in range(rounds + 1))
        for question, call in calls.items():
            row: dict[str, Any] = {"network": training.name, "step_ms": 1000 * plain / training.steps}
            row |= {"question": question, **chosen(call)}
            row["by itself"] = min(seconds(call) for _ in range(rounds + 1)) / plain
            for count in STATES:
                with states_together(count):
                    row[str(count or "all")] = min(seconds(call) for _ in range(rounds + 1)) / plain
            rows.append(row)
            typer.echo(json.dumps(row, ensure_ascii=False))
    _save(out, "together", rows)


# ---- programs ------------------------------------------------------------------------------------------------------


@app.command()
def programs(
    rounds: Annotated[int, typer.Option(help="Runs of each program; the fastest counts.")] = 1,
    only: Annotated[str, typer.Option(help="Run programs with these words.")] = "",
    out: Out = HERE / "small_networks",
) -> None:
    """Time the demo, a map of 60 × 60 points and the paper's figure 5, each as it comes, on one thread."""
    command_line = str(Path(sys.executable).with_name("epk-gp"))
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "make demo, after installation": [command_line, "demo", "--out", f"{folder}/demo"],
            "map of two moons, 60 × 60, gauss_legendre(4)": [str(HERE / "paths.py"), "map", "--asked", "1:4"],
            "experiments/fig05_uncertainty.py": [
                str(ROOT / "experiments/fig05_uncertainty.py"), "--out", f"{folder}/figure",
            ],
        }  # fmt: skip
        rows = []
        for name, arguments in commands.items():
            if only not in name:
                continue
            taken = []
            for number in range(rounds):
                command = [sys.executable, *(word.replace(folder, f"{folder}/{number}") for word in arguments)]
                taken.append(_seconds_of(command))
            rows.append({"program": name, "seconds": min(t["seconds"] for t in taken)})
            rows[-1]["processor"] = min(t["processor"] for t in taken)
            typer.echo(json.dumps(rows[-1], ensure_ascii=False))
    _save(out, "programs", rows)


def _seconds_of(command: list[str]) -> dict[str, float]:
    """Return the seconds of a process, and those of the processor."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | one_thread, check=False)
    taken = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"the program must end without an error: {done.stderr.strip()[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": taken, "processor": processor}


# ---- tables --------------------------------------------------------------------------------------------------------


def _save(out: Path, part: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a part, beside those of the others, and the tables."""
    file = out.with_suffix(".json")
    parts = json.loads(file.read_text()) if file.exists() else {}
    parts[part] = rows
    file.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n")
    out.with_suffix(".md").write_text(markdown(parts))


def markdown(parts: dict[str, list[dict[str, Any]]]) -> str:
    """Return the tables of all measured parts."""
    return "\n".join(TABLES[name](parts[name]) for name in TABLES if name in parts)


def _of_questions(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["question"] for row in rows))
    found = {(row["question"], row["optimizer"]): row["trainings"] for row in rows}
    lines = [[name, *(f"{found[name, optimizer]:.2f}" for optimizer in OPTIMIZERS)] for name in names]
    return _table(["in trainings of the plain loop", *OPTIMIZERS], lines)


def _of_together(rows: list[dict[str, Any]]) -> str:
    times = ["by itself", "1", "16", "all"]  # more columns are wider than the page; the JSON file has them
    lines = [[row["network"], row["question"], *(f"{row[name]:.2f}" for name in times)] for row in rows]
    return _table(["network", "in trainings", *times], lines)


def _of_programs(rows: list[dict[str, Any]]) -> str:
    return _table(
        ["program", "seconds", "of the processor"],
        [[row["program"], f"{row['seconds']:.1f}", f"{row['processor']:.1f}"] for row in rows],
    )


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


TABLES = {"questions": _of_questions, "together": _of_together, "programs": _of_programs}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of amplification and of slow calls
    app()
