"""Random numbers of torch that other threads draw are not recorded as those of a network's forward pass."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from thread_tools import at_once
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.recording.passes import draws_random_numbers


class Beside(nn.Module):
    """A network during whose passes another thread draws from torch's global generator, if it is told to."""

    def __init__(self, dropout_above: float) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.other_draws, self.dropout_above = False, dropout_above

    def forward(self, x: Tensor) -> Tensor:
        if self.other_draws:
            at_once([lambda: torch.rand(1)])
        h = torch.tanh(self.hidden(x))
        draws = float(self.out.bias[0].detach()) > self.dropout_above
        return self.out(F.dropout(h, 0.5, self.training and draws))


def _recorded(other_draws: bool, dropout_above: float) -> epk.Trajectory:
    """Record 3 steps, in which the first bias of the last layer, 0 at first, grows."""
    torch.manual_seed(0)
    net = Beside(dropout_above).double()
    with torch.no_grad():
        net.out.bias.zero_()
    net.other_draws = other_draws
    X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(6, dtype=torch.int64)
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.3), steps=3)


def test_random_numbers_that_another_thread_draws_are_not_those_of_a_forward_pass() -> None:
    alone_, beside = (_recorded(other_draws, dropout_above=float("inf")) for other_draws in (False, True))
    assert [step.passes for step in beside.steps] == [()] * 3
    assert beside.digest == alone_.digest


@pytest.mark.parametrize("other_draws", [False, True])
def test_random_numbers_are_recorded_in_just_the_passes_that_draw_some(other_draws: bool) -> None:
    """Here the weights decide, and only after the first step."""
    run = _recorded(other_draws, dropout_above=1e-3)
    assert [[p.random_state is not None for p in step.passes] for step in run.steps] == [[False], [True], [True]]


def _draws_and_catches(x: Tensor) -> Tensor:
    try:
        return x + torch.rand_like(x)
    except Exception:
        return x


@torch.library.custom_op("epk_gp_tests::own", mutates_args=())
def _own_operation(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@pytest.mark.parametrize(("call", "expected"), [
    (lambda x: x @ x.T + x.relu().sum(), False),
    (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.LSTM(3, 2)), False),
    (nn.Dropout(0.5).eval(), False),
    (nn.Dropout(0.5), True),
    (nn.Sequential(nn.Linear(3, 3), nn.RReLU()), True),
    (lambda x: torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x), True),
    (_draws_and_catches, True),
    (_own_operation, True),  # torch does not say what is in it
    (lambda x: x @ x, True),  # an error
])  # fmt: skip
def test_a_call_that_may_draw_random_numbers_is_told_before_it_does(
    call: Callable[[Tensor], object], expected: bool
) -> None:
    before = torch.get_rng_state()
    assert draws_random_numbers(lambda: call(torch.ones(2, 3))) is expected
    assert torch.equal(torch.get_rng_state(), before)
