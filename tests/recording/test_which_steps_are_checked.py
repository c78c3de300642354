"""Which steps have their gradient recomputed: as many as fit into a share of the loop's time, or one out of several."""

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.optimizers.update_rules import ClipNorm
from epk_gp.recording import check as check_module
from epk_gp.recording import stretch as stretch_module
from epk_gp.recording.check import CheckSchedule
from loops import data, mlp, sgd
from stored_runs import step

MS = 1e-3


class Clock:
    """A loop whose parts take the time that they are told to."""

    def __init__(self, every=None):
        self.time, self.checked = 0.0, []
        self.schedule = CheckSchedule(every)
        self.schedule.now = lambda: self.time

    def run(self, steps, loop, check, first=0.0, waiting=1):
        """Make steps, some of which wait for others; the first one takes longer. Return the share of the checks."""
        for index in range(steps):
            self.time += loop + (first if index == 0 else 0.0)
            self.schedule.count_step()
            for own in range(index + 1 - waiting, index + 1) if (index + 1) % waiting == 0 else ():
                if self.schedule.is_due(own):
                    with self.schedule.checking():
                        self.time += check
                    self.schedule.add(own)
                    self.checked.append(own)
        return (self.time - first) / (steps * loop) - 1


@pytest.mark.parametrize("waiting", [1, 64])
@pytest.mark.parametrize("loop", [0.4 * MS, 20 * MS, 200 * MS])
@pytest.mark.parametrize("steps", [0.5, 1.2, 6])
def test_checks_take_their_share_of_the_time(loop, steps, waiting):
    clock = Clock()
    assert 0.04 < clock.run(6400, loop, steps * loop, waiting=waiting) < 0.06
    assert 20 < len(clock.checked) == clock.schedule.num_checked
    gaps = {b - a for a, b in zip(clock.checked[5:], clock.checked[6:], strict=False)}
    assert len(gaps) > 8  # no period


def test_a_slow_first_step_is_not_paid_for_by_others_and_other_checks_are():
    slow, quick = Clock(), Clock()
    slow.run(500, 20 * MS, check=25.3 * MS, first=5.0)
    quick.run(500, 20 * MS, check=25.3 * MS)
    assert slow.checked[:5] == quick.checked[:5]
    before = len(quick.checked)
    with quick.schedule.checking():
        quick.time += 2.0
    assert quick.schedule.steps_that_pay() == pytest.approx(1500, rel=0.2)  # 5 % of some 25 ms
    quick.run(500, 20 * MS, check=25 * MS)
    assert len(quick.checked) - before < 10


def test_a_fixed_number_is_kept_whatever_the_time():
    clock = Clock(every=10)
    clock.run(100, 20 * MS, check=900 * MS)
    assert [index // 10 for index in clock.checked] == list(range(10))
    assert clock.schedule.steps_that_pay() == 0


@pytest.fixture
def recomputed(monkeypatch):
    """The steps whose gradient is recomputed."""
    indices, real = [], stretch_module.check_step

    def counted(setup, observed, *, exact=True):
        indices.extend([observed.step.index] * exact)
        return real(setup, observed, exact=exact)

    for module in (check_module, stretch_module):
        monkeypatch.setattr(module, "check_step", counted)
    return indices


@pytest.mark.mostly_slow
@pytest.mark.parametrize("every", [1, 2, 5])
def test_one_gradient_of_each_block_of_steps_is_recomputed_and_the_run_is_the_same(every, recomputed):
    def digest(**options):
        net, (X, y) = mlp(), data()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
        generator = torch.Generator().manual_seed(5)
        return epk.train(net, X, y, optimizer=optimizer, steps=20, batch_size=4, generator=generator, **options).digest

    found = digest(check_every=every)
    assert [index // every for index in recomputed[: 20 // every]] == list(range(20 // every))
    assert recomputed[0] == 0
    assert found == digest()


def test_a_step_whose_gradient_is_not_recomputed_must_still_follow_the_update_rule():
    net, (X, y) = mlp(), data()
    recorder = epk.Recorder(net, sgd(net), X, y, check_every=1000)
    with recorder:
        step(recorder)
        recorder.optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        recorder.batch(None)
        with torch.no_grad():
            net[0].bias += 1e-3
        with pytest.raises(epk.StepMismatchError, match="step 1: .*on the gradient that backward.. left"):
            recorder.optimizer.step()


def test_an_error_of_a_step_that_waited_names_that_step_alone():
    net, (X, y) = mlp(), data()
    with epk.Recorder(net, sgd(net), X, y, check_every=1000) as recorder:
        for _ in range(5):
            step(recorder)
        recorder.optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        net[0].weight.grad[0, 0] = torch.nan
        recorder.batch(None)
        recorder.optimizer.step()
        recorder.optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        with pytest.raises(epk.StepMismatchError, match="^step 5: the weights must stay finite") as raised:
            recorder.batch(None)
    assert raised.value.step == 5
    assert recorder.num_steps == 5


@pytest.mark.parametrize("stated", [True, False])
def test_a_clipped_step_between_two_checks_needs_none(stated, monkeypatch, recomputed):
    clipped = []
    monkeypatch.setattr(CheckSchedule, "is_due", lambda schedule, index: index == 0)
    net, (X, y) = mlp(), data()
    recorder = epk.Recorder(net, sgd(net), X, y, clip=ClipNorm(0.31) if stated else None)
    with recorder:
        for index in range(8):
            recorder.optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.31)
            clipped += [index] if norm > 0.31 else []
            recorder.batch(None)
            recorder.optimizer.step()
    assert 0 < len(clipped) < 8
    assert recomputed == [0, 7]
    assert epk.reconstruct(recorder.trajectory, X).certified
