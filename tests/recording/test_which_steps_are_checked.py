"""Which steps have their gradient recomputed: as many as fit into a share of the loop's time, or one out of several."""

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.optimizers.update_rules import ClipNorm
from epk_gp.recording import check as check_module
from epk_gp.recording import recorder as recorder_module
from epk_gp.recording.check import CheckSchedule
from loops import data, mlp, sgd
from stored_runs import step

MS = 1e-3


class Clock:
    """A loop whose parts take the time that they are told to."""

    def __init__(self, every=None):
        self.time, self.checked = 0.0, []
        self.schedule = CheckSchedule(every, torch.device("cpu"))
        self.schedule.now = lambda: self.time

    def run(self, steps, loop, own, check, first=0.0):
        """Make steps; the first one takes longer to record. Return the share of the loop's time that is added."""
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


@pytest.mark.parametrize(
    ("loop", "own", "check", "least", "most"),
    [(loop * MS, own * MS, 1.2 * loop * MS, 0.145, 0.155) for loop in (20, 35, 200) for own in (0.1, 1, 2)]
    + [(20 * MS, 4 * MS, 25 * MS, 0.2, 0.215)],  # where recording alone takes the time, some steps are checked
)
def test_recording_takes_its_share_of_the_time_and_uses_it(loop, own, check, least, most):
    clock = Clock()
    assert least < clock.run(4000, loop, own, check) < most
    assert 20 < len(clock.checked) == clock.schedule.num_checked
    gaps = {b - a for a, b in zip(clock.checked[5:], clock.checked[6:], strict=False)}
    assert len(gaps) > 8  # no period


def test_a_short_step_counts_as_20_ms():
    clock = Clock()
    clock.run(2000, 1 * MS, own=0.5 * MS, check=2 * MS)
    assert len(clock.checked) > 2000 / 2


def test_a_slow_first_step_is_not_paid_for_by_others_and_other_checks_are():
    slow, quick = Clock(), Clock()
    slow.run(500, 20 * MS, own=1 * MS, check=25.3 * MS, first=5.0)
    quick.run(500, 20 * MS, own=1 * MS, check=25.3 * MS)
    assert slow.checked[:5] == quick.checked[:5]
    before = len(quick.checked)
    with quick.schedule.recording(), quick.schedule.checking():
        quick.time += 2.0
    cost = quick.schedule.cost
    assert quick.schedule.steps_that_pay(cost) == pytest.approx(
        1000, rel=0.05
    )  # 15 % of 20 ms are 3, of which 1 is taken
    quick.run(500, 20 * MS, own=1 * MS, check=25 * MS)
    assert len(quick.checked) - before < 10


def test_a_fixed_number_is_kept_whatever_the_time():
    clock = Clock(every=10)
    clock.run(100, 20 * MS, own=1 * MS, check=900 * MS)
    assert [index // 10 for index in clock.checked] == list(range(10))
    assert clock.schedule.steps_that_pay(1.0) == 0


@pytest.fixture
def recomputed(monkeypatch):
    """The steps whose gradient is recomputed."""
    indices, real = [], recorder_module.check_step

    def counted(setup, observed, *, exact=True):
        indices.extend([observed.step.index] * exact)
        return real(setup, observed, exact=exact)

    for module in (check_module, recorder_module):
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
    with pytest.raises(ValueError, match="check_every must be 1 where gradients are clipped: got 2"):
        epk.Recorder(net, sgd(net), X, y, clip=ClipNorm(1.0), check_every=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_clipping_of_some_parameters_is_recorded_as_their_factor(dtype):
    """As if these had the learning rate times the factor, and nothing was clipped; every step is checked."""
    results, factors, X_test = [], [], data(5)[0].to(dtype)
    for is_clipped in (True, False):
        net, (X, y) = mlp(dtype), data(dtype=dtype)
        parts = [[*net[0].parameters()], [*net[2].parameters()]]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.5)
        with epk.Recorder(net, optimizer, X, y) as recorder:
            for index in range(6):
                optimizer.zero_grad()
                F.cross_entropy(net(X), y).backward()
                if is_clipped:
                    norm = float(torch.nn.utils.clip_grad_norm_(parts[1], 0.15))
                    factors.append(min(1.0, 0.15 / (norm + 1e-6)))
                else:
                    optimizer.param_groups[1]["lr"] = 0.5 * factors[index]
                recorder.batch(None)
                optimizer.step()
        if is_clipped:
            assert recorder.num_checked == 6
        results.append(epk.attribute(recorder.trajectory, X_test))
    clipped, scaled = results
    assert clipped.certified
    assert min(factors) < 0.9
    assert (clipped.samples - scaled.samples).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)
    with pytest.warns(epk.CertificateWarning, match="the clipping of gradients give"):
        epk.influence(recorder_of_clipped(), data(3)[0])


def recorder_of_clipped():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        F.cross_entropy(net(X), y).backward()
        torch.nn.utils.clip_grad_norm_(net[2].parameters(), 0.05)
        recorder.batch(None)
        optimizer.step()
    return recorder.trajectory


@pytest.mark.parametrize("stated", [True, False])
def test_of_the_steps_between_two_checks_those_that_were_clipped_are_recomputed(stated, monkeypatch, recomputed):
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
    assert recomputed == sorted({0, *clipped, 7})
    assert epk.reconstruct(recorder.trajectory, X).certified
