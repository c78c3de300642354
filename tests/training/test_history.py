"""Large steps are hashed in another thread, and give what small ones give."""

import threading

import pytest
import torch

from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.recording import history as history_module
from epk_gp.recording.history import RunHistory

P = 3


def recorded(num_steps=4):
    """A history of random steps, made anew from the same numbers."""
    generator = torch.Generator().manual_seed(0)
    history = RunHistory(torch.zeros(P), "start")
    update = stack_coefficients([LinearStep(lr=0.1)], [P])
    for index in range(num_steps):
        seen = SeenRows(torch.arange(10), torch.randn(10, 4, generator=generator))
        step = Step(index, 0.1, torch.arange(10), None, (ForwardPass(10, inputs=seen),))
        history.append(step, torch.randn(P, generator=generator), update)
    return history


def test_another_thread_gives_the_same_digests_and_passes(monkeypatch):
    expected = recorded()
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    history = recorded()
    assert [history.digest(n) for n in range(5)] == [expected.digest(n) for n in range(5)]
    assert len({history.digest(n) for n in range(5)}) == 5
    for step, other in zip(history.steps, expected.steps, strict=True):
        assert torch.equal(step.passes[0].inputs.values, other.passes[0].inputs.values)
        assert torch.equal(step.batch, other.batch)


def test_the_last_step_is_hashed_beside_the_next_one_of_the_training(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    may_go, inside = threading.Event(), threading.Event()
    fingerprint = history_module.fingerprint_step

    def held(*args):
        inside.set()
        assert may_go.wait(10)
        return fingerprint(*args)

    monkeypatch.setattr(history_module, "fingerprint_step", held)
    history = recorded(1)  # returns although the step is not hashed
    assert inside.wait(10)
    assert history.num_steps == 1
    may_go.set()
    assert len(history.digest(1)) == 32


def test_closing_ends_the_thread(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    history = recorded()
    history.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("epk_gp-recorder") and t.is_alive()]
    assert history.digest(4) == recorded().digest(4)


def test_an_error_while_hashing_is_not_lost(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    history = recorded(2)
    history.settle()

    def fails(*args):
        raise MemoryError("no memory")

    monkeypatch.setattr(history_module, "fingerprint_step", fails)
    step = Step(2, 0.1, None, None, (ForwardPass(10, inputs=SeenRows(torch.arange(10), torch.randn(10, 4))),))
    history.append(step, torch.zeros(P), stack_coefficients([LinearStep(lr=0.1)], [P]))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            history.digest(3)


def test_a_pass_that_cannot_be_stored_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    history = recorded(1)
    bad = ForwardPass(10, inputs=SeenRows(torch.arange(10), torch.full((10, 4), float("nan"))))
    with pytest.raises(ValueError, match="finite"):
        history.append(Step(1, 0.1, None, None, (bad,)), torch.zeros(P), stack_coefficients([LinearStep(lr=0.1)], [P]))
    assert history.num_steps == 1
