"""A run of a network of ResNet-18's size that keeps every k-th weight state: bytes on disk, seconds and memory.

Usage: python benchmarks/fewer_states.py --steps 200 --keep-every 20
Records the run in one process and attributes one image to all samples of all steps in another, each on its own, so
that the largest memory of each is seen. Data are random images; the network has BatchNorm and is trained by SGD with
momentum, in float32.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import epk_gp as epk

CLASSES, POINTS = 10, 128
_BUDGET = 1 << 28  # bytes; what weights, states and gradients take comes on top of it


class Block(nn.Module):
    """Two convolutions beside an identity, or beside a convolution of one position where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, before, h, w) to (n, width, h', w')."""
        return torch.relu(self.convs(x) + self.shortcut(x))


def resnet(base: int) -> nn.Sequential:
    """Return a ResNet-18 for small images; with base 64 it has 11.2 million weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, base, 3, 1, 1, bias=False), nn.BatchNorm2d(base), nn.ReLU()]
    before = base
    for stage in range(4):
        for number in range(2):
            width = base << stage
            layers.append(Block(before, width, 2 if stage and not number else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def images(side: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(POINTS, 3, side, side, generator=generator), torch.arange(POINTS) % CLASSES


def record(folder: Path, steps: int, storage: epk.Storage, base: int, side: int, batch_size: int) -> dict[str, float]:
    """Record the run."""
    net, (X, y) = resnet(base), images(side)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, weight_decay=5e-4)
    net.train()
    generator = torch.Generator().manual_seed(2)
    start = time.perf_counter()
    trajectory = epk.train(
        net, X, y, optimizer=optimizer, steps=steps, batch_size=batch_size, generator=generator, folder=folder,
        storage=storage,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return {
        "weights": trajectory.num_weights,
        "seconds": seconds,
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def attribute(folder: Path, base: int, side: int, nodes: int, layerwise: int) -> dict[str, float]:
    """Attribute the largest output of one new image to all samples."""
    trajectory = epk.load_trajectory(folder, resnet(base))
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(3))
    label = epk.network_outputs(trajectory, x).argmax(dim=1)
    rule = epk.adaptive() if nodes == 0 else epk.gauss_legendre(nodes)
    start = time.perf_counter()
    path = epk.layerwise(layerwise) if layerwise else epk.straight()
    parts = epk.attribute(trajectory, x, classes=label, rule=rule, path=path, memory_budget=_BUDGET)
    return {
        "seconds": time.perf_counter() - start,
        "output": float(parts.network),
        "change": float(parts.network - parts.initial),
        "error": parts.max_error,
        "evaluations": parts.evaluations,
        "residual": parts.max_residual,
        "unexplained": float(parts.unexplained.abs().max()),
        "largest_jump": parts.max_step_mismatch,
    }


def main(
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    keep_every: Annotated[int, typer.Option(help="Steps between kept states.")] = 20,
    base: Annotated[int, typer.Option(help="Channels of the first stage; 64 is ResNet-18's.")] = 64,
    side: Annotated[int, typer.Option(help="Side of an image.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 16,
    nodes: Annotated[int, typer.Option(help="Nodes of a fixed rule; 0 for the adaptive one.")] = 0,
    layerwise: Annotated[int, typer.Option(help="Steps of a layerwise stretch; 0 for straight steps.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
    part: Annotated[str, typer.Option(help="record, attribute, or both in processes of their own.")] = "both",
    folder: Annotated[Path | None, typer.Option(help="Folder of the run; a temporary one by default.")] = None,
) -> None:
    """Record a run and attribute one image."""
    torch.set_num_threads(threads)
    if part == "both":
        with tempfile.TemporaryDirectory() as temporary:
            where = folder or Path(temporary) / "run"
            for name in ("record", "attribute"):
                command = [sys.executable, *sys.argv, "--part", name, "--folder", str(where)]
                subprocess.run(command, check=True)
        return
    if folder is None:
        raise typer.BadParameter("--part record and --part attribute need --folder.")
    before = time.process_time()
    if part == "record":
        found = record(folder, steps, epk.Storage(keep_every=keep_every), base, side, batch_size)
    else:
        found = attribute(folder, base, side, nodes, layerwise)
    found |= {"cpu_seconds": time.process_time() - before}
    found |= {"max_memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    typer.echo(json.dumps({"part": part, "steps": steps, "keep_every": keep_every, **found}))


if __name__ == "__main__":
    typer.run(main)
