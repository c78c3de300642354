"""A training loop under a recorder, with features of recording, odd networks, and places for faults."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk

POINTS, CLASSES = 12, 3
FEATURES = (
    "dropout", "batch_norm", "augmentation", "mixup", "weights", "accumulation", "two_optimizers",
    "accumulated_batch_norm",
)  # fmt: skip


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind, self.count = nn.Linear(4, 6), nn.Linear(6, CLASSES), kind, 0
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True) if kind == "attention" else None
        self.generator = torch.Generator().manual_seed(0) if kind == "generator" else None
        self.register_buffer("number", torch.zeros((), dtype=torch.int64 if kind == "integer" else torch.float64))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        if not self.training:
            return self.last(
                h * (1 - self.number) if self.kind == "annealed" else h - self.number * (self.kind == "mean")
            )
        match self.kind:
            case "functional_dropout":
                h = F.dropout(h, 0.3)
            case "attention":
                h = h[:, None].expand(-1, 5, -1)
                h = self.attention(h, h, h, need_weights=False)[0].mean(1)
            case "centred":
                h = h - h.mean(0)
            case "counting":
                self.number += 1
            case "annealed":
                h, self.number = h * (1 - self.number), 0.1 + 0.9 * self.number
            case "mean":  # another tensor after each pass, as most people write a moving mean
                self.number = 0.9 * self.number + 0.1 * h.mean().detach()
                h = h - self.number
            case "attribute" | "integer" | "generator":
                self.count += self.kind == "attribute"
                self.number += self.kind == "integer"
                h = h + torch.randn(h.shape, dtype=h.dtype, generator=self.generator) / (1 + self.count + self.number)
            case "auxiliary":
                return self.last(h), self.last(2 * h)
        return self.last(h)


def make_net(feature: str) -> nn.Module:
    torch.manual_seed(1)
    if feature.startswith("odd_"):
        return Odd(feature.removeprefix("odd_")).double()
    extra: list[nn.Module] = []
    if "batch_norm" in feature:
        extra = [nn.BatchNorm1d(6)]
    if "dropout" in feature or feature == "two_optimizers":
        extra = [nn.Dropout(0.0 if feature == "no_dropout" else 0.5)]
    net = nn.Sequential(nn.Linear(4, 6), *extra, nn.Tanh(), nn.Linear(6, CLASSES)).double()
    net[0].requires_grad_(feature != "frozen_layer")
    return net.train(not feature.startswith("late_"))


class CapturedLoop:
    """A correct loop of three steps; functions are called at named places of it.

    Attributes:
        feature: What is recorded, or what network: "plain", one of `FEATURES`, "odd_" and a kind, "late_" (in
            evaluation mode when recording begins) and a layer, "sum", "regression", "regression_sum",
            "one_hot_regression".
        at: Functions to call before these places of the faulty step: "begin", "forward", "value" (of the loss),
            "announce", "step"; "announced" follows "announce", and "end" the step.
        faulty_step: The step.
        dtype: Of the network and its inputs.
    """

    steps = 3

    def __init__(
        self, feature: str, at: Mapping[str, Callable[["CapturedLoop"], Any]] | None = None, faulty_step: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.feature, self.at, self.faulty_step = feature, dict(at or {}), faulty_step
        self.call = self.net = make_net(feature).to(dtype)
        self.X = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
        self.y = torch.arange(POINTS) % CLASSES
        self.reduction = "sum" if feature.endswith("sum") else "mean"
        self.loss: Any = epk.CrossEntropy(self.reduction)
        if "regression" in feature:
            self.loss = epk.MeanSquaredError(self.reduction)
            self.y = F.one_hot(self.y, CLASSES).double() if "one_hot" in feature else self.X[:, :CLASSES].sin()
        parameters = [p for p in self.net.parameters() if p.requires_grad]
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
        self.x, y = self.X[rows], self.y[rows]
        self.q = y if y.is_floating_point() else F.one_hot(y, CLASSES).to(self.X.dtype)
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

    def losses(self) -> Tensor:
        if "regression" not in self.feature:
            return -(self.q * self.z.log_softmax(dim=1)).sum(dim=1)
        squares = (self.z - self.q).square()
        return squares.sum(dim=1) if self.reduction == "sum" else squares.mean(dim=1)

    def value(self) -> Tensor:
        terms = self.weight * self.losses()
        return terms.sum() if self.reduction == "sum" else terms.mean()

    def run(self, path: Path | None = None, **options: Any) -> epk.Trajectory:
        torch.manual_seed(7)
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        options = {"check_every": 1, "loss": self.loss} | options  # every step, whatever time that takes
        self.recorder = epk.Recorder(self.net, optimizers, self.X, self.y, folder=path, **options)
        with self.recorder:
            for step in range(self.steps):
                self.step = step
                self.place("begin")
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                rows = torch.randperm(POINTS, generator=self.draw)
                for part in rows[:8].split(4) if "accumulat" in self.feature else [rows[:8]]:
                    self.prepare(part)
                    self.place("forward")
                    self.z = self.call(self.x)
                    self.place("value")
                    self.value().backward()
                    self.place("announce")
                    self.recorder.batch(self.announced, weight=self.weight)
                    self.place("announced")
                self.place("step")
                for optimizer in self.optimizers:
                    optimizer.step()
                self.place("end")
        return self.recorder.trajectory
