"""Recording that recomputes the gradient of one step out of several: the same run, and a weaker check of the others."""

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.recording import recorder as recorder_module
from epk_gp.recording.check import CheckSchedule
from epk_gp.recording.setup import ClipNorm
from loops import data, mlp, sgd
from stored_runs import step


def digest_of_twenty_steps(**options):
    net, (X, y) = mlp(), data()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    generator = torch.Generator().manual_seed(5)
    return epk.train(net, X, y, optimizer=optimizer, steps=20, batch_size=4, generator=generator, **options).digest


@pytest.mark.mostly_slow
@pytest.mark.parametrize("every", [1, 2, 5])
def test_one_gradient_of_each_block_of_steps_is_recomputed_and_the_run_is_the_same(every, monkeypatch):
    recomputed = []
    real = recorder_module.check_against_exact_gradient

    def counted(setup, observed):
        recomputed.append(observed.step.index)
        return real(setup, observed)

    monkeypatch.setattr(recorder_module, "check_against_exact_gradient", counted)
    digest = digest_of_twenty_steps(check_every=every)
    indices = recomputed[: 20 // every]
    assert digest == digest_of_twenty_steps()
    assert [index // every for index in indices] == list(range(20 // every))
    assert indices[0] == 0


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


@pytest.mark.parametrize("stated", [True, False])
def test_of_the_steps_between_two_checks_those_that_were_clipped_are_recomputed(stated, monkeypatch):
    recomputed, clipped = [], []
    real = recorder_module.check_against_exact_gradient

    def counted(setup, observed):
        recomputed.append(observed.step.index)
        return real(setup, observed)

    monkeypatch.setattr(recorder_module, "check_against_exact_gradient", counted)
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
