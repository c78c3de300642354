"""Runs whose files are replaced while a trajectory is open: what is read is of the run that was opened, or fails."""

import copy
import pickle
import shutil

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from loops import data, mlp
from stored_runs import adam, chunk_files, norm_net

OTHER = "Or another run was recorded there"


def record(path, seed, *, net=mlp, optimizer=adam, unexplained=None, **storage):
    """A run of four steps on other data for each seed; its files have the sizes of those of any other seed."""
    model, (X, y) = net(), data()
    own = optimizer(model)
    storage = epk.Storage(steps=2, **storage)
    with epk.Recorder(model, own, X + seed, y, folder=path, storage=storage, unexplained=unexplained) as recorder:
        for step in recorder.until(4):
            batch = torch.tensor([step, 9, 2])
            own.zero_grad()
            F.cross_entropy(model((X + seed)[batch]), y[batch]).backward()
            recorder.batch(batch)
            own.step()
    return epk.load_trajectory(path, net())


def trained_again(run, _):
    shutil.rmtree(run)
    record(run, 1)


def renamed(run, other):
    run.rename(run.with_name("elsewhere"))
    other.rename(run)


def copied(copy):
    """The chunks of another run copied over those of this one, into the same files."""

    def replace(run, other):
        for own, theirs in zip(chunk_files(run), chunk_files(other), strict=True):
            copy(theirs, own)

    return replace


REPLACED = {
    "trained_again": trained_again,
    "renamed": renamed,
    "copied": copied(shutil.copyfile),
    "copied_with_times": copied(shutil.copy2),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_what_is_read_after_a_replacement_is_refused(tmp_path, replace):
    run, other = tmp_path / "run", tmp_path / "other"
    trajectory = record(run, 0)
    record(other, 1)
    held, before = trajectory.states[3], trajectory.states[3].clone()
    replace(run, other)
    points = epk.Points(trajectory.inputs[:2], is_train=True)
    reads = [
        lambda: trajectory.states[3],
        lambda: trajectory.updates[2],
        lambda: epk.gram_block(trajectory, points, points),
        lambda: epk.attribute(trajectory, trajectory.inputs[:2]),
        lambda: pickle.loads(pickle.dumps(trajectory)).states[2],
        lambda: copy.deepcopy(trajectory).updates[1],
    ]
    for read in reads:
        with pytest.raises(ValueError, match=rf"chunk-00000\d.* must have the checksum it was written with.* {OTHER}"):
            read()
    assert torch.equal(held, before)  # what was read before stays as it was


@pytest.mark.parametrize("storage", [{}, {"keep_every": 2}], ids=["all", "keep_every"])
def test_packed_and_kept_states_are_refused_too(tmp_path, storage):
    run, other = tmp_path / "run", tmp_path / "other"
    trajectory = record(run, 0, **storage)
    record(other, 1, **storage)
    copied(shutil.copyfile)(run, other)
    for read in (lambda: trajectory.states[2], lambda: trajectory.updates[1]):
        with pytest.raises(ValueError, match=OTHER):
            read()


def test_passes_and_moving_statistics_are_refused_too(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    trajectory = record(run, 0, net=norm_net)
    record(other, 1, net=norm_net)
    assert trajectory.steps[1].passes[0].random_state is not None
    copied(shutil.copyfile)(run, other)
    for read in (lambda: trajectory.statistics[2], lambda: trajectory.steps[1].passes[0]):
        with pytest.raises(ValueError, match=OTHER):
            read()


def test_matrices_of_preconditioners_are_refused_too(tmp_path):
    def muon(net):
        matrices = [p for p in net.parameters() if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=0.02)

    run, other = tmp_path / "run", tmp_path / "other"
    trajectory = record(run, 0, optimizer=muon, unexplained=0.5)
    record(other, 1, optimizer=muon, unexplained=0.5)
    assert trajectory.updates[1].left or trajectory.updates[1].right
    copied(shutil.copyfile)(run, other)
    with pytest.raises(ValueError, match=OTHER):
        _ = trajectory.updates[1]


def test_a_copy_of_the_same_run_is_read(tmp_path):
    """Other files, the same content: compared once, and used."""
    run = tmp_path / "run"
    trajectory = record(run, 0)
    expected = [state.clone() for state in trajectory.states]
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "copy", run)
    assert all(torch.equal(a, b) for a, b in zip(trajectory.states, expected, strict=True))


def test_unchanged_files_are_not_hashed_again(tmp_path, monkeypatch):
    trajectory = record(tmp_path / "run", 0)
    monkeypatch.setattr("epk_gp.storage.journal.checksum_file", pytest.fail)
    epk.attribute(trajectory, trajectory.inputs[:2])
