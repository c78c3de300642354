"""The cost of a posterior beside its kernel: processor seconds of linear algebra, and peak memory.

Usage: python benchmarks/logit_posterior.py --points 10000 --num-train 1000
"""

import resource
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import epk_gp as epk
from epk_gp.gp import models
from epk_gp.gram.path_kernel import PathKernel


class Clock:
    """Processor time spent in chosen functions."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the time of every call is added."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - before

        return timed


def main(
    points: Annotated[int, typer.Option(help="Test points.")] = 10_000,
    num_train: Annotated[int, typer.Option(help="Training points, all conditioned on.")] = 1000,
    outputs: Annotated[str, typer.Option(help="full or independent.")] = "full",
    budget: Annotated[int, typer.Option(help="Memory budget in MiB.")] = 512,
    fit_steps: Annotated[int, typer.Option(help="Steps of the marginal-likelihood fit.")] = 20,
) -> None:
    """Condition the GP of a small network on the plane, and evaluate its posterior."""
    torch.manual_seed(0)
    X, y = torch.randn(num_train, 2, dtype=torch.float64), torch.arange(num_train) % 3
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    gp = epk.LogitGP(run, outputs=outputs, rule=epk.gauss_legendre(2), memory_budget=budget << 20)
    grams, kernel = Clock(), Clock()
    for name in ("block", "block_per_class", "trace_block"):
        setattr(PathKernel, name, grams.around(getattr(PathKernel, name)))
    before = time.process_time()
    gp.fit(fit_steps)
    typer.echo(
        f"fit, {fit_steps} steps: {time.process_time() - before:.1f} s, of which the kernel {grams.seconds:.1f} s"
    )
    for name in ("normalized_block", "point_blocks"):
        setattr(models, name, kernel.around(getattr(models, name)))
    X_test, peak_before = 2 * torch.randn(points, 2, dtype=torch.float64), _peak()
    before = time.process_time()
    gp.logit_posterior(X_test)
    total = time.process_time() - before
    typer.echo(
        f"{points} test points x {num_train} training points x 3 outputs, {outputs}: linear algebra "
        f"{total - kernel.seconds:.1f} s, kernel {kernel.seconds:.1f} s (processor time)"
    )
    typer.echo(f"peak memory of the process: {_peak():.2f} GiB, {_peak() - peak_before:.2f} GiB more than before")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    typer.run(main)
