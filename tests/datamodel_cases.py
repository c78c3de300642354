"""Small runs of which datamodels are made, and the formulas of path ridge written out with explicit Jacobians."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

import epk_gp as epk
from helpers import Attention
from loops import Tokens

NODES = 6
Metric = Callable[[dict[str, Any], dict[str, Any], int], Any]

TIGHT = 1e-10 / torch.finfo(torch.float64).eps  # of `assert_close`


def error(a: Tensor, b: Tensor) -> float:
    """Return the distance of a from b, relative to the length of b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def internals(name: str) -> ModuleType:
    return importlib.import_module(f"epk_gp.datamodels.{name}")


def vectors(n: int, seed: int = 2, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(n: int, seed: int = 2) -> Tensor:
    return vectors(n, seed, 16).reshape(n, 1, 4, 4)


def words(n: int, seed: int = 2) -> Tensor:
    return torch.randint(0, 7, (n, 5), generator=torch.Generator().manual_seed(seed))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "mlp": (mlp, vectors),
    "wide": (
        lambda: nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)),
        vectors,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
        ),
        images,
    ),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)), vectors),
    "batch_norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)), vectors),
    "tokens": (Tokens, words),
    "attention": (Attention, words),
}


def adam_metric(group: dict[str, Any], state: dict[str, Any], step: int) -> Tensor:
    """lr / (sqrt(v) + eps): the corrections of the mean by 1 / (1 - beta1^t) and of its momentum cancel."""
    v: Tensor = state["exp_avg_sq"] / (1 - group["betas"][1] ** step)
    return group["lr"] / (v.sqrt() + group["eps"])


def sgd_metric(group: dict[str, Any], state: dict[str, Any], step: int) -> float:
    mu = group["momentum"]
    q = sum(mu**k for k in range(step))
    return float(group["lr"] * (1 + mu * q if group["nesterov"] else q))


def rmsprop_metric(group: dict[str, Any], state: dict[str, Any], step: int) -> Tensor:
    return group["lr"] / (state["square_avg"].sqrt() + group["eps"])


