"""A training loop whose samples have weights, with and without the package: the brute force of influence."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
import loops

POINTS, INPUTS, CLASSES = 12, 4, 3


def cross_entropy(net: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(X), y)


def record(
    net: nn.Module, optimizer: torch.optim.Optimizer, X: Tensor, y: Tensor, batches: Iterable[Any], *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy, **options: Any,
) -> epk.Trajectory:  # fmt: skip
    whole_loss = {"call": lambda net, x: (net, x), "value": lambda called, y: loss(*called, y)}
    return loops.record(net.train(), optimizer, X, y, batches, **whole_loss, **options).trajectory


def mlp(*between: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 6), *between, activation or nn.Tanh(), nn.Linear(6, CLASSES))


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def operation(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    wrap: Callable[..., Any] = lambda backward: backward,
) -> Apply:
    """An operation of one's own with its own backward pass, which cannot be differentiated in forward mode."""

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return value(x)

        @staticmethod
        @wrap
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * slope(ctx.saved_tensors[0])

    return Apply(Operation.apply)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(1, 4), nn.Linear(4, CLASSES)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.embed(x[:, :, None])).mean(dim=1))
        return out


def convolutions(norm: nn.Module | None = None) -> nn.Module:
    norm = norm or nn.BatchNorm1d(3)
    layers = [nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, 3, 2), norm, nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(9, CLASSES))


@dataclass(frozen=True)
class WeightedLoop:
    """A loop over minibatches, the same in every run but for the weights of the samples."""

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    net: Callable[[], nn.Module] = mlp  # called after a seed
    steps: int = 8
    batch: int = 5
    clip: Callable[[list[nn.Parameter]], Any] | None = None  # called before each step
    after_step: Callable[[torch.optim.Optimizer], Any] | None = None
    beside: Callable[[nn.Module], Any] | None = None  # called on the network before each of its passes
    accumulated: int = 1  # batches whose gradients a step adds up
    options: dict[str, Any] = field(default_factory=dict)  # of the recorder

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        X = torch.randn(POINTS, INPUTS, generator=generator, dtype=torch.float64)
        return X, torch.arange(POINTS) % CLASSES

    @property
    def test_points(self) -> Tensor:
        return torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def batches(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(self.steps):
            yield [torch.randperm(POINTS, generator=generator)[: self.batch] for _ in range(self.accumulated)]

    def record(self, **options: Any) -> epk.Trajectory:
        trajectory = self._run(None, **options)[1]
        assert trajectory is not None
        return trajectory

    def outputs(self, weights: Tensor) -> Tensor:
        net = self._run(weights)[0].eval()
        with torch.no_grad():
            return net(self.test_points).log_softmax(dim=1)

    def slopes(self, sample: int, *, step: float = 1e-4) -> Tensor:
        """Differentiate the log-probabilities in a sample's weight by central differences of two steps, (n, C)."""

        def difference(size: float) -> Tensor:
            ends = []
            for sign in (1, -1):
                weights = torch.ones(POINTS, dtype=torch.float64)
                weights[sample] += sign * size
                ends.append(self.outputs(weights))
            return (ends[0] - ends[1]) / (2 * size)

        return (4 * difference(step) - difference(2 * step)) / 3  # the error of order step^2 cancels

    def _run(self, weights: Tensor | None, **options: Any) -> tuple[nn.Module, epk.Trajectory | None]:
        X, y = self.data
        torch.manual_seed(1)
        net = self.net().double()
        parameters = list(net.parameters())
        optimizer = self.optimizer(parameters)
        recorder = None if weights is not None else epk.Recorder(net, optimizer, X, y, **{**self.options, **options})
        torch.manual_seed(5)
        with recorder or nullcontext():
            for batches in self.batches():
                optimizer.zero_grad()
                for batch in batches:
                    if self.beside is not None:
                        self.beside(net)
                    losses = F.cross_entropy(net(X[batch]), y[batch], reduction="none")
                    scale = 1.0 if weights is None else weights[batch]
                    ((losses * scale).sum() / (len(batch) * self.accumulated)).backward()
                    if recorder is not None:
                        recorder.batch(batch, weight=1 / self.accumulated)
                if self.clip is not None:
                    self.clip(parameters)
                optimizer.step()
                if self.after_step is not None:
                    self.after_step(optimizer)
        return net, None if recorder is None else recorder.trajectory
