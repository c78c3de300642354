"""Small runs with what a path must follow, and paths in plain loops over autograd.grad."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from statistics_runs import reference_jacobian
from torch import Tensor, nn
from torch.nn import functional as F
from weighted_loops import Apply, Encoder, record

import epk_gp as epk
import reference
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.quadrature.rules import QuadratureRule

STEPS = 5  # chords of 2 leave one of a single step


def mlp(activation: type[nn.Module], *extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *extra, activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))


def three_sizes() -> nn.Module:
    """Layers between the first and the last: one is written out once for each chord, one is multiplied at its nodes."""
    sizes = (4, 12, 12, 40, 3)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


class InPlaceResidual(nn.Module):
    """As residual networks are written: batch and group norm, ReLU in place, a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.norm_b = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm_a(self.a(x.view(-1, 1, 2, 2))))
        skip, x = x, self.norm_b(self.b(x))
        x += skip
        return self.out(F.adaptive_max_pool2d(self.relu(x), 1).flatten(1))


def recurrent() -> nn.Module:
    last = Apply(lambda returned: returned[0][:, -1])
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LSTM(2, 5, batch_first=True), last, nn.Linear(5, 3))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.3),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1),
}
RUNS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "relu_sgd": (lambda: mlp(nn.ReLU), "sgd"),
    "tanh_sgd": (lambda: mlp(nn.Tanh), "sgd"),
    "tanh_momentum": (lambda: mlp(nn.Tanh), "momentum"),
    "tanh_adamw": (lambda: mlp(nn.Tanh), "adamw"),
    "dropout_momentum": (lambda: mlp(nn.ReLU, nn.Dropout(0.3)), "momentum"),
    "batch_norm_sgd": (lambda: mlp(nn.Tanh, nn.BatchNorm1d(6)), "sgd"),
    "cnn_adamw": (cnn, "adamw"),
    "transformer_adamw": (Encoder, "adamw"),
    "three_sizes": (three_sizes, "sgd"),
    "in_place_momentum": (InPlaceResidual, "momentum"),
    "recurrent_momentum": (recurrent, "momentum"),
    "average": (lambda: mlp(nn.ReLU), "momentum"),
}


@functools.cache
def recorded(name: str, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> epk.Trajectory:
    torch.manual_seed(3)
    make, optimizer_name = RUNS[name]
    net = make().to(dtype).train()
    optimizer = OPTIMIZERS[optimizer_name](net)
    X, y = torch.randn(10, 4, dtype=torch.float64).to(dtype), torch.arange(10) % 3
    run = record(net, optimizer, X, y, [torch.arange(4 * s, 4 * s + 4) % 10 for s in range(steps)])
    return averaged_trajectory(run, averaging_coefficients(steps, decay=0.6)) if name == "average" else run


def queries(count: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def state(run: epk.Trajectory, s: int) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.weights(s).items()}


def jacobian(run: epk.Trajectory, at: dict[str, Tensor], x: Tensor, head: str) -> dict[str, Tensor]:
    """Differentiate f in weights and statistics by loops over autograd.grad: (C, size) of each."""
    flat = torch.cat([value.flatten() for value in at.values()])
    columns = reference_jacobian(run.model.module, run, flat, x[None], head)[0]
    return dict(zip(at, columns.split([value.numel() for value in at.values()], dim=1), strict=True))


def path_average(
    run: epk.Trajectory, path: Any, step: int, x: Tensor, head: str, rule: QuadratureRule
) -> dict[str, Tensor]:
    """Phi of the stretch that a step belongs to, parameter by parameter and statistic by statistic: (C, size) each."""
    k = getattr(path, "every", 1)
    first = step // k * k
    start, end = state(run, first), state(run, min(first + k, run.num_steps))
    total: dict[str, Tensor] = {}
    for t, weight in rule:
        at = {name: torch.lerp(start[name], end[name], t) for name in start}
        for name, value in jacobian(run, at, x, head).items():
            total[name] = total.get(name, 0) + weight * value
    return total


def gram_block(run: epk.Trajectory, path: Any, points: epk.Points, head: str, rule: QuadratureRule) -> Tensor:
    return reference.gram_block(run, points, points, head, rule, path.every)
