"""Networks that make constants, scatter, compute with complex numbers, or hold parameters without numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epk_gp as epk

INDEX = torch.tensor([1, 0, 2, 3, 5, 4])


class Odd(nn.Module):
    """A function of the activations between two layers."""

    def __init__(self, function: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.c, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.function(self, self.a(x)).tanh())
        return out


def written(h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result[:, :3] = h[:, 3:]
    return result.index_add_(1, INDEX, h)


FUNCTIONS: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "like": lambda net, h: h * torch.full_like(h, 2.0) + torch.ones_like(h) + torch.empty_like(h).fill_(0.3),
    "new": lambda net, h: h * h.new_tensor([1.0, 2, 3, 4, 5, 6]) + h.new_full((6,), 2.0) + h.new_zeros(len(h), 1),
    "scatter": lambda net, h: torch.zeros_like(h).scatter(1, INDEX.expand(len(h), -1), h),
    "written": lambda net, h: written(h),
    "multiple": lambda net, h: h * (0.1 * net.a.bias) + (net.a.bias + 1),
    "fourier": lambda net, h: torch.fft.irfft(2 * torch.fft.rfft(h), n=6),
}


def record(net: nn.Module) -> epk.Trajectory:
    torch.manual_seed(0)
    X, y, net = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3, net.double()
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_layerwise_takes_constants_scatters_and_multiples_of_weights(function: Callable[[Odd, Tensor], Tensor]) -> None:
    run = record(Odd(function))
    assert epk.attribute(run, run.inputs[:1], path=epk.layerwise(every=2)).certified


def test_the_size_of_complex_numbers_is_integrated_and_not_averaged() -> None:
    run = record(Odd(lambda net, h: torch.view_as_complex(h.view(-1, 3, 2)).abs().repeat(1, 2)))
    assert epk.attribute(run, run.inputs[:1]).certified
    with pytest.raises(ValueError, match=r"cannot average abs: it takes complex numbers.*Take chords"):
        epk.attribute(run, run.inputs[:1], path=epk.layerwise(every=2))


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
def test_a_number_made_of_a_weight_is_a_clear_error() -> None:
    run = record(Odd(lambda net, h: h * net.a.bias[0].item()))
    with pytest.raises(ValueError, match=r"must compute with tensors: forward\(\) makes a Python number"):
        epk.attribute(run, run.inputs[:1])


def test_the_callers_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    X, y, net = torch.randn(8, 4), torch.arange(8) % 3, nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    weights = torch.full((8,), 0.5)
    doors: list[Callable[[], Tensor]] = [
        lambda: epk.attribute(run, X[:2]).samples,
        lambda: epk.reconstruct(run, X[:2]).outputs,
        lambda: epk.influence(run, X[:2]).values,
        lambda: epk.retrain(run, weights).states,
    ]
    for door in doors:
        expected = door()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(door(), expected)
