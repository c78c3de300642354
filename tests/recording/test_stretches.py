"""Steps of a small network wait, and are checked and recorded together: with what is true of steps recorded at once."""

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.recording import stretch
from loops import data, mlp

STEPS = 100
X, Y = data()


def record(wrong=None, optimizer=lambda params: torch.optim.Adam(params, lr=0.01), **options):
    """Record a loop; in the step `wrong` other rows than those that the network saw are announced."""
    net = mlp()
    recorder = epk.Recorder(net, optimizer(net.parameters()), X, Y, **options)
    try:
        with recorder:
            for step in range(STEPS):
                rows = torch.arange(len(X)).roll(3 * step)[:6]
                recorder.optimizer.zero_grad()
                F.cross_entropy(net(X[rows]), Y[rows]).backward()
                recorder.batch(rows.roll(1) if step == wrong else rows)
                recorder.optimizer.step()
    except (ValueError, KeyboardInterrupt) as error:
        return recorder, str(error)
    return recorder, ""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adadelta])
def test_a_run_is_the_same_however_many_steps_wait(kind, monkeypatch):
    digests = []
    for most in (64, 7, 1):
        monkeypatch.setattr(stretch, "MOST_STEPS", most)
        recorder, _ = record(optimizer=lambda params: kind(params, lr=0.01, weight_decay=0.01))
        digests.append(recorder.trajectory.digest)
    assert len(set(digests)) == 1
    assert epk.attribute(recorder.trajectory, X[:2]).certified


@pytest.mark.parametrize("wrong", [0, 2, 3, 40, 66, 67, STEPS - 1])
@pytest.mark.parametrize("on_disk", [True, False])
def test_an_error_names_its_step_and_the_steps_before_it_are_kept(wrong, on_disk, tmp_path):
    recorder, error = record(wrong, folder=tmp_path / "run" if on_disk else None)
    assert error.startswith(f"step {wrong}: recorder.batch() must get the indices of the rows")
    assert recorder.num_steps == wrong
    run = epk.load_trajectory(tmp_path / "run", mlp()) if on_disk else recorder.trajectory
    assert run.digest == record()[0].trajectory.until(wrong).digest


def test_an_interrupt_leaves_the_steps_that_wait_to_be_recorded(monkeypatch):
    expected, real, calls = record()[0].trajectory, stretch.Stretch._record_step, iter(range(STEPS))

    def interrupted(*args):
        real(*args)
        if next(calls) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(stretch.Stretch, "_record_step", interrupted)
    recorder, _ = record()
    assert recorder.num_steps == 67  # the first three by themselves, then 64
    assert recorder.trajectory.digest == expected.until(67).digest
