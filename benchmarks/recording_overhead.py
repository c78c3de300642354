"""The cost of recording: an MNIST CNN trained with and without a recorder, in turns, on one thread, in processor time.

Usage: EPK_GP_DATA=FOLDER python benchmarks/recording_overhead.py --batch-size 64 --rounds 6
"""

import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import Dataset, mnist_folder
from epk_gp.storage.check import check_run


def main(
    batch_size: Annotated[int, typer.Option(help="Points per step.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps per turn.")] = 300,
    rounds: Annotated[int, typer.Option(help="Turns of each kind; the median counts.")] = 6,
    optimizer: Annotated[str, typer.Option(help="SGD or Adam.")] = "SGD",
) -> None:
    """Time training without a recorder, and with one that checks as many steps as are cheap, all, or one in 50."""
    if "EPK_GP_DATA" not in os.environ:
        typer.echo("skipped: EPK_GP_DATA must name the folder that holds mnist/; it is not set.")
        return
    torch.set_num_threads(1)
    data = mnist_folder(Path(os.environ["EPK_GP_DATA"]) / "mnist", split="train", dtype=torch.float32)[:10_000]
    kinds: dict[str, tuple[int | None, str] | None] = {
        "plain": None,
        "default": (None, "none"),
        "every gradient": (1, "none"),
        "one in 50": (50, "none"),
        "one in 50, deltas": (50, "deltas"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    started: dict[str, list[float]] = {name: [] for name in kinds}
    sizes: dict[str, int] = {}
    checked: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, kind in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                start, taken, sizes[name], checked[name] = train(data, batch_size, steps, optimizer, kind, Path(folder))
            if turn:  # the first one warms up
                seconds[name].append(taken)
                started[name].append(start)
    plain = seconds["plain"]
    for name in kinds:
        ratios = [recorded / unrecorded - 1 for recorded, unrecorded in zip(seconds[name], plain, strict=True)]
        milliseconds = 1000 * statistics.median(seconds[name]) / steps
        typer.echo(
            f"{name:18} {milliseconds:7.2f} ms per step, overhead {100 * statistics.median(ratios):6.1f} % "
            f"({100 * min(ratios):.1f} to {100 * max(ratios):.1f}); {checked[name]} of {steps} steps checked; "
            f"once {statistics.median(started[name]):.2f} s; {sizes[name] / 1e6:.1f} MB"
        )


def train(
    data: Dataset, batch_size: int, steps: int, optimizer: str, kind: tuple[int | None, str] | None, folder: Path
) -> tuple[float, float, int, int]:
    """Train once.

    Args:
        data: Training data.
        batch_size: Points per step.
        steps: Number of steps.
        optimizer: SGD or Adam.
        kind: `check_every` and `compression` of the recorder, or None for training without one.
        folder: Folder of the run.

    Returns:
        Seconds to make the recorder, which checks, hashes and writes the data; seconds of the steps with all commits;
        bytes on disk; steps whose gradient was recomputed.
    """
    torch.manual_seed(0)
    net = _cnn()
    made = torch.optim.SGD(net.parameters(), lr=0.05) if optimizer == "SGD" else torch.optim.Adam(net.parameters())
    X, y, generator = data.inputs, data.labels, torch.Generator().manual_seed(0)
    start = time.process_time()
    recorder = None
    if kind is not None:
        storage = epk.Storage(compression=kind[1])
        recorder = epk.Recorder(net, made, X, y, path=folder / "run", storage=storage, check_every=kind[0])
    begun = time.process_time()
    with nullcontext() if recorder is None else recorder:
        for _ in range(steps):
            batch = torch.randint(len(X), (batch_size,), generator=generator)
            made.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            if recorder is not None:
                recorder.batch(batch)
            made.step()
    taken = time.process_time() - begun
    size = 0 if recorder is None else sum(chunk.bytes for chunk in check_run(folder / "run").chunks)
    return begun - start, taken, size, 0 if recorder is None else recorder.num_checked


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
