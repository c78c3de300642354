"""Time and peak memory of an uncertainty map: grid points x training points x steps, in a process of its own.

Usage: python benchmarks/uncertainty_grid.py --grid 100 --num-train 1000 --steps 100
"""

import json
import resource
import time
from typing import Annotated

import torch
import typer

import epk_gp as epk
from epk_gp.analysis.maps import principal_plane, uncertainty_on_plane
from epk_gp.datasets import three_gaussians


def main(
    grid: Annotated[int, typer.Option(help="Nodes per side of the map.")] = 100,
    num_train: Annotated[int, typer.Option(help="Training points, all conditioned on.")] = 1000,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    outputs: Annotated[str, typer.Option(help="full or independent.")] = "independent",
    nodes: Annotated[int, typer.Option(help="Gauss-Legendre nodes per step.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers only.")] = False,
) -> None:
    """Record the toy problem (64 ReLU units, 100-D, 3 classes), fit its GP and map its uncertainty."""
    torch.manual_seed(0)
    data = three_gaussians(-(-num_train // 3))
    X, y = data.inputs[:num_train], data.labels[:num_train]
    net = torch.nn.Sequential(torch.nn.Linear(100, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seconds, before = {}, time.perf_counter()
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=steps)
    seconds["record"] = time.perf_counter() - before
    recorded = _peak()
    before = time.perf_counter()
    gp = epk.LogitGP(trajectory, outputs=outputs, rule=epk.gauss_legendre(nodes))
    gp.fit(20)
    seconds["fit"] = time.perf_counter() - before
    before = time.perf_counter()
    uncertainty_on_plane(gp, principal_plane(X), size=grid, num_samples=256, generator=torch.Generator().manual_seed(0))
    seconds["map"] = time.perf_counter() - before
    if as_json:
        sizes = {"grid_points": grid**2, "training_points": num_train, "steps": steps, "nodes": nodes}
        typer.echo(json.dumps({**sizes, "outputs": outputs, "seconds": seconds, "peak_gib": _peak()}))
        return
    typer.echo(f"{grid**2} grid points x {num_train} training points x {steps} steps, {outputs}, {nodes} nodes")
    typer.echo(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    typer.echo(f"peak memory of the process: {_peak():.2f} GiB ({recorded:.2f} GiB after recording)")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    typer.run(main)
