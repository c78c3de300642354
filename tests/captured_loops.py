"""Loops whose forward passes are recorded as they were, one feature of recording each, with places for faults."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk

POINTS, CLASSES = 12, 3
FEATURES = (
    "dropout",
    "batch_norm",
    "augmentation",
    "mixup",
    "weights",
    "accumulation",
    "two_optimizers",
    "accumulated_batch_norm",
)


def make_net(feature: str) -> nn.Module:
    torch.manual_seed(1)
    extra: list[nn.Module] = []
    if "batch_norm" in feature:
        extra = [nn.BatchNorm1d(6)]
    if feature in ("dropout", "two_optimizers"):
        extra = [nn.Dropout(0.5)]
    return nn.Sequential(nn.Linear(4, 6), *extra, nn.Tanh(), nn.Linear(6, CLASSES)).double()


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(POINTS, 4, generator=generator, dtype=torch.float64), torch.arange(POINTS) % CLASSES


class CapturedLoop:
    """A correct loop of three steps; functions are called at named places of it.

    Attributes:
        at: Functions to call before these places of the faulty step: "begin", "forward", "value" (of the loss),
            "announce", "step"; "announced" follows "announce", and "end" the step.
        faulty_step: The step.
    """

    steps = 3

    def __init__(
        self, feature: str, at: Mapping[str, Callable[["CapturedLoop"], Any]] | None = None, faulty_step: int = 1
    ) -> None:
        self.feature, self.at, self.faulty_step = feature, dict(at or {}), faulty_step
        self.net = make_net(feature)
        self.X, self.y = make_data()
        parameters = list(self.net.parameters())
        groups = [parameters[:2], parameters[2:]] if feature == "two_optimizers" else [parameters]
        self.optimizers = [torch.optim.SGD(group, lr=0.2, momentum=0.5) for group in groups]
        self.draw = torch.Generator().manual_seed(3)
        self.step = 0

    def place(self, name: str) -> None:
        if self.step == self.faulty_step and name in self.at:
            self.at[name](self)

    def prepare(self, rows: Tensor) -> None:
        """Say which rows the network sees, with which targets and weights."""
        self.rows = self.announced = rows
        self.x, self.q = self.X[rows], F.one_hot(self.y[rows], CLASSES).double()
        self.weight: float | Tensor = 1.0
        if self.feature == "augmentation":
            self.x = self.x + 0.3 * torch.randn(self.x.shape, generator=self.draw, dtype=self.x.dtype)
        if self.feature == "mixup":
            order = torch.arange(len(rows)).roll(1)
            self.x, self.q = 0.7 * self.x + 0.3 * self.x[order], 0.7 * self.q + 0.3 * self.q[order]
        if self.feature == "weights":
            self.weight = 0.5 + torch.rand(len(rows), generator=self.draw, dtype=torch.float64)
        if "accumulat" in self.feature:
            self.weight = 0.5

    def value(self) -> Tensor:
        losses = -(self.q * self.z.log_softmax(dim=1)).sum(dim=1)
        return (self.weight * losses).mean()

    def run(self, path: Path | None = None, **options: Any) -> epk.Trajectory:
        torch.manual_seed(7)
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        options = {"check_every": 1} | options  # every step, whatever time that takes
        with epk.Recorder(self.net, optimizers, self.X, self.y, folder=path, **options) as recorder:
            self.recorder = recorder
            for step in range(self.steps):
                self.step = step
                self.place("begin")
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                rows = torch.randperm(POINTS, generator=self.draw)
                for part in rows[:8].split(4) if "accumulat" in self.feature else [rows[:8]]:
                    self.prepare(part)
                    self.place("forward")
                    self.z = self.net(self.x)
                    self.place("value")
                    self.value().backward()
                    self.place("announce")
                    recorder.batch(self.announced, weight=self.weight)
                    self.place("announced")
                self.place("step")
                for optimizer in self.optimizers:
                    optimizer.step()
                self.place("end")
        return recorder.trajectory
