"""The recorded steps: hashed, in another thread if they are large, and kept in blocks, so that no process grows."""

import pickle
import threading
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.step import ForwardPass, SeenRows, Step, fingerprint_data
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.recording import history as history_module
from epk_gp.recording.history import RunHistory
from loops import data, mlp, sgd

P = 3


@pytest.fixture
def in_background(monkeypatch):
    monkeypatch.setattr(history_module, "_IN_BACKGROUND", 0)


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


@pytest.mark.usefixtures("in_background")
def test_the_last_step_is_hashed_beside_the_next_one_of_the_training(monkeypatch):
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


@pytest.mark.usefixtures("in_background")
def test_closing_ends_the_thread():
    before = set(threading.enumerate())  # recorders of earlier tests that were not closed
    history = recorded()
    history.close()
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("epk_gp-recorder")]
    assert history.digest(4) == recorded().digest(4)


@pytest.mark.usefixtures("in_background")
def test_an_error_while_hashing_is_not_lost_and_a_pass_that_cannot_be_stored_is_refused_at_once(monkeypatch):
    history = recorded(2)
    with pytest.raises(ValueError, match="finite"):
        add(history, inputs=rows(torch.full((10, 4), torch.nan)))
    assert history.num_steps == 2
    history.digest(2)
    monkeypatch.setattr(history_module, "fingerprint_step", mock.Mock(side_effect=MemoryError("no memory")))
    add(history, inputs=rows(torch.randn(10, 4)))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            history.digest(3)


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


# Digests are part of the format: runs have those of version 2. All numbers are short binary fractions: no rounding.

STATES = [0.5, 0.4140625, 0.306396484375, 0.11346435546875, 0.08205127716064453]
DIGESTS = {  # of the run and of its data
    torch.float64: ("a2a494c892ade4f8981b3f70f5bab250", "3b57ef645b377f9462d291512ffef46d"),
    torch.float32: ("c7cdc224b3a0131b42b96e1c59479e03", "c5441667318a6bbe2f69d6e44e2a9b8c"),
}


@pytest.mark.parametrize("dtype", DIGESTS, ids=str)
def test_a_recorded_and_a_stored_run_have_the_digest_they_always_had_and_few_tensors(dtype, tmp_path):
    """One weight, momentum, a full batch, two small ones, and a step of two accumulated batches."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.fill_(0.5)
    X, y = torch.tensor([[[1.0], [2.0], [-1.0], [0.5]], [[0.5], [1.0], [0.25], [-1.0]]]).to(dtype)
    optimizer, path = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5), tmp_path / "run"
    with epk.Recorder(net, optimizer, X, y, loss=epk.MeanSquaredError(), folder=path) as recorder:
        for batches in ([None], [[0, 3]], [[2]], [[0, 1], [2, 3]]):
            optimizer.zero_grad()
            for batch in batches:
                rows = slice(None) if batch is None else batch
                (F.mse_loss(net(X[rows]), y[rows]) / len(batches)).backward()
                recorder.batch(batch, weight=1 / len(batches))
            optimizer.step()
    for trajectory in (recorder.trajectory, epk.load_trajectory(path, nn.Linear(1, 1, bias=False).to(dtype))):
        assert [float(trajectory.states[s]) for s in range(5)] == STATES
        assert (trajectory.digest, trajectory.data_digest) == DIGESTS[dtype]
    chunk = load_file(path / "chunk-000001.safetensors")
    assert chunk.keys() == {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update", "digests"}


def test_large_tensors_are_hashed_by_parts_whatever_the_number_of_threads():
    x, before = torch.arange(3 << 20, dtype=torch.float32), torch.get_num_threads()
    digests = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            digests.append(fingerprint_data(x))
    finally:
        torch.set_num_threads(before)
    x[-1] += 1
    assert len({*digests, fingerprint_data(x)}) == 2
