"""The schedule of the checks keeps recording within its share of a loop's time."""

import pytest
import torch

from epk_gp.recording.check import CheckSchedule

MS = 1e-3


class Clock:
    """A loop whose parts take the time that they are told to."""

    def __init__(self, every=None):
        self.time = 0.0
        self.schedule = CheckSchedule(every, torch.device("cpu"))
        self.schedule.now = lambda: self.time
        self.checked = []

    def run(self, steps, loop, own, check, first=0.0):
        """Make steps; the first one takes longer to record."""
        for index in range(steps):
            self.time += loop
            with self.schedule.recording():
                self.schedule.begin_step()
                self.time += own + (first if index == 0 else 0.0)
                if self.schedule.is_due(index):
                    with self.schedule.checking():
                        self.time += check
                    self.schedule.add(index)
                    self.checked.append(index)
        return self.time / (steps * loop) - 1


@pytest.mark.parametrize("own", [0.1 * MS, 1 * MS, 2 * MS])
@pytest.mark.parametrize("loop", [20 * MS, 35 * MS, 200 * MS])
def test_recording_takes_15_percent_and_uses_them(loop, own):
    clock = Clock()
    overhead = clock.run(4000, loop, own, check=1.2 * loop)
    assert overhead < 0.155
    assert overhead > 0.145
    assert len(clock.checked) == clock.schedule.num_checked


def test_where_recording_alone_takes_the_time_some_steps_are_checked():
    clock = Clock()
    overhead = clock.run(4000, 20 * MS, own=4 * MS, check=25 * MS)
    assert 0.2 < overhead < 0.215
    assert 20 < len(clock.checked) < 60


def test_a_short_step_counts_as_20_ms():
    clock = Clock()
    clock.run(2000, 1 * MS, own=0.5 * MS, check=2 * MS)
    assert len(clock.checked) > 2000 / 2


def test_a_slow_first_step_is_not_paid_for_by_others():
    slow, quick = Clock(), Clock()
    slow.run(500, 20 * MS, own=1 * MS, check=25 * MS, first=5.0)
    quick.run(500, 20 * MS, own=1 * MS, check=25 * MS)
    assert slow.checked[:5] == quick.checked[:5]


def test_other_checks_are_paid_for_too():
    clock, schedule = Clock(), None
    schedule = clock.schedule
    clock.run(100, 20 * MS, own=1 * MS, check=25 * MS)
    before = len(clock.checked)
    with schedule.recording(), schedule.checking():
        clock.time += 2.0
    assert schedule.steps_that_pay() == pytest.approx(1000, rel=0.05)  # 15 % of 20 ms are 3 ms, of which 1 is taken
    clock.run(1000, 20 * MS, own=1 * MS, check=25 * MS)
    assert len(clock.checked) - before < 10


def test_the_gaps_between_checks_are_no_period():
    clock = Clock()
    clock.run(4000, 20 * MS, own=1 * MS, check=25 * MS)
    gaps = {b - a for a, b in zip(clock.checked[5:], clock.checked[6:], strict=False)}
    assert len(gaps) > 8


def test_a_fixed_number_is_kept_whatever_the_time():
    clock = Clock(every=10)
    clock.run(100, 20 * MS, own=1 * MS, check=900 * MS)
    assert [index // 10 for index in clock.checked] == list(range(10))
    assert clock.schedule.steps_that_pay() == 0
