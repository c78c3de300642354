"""Runs on disk that keep every k-th state: what their files hold, and what is read, resumed and refused."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import recomputation_of
from epk_gp.storage.run import check_run
from epk_gp.storage.schema import read_header
from loops import data, file_hashes, mlp, sgd
from stored_runs import KEPT_STEPS as STEPS
from stored_runs import changed, chunk_files, entry, refused, step, with_tensor
from stored_runs import record_kept as record


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "run"
    record(path)
    return path


@pytest.fixture
def run(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run")


def test_chunks_hold_every_third_state_and_one_coefficient_per_parameter(run):
    whole, _ = record(None, keep_every=1)
    chunks = [load_file(file) for file in chunk_files(run)]
    assert [len(chunk["states"]) for chunk in chunks] == [1, 1, 2, 1, 1]
    assert torch.equal(chunks[2]["states"][0], whole.states[3])
    assert not any("update.momentum_lr" in chunk for chunk in chunks)
    at = torch.cat([chunk["update.momentum_lr.at"] for chunk in chunks[1:]])
    held = torch.cat([chunk["update"] for chunk in chunks[1:]])[:, 1]
    for s in range(STEPS):
        parts = whole.updates[s].momentum_lr.split(list(whole.model.sizes))
        assert torch.equal(torch.stack([part[r] for part, r in zip(parts, at[s], strict=True)]), held[s])
    assert read_header(run)["keep_every"] == 3
    assert check_run(run).finished


def test_a_run_is_read_as_it_was_recorded_in_threads_and_other_processes_too(run):
    whole, _ = record(None, keep_every=1)
    opened, other = epk.load_trajectory(run, mlp()), epk.load_trajectory(run, mlp())
    assert recomputation_of(opened).kept.numbers == (0, 3, 6, 7)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda s: opened.states[s % (STEPS + 1)], range(32)))
    assert all(torch.equal(w, other.states[s % (STEPS + 1)]) for s, w in enumerate(found))
    copied = pickle.loads(pickle.dumps(opened))
    for s in range(STEPS + 1):
        assert torch.equal(copied.states[s], other.states[s])
        assert torch.allclose(opened.states[s], whole.states[s], rtol=0, atol=1e-12)
    assert opened.digest == record(run.parent / "again")[0].digest
    assert opened.digest != whole.digest  # results of other states have another name
    with pytest.raises(IndexError, match="state must lie in 0..7"):
        opened.states[8]


@pytest.mark.parametrize("until", [3, 4])
def test_a_run_is_resumed_to_the_bits_of_one_that_never_stopped(tmp_path, until):
    """At a kept state, and between two."""
    record(tmp_path / "run", until=until, finish=False)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == until
    resumed, net = record(tmp_path / "run", resume=True)
    whole, other = record(tmp_path / "whole")
    assert resumed.digest == whole.digest
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(resumed.states[s], whole.states[s]) for s in range(STEPS + 1))
    assert recomputation_of(resumed).kept.numbers == (0, 3, 6, 7)


def test_a_trajectory_taken_while_recording_ends_at_its_last_state(tmp_path):
    net, (X, y) = mlp(), data()
    with epk.Recorder(net, sgd(net), X, y, folder=tmp_path / "run", storage=epk.Storage(keep_every=3)) as recorder:
        for _ in range(4):
            step(recorder)
            assert torch.equal(recorder.trajectory.weights(-1)["0.weight"], net[0].weight)
    assert recomputation_of(recorder.trajectory).kept.numbers == (0, 3, 4)


def test_what_does_not_fit_is_refused(run):
    before = file_hashes(run)
    with pytest.raises(ValueError, match="keep_every must come with folder="):
        record(None, keep_every=2)
    for keep_every in (1, 2):
        with pytest.raises(ValueError, match=r"keep_every must be the recorded one to resume"):
            record(run, resume=True, keep_every=keep_every)
    assert file_hashes(run) == before


WRONG = {
    "must hold 'update.momentum_lr.at' of -1 or a weight of its parameter": entry("update.momentum_lr.at", 0, 24),
    "must hold 'update.momentum_lr.at' of -1 or a weight": entry("update.momentum_lr.at", 0, -2),
    r"must hold 'states' of shape \(1, 51\)": with_tensor("states", lambda states: states.expand(2, -1)),
}


@pytest.mark.parametrize("message", WRONG)
def test_chunks_that_hold_something_else_are_refused(run, message):
    changed(WRONG[message])(run)
    refused(run, message)


def test_the_name_of_a_loss_does_not_stand_for_another_function(tmp_path):
    """Computed states follow the loss that is given; the kept ones say whether it is the recorded one."""
    net, (X, y) = mlp(), data()
    loss, other = (
        epk.PerSampleLoss(lambda z, t, c=c: c * F.cross_entropy(z, t, reduction="none"), name="own") for c in (1, 1.1)
    )
    storage = epk.Storage(keep_every=3)
    epk.train(net, X, y, optimizer=sgd(net), steps=4, loss=loss, folder=tmp_path / "run", storage=storage)
    assert epk.load_trajectory(tmp_path / "run", mlp(), loss=loss).num_steps == 4
    with pytest.raises(ValueError, match="its steps do not lead to state 3"):
        epk.load_trajectory(tmp_path / "run", mlp(), loss=other)
