"""The recorded steps: hashed in another thread if they are large, and kept in blocks, so that no process grows."""

import pickle
import threading

import pytest
import torch

import epk_gp as epk
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.recording import history as history_module
from epk_gp.recording.history import RunHistory, TensorArena
from loops import data, mlp, sgd

P = 3


@pytest.fixture
def in_background(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)
    return monkeypatch


def add(history, **seen):
    step = Step(history.num_steps, 0.1, torch.arange(10), None, (ForwardPass(10, **seen),))
    history.append(step, torch.full((P,), 0.5 * history.num_steps), stack_coefficients([LinearStep(lr=0.1)], [P]))


def rows(values):
    return SeenRows(torch.arange(10), values)


def recorded(num_steps=4):
    """A history of random steps, made anew from the same numbers."""
    generator, history = torch.Generator().manual_seed(0), RunHistory(torch.zeros(P), "start")
    for _ in range(num_steps):
        add(history, inputs=rows(torch.randn(10, 4, generator=generator)))
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


def test_the_last_step_is_hashed_beside_the_next_one_of_the_training(in_background):
    may_go, inside = threading.Event(), threading.Event()
    fingerprint = history_module.fingerprint_step

    def held(*args):
        inside.set()
        assert may_go.wait(10)
        return fingerprint(*args)

    in_background.setattr(history_module, "fingerprint_step", held)
    history = recorded(1)  # returns although the step is not hashed
    assert inside.wait(10)
    assert history.num_steps == 1
    may_go.set()
    assert len(history.digest(1)) == 32


def test_closing_ends_the_thread(in_background):
    before = set(threading.enumerate())  # recorders of earlier tests that were not closed
    history = recorded()
    history.close()
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("epk_gp-recorder")]
    assert history.digest(4) == recorded().digest(4)


def test_an_error_while_hashing_is_not_lost(in_background):
    history = recorded(2)
    history.digest(2)

    def fails(*args):
        raise MemoryError("no memory")

    in_background.setattr(history_module, "fingerprint_step", fails)
    add(history, inputs=rows(torch.randn(10, 4)))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            history.digest(3)


def test_a_pass_that_cannot_be_stored_is_refused_at_once(in_background):
    history = recorded(1)
    with pytest.raises(ValueError, match="finite"):
        add(history, inputs=rows(torch.full((10, 4), torch.nan)))
    assert history.num_steps == 1


def test_the_random_state_of_a_recorded_pass_can_be_set_by_its_clone():
    """It lies in the arena: torch reads the state of a view of a larger tensor at another place."""
    state = torch.Generator().manual_seed(7).get_state()
    history = RunHistory(torch.zeros(P), "start")
    for _ in range(3):
        add(history, random_state=state)
    for step in history.steps:
        generator = torch.Generator()
        generator.set_state(step.passes[0].random_state.clone())
        assert torch.equal(generator.get_state(), state)


def test_tensors_of_steps_lie_in_blocks():
    """One by one they would lie between those that come and go in training, and the process would grow."""
    history = recorded()
    seen = [step.passes[0].inputs.values for step in history.steps]
    kept = [*seen, *(result.end for result in history.results(0, 4))]
    assert len({value.untyped_storage().data_ptr() for value in kept}) == 1
    assert all(step.batch.untyped_storage().nbytes() >= 1 << 20 for step in history.steps)


def test_what_is_put_is_what_is_kept(monkeypatch):
    monkeypatch.setattr(history_module, "_BLOCK_BYTES", 64)
    place = TensorArena()
    values = [torch.randn(n, 2) for n in (1, 3, 30, 2)] + [torch.arange(5), torch.zeros(0), torch.tensor(2.0)]
    kept = [place.copy_in(value) for value in values]
    for value, copy in zip(values, kept, strict=True):
        assert torch.equal(copy, value)
        assert copy.dtype == value.dtype
        assert copy.data_ptr() != value.data_ptr() or not value.numel()
    a, b = place.copy_in(torch.ones(3)), place.copy_in(torch.zeros(2))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.slow
def test_a_pickled_run_holds_its_own_numbers_only():
    net, (X, y) = mlp(), data()
    run = epk.train(net, X, y, optimizer=sgd(net), steps=30, batch_size=5)
    content = pickle.dumps(run)
    assert len(content) < 1 << 20  # blocks are 1 MiB each
    again = pickle.loads(content)
    assert again.digest == run.digest
    assert all(torch.equal(again.states[s], run.states[s]) for s in range(31))
    assert epk.reconstruct(again, X).max_error < 1e-12
