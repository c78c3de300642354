"""The cost of influence: against attribution of the same points and outputs, in turns in one process.

Usage: python benchmarks/influence.py --rounds 5
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import epk_gp as epk


@dataclass(frozen=True)
class Case:
    """A network, how it is trained, and which outputs are explained.

    Attributes:
        name: Name in the table.
        net: Makes the network.
        inputs: Number of inputs.
        optimizer: Makes the optimizer.
        batch_size: Samples of a batch; None for all.
        classes: Whether one output of each point is explained, or all ten.
    """

    name: str
    net: Callable[[], nn.Module]
    inputs: int
    optimizer: Callable[..., torch.optim.Optimizer]
    batch_size: int | None
    classes: bool = True


def mlp(inputs: int, width: int, activation: type[nn.Module]) -> nn.Module:
    """Return a network of one hidden layer and ten outputs."""
    return nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, 10))


def cnn() -> nn.Module:
    """Return two convolutions on images of 14 x 14 pixels."""
    layers = [nn.Unflatten(1, (1, 14, 14)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))


def sgd(p: object) -> torch.optim.Optimizer:
    """Return plain gradient descent."""
    return torch.optim.SGD(p, lr=0.1)  # type: ignore[arg-type]


def momentum(p: object) -> torch.optim.Optimizer:
    """Return gradient descent with momentum."""
    return torch.optim.SGD(p, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def adamw(p: object) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(p, lr=0.003)  # type: ignore[arg-type]


CASES = (
    Case("MLP 64-32-10, tanh, SGD, full batch", lambda: mlp(64, 32, nn.Tanh), 64, sgd, None),
    Case("MLP 64-32-10, ReLU, SGD, full batch", lambda: mlp(64, 32, nn.ReLU), 64, sgd, None),
    Case("MLP 64-32-10, ReLU, AdamW, batches of 25", lambda: mlp(64, 32, nn.ReLU), 64, adamw, 25),
    Case("the same, all ten outputs", lambda: mlp(64, 32, nn.ReLU), 64, adamw, 25, classes=False),
    Case("MLP 784-64-10, ReLU, AdamW, batches of 50", lambda: mlp(784, 64, nn.ReLU), 784, adamw, 50),
    Case("CNN, momentum, batches of 25", cnn, 196, momentum, 25),
)


def measured(case: Case, *, num_train: int, num_test: int, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of attribution and of influence, round by round."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num_train + num_test, case.inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (num_train,), generator=generator)
    torch.manual_seed(0)
    net = case.net().double()
    trajectory = epk.train(
        net, X[:num_train], y, optimizer=case.optimizer(net.parameters()), steps=steps, batch_size=case.batch_size
    )
    points = X[num_train:]
    classes = torch.arange(num_test) % 10 if case.classes else None
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: epk.attribute(trajectory, points, classes=classes).samples,
        lambda: epk.influence(trajectory, points, classes=classes).values,
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first round warms up
        for call, found in zip(calls, seconds, strict=True):
            begun = time.perf_counter()
            call()
            if number:
                found.append(time.perf_counter() - begun)
    return seconds


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 5,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 200,
    num_test: Annotated[int, typer.Option(help="Points that are explained.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 60,
) -> None:
    """Print the ratio of the times of influence and of attribution, and attribution's seconds."""
    typer.echo(
        f"{num_train} training points, {num_test} points, {steps} steps, float64, {torch.get_num_threads()} threads"
    )
    typer.echo("| case | influence / attribution | smallest to largest | attribution, seconds |")
    typer.echo("|---|---|---|---|")
    for case in CASES:
        attribution, influence = measured(case, num_train=num_train, num_test=num_test, steps=steps, rounds=rounds)
        ratios = [b / a for a, b in zip(attribution, influence, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        typer.echo(
            f"| {case.name} | {statistics.median(ratios):.2f} | {spread} | {statistics.median(attribution):.2f} |"
        )


if __name__ == "__main__":
    typer.run(main)
