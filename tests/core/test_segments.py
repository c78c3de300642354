"""The order in which steps are made again, counted in a run of 100,000 steps that nothing computes."""

import math

import pytest
import torch

from epk_gp.core import replay
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replay import Segments, Steps

STEPS = 100_000


class Kept:
    """Every k-th state, and the last; a state is its number."""

    def __init__(self, every):
        self.numbers = [*range(0, STEPS, every), STEPS]

    def __len__(self):
        return STEPS + 1

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


@pytest.mark.parametrize("every", [2154, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7, 20, 316, STEPS))])
def test_no_step_is_made_more_than_twice_and_some_roots_of_states_are_held(every, monkeypatch):
    """On the way up, as the comparison of steps reads them, and on the way down, as adjoints do, by chords too."""
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    longest = 5 if every > 100 else 1  # shorter than what is held
    for steps, chord in ((range(STEPS), 1), (reversed(range(STEPS)), longest)):
        run = Counted(every)
        for s in steps:
            if s % chord == chord - 1:
                assert float(run.state(s - chord + 1)) == s - chord + 1
            made, place = run.segment(s)
            assert float(made.states[place]) == s
            assert float(run.state(s + 1)) == s + 1
        assert run.count <= 2 * STEPS
        assert run.most_held <= 5 * (math.isqrt(every) + 2)


def test_a_stretch_that_fits_into_memory_is_made_once(monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 8 * 2 * 400)
    for steps in (range(STEPS), reversed(range(STEPS))):
        run = Counted(316)
        assert len(run.bounds) == len(run.numbers)
        for s in steps:
            run.segment(s)
        assert run.count == STEPS


def test_what_segments_begin_with_lies_in_files_that_are_written_over(monkeypatch, tmp_path):
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    monkeypatch.setattr(replay.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    run = Counted(1000)
    for s in reversed(range(STEPS - 5000, STEPS)):
        assert float(run.state(s)) == s
    assert len([*tmp_path.iterdir()]) <= math.isqrt(1000) + 2
