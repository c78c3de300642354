"""Influence needs second derivatives of the loss: operations that have none are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from weighted_loops import CLASSES, WeightedLoop, mlp

import epk_gp as epk


def momentum(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.8)


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
    loop = WeightedLoop(momentum, net)
    run = loop.record()
    with pytest.raises(ValueError, match=f"must have second derivatives.*{message}.*use epk_gp.attribute"):
        epk.influence(run, loop.test_points)
    assert epk.attribute(run, loop.test_points).certified


def test_an_operation_of_ones_own_that_has_one_is_differentiated() -> None:
    """The negative control."""
    loop = WeightedLoop(momentum, lambda: mlp(activation=Squared(torch.square)))
    effect, expected = epk.influence(loop.record(), loop.test_points), loop.slopes(3)
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()
