"""The cost of recording, on one thread: of the first steps and of later ones, and of an MNIST CNN's whole training.

Usage: EPK_GP_DATA=FOLDER python benchmarks/recording_overhead.py networks
       python benchmarks/recording_overhead.py small
       EPK_GP_DATA=FOLDER python benchmarks/recording_overhead.py training --batch-size 64 --rounds 6
The loop of a usual training (dropout, BatchNorm, augmentation): add --network random --augments
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recorded_networks import TRAININGS
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import Dataset, mnist_folder
from epk_gp.storage.run import check_run

HERE = Path(__file__).parent
FIRST = 3  # steps: all are checked, and the derivative is probed along one of them
app = typer.Typer(help=__doc__)


@app.command()
def networks(
    rounds: Annotated[int, typer.Option(help="Processes of each network; the medians count.")] = 3,
    steps: Annotated[int, typer.Option(help="Later steps, with and without a recorder in turns.")] = 30,
    out: Annotated[Path, typer.Option(help="Path of the table, without a suffix.")] = HERE / "recording_overhead",
) -> None:
    """Measure the first steps of a recording, and later ones, on networks of several kinds, and save the table."""
    rows = []
    for name in TRAININGS:
        command = [sys.executable, __file__, "network", name, "--steps", str(steps)]
        found = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(rounds)]
        if any(process.returncode for process in found):
            errors = next(process.stderr for process in found if process.returncode).strip().splitlines()
            rows.append({"training": name, "failure": errors[-1] if errors else "the process ended without a message"})
        else:
            numbers = [json.loads(process.stdout.splitlines()[-1]) for process in found]
            keys = [key for key in numbers[0] if key != "training"]
            medians = {key: statistics.median(number[key] for number in numbers) for key in keys}
            rows.append({"training": numbers[0]["training"], **medians})
        typer.echo(json.dumps(rows[-1]))
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(rows))


@app.command()
def network(name: str, steps: Annotated[int, typer.Option(help="Later steps.")] = 30) -> None:
    """Measure one of the networks in this process."""
    torch.set_num_threads(1)
    training, generator = TRAININGS[name](), torch.Generator().manual_seed(0)

    def seconds(call: Callable[[], object]) -> float:
        begun = time.thread_time()
        call()
        return time.thread_time() - begun

    def batch() -> Tensor:
        return torch.randint(len(training.y), (training.batch_size,), generator=generator)

    plain, made, recorder_class = training.make(), training.make(), epk.Recorder  # imported before it is timed
    alone = [seconds(lambda: training.step(plain, batch())) for _ in range(7)][2:]  # the first ones warm up
    begun = time.thread_time()
    recorder = recorder_class(*made, training.X, training.y, **training.options)
    with recorder:
        for _ in range(FIRST):
            training.step(made, batch(), recorder.batch)
        first = time.thread_time() - begun
        recorded, checked = list[float](), recorder.num_checked
        for _ in range(steps):
            rows = batch()
            alone.append(seconds(lambda rows=rows: training.step(plain, rows)))
            recorded.append(seconds(lambda rows=rows: training.step(made, rows, recorder.batch)))
        checked = recorder.num_checked - checked
    kept, copies = list[Tensor](), list[float]()
    for _ in range(8):  # what any recorder does at least: it keeps a copy of the weights of each step
        training.step(plain, batch())
        weights = [p for p in plain[0].parameters() if p.requires_grad]
        copies.append(seconds(lambda weights=weights: kept.append(nn.utils.parameters_to_vector(weights).detach())))
    step, later = statistics.median(alone), alone[-steps:]
    numbers: dict[str, Any] = {
        "step_ms": 1000 * step,
        "first": first / step - FIRST,
        "floor": 1 + statistics.median(copies) / step,
        "later": statistics.median(recorded) / statistics.median(later),
        "later_mean": sum(recorded) / sum(later),
        "checked_share": checked / steps,
    }
    typer.echo(json.dumps({"training": training.name, **numbers}))


@app.command()
def small(
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Trainings of each kind, in turns; the medians count.")] = 5,
) -> None:
    """Time whole recordings of a network 2-32-32-3 in plain trainings: batches of 30, float64, one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    X, y = torch.randn(300, 2, dtype=torch.float64), torch.randint(3, (300,))
    batches = [torch.randint(300, (30,)) for _ in range(steps)]

    def seconds(kind: str, make: Callable[..., torch.optim.Optimizer]) -> float:
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).double()
        optimizer = make(net.parameters())
        with tempfile.TemporaryDirectory() as folder:
            begun = time.thread_time()
            path = Path(folder) / "run" if kind == "on disk" else None
            recorder = None if kind == "plain" else epk.Recorder(net, optimizer, X, y, folder=path)
            with nullcontext() if recorder is None else recorder:
                for batch in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(net(X[batch]), y[batch]).backward()
                    if recorder is not None:
                        recorder.batch(batch)
                    optimizer.step()
            return time.thread_time() - begun

    optimizers = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    }
    for name, make in optimizers.items():
        taken = [{kind: seconds(kind, make) for kind in ("plain", "in memory", "on disk")} for _ in range(rounds + 1)]
        for kind in ("in memory", "on disk"):
            ratios = [times[kind] / times["plain"] for times in taken[1:]]  # the first round warms up
            typer.echo(
                f"{name} {kind}: {statistics.median(ratios):.2f} plain trainings "
                f"({min(ratios):.2f} to {max(ratios):.2f}, {rounds} rounds of {steps} steps)"
            )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    head = ["training", "step, ms", "first, steps", "copies alone", "later step, median", "mean", "checked"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row.get("failure", "") + " |" * (len(head) - 2)]
        if "failure" not in row:
            ratios = (f"{row[key]:.2f} ×" for key in ("floor", "later", "later_mean"))
            cells = [f"{row['step_ms']:.0f}", f"{row['first']:.1f}", *ratios, f"{100 * row['checked_share']:.0f} %"]
        lines.append("| " + " | ".join([row["training"], *cells]) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Kind:
    """How a training is recorded.

    Attributes:
        check_every: As the recorder's.
        on_disk: Whether the run is written to a folder.
    """

    check_every: int | None = None
    on_disk: bool = True


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        data: Training data.
        batch_size: Points per step.
        steps: Number of steps.
        optimizer: SGD or Adam.
        network: plain, or random.
        augments: Whether images are shifted at random.
    """

    data: Dataset
    batch_size: int
    steps: int
    optimizer: str
    network: str
    augments: bool


@app.command("training")
def main(
    batch_size: Annotated[int, typer.Option(help="Points per step.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps per turn.")] = 300,
    rounds: Annotated[int, typer.Option(help="Turns of each kind; the median counts.")] = 6,
    optimizer: Annotated[str, typer.Option(help="SGD or Adam.")] = "SGD",
    network: Annotated[str, typer.Option(help="plain, or random: with BatchNorm and dropout.")] = "plain",
    augments: Annotated[bool, typer.Option(help="Shift the images at random.")] = False,
) -> None:
    """Time training without a recorder, and with one that checks as many steps as it chooses, all, or some.

    Times are the processor's, so that other processes do not count.
    """
    if "EPK_GP_DATA" not in os.environ:
        typer.echo("skipped: EPK_GP_DATA must name the folder that holds mnist/; it is not set.")
        return
    torch.set_num_threads(1)
    data = mnist_folder(Path(os.environ["EPK_GP_DATA"]) / "mnist", split="train", dtype=torch.float32)[:10_000]
    kinds: dict[str, Kind | None] = {
        "unrecorded": None,
        "default": Kind(),
        "every gradient": Kind(check_every=1),
        "one in 50": Kind(check_every=50),
        "default, in memory": Kind(on_disk=False),
    }
    loop = Loop(data, batch_size, steps, optimizer, network, augments)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    started: dict[str, list[float]] = {name: [] for name in kinds}
    sizes: dict[str, int] = {}
    checked: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, kind in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                start, taken, sizes[name], checked[name] = train(loop, kind, Path(folder))
            if turn:  # the first one warms up
                seconds[name].append(taken)
                started[name].append(start)
    unrecorded = seconds["unrecorded"]
    for name in kinds:
        ratios = [recorded / plain - 1 for recorded, plain in zip(seconds[name], unrecorded, strict=True)]
        milliseconds = 1000 * statistics.median(seconds[name]) / steps
        typer.echo(
            f"{name:18} {milliseconds:7.2f} ms per step, overhead {100 * statistics.median(ratios):6.1f} % "
            f"({100 * min(ratios):.1f} to {100 * max(ratios):.1f}); once {statistics.median(started[name]):.2f} s; "
            f"{sizes[name] / 1e6:.1f} MB; {checked[name]} steps checked"
        )


def train(loop: Loop, kind: Kind | None, folder: Path) -> tuple[float, float, int, int]:
    """Train once.

    Args:
        loop: The training loop.
        kind: How it is recorded; None for training without a recorder.
        folder: Folder of the run.

    Returns:
        Seconds to make the recorder, which checks, hashes and writes the data; seconds of the steps with all commits;
        bytes on disk; number of checked steps.
    """
    torch.manual_seed(0)
    net = _cnn(loop.network)
    made = torch.optim.SGD(net.parameters(), lr=0.05) if loop.optimizer == "SGD" else torch.optim.Adam(net.parameters())
    X, y, generator = loop.data.inputs, loop.data.labels, torch.Generator().manual_seed(0)
    start = time.thread_time()
    recorder = None
    if kind is not None:
        path = folder / "run" if kind.on_disk else None
        recorder = epk.Recorder(net, made, X, y, folder=path, check_every=kind.check_every)
    begun = time.thread_time()
    with nullcontext() if recorder is None else recorder:
        for _ in range(loop.steps):
            batch = torch.randint(len(X), (loop.batch_size,), generator=generator)
            rows = _shifted(X[batch], generator) if loop.augments else X[batch]
            made.zero_grad()
            F.cross_entropy(net(rows), y[batch]).backward()
            if recorder is not None:
                recorder.batch(batch)
            made.step()
    taken = time.thread_time() - begun
    on_disk = recorder is not None and kind is not None and kind.on_disk
    size = sum(chunk.bytes for chunk in check_run(folder / "run").chunks) if on_disk else 0
    return begun - start, taken, size, 0 if recorder is None else recorder.num_checked


def _shifted(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to two pixels."""
    shifts = torch.randint(-2, 3, (len(rows), 2), generator=generator).tolist()
    return torch.stack([row.roll(shift, dims=(1, 2)) for row, shift in zip(rows, shifts, strict=True)])


def _cnn(network: str) -> nn.Module:
    is_random = network == "random"
    norms = [nn.BatchNorm2d(width) if is_random else nn.Identity() for width in (8, 16)]
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), norms[1],
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3 if is_random else 0.0), nn.Linear(784, 10),
    )  # fmt: skip


if __name__ == "__main__":
    app()
