"""Influence takes second derivatives from torch, which are compared with differences of gradients, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked_networks import GradientReversal, StopGradient, StraightThrough
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from weighted_loops import CLASSES, WeightedLoop, mlp

import epk_gp as epk
from epk_gp.core.show import CertificateWarning


def sgd(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.5)


def normalised(dim: int | None) -> nn.Module:
    net = mlp()
    weight_norm(net[0], dim=dim)
    return net


class Convolution(nn.Module):
    """A convolution whose weights are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = weight_norm(nn.Conv1d(1, 3, 2)), nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.a(x[:, None]).tanh().flatten(1))
        return out


class Scaled(nn.Module):
    """An embedding whose gradient is divided by how often each entry is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.embedding((2 * x.abs()).long() % 5).mean(dim=1).tanh())
        return out


class FakeQuantised(nn.Module):
    """A layer whose weights are rounded, with a gradient as if they were not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_tensor_affine(self.a.weight, 0.02, 0, -128, 127)
        out: Tensor = self.out(F.linear(x, w, self.a.bias).tanh())
        return out


class FakeQuantisedInFloat32(FakeQuantised):
    """The same with weights that are rounded in float32, whatever the network's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_tensor_affine(self.a.weight.float(), 0.05, 0, -128, 127)
        out: Tensor = self.out(F.linear(x, w.to(x.dtype), self.a.bias).tanh())
        return out


@pytest.mark.parametrize("make", [lambda: normalised(0), lambda: normalised(1), lambda: normalised(None), Convolution])
def test_weight_normalisation_is_differentiated_twice(make: Callable[[], nn.Module]) -> None:
    """torch's own second derivative of it takes the norm as constant: 0.03 % to 4 % off."""
    loop = WeightedLoop(sgd, make)
    effect, expected = epk.influence(loop.record(), loop.test_points), loop.slopes(3)
    assert effect.certified
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-7 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
@pytest.mark.parametrize(
    "make", [StraightThrough, StopGradient, GradientReversal, Scaled, FakeQuantised, FakeQuantisedInFloat32]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_that_of_no_function_is_said(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    X, y, net = torch.randn(12, 4, dtype=dtype), torch.arange(12) % CLASSES, make().to(dtype)
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=3)
    for call in (lambda: epk.influence(run, X[:1]), lambda: epk.self_influence(run)):
        with pytest.warns(CertificateWarning, match="torch's derivative of the gradient differs by"):
            call()


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
def test_a_kernel_of_gradients_that_depend_on_the_other_points_is_refused() -> None:
    torch.manual_seed(0)
    X, y, net = torch.randn(12, 4).double(), torch.arange(12) % CLASSES, Scaled().double()
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=2)
    points = epk.Points(X[:3], is_train=False)
    for call in (lambda: epk.gram_block(run, points, points), lambda: epk.path_features(run, X[:3], 8)):
        with pytest.raises(ValueError, match=r"embedding divides them by how often .* scale_grad_by_freq=False"):
            call()


class _Wrong(torch.autograd.Function):
    """The cube, whose second derivative is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g * (x * x + 0.1 * (x * x - (x * x).detach()))


class Wrong(nn.Module):
    """An operation of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return _Wrong.apply(x)


def test_a_wrong_second_derivative_of_any_operation_is_found() -> None:
    loop = WeightedLoop(sgd, lambda: mlp(activation=Wrong()))
    run = loop.record()
    assert epk.attribute(run, loop.test_points).certified
    with pytest.warns(CertificateWarning, match="or torch's second derivative of an operation is wrong"):
        epk.influence(run, loop.test_points)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kinks_random_numbers_and_float32_are_no_false_alarm(dtype: torch.dtype) -> None:
    """Measured on 27 kinds of networks; warnings are errors in this suite."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 8, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    ).to(dtype)  # fmt: skip
    X, y = torch.randn(24, 4, dtype=dtype), torch.arange(24) % CLASSES
    recorder = epk.Recorder(net, optimizer := torch.optim.AdamW(net.parameters(), lr=1e-2), X, y)
    with recorder:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            recorder.batch(torch.arange(24))
            optimizer.step()
    assert epk.influence(recorder.trajectory, X[:1]).certified


class Once(torch.autograd.Function):
    """The square, whose backward pass torch cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class Squared(nn.Module):
    """A module that applies a square."""

    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x)


class Bags(nn.Module):
    """An operation of torch that can be differentiated once."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(5, 3, mode="sum"), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.bags((x.abs().long() % 5), per_sample_weights=x).tanh())
        return out


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: mlp(activation=Squared(Once.apply)), r"@once_differentiable \(operations of one's own here: Once\)"),
        (Bags, "derivative for '_embedding_bag_backward' is not implemented"),
    ],
    ids=("of_ones_own", "of_torch"),
)
def test_an_operation_without_a_second_derivative_is_named(net: Callable[[], nn.Module], message: str) -> None:
    loop = WeightedLoop(sgd, net)
    run = loop.record()
    with pytest.raises(ValueError, match=f"must have second derivatives.*{message}.*use epk_gp.attribute"):
        epk.influence(run, loop.test_points)
    assert epk.attribute(run, loop.test_points).certified


def test_an_operation_of_ones_own_that_has_one_is_differentiated() -> None:
    """The negative control."""
    loop = WeightedLoop(sgd, lambda: mlp(activation=Squared(torch.square)))
    effect, expected = epk.influence(loop.record(), loop.test_points), loop.slopes(3)
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()
