"""The order in which steps are made again, counted in a run of 100,000 steps that nothing computes."""

import math
from types import SimpleNamespace

import pytest
import torch

from epk_gp.core import replay
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replay import Segment, Segments

STEPS = 100_000


class Counted(Segments):
    """States are their numbers; a step may only be made from the state before it."""

    def __init__(self, every):
        spec = TensorSpec(torch.float64, torch.device("cpu"))
        super().__init__(SimpleNamespace(numbers=[*range(0, STEPS, every), STEPS]), spec, 8)
        self.count, self.most = 0, 0

    def is_stored(self, state):
        return state in self.numbers

    def stored(self, state):
        return state

    def make(self, first, end, start):
        assert start == first
        self.count += end - first
        held = sum(len(segment.states) for segment in self.made.values()) + end - first + 1
        self.most = max(self.most, held + len(self.starts))
        return Segment([torch.tensor([float(s)]) for s in range(first, end + 1)], [], end)

    def read(self, state):
        return state if state in self.numbers else float(self.state(state))


@pytest.mark.parametrize("every", [2154, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7, 20, 316, STEPS))])
def test_no_step_is_made_more_than_twice_and_some_roots_of_states_are_held(every, monkeypatch):
    """On the way up, as the comparison of steps reads them, and on the way down, as adjoints do, by chords too."""
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    longest = 5 if every > 100 else 1  # shorter than what is held
    for steps, chord in ((range(STEPS), 1), (reversed(range(STEPS)), longest)):
        run = Counted(every)
        for s in steps:
            if s % chord == chord - 1:
                assert run.read(s - chord + 1) == s - chord + 1
            made, place = run.segment(s)
            assert float(made.states[place]) == s
            assert run.read(s + 1) == s + 1
        assert run.count <= 2 * STEPS
        assert run.most <= 5 * (math.isqrt(every) + 2)


def test_a_stretch_that_fits_into_memory_is_made_once(monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 8 * 2 * 400)
    for steps in (range(STEPS), reversed(range(STEPS))):
        run = Counted(316)
        assert not run.is_divided
        for s in steps:
            run.segment(s)
        assert run.count == STEPS


def test_what_segments_begin_with_lies_in_files_that_are_written_over(monkeypatch, tmp_path):
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    monkeypatch.setattr(replay.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    run = Counted(1000)
    for s in reversed(range(STEPS - 5000, STEPS)):
        assert run.read(s) == s
    assert len([*tmp_path.iterdir()]) <= math.isqrt(1000) + 2
