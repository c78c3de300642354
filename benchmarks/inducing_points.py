"""The cost of learning inducing points: variational steps of a GPyTorch SVGP with learned ones and with fixed ones.

Usage: EPK_GP_DATA=FOLDER python benchmarks/inducing_points.py --inducing 20 --batch-size 100 --rounds 10
Without EPK_GP_DATA only the network on the plane is measured.
"""

import itertools
import os
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import gpytorch
import torch
import typer
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.datasets import Dataset, mnist_folder, three_gaussians
from epk_gp.kernels.blocks import Outputs
from epk_gp.kernels.epk import Normalization

LEARNING_RATE = 0.01
WARM_UP = 2  # steps of each kind that are not timed


@dataclass(frozen=True)
class Case:
    """A kernel of a process.

    Attributes:
        name: Name in the table.
        outputs: "trace", one process for all classes; "independent", one for each class, with shared inducing points.
        normalize: As the kernel's.
    """

    name: str
    outputs: Outputs = "trace"
    normalize: Normalization = None


class SparseProcess(gpytorch.models.ApproximateGP):  # type: ignore[misc]  # gpytorch ships no types
    """A sparse variational GP on the path kernel."""

    def __init__(self, kernel: epk.EPKKernel, Z: Tensor, *, learns_points: bool) -> None:
        """Start at the inducing points Z."""
        batch = kernel.batch_shape
        weights = gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(
            self, Z.clone(), weights, learn_inducing_locations=learns_points
        )
        inducing = strategy.inducing_points
        if batch:
            strategy = gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=batch[0])
        super().__init__(strategy)
        self.inducing = inducing  # a parameter, or a buffer if it is fixed
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at some points."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Fit:
    """A variational fit that goes on step by step, with a kernel and thus a cache of its own."""

    def __init__(self, run: epk.Trajectory, case: Case, Z: Tensor, *, learns_points: bool) -> None:
        """Make the process, its likelihood and its optimizer."""
        kernel = epk.EPKKernel(run, case.outputs, normalize=case.normalize)
        self.run, self.learns_points, self.start = run, learns_points, Z
        self.gp = SparseProcess(kernel, Z, learns_points=learns_points).double()
        C = run.num_outputs
        self.likelihood = (
            gpytorch.likelihoods.SoftmaxLikelihood(num_features=C, num_classes=C, mixing_weights=False)
            if kernel.batch_shape
            else gpytorch.likelihoods.GaussianLikelihood().double()
        )
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.gp, num_data=run.num_points)
        parameters = [*self.gp.parameters(), *self.likelihood.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)

    def step(self, batch: Tensor) -> float:
        """Make one step on some training points, and return its seconds of processor time."""
        before = time.process_time()
        y = self.run.targets[batch]
        if isinstance(self.likelihood, gpytorch.likelihoods.GaussianLikelihood):
            y = (y == 0).double() - 1 / self.run.num_outputs
        self.optimizer.zero_grad()
        loss = -self.bound(self.gp(self.run.inputs[batch].flatten(1)), y).sum()
        loss.backward()
        self.optimizer.step()
        return time.process_time() - before

    def check(self) -> None:
        """Fail if the inducing points moved although they are fixed, or one of them did not although all are learned.

        Raises:
            RuntimeError: It is so, and the times would mean nothing.
        """
        moved = int((self.gp.inducing != self.start).any(-1).sum())
        expected = len(self.start) if self.learns_points else 0
        if moved != expected:
            raise RuntimeError(f"{expected} of {len(self.start)} inducing points must move: {moved} did.")


def main(
    inducing: Annotated[int, typer.Option(help="Inducing points.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Training points per variational step, drawn anew each time.")] = 100,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 1000,
    steps: Annotated[int, typer.Option(help="Training steps of the network.")] = 20,
    rounds: Annotated[int, typer.Option(help="Steps of each kind that are timed, in turns; the median counts.")] = 10,
) -> None:
    """Time steps with learned and with fixed inducing points in turns, on the same batches and on one thread.

    Times are the processor's, so that other processes do not count. Fixed points' own block is computed once and kept;
    their block with a new batch is computed in every step.
    """
    torch.set_num_threads(1)
    cases = [
        Case("trace"),
        Case("trace, cosine", normalize="cosine"),
        Case("independent", "independent"),
        Case("independent, cosine", "independent", "cosine"),
    ]
    runs = {"plane, 2-32-32-3": train(three_gaussians(-(-num_train // 3), dim=2)[:num_train], (2, 32, 32, 3), steps)}
    if "EPK_GP_DATA" in os.environ:
        runs["MNIST, 784-64-10"] = train(mnist_folder(split="train")[:num_train], (784, 64, 10), steps)
    else:
        typer.echo("MNIST is left out: EPK_GP_DATA must name the folder that holds mnist/; it is not set.")
    for name, run in runs.items():
        typer.echo(
            f"{name}: {num_train} training points, {steps} steps; {inducing} inducing points, batches of {batch_size}"
        )
        for case in cases:
            fixed, learned = measure(run, case, inducing, batch_size, rounds)
            ratios = [slow / fast for fast, slow in zip(fixed, learned, strict=True)]
            typer.echo(
                f"  {case.name:20} fixed {1e3 * statistics.median(fixed):7.1f} ms, learned "
                f"{1e3 * statistics.median(learned):7.1f} ms per step; learned / fixed {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds)"
            )


def train(data: Dataset, widths: tuple[int, ...], steps: int) -> epk.Trajectory:
    """Record the training of a tanh network by gradient descent."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.Tanh()]
    net = nn.Sequential(*layers[:-1]).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return epk.train(net, data.inputs, data.labels, optimizer=optimizer, steps=steps)


def measure(
    run: epk.Trajectory, case: Case, inducing: int, batch_size: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Let both kinds take turns.

    Args:
        run: The run.
        case: The kernel.
        inducing: Number of inducing points, which start at the first training points.
        batch_size: Points per step.
        rounds: Steps of each kind that are timed, after two that are not.

    Returns:
        Seconds of each step with fixed points, and with learned ones.
    """
    draws = torch.Generator().manual_seed(0)
    Z = run.inputs[:inducing].flatten(1)
    Z = Z + 0.1 * torch.randn(Z.shape, generator=draws, dtype=Z.dtype)
    fits = [Fit(run, case, Z, learns_points=learns) for learns in (False, True)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + rounds):
        batch = torch.randperm(run.num_points, generator=draws)[:batch_size]
        for kind in (0, 1) if number % 2 else (1, 0):  # neither is always the first
            taken = fits[kind].step(batch)
            if number >= WARM_UP:
                seconds[kind].append(taken)
    for fit in fits:
        fit.check()
    return seconds


if __name__ == "__main__":
    typer.run(main)
