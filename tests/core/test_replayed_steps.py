"""Recorded steps made once more: gradients that are taken together are those that are taken one at a time."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from weighted_loops import CLASSES, INPUTS, POINTS, Apply, mlp, record

from epk_gp.autodiff.verification import plan_for
from epk_gp.core.replayed_steps import RunReplay, replayed_steps

STEPS = 24
CALLS = list[int]()  # of the network, by the number of its rows


def counted() -> nn.Module:
    return mlp(Apply(lambda h: CALLS.append(len(h)) or h))


def tokens(**options: int) -> nn.Module:
    """A network of tokens, of which some batches hold none of number 0."""
    entries, mean = Apply(lambda x: (3 * x.abs()).long() % 7), Apply(lambda h: h.mean(dim=1).tanh())
    return nn.Sequential(entries, nn.Embedding(7, 4, **options), mean, nn.Linear(4, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.cells(x[:, :, None])[0][:, -1])


NETWORKS = {
    "mlp": counted, "tokens": tokens, "padding": lambda: tokens(padding_idx=0), "recurrent": Recurrent,
    "normalised": lambda: mlp(nn.LayerNorm(6)), "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(INPUTS, 3))),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten()),
}  # fmt: skip


def run_of(make, dtype: torch.dtype, X: Tensor | None = None):
    torch.manual_seed(1)
    net, X = make().to(dtype), torch.randn(POINTS, INPUTS, dtype=dtype) if X is None else X
    batches = [torch.randperm(POINTS)[: 5 if step % 7 else 4] for step in range(STEPS)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8)
    return record(net, optimizer, X, torch.arange(POINTS) % CLASSES, batches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_gradients_of_steps_together_are_those_of_each_alone(make, dtype):
    """Whatever torch's rules for batches leave out, such as the padding index of an embedding."""
    run = run_of(make, dtype)
    net = plan_for(run, run.model_for(run.inputs))
    together, alone = (RunReplay(run, net.model, run.inputs, plan) for plan in (net.memory_plan(1 << 30), None))
    CALLS.clear()
    found = [step.gradient for step in replayed_steps(together)]
    num_calls = len(CALLS)
    expected = [step.gradient for step in replayed_steps(alone)]
    for g, own in zip(found, expected, strict=True):
        assert (g - own).abs().max() <= 64 * torch.finfo(dtype).eps * own.abs().max().clamp(min=1e-3)
    # rounding is another beside other steps, and what it leaves of a step in float32 is a term of an attribution
    assert num_calls <= STEPS // 3 if dtype == torch.float64 else all(map(torch.equal, found, expected))


def test_batches_of_whole_numbers_are_taken_together_too():
    """The weights of their rows, as 1/5, are no whole numbers."""
    words = torch.randint(7, (POINTS, INPUTS), generator=torch.Generator().manual_seed(0))
    run = run_of(lambda: nn.Sequential(*[*tokens()][1:]), torch.float64, words)
    net = plan_for(run, run.model_for(words))
    replay = RunReplay(run, net.model, words, net.memory_plan(1 << 30))
    with mock.patch.object(RunReplay, "gradient", side_effect=AssertionError("one step alone")):
        assert len(list(replayed_steps(replay))) == STEPS


def test_gradients_of_a_small_budget_are_those_of_a_large_one():
    run = run_of(counted, torch.float64)
    net = plan_for(run, run.model_for(run.inputs))
    small, large = (RunReplay(run, net.model, run.inputs, net.memory_plan(budget)) for budget in (1 << 16, 1 << 30))
    for a, b in zip(replayed_steps(small), replayed_steps(large), strict=True):
        assert torch.allclose(a.gradient, b.gradient, rtol=1e-12, atol=1e-15)
