"""Random numbers are recorded in the passes that draw some, and change no result where another thread drew them."""

import torch
import torch.nn.functional as F
from thread_tools import at_once
from torch import Tensor, nn

import epk_gp as epk


class Beside(nn.Module):
    """A network during whose training passes another thread draws from torch's global generator, if it is told to."""

    other_draws = False

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if Beside.other_draws:
            at_once([lambda: torch.rand(1)])
        return self.out(torch.tanh(self.hidden(x)))


class DropsLater(Beside):
    """Drops units once the first bias of the last layer has grown."""

    def forward(self, x: Tensor) -> Tensor:
        draws = float(self.out.bias[0].detach()) > 1e-3
        return self.out(F.dropout(torch.tanh(self.hidden(x)), 0.5, self.training and draws))


def _recorded(kind: type[Beside], *, other_draws: bool = False) -> epk.Trajectory:
    torch.manual_seed(0)
    net = kind().double()
    with torch.no_grad():
        net.out.bias.zero_()
    X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(6, dtype=torch.int64)
    Beside.other_draws = other_draws
    try:
        return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.3), steps=3)
    finally:
        Beside.other_draws = False


def test_random_numbers_that_another_thread_draws_during_a_pass_change_no_result() -> None:
    X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, beside = (epk.attribute(_recorded(Beside, other_draws=draws), X) for draws in (False, True))
    assert beside.certified
    assert float((beside.samples - alone.samples).abs().max()) < 1e-12


def test_random_numbers_are_recorded_in_just_the_passes_that_draw_some() -> None:
    """Here the weights decide, and only after the first step."""
    run = _recorded(DropsLater)
    assert [[p.random_state is not None for p in step.passes] for step in run.steps] == [[False], [True], [True]]