def halves(net: nn.Module) -> list[dict[str, Any]]:
    p = list(net.parameters())
    return [{"params": p[len(p) // 2 :]}, {"params": p[: len(p) // 2], "lr": 0.02}]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Optimizer], Metric]] = {
    "sgd": (lambda net: SGD(net.parameters(), lr=0.3), sgd_metric),
    "momentum": (lambda net: SGD(net.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01), sgd_metric),
    "nesterov": (lambda net: SGD(net.parameters(), lr=0.1, momentum=0.7, nesterov=True), sgd_metric),
    "sgd_groups": (lambda net: SGD(halves(net), lr=0.2), sgd_metric),
    "adam": (lambda net: Adam(net.parameters(), lr=0.03), adam_metric),
    "adam_groups": (lambda net: Adam(halves(net), lr=0.03, betas=(0.7, 0.9)), adam_metric),
    "adamw": (lambda net: AdamW(net.parameters(), lr=0.03, weight_decay=0.1), adam_metric),
    "rmsprop": (lambda net: RMSprop(net.parameters(), lr=0.01), rmsprop_metric),
}


def margin(z: Tensor, y: Tensor) -> Tensor:
    log_p = z.log_softmax(dim=1).gather(1, y[:, None])[:, 0]
    return log_p - torch.log1p(-log_p.exp())


@dataclass(frozen=True)
class State:
    """What a loop had before a step, and its optimizer's number for each weight in it, by the parameters' names."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metric: dict[str, Tensor]
    rate: float
    batch: Tensor


@dataclass(frozen=True, eq=False)
class Loop:
    network: str = "mlp"
    optimizer: str = "sgd"
    batch: int | None = None
    decay: float = 1.0
    steps: int = 10
    points: int = 11
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return NETWORKS[self.network][1](self.points), torch.arange(self.points) % 3

    @property
    def asked(self) -> tuple[Tensor, Tensor]:
        return NETWORKS[self.network][1](4, seed=7), torch.tensor([0, 1, 2, 0])

    @functools.cached_property
    def net(self) -> nn.Module:
        torch.manual_seed(1)
        return NETWORKS[self.network][0]().double()

    def record(self, **options: Any) -> epk.Trajectory:
        trajectory: epk.Trajectory = self._train(True, **options)[1].trajectory
        return trajectory

    @functools.cached_property
    def run(self) -> epk.Trajectory:
        return self.record()

    @functools.cached_property
    def model(self) -> Any:
        return epk.datamodel(self.run, *self.asked)

    def states(self) -> list[State]:
        return self._train(False)[0]

    def _train(self, is_recorded: bool, **options: Any) -> tuple[list[State], Any]:
        net, (X, y), states = self._fresh(), self.data, list[State]()
        make, metric = OPTIMIZERS[self.optimizer]
        optimizer = make(net)
        scheduler, names = ExponentialLR(optimizer, self.decay), {p: name for name, p in net.named_parameters()}
        recorder = epk.Recorder(net, optimizer, X, y, **{**self.options, **options}) if is_recorded else None
        with recorder or nullcontext():
            for step, batch in zip(range(1, self.steps + 1), self._batches(), strict=False):
                before = {name: p.detach().clone() for name, p in net.named_parameters()}
                buffers = {name: value.clone() for name, value in net.named_buffers()}
                optimizer.zero_grad()
                self.loss(net(X[batch]), y[batch]).backward()
                if recorder is not None:
                    recorder.batch(batch)
                optimizer.step()
                numbers = {
                    names[p]: torch.zeros_like(p) + metric(group, optimizer.state[p], step)
                    for group in optimizer.param_groups
                    for p in group["params"]
                }
                states.append(State(before, buffers, numbers, optimizer.param_groups[0]["lr"], batch))
                scheduler.step()
        return states, recorder

    def _fresh(self) -> nn.Module:
        torch.manual_seed(1)
        return NETWORKS[self.network][0]().double()

    def _batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield from torch.randperm(self.points, generator=generator).split(self.batch or self.points)

    def shares(self, states: list[State]) -> Tensor:
        """Return the mean weight of each sample's loss over the time of the run, of losses that are means."""
        total = torch.zeros(self.points, dtype=torch.float64)
        for state in states:
            for i in state.batch.tolist():
                total[i] += state.rate / len(state.batch)
        return total / sum(state.rate for state in states)


@dataclass(frozen=True)
class Dense:
    """The path kernels of a run, rows of questions behind those of N coordinates of its samples, and what goes with it.

    Attributes:
        kernels: (6, N + Q, N).
        path: The coordinates at the six states, (6, N).
        a: Weight of each coordinate, (N,).
        loss: Maps coordinates to the sum of the samples' losses.
    """

    kernels: Tensor
    path: Tensor
    a: Tensor
    loss: Callable[[Tensor], Tensor]

    @property
    def force(self) -> Tensor:
        return -torch.stack([jacrev(self.loss)(u) for u in self.path]).mean(dim=0)

    @functools.cached_property
    def curvature(self) -> float:
        """Mean diagonal of the loss's second derivative, states weighted by the mean diagonal of their kernel."""
        N = len(self.a)
        curvatures = torch.stack([hessian(self.loss)(u).diagonal().mean() for u in self.path])
        weights = torch.stack([K[:N].diagonal().mean() for K in self.kernels])
        return float(curvatures @ weights / weights.sum())

    def ridge(self, curvature: float | None = None) -> Tensor:
        """Return k A (K A + 1 / c)^-1 r / c, (Q, N)."""
        N, total = len(self.a), self.kernels.sum(dim=0)
        c = 0.5 * (self.curvature if curvature is None else curvature)
        KA, kA = total[:N] * self.a, total[N:] * self.a
        return torch.linalg.solve(KA + torch.eye(N).double() / c, kA, left=False) * self.force / c


def node_states(states: list[State]) -> list[tuple[State, float]]:
    """Return the states in the middle of six parts of equal time, and how many steps like theirs each part is."""
    time, chosen = sum(state.rate for state in states), list[tuple[State, float]]()
    for node in range(NODES):
        elapsed = 0.0
        for state in states:
            elapsed += state.rate
            if elapsed >= (node + 0.5) * time / NODES:
                break
        chosen.append((state, time / NODES / state.rate))
    return chosen


def dense(
    loop: Loop, *, coordinates: Callable[[Tensor], Tensor] | None = None,
    numbers: Callable[[Tensor], Tensor] | None = None, loss: Callable[[Tensor], Tensor] | None = None,
    metric: Callable[[Tensor], Tensor] = lambda H: H,
) -> Dense:  # fmt: skip
    """Compute everything from Jacobians of the loop's own states; of the margins unless others are given.

    Args:
        loop: The loop.
        coordinates: Maps the outputs for all samples to N numbers.
        numbers: Maps the outputs for the questions to Q numbers.
        loss: Maps coordinates to the sum of the samples' losses.
        metric: Changes the optimizer's numbers of all weights.
    """
    (X, y), (X_asked, y_asked), states = loop.data, loop.asked, loop.states()
    coordinates = coordinates or (lambda z: margin(z, y))
    numbers = numbers or (lambda z: margin(z, y_asked))
    net, kernels, path, shares = loop.net.eval(), list[Tensor](), list[Tensor](), loop.shares(states)
    for state, times in node_states(states):
        evaluate = functools.partial(_rows, net, state, coordinates, numbers, X, X_asked)
        weights = torch.cat([w.flatten() for w in state.weights.values()])
        J = jacrev(evaluate)(weights)
        path.append(coordinates(functional_call(net, {**state.weights, **state.buffers}, X)).detach())
        H = torch.cat([state.metric[name].flatten() for name in state.weights])
        if not loop.optimizer.startswith(("sgd", "momentum", "nesterov")):
            force = torch.func.grad(loss or (lambda u: F.softplus(-u).sum()))(path[-1])
            g = (shares.repeat(len(force) // loop.points) * force) @ J[: len(force)]
            H = H.where(H * g.abs() <= 100 * state.rate, state.rate / g.abs())  # where no gradient was seen before
        H = metric(H) * times
        kernels.append((J * H) @ J[: len(path[-1])].T)
    a = shares.repeat(len(path[0]) // loop.points)
    return Dense(torch.stack(kernels), torch.stack(path), a, loss or (lambda u: F.softplus(-u).sum()))


def _rows(
    net: nn.Module, state: State, coordinates: Any, numbers: Any, X: Tensor, X_asked: Tensor, weights: Tensor
) -> Tensor:
    parts = weights.split([w.numel() for w in state.weights.values()])
    named = {name: part.view_as(w) for (name, w), part in zip(state.weights.items(), parts, strict=True)}
    z, asked = (functional_call(net, {**named, **state.buffers}, x) for x in (X, X_asked))
    return torch.cat([coordinates(z), numbers(asked)])
