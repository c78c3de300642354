"""What several tests share: a comparison of tensors, a terminal, and small recorded runs of many kinds of network."""

import copy
import functools
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.checks import ComputeSettings


class Terminal(io.StringIO):
    """A terminal, and what it was sent."""

    def isatty(self) -> bool:
        """Say that a person sees it."""
        return True


def assert_close(actual: Tensor, expected: Tensor, *, rounding: float = 1e4) -> None:
    """Compare up to `rounding` times eps of the largest expected value: the rounding error of long sums."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    scale = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    error = float((actual - expected).abs().max() / scale)
    assert error <= rounding * torch.finfo(expected.dtype).eps, f"relative error {error:.2e}"


def assert_blocks(kernel: epk.PathKernel, a: epk.Points, b: epk.Points, expected: Tensor) -> None:
    """Compare the kernel's blocks of every kind with what the full one must be."""
    assert_close(kernel.block(a, b), expected)
    assert_close(kernel.block_per_class(a, b), torch.einsum("ncmc->cnm", expected))
    assert_close(kernel.trace_block(a, b), torch.einsum("ncmc->nm", expected))
    if a is b:
        assert_close(kernel.diagonal_blocks(a), torch.einsum("ncnd->ncd", expected))


def _ask_kernel(method: str, run: epk.Trajectory, *points: epk.Points, **options: Any) -> Tensor:
    computed = {name: options.pop(name) for name in ComputeSettings.__annotations__.keys() & options.keys()}
    result: Tensor = getattr(epk.PathKernel(run, **options), method)(*points, **computed)
    return result


def gram_block_per_class(run: epk.Trajectory, a: epk.Points, b: epk.Points, **options: Any) -> Tensor:
    """The kernel of each output with itself, with options as `gram_block` takes them."""
    return _ask_kernel("block_per_class", run, a, b, **options)


def gram_diagonal_blocks(run: epk.Trajectory, a: epk.Points, **options: Any) -> Tensor:
    """Each point's kernel with itself, with options as `gram_block` takes them."""
    return _ask_kernel("diagonal_blocks", run, a, **options)


def first_step(trajectory: epk.Trajectory, X: Tensor, head: str = "logits") -> WeightSegment:
    """Return f along the first step of a run."""
    w, end = trajectory.states[:2]
    return WeightSegment(plan_for(trajectory, trajectory.model_for(X)), w, end - w, head, 1 << 30)


def deviation(products: Tensor, exact: Tensor, *, diagonal: bool = False) -> float:
    """The mean's distance from the exact kernel in standard errors: root mean square over (different) pairs."""
    pairs = ~torch.eye(len(exact), dtype=torch.bool) | diagonal
    standard_error = products.std(0) / len(products) ** 0.5
    return float(((products.mean(0) - exact)[pairs] / standard_error[pairs]).square().mean().sqrt())


def refusal(error: Any, message: str, ask: Callable[..., object], *args: Any, **options: Any) -> str | None:
    """None if a call is refused with an error and a message, as it should be; else what it does instead."""
    try:
        ask(*args, **options)
    except error as refused:
        return None if re.search(message, str(refused)) else f"says: {refused}"
    except Exception as other:
        return f"raises {other!r}"
    return "accepts it"


def with_value(X: Tensor, value: float, row: int = 3) -> Tensor:
    """Return a copy of X with one other value in a row."""
    X = X.clone()
    X[row, 1] = value
    return X


class Twice(nn.Module):
    """A layer used twice, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(torch.tanh(self.a(x))) * self.scale)


class Tied(nn.Module):
    """One weight used by two layers, once transposed: it is not the weight of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(torch.tanh(self.a(x)), self.a.weight.T))


class Attention(nn.Module):
    """Token embedding, attention made of linear layers, layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        a = F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        return self.out(self.norm(h + a).mean(dim=1))


class Transformer(nn.Module):
    """An `nn.TransformerEncoderLayer` with a learned class token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.token, self.out = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))[:, 0])


class Cosine(nn.Module):
    """A classifier with normalised weights: the parameter itself is never multiplied by an input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(F.softplus(self.hidden(x))), F.normalize(self.out.weight))


class SequenceFirst(nn.Module):
    """A network that puts the sequence before the samples: the first dimension of its layers is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x.transpose(0, 1))).mean(dim=0))


def _mlp(activation: Callable[[], nn.Module], outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 12), activation(), nn.Linear(12, outputs))


