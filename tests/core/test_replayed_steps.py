"""Recorded steps made once more: together as one at a time, and in an order that makes none more than twice."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from weighted_loops import CLASSES, INPUTS, POINTS, Apply, mlp, record

from epk_gp.autodiff.verification import plan_for
from epk_gp.core import replay
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replay import Segments, Steps
from epk_gp.core.replayed_steps import RunReplay, replayed_steps

STEPS = 24
CALLS = list[int]()  # of the network, by the number of its rows


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
    "mlp": lambda: mlp(Apply(lambda h: CALLS.append(len(h)) or h)),
    "tokens": tokens, "padding": lambda: tokens(padding_idx=0), "recurrent": Recurrent,
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


MANY = 1_000


class Kept:
    """Every k-th state, and the last; a state is its number."""

    def __init__(self, every):
        self.numbers = [*range(0, MANY, every), MANY]

    def __len__(self):
        return MANY + 1

    def __getitem__(self, state):
        return torch.tensor([float(state)])


class Counted(Segments):
    """States are their numbers; a step may only be made from the state before it."""

    def __init__(self, every):
        kept, self.count, self.most_held = Kept(every), 0, 0
        spec = TensorSpec(torch.float64, torch.device("cpu"))
        super().__init__(Steps(kept, spec, {*kept.numbers}, lambda state: state, self.step))

    def step(self, index, w, memory, earlier):
        assert index == memory == float(w)
        self.count += 1
        held = sum(len(segment.states) for segment in self.made.values()) + len(self._current[1]) + 1
        self.most_held = max(self.most_held, held + len(self.starts))
        return w + 1, memory + 1, None


@pytest.mark.parametrize("every", [100, 20, 464, MANY])
def test_no_step_is_made_more_than_twice_and_some_roots_of_states_are_held(every, monkeypatch):
    """On the way up, as the comparison of steps reads them, and on the way down, as adjoints do, by chords too."""
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    longest = 5 if every >= 100 else 1  # shorter than what is held
    for steps, chord in ((range(MANY), 1), (reversed(range(MANY)), longest)):
        run = Counted(every)
        for s in steps:
            if s % chord == chord - 1:
                assert float(run.state(s - chord + 1)) == s - chord + 1
            made, place = run.segment(s)
            assert float(made.states[place]) == s
            assert float(run.state(s + 1)) == s + 1
        assert run.count <= 2 * MANY
        assert run.most_held <= 5 * (math.isqrt(every) + 2)


def test_a_stretch_that_fits_into_memory_is_made_once(monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 8 * 2 * 400)
    for steps in (range(MANY), reversed(range(MANY))):
        run = Counted(316)
        assert len(run.bounds) == len(run.numbers)
        for s in steps:
            run.segment(s)
        assert run.count == MANY


def test_what_segments_begin_with_lies_in_files_that_are_written_over(monkeypatch, tmp_path):
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    monkeypatch.setattr(replay.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    run = Counted(250)
    for s in reversed(range(MANY)):
        assert float(run.state(s)) == s
    assert len([*tmp_path.iterdir()]) <= math.isqrt(250) + 2
