"""A training loop under a recorder, one of whose parts a test replaces; and networks that cannot be recorded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from loops import data, mlp, regression_data, sgd


class Loop:
    """A correct training loop; a fault replaces one of its parts, from step 2 on."""

    loss: Any = epk.CrossEntropy()
    lr = 0.1
    steps = 4
    batch_size = 4

    def __init__(self) -> None:
        self.net = self.make_net()
        self.X, self.y = self.make_data()
        self.optimizer = sgd(self.net, self.lr)

    def make_net(self) -> nn.Module:
        return mlp()

    def make_data(self) -> tuple[Tensor, Tensor]:
        return data()

    def rows(self, step: int) -> Tensor:
        return (torch.arange(self.batch_size) + step) % len(self.X)

    def zero(self, step: int) -> None:
        self.optimizer.zero_grad()

    def before(self, step: int) -> None: ...

    def inputs(self, step: int, rows: Tensor) -> Tensor:
        return self.X[rows]

    def value(self, z: Tensor, y: Tensor, step: int) -> Tensor:
        return F.cross_entropy(z, y)

    def gradients(self, step: int) -> None: ...

    def announce(self, recorder: epk.Recorder, rows: Tensor, step: int) -> None:
        recorder.batch(rows)

    def between(self, step: int) -> None: ...

    def update(self, step: int) -> None:
        self.optimizer.step()

    def after(self, step: int) -> None: ...

    def run(self) -> epk.Recorder:
        with epk.Recorder(self.net, self.optimizer, self.X, self.y, loss=self.loss) as recorder:
            self.recorder = recorder
            for step in range(self.steps):
                rows = self.rows(step)
                self.before(step)
                self.zero(step)
                self.value(self.net(self.inputs(step, rows)), self.y[rows], step).backward()
                self.gradients(step)
                self.announce(recorder, rows, step)
                self.between(step)
                self.update(step)
                self.after(step)
        return recorder


class Regression(Loop):
    loss = epk.MeanSquaredError()

    def make_data(self):
        return regression_data()

    def value(self, z, y, step):
        return F.mse_loss(z, y)


class DropoutInEvaluationMode(Loop):
    def make_net(self):
        return nn.Sequential(mlp(), nn.Dropout(0.5)).eval()


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.3, training=self.training))


class HandMadeNorm(nn.Module):
    """Batch statistics in training, none in evaluation, and no layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0) if self.training else x)


class Attentive(nn.Module):
    """Dropout inside of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 5, -1)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Counting(nn.Module):
    """A buffer that moves whenever the network is called, without any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


class Annealed(nn.Module):
    """A buffer that moves whenever the network is called, and scales its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.scale * self.inner(x)
        if self.training:
            self.scale = self.scale * 0.9
        return z


class Auxiliary(nn.Module):
    """A second output in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        return (self.inner(x), self.inner(2 * x)) if self.training else self.inner(x)


def eager_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
