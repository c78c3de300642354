"""Which steps have their gradient recomputed: as many as fit into a share of the loop's time, or one out of several."""

import functools

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.optimizers.update_rules import ClipNorm
from epk_gp.recording import check as check_module
from epk_gp.recording import stretch as stretch_module
from epk_gp.recording.check import CheckSchedule
from loops import data, mlp, record, sgd

MS = 1e-3


class Clock:
    """A loop whose parts take the time that they are told to."""

    def __init__(self):
        self.time, self.checked = 0.0, []
        self.schedule = CheckSchedule(None)
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


@pytest.mark.parametrize(
    ("loop", "steps", "waiting"), [(0.4 * MS, 0.5, 64), (0.4 * MS, 6, 1), (20 * MS, 1.2, 1), (20 * MS, 6, 64),
    (200 * MS, 0.5, 1), (200 * MS, 1.2, 64)],
)  # fmt: skip
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


def record_acting(act, steps, **options):
    """Record a loop that acts after `batch()`."""
    net, (X, y) = mlp(), data()
    return record(net, sgd(net), X, y, [None] * steps, announced=lambda step: act(net, step), **options)


def test_a_step_whose_gradient_is_not_recomputed_must_still_follow_the_update_rule():
    def edit(net, step):
        net[0].bias.data += 1e-3 * (step == 1)

    with pytest.raises(epk.StepMismatchError, match="step 1: .*on the gradient that backward.. left"):
        record_acting(edit, 3, check_every=1000)


def test_an_error_of_a_step_that_waited_names_that_step_alone():
    def edit(net, step):
        net[0].weight.grad[0, 0] = torch.nan if step == 5 else net[0].weight.grad[0, 0]

    with pytest.raises(epk.StepMismatchError, match="^step 5: the weights must stay finite") as raised:
        record_acting(edit, 7, check_every=1000)
    assert raised.value.step == 5


@pytest.mark.parametrize("stated", [True, False])
def test_a_clipped_step_between_two_checks_needs_none(stated, monkeypatch, recomputed):
    norms = []
    monkeypatch.setattr(CheckSchedule, "is_due", lambda schedule, index: index == 0)
    clip = lambda net, step: norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.31))  # noqa: E731
    recorder = record_acting(clip, 8, clip=ClipNorm(0.31) if stated else None)
    assert 0 < sum(float(norm) > 0.31 for norm in norms) < 8
    assert recomputed == [0, 7]
    assert epk.reconstruct(recorder.trajectory, data()[0]).certified


# Steps of a small network wait, and are checked and recorded together.

LONG = 100
INPUTS, LABELS = data()


def record_waiting(wrong=None, optimizer=lambda params: torch.optim.Adam(params, lr=0.01), **options):
    """Record a loop; in the step `wrong` other rows than those that the network saw are announced."""
    net = mlp()
    recorder = epk.Recorder(net, optimizer(net.parameters()), INPUTS, LABELS, **options)
    try:
        with recorder:
            for step in range(LONG):
                rows = torch.arange(len(INPUTS)).roll(3 * step)[:6]
                recorder.optimizer.zero_grad()
                F.cross_entropy(net(INPUTS[rows]), LABELS[rows]).backward()
                recorder.batch(rows.roll(1) if step == wrong else rows)
                recorder.optimizer.step()
    except (ValueError, KeyboardInterrupt) as error:
        return recorder, str(error)
    return recorder, ""


@functools.cache
def whole_run():
    return record_waiting()[0].trajectory


# The first steps of RAdam are those of SGD: its numbers become vectors while steps wait.
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RAdam, torch.optim.Adadelta])
def test_a_run_is_the_same_however_many_steps_wait(kind, monkeypatch):
    digests = []
    for most in (64, 7, 1):
        monkeypatch.setattr(stretch_module, "MOST_STEPS", most)
        recorder, _ = record_waiting(optimizer=lambda params: kind(params, lr=0.01, weight_decay=0.01))
        digests.append(recorder.trajectory.digest)
    assert len(set(digests)) == 1
    assert epk.attribute(recorder.trajectory, INPUTS[:2]).certified


@pytest.mark.parametrize(
    ("wrong", "on_disk"), [(0, True), (2, False), (3, True), (40, False), (66, True), (67, False), (LONG - 1, True)]
)
def test_an_error_names_its_step_and_the_steps_before_it_are_kept(wrong, on_disk, tmp_path):
    recorder, error = record_waiting(wrong, folder=tmp_path / "run" if on_disk else None)
    assert error.startswith(f"step {wrong}: recorder.batch() must get the indices of the rows")
    assert recorder.num_steps == wrong
    assert not recorder.optimizer._optimizer_step_post_hooks
    run = epk.load_trajectory(tmp_path / "run", mlp()) if on_disk else recorder.trajectory
    assert run.digest == whole_run().until(wrong).digest


def test_an_interrupt_leaves_the_steps_that_wait_to_be_recorded(monkeypatch):
    expected, real, calls = whole_run(), stretch_module.Stretch._record_step, iter(range(LONG))

    def interrupted(*args):
        real(*args)
        if next(calls) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(stretch_module.Stretch, "_record_step", interrupted)
    recorder, _ = record_waiting()
    assert recorder.num_steps == 67  # the first three by themselves, then 64
    assert recorder.trajectory.digest == expected.until(67).digest