def _frozen_batch_norm() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net[1].running_mean.copy_(torch.linspace(-1, 1, 8))
    return net.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "relu": (lambda: _mlp(nn.ReLU), (8,)),
    "leaky_relu": (lambda: _mlp(nn.LeakyReLU), (8,)),
    "tanh": (lambda: _mlp(nn.Tanh), (8,)),
    "gelu": (lambda: _mlp(nn.GELU), (8,)),
    "one_class": (lambda: _mlp(nn.Tanh, outputs=1), (8,)),
    # Its last layer's share under the softmax is averaged, not multiplied out.
    "wide": (lambda: nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 80), nn.Tanh(), nn.Linear(80, 3)), (8,)),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 3)), (8,)),
    "cnn": (lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, (3, 1), groups=2, padding="same"), nn.GELU(), nn.GroupNorm(2, 6), nn.Flatten(),
        nn.Linear(24, 3),
    ), (2, 8, 8)),
    "conv1d": (lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1, stride=2, padding_mode="circular"), nn.Tanh(),
        nn.Conv1d(4, 4, 3, dilation=2, bias=False, padding=(1,)), nn.Flatten(), nn.Linear(8, 3),
    ), (2, 8)),
    "conv3d": (lambda: nn.Sequential(
        nn.Conv3d(2, 4, (2, 1, 2), dilation=(1, 1, 2), padding=(0, 1, 0), groups=2), nn.ReLU(),
        nn.Conv3d(4, 2, 2, stride=(1, 2, 1)), nn.Flatten(), nn.Linear(4, 3),
    ), (2, 3, 3, 4)),
    # So many channels at so few positions that factors are cheaper than the dense gradient.
    "wide_conv": (lambda: nn.Sequential(
        nn.Conv2d(2, 40, 3, padding=1), nn.Tanh(), nn.Conv2d(40, 30, 3), nn.Flatten(), nn.Linear(30, 3),
    ), (2, 3, 3)),
    "transposed": (lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3),
    ), (8,)),
    "norms": (lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.InstanceNorm1d(4, affine=True), nn.GELU(),
        nn.LayerNorm((4, 4)), nn.RMSNorm(4), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3),
    ), (8,)),
    "frozen_batch_norm": (_frozen_batch_norm, (8,)),
    "twice": (Twice, (8,)),
    "tied": (Tied, (8,)),
    "attention": (Attention, None),
    "transformer": (Transformer, (6, 8)),
    "cosine": (Cosine, (8,)),
    "sequence_first": (SequenceFirst, (5, 4)),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A recorded run and test points."""

    name: str
    trajectory: epk.Trajectory
    test: Tensor
    heads: tuple[str, ...]


def make_case(
    name: str, *, steps: int = 4, lr: float = 0.2, dtype: torch.dtype = torch.float64, batch_size: int | None = 4
) -> Case:
    """Record a small run: 7 points in batches of 4 and 3.

    Each is recorded once; the tests get copies of it, with torch's random numbers as they are after the recording.
    """
    case, numbers = _recorded_case(name, steps, lr, dtype, batch_size)
    torch.set_rng_state(numbers)
    return copy.deepcopy(case)


@functools.cache
def _recorded_case(name: str, steps: int, lr: float, dtype: torch.dtype, batch_size: int | None) -> tuple[Case, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    net = build().to(dtype)
    if shape is None:
        X, test = (torch.randint(0, 20, (n, 7), generator=generator) for n in (7, 5))
    else:
        X, test = (torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype) for n in (7, 5))
    outputs = net(X).shape[1]
    loss: epk.CrossEntropy | epk.MeanSquaredError = epk.CrossEntropy()
    y = torch.arange(7) % outputs
    if outputs == 1:
        loss, y = epk.MeanSquaredError(), torch.linspace(-1, 1, 7, dtype=dtype)[:, None]
    options = {"steps": steps, "loss": loss, "batch_size": batch_size, "generator": generator}
    trajectory = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=lr), **options)
    case = Case(name, trajectory, test, ("logits",) if outputs == 1 else ("logits", "log_softmax"))
    return case, torch.get_rng_state()


class SplitWhereNegative(nn.Module):
    """Calls a layer for some of the rows only; the rows that the plan is made on do not show it."""

    def __init__(self, inputs: int = 3, outputs: int = 2, below: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.out, self.below = nn.Linear(inputs, 6), nn.Linear(6, outputs), below

    def forward(self, x: Tensor) -> Tensor:
        negative = x[:, 0] < self.below
        if not negative.any():
            return self.out(torch.tanh(self.hidden(x)))
        h = x.new_zeros(len(x), 6).index_put((negative,), 0.5 * self.hidden(x[negative]))
        return self.out(torch.tanh(h.index_put((~negative,), self.hidden(x[~negative]))))


def surprising_run() -> tuple[epk.Trajectory, Tensor]:
    torch.manual_seed(0)
    X = torch.rand(8, 3, dtype=torch.float64) + 0.1
    X[3, 0] = -0.5  # between the rows that the plan is made on
    net = SplitWhereNegative().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trajectory = epk.train(net, X, torch.arange(8) % 2, optimizer=optimizer, steps=3)
    return trajectory, X[1:5]
