"""A large map by one program, whose processes are watched."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

import epk_gp as epk

WIDTH = 64


def grid(
    points: Annotated[int, typer.Option(help="Grid points.")] = 100_000,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 1_000,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    memory: Annotated[float, typer.Option(help="Memory budget of a worker, GiB.")] = 0.25,
) -> None:
    """Compute the kernel between a grid's points and all training points by one program, and watch its processes.

    The network has one output, so that a value of the kernel is one number.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draws = torch.Generator().manual_seed(0)
        X = torch.randn(num_train, 2, generator=draws, dtype=torch.float64)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
        optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss()
        epk.train(
            net, X, X.sin().sum(1, keepdim=True), loss=loss, optimizer=optimizer, steps=steps, folder=folder / "run"
        )
        (folder / "map.py").write_text(PROGRAM)
        save_file({"inputs": on_grid(points)}, folder / "grid.safetensors")
        begun = time.perf_counter()
        peaks = watched([sys.executable, "map.py", str(workers), str(int(memory * 2**30))], folder)
        seconds, size = time.perf_counter() - begun, (folder / "map.safetensors").stat().st_size
    owner, *others = peaks
    typer.echo(
        f"{points:,} grid points x {num_train:,} training points x {steps} steps: {seconds:.1f} s, a file of "
        f"{size / 2**20:.0f} MiB"
    )
    typer.echo(f"peak memory: owner {owner:.0f} MiB; workers {', '.join(f'{peak:.0f}' for peak in others)} MiB")


PROGRAM = f"""import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from safetensors.torch import load_file, save_file
from torch import nn

import epk_gp as epk

if __name__ == "__main__":
    workers, memory = map(int, sys.argv[1:])
    run = epk.load_trajectory("run", nn.Sequential(nn.Linear(2, {WIDTH}), nn.Tanh(), nn.Linear({WIDTH}, 1)).double())
    grid = epk.Points(load_file("grid.safetensors")["inputs"], is_train=False)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        how = {{"memory_budget": memory, "executor": executor, "checkpoint": "pieces"}}
        K = epk.gram_block(run, grid, epk.Points(run.inputs, is_train=True), **how)
    save_file({{"gram": K}}, "map.safetensors")
"""


def on_grid(points: int) -> Tensor:
    """Return points of a square grid, row by row."""
    side = -(-points // max(1, round(points**0.5)))
    first = torch.linspace(-3, 3, side, dtype=torch.float64)
    second = torch.linspace(-3, 3, -(-points // side), dtype=torch.float64)
    return torch.cartesian_prod(second, first)[:points].contiguous()


def watched(command: list[str], folder: Path) -> list[float]:
    """Run a command, and return the peak memory in MiB of its process, and of each process that it started."""
    peaks = dict[int, float]()
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        for number in (process.pid, *children(process.pid)):
            peaks[number] = peak_mib(number) or peaks.get(number, 0.0)
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the program must succeed: it ended with {process.returncode}.")
    owner = peaks.pop(process.pid)
    return [owner, *sorted(peaks.values(), reverse=True)]


def children(number: int) -> list[int]:
    """List the worker processes that a process started, and no other ones."""
    file = Path(f"/proc/{number}/task/{number}/children")
    try:
        started = file.read_text().split()
        return [int(child) for child in started if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []


def peak_mib(number: int) -> float:
    """Return the peak memory of a process, 0 if it has gone."""
    try:
        status = Path(f"/proc/{number}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(entry.split()[1]) / 1024 for entry in status if entry.startswith("VmHWM")), 0.0)
