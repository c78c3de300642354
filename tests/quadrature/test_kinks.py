"""Kinks are located, so that they cost a few evaluations and not a bisection each."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.quadrature.kinks import Kinks

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_in_place": lambda h: F.relu_(h + 0),
    "hardtanh": lambda h: F.hardtanh(h, -0.3, 0.4),
    "relu6": lambda h: F.relu6(4 * h + 3),
    "softshrink": lambda h: F.softshrink(h, 0.2),
    "threshold": lambda h: F.threshold(h, 0.0, 0.0),
    "clamp": lambda h: h.clamp(min=-0.2),
    "clamp_min": lambda h: torch.clamp_min(h, 0.1),
    "clamp_max": lambda h: h.clamp_max(0.1),
    "abs": abs,
    "max_pool1d": lambda h: F.max_pool1d(h.unflatten(1, (2, 8)), 4).flatten(1),
    "adaptive_max_pool1d": lambda h: F.adaptive_max_pool1d(h.unflatten(1, (2, 8)), 3).flatten(1),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h.view(-1, 1, 4, 4), (2, 3)).flatten(1),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(h.view(-1, 1, 2, 2, 4), (1, 2, 2)).flatten(1),
    "amax": lambda h: h.view(-1, 4, 4).amax(dim=(1, 2))[:, None],
    "amax_of_one_dimension": lambda h: torch.amax(h.view(-1, 2, 4, 2), -2).flatten(1),
    "amin": lambda h: h.view(-1, 4, 4).amin(1),
    "max": lambda h: h.view(-1, 4, 4).max(dim=1).values,
    "min": lambda h: torch.min(h.view(-1, 4, 4), 2)[0],
    "maximum": lambda h: torch.maximum(h[:, :8], h[:, 8:]),
    "minimum": lambda h: torch.minimum(h[:, :8], h[:, 8:]),
    "maximum_of_numbers": lambda h: torch.maximum(h, torch.tensor(0.1, dtype=h.dtype)),
}


class Around(nn.Module):
    """Linear, the function, linear: the logits are polynomials in t between kinks."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(3, 16), nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_located_kink_costs_a_fraction_of_a_blind_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.randn(12, 3, dtype=torch.float64)
    net = Around(FUNCTIONS[name]).double()
    net(X)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0)
    trajectory = epk.train(net, X, torch.arange(12) % 2, optimizer=optimizer, steps=2)
    found = epk.reconstruct(trajectory, X, head="logits", rule=epk.adaptive(1e-12, order=2))
    assert found.max_error < 1e-11

    def blind(line: object, x: Tensor, a: Tensor, b: Tensor) -> Kinks:
        return torch.zeros(0, dtype=torch.int64), a[:0], torch.ones_like(a, dtype=torch.bool)

    monkeypatch.setattr("epk_gp.quadrature.adaptive.locate_kinks", blind)
    control = epk.reconstruct(trajectory, X, head="logits", rule=epk.adaptive(1e-12, order=2))
    assert control.max_error < 1e-11
    assert control.evaluations > 2.5 * found.evaluations
