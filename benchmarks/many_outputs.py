"""Measure memory and time with a thousand outputs and a million weights, each computation in a process of its own.

Usage: python benchmarks/many_outputs.py table. Peaks are read from Linux's /proc.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor, nn

import epk_gp as epk

MIB = 1 << 20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Asked:
    """What a computation is given.

    Attributes:
        run: A recorded run.
        X: Test inputs.
        budget: Memory budget in bytes.
    """

    run: epk.Trajectory
    X: Tensor
    budget: int

    @property
    def classes(self) -> Tensor:
        """One output of each input."""
        return torch.arange(len(self.X)) % self.run.num_outputs

    def block(self, head: Literal["logits", "log_softmax"], n: int = 4) -> Tensor:
        """Compute a Gram block of n test copies and n training copies."""
        sides = epk.Points(self.X[:n], is_train=False), epk.Points(self.run.inputs[:n], is_train=True)
        return epk.gram_block(self.run, *sides, head=head, memory_budget=self.budget)

    def trace(self) -> Tensor:
        """Compute the kernel that is summed over outputs, between all inputs and all training points."""
        kernel = epk.EPKKernel(self.run, outputs="trace", memory_budget=self.budget)
        with torch.no_grad():
            return kernel(epk.test_copy(self.X), epk.train_copy(self.run.inputs)).to_dense()


COMPUTATIONS: dict[str, Callable[[Asked], Tensor]] = {
    "`gram_block`, logits, 4 x 4 points": lambda a: a.block("logits"),
    "`gram_block`, log-softmax, 4 x 4 points": lambda a: a.block("log_softmax"),
    '`EPKKernel(outputs="trace")`, 30 x 40 points': Asked.trace,
    "`reconstruct`, 30 points": lambda a: epk.reconstruct(a.run, a.X, memory_budget=a.budget).network,
    "`attribute`, 30 points, one output each": lambda a: (
        epk.attribute(a.run, a.X, classes=a.classes, memory_budget=a.budget).samples
    ),
    "the same, `path=layerwise()`": lambda a: (
        epk.attribute(a.run, a.X, classes=a.classes, path=epk.layerwise(), memory_budget=a.budget).samples
    ),
    "`attribute`, 3 points, all outputs": lambda a: epk.attribute(a.run, a.X[:3], memory_budget=a.budget).samples,
    "`influence`, 3 points, one output each": lambda a: (
        epk.influence(a.run, a.X[:3], classes=a.classes[:3], memory_budget=a.budget).values
    ),
    "`attribute`, 1 point, all outputs, AdamW, `path=layerwise()`": lambda a: (
        epk.attribute(a.run, a.X[:1], path=epk.layerwise(), memory_budget=a.budget).samples
    ),
    "`influence`, 1 point, all outputs, AdamW": lambda a: epk.influence(a.run, a.X[:1], memory_budget=a.budget).values,
}
app = typer.Typer()


@app.command()
def table(
    budget: Annotated[int, typer.Option(help="Memory budget in MiB.")] = 256,
    only: Annotated[str, typer.Option(help="Regular expression: computations that are measured.")] = "",
    width: Annotated[int, typer.Option(help="Inputs, and hidden units of each of two layers.")] = 500,
    outputs: Annotated[int, typer.Option(help="Outputs.")] = 1000,
    steps: Annotated[int, typer.Option(help="Recorded steps.")] = 4,
    dtypes: Annotated[str, typer.Option(help="Dtypes of data and weights.")] = "float32,float64",
) -> None:
    """Print the table: for each dtype the peak beside the result, the result, and processor time."""
    asked = dtypes.split(",")
    heads = "".join(f" {dtype}: peak, MiB | result, MiB | processor s |" for dtype in asked)
    typer.echo(f"| |{heads}\n|---|" + "---|---|---|" * len(asked))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    for number, name in enumerate(COMPUTATIONS):
        if not re.search(only, name):
            continue
        cells = []
        for dtype in asked:
            command = [sys.executable, __file__, "measure", str(number), dtype]
            command += [str(value) for value in (budget, width, outputs, steps)]
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
            peak, result, seconds = json.loads(printed.splitlines()[-1])
            cells += [f"{peak / MIB:.0f}", f"{result / MIB:.1f}", f"{seconds:.1f}"]
        typer.echo(f"| {name} | " + " | ".join(cells) + " |")


@app.command()
def measure(number: int, dtype: str, budget: int, width: int, outputs: int, steps: int) -> None:
    """Make one computation in this process, and print peak, bytes of the result and processor seconds."""
    warnings.simplefilter("ignore", epk.CertificateWarning)  # float32
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        name, computation = list(COMPUTATIONS.items())[number]
        run = recorded(Path(folder) / "run", width, outputs, steps, getattr(torch, dtype), is_adam="AdamW" in name)
        asked = Asked(run, torch.randn(30, width, dtype=run.dtype), budget * MIB)
        CLEAR.write_text("5")  # the peak starts anew
        before, start = _resident("VmRSS"), time.process_time()
        result = computation(asked)
        seconds, peak = time.process_time() - start, _resident("VmHWM") - before
        typer.echo(json.dumps([peak - result.nbytes, result.nbytes, seconds]))


def recorded(path: Path, width: int, outputs: int, steps: int, dtype: torch.dtype, *, is_adam: bool) -> epk.Trajectory:
    """Record a network of two hidden layers on 40 points; and let torch load what it loads once."""
    torch.manual_seed(0)
    X, y = torch.randn(40, width, dtype=dtype), torch.randint(0, outputs, (40,))
    for widths, where in (((width, 3, 3, outputs), None), ((width, width, width, outputs), path)):
        layers = [nn.Linear(n_in, n_out) for n_in, n_out in pairwise(widths)]
        net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).to(dtype)
        optimizer = (
            torch.optim.AdamW(net.parameters(), lr=1e-4) if is_adam else torch.optim.SGD(net.parameters(), lr=0.05)
        )
        run = epk.train(net, X, y, optimizer=optimizer, steps=steps, batch_size=10, folder=where)
        if where is None:
            epk.attribute(run, X[:1], classes=y[:1])
            epk.influence(run, X[:1], classes=y[:1])
    return run


def _resident(which: str) -> int:
    return int(STATUS.read_text().split(which + ":")[1].split()[0]) * 1024


if __name__ == "__main__":
    app()
