"""Runs whose files are replaced while a trajectory is open: what is read is of the run that was opened, or fails."""

import copy
import pickle
import shutil

import pytest
import torch

import epk_gp as epk
from loops import mlp
from stored_runs import chunk_files, norm_net, record_kept


def record(path, shift, make_net=mlp, keep_every=1, **options):
    """A run of four steps on other data for each shift; its files have the sizes of those of any other shift."""
    record_kept(path, make_net, until=4, keep_every=keep_every, shift=shift, **options)
    return epk.load_trajectory(path, make_net())


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


def muon(net):
    return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)


READS = (
    lambda run: run.states[3],
    lambda run: run.updates[2],
    lambda run: epk.gram_block(run, *[epk.Points(run.inputs[:2], is_train=True)] * 2),
    lambda run: epk.attribute(run, run.inputs[:2]),
    lambda run: pickle.loads(pickle.dumps(run)).states[2],
    lambda run: copy.deepcopy(run).updates[1],
)
OF_NET = (lambda run: run.statistics[2], lambda run: run.steps[1].passes[0])
COPY = copied(shutil.copyfile)
CASES = {
    "trained_again": (trained_again, {}, READS),
    "renamed": (renamed, {}, READS),
    "copied": (COPY, {}, READS),
    "copied_with_times": (copied(shutil.copy2), {}, READS),
    "kept_states": (COPY, {"keep_every": 2}, READS[:2]),
    "passes_and_statistics": (COPY, {"make_net": norm_net}, OF_NET),
    "matrices": (COPY, {"optimizer": muon, "unexplained": 0.5}, READS[1:2]),
}


@pytest.mark.parametrize(("replace", "options", "reads"), CASES.values(), ids=CASES)
def test_what_is_read_after_a_replacement_is_refused(tmp_path, replace, options, reads):
    run, other = tmp_path / "run", tmp_path / "other"
    trajectory = record(run, 0, **options)
    record(other, 1, **options)
    held, before = trajectory.states[0], trajectory.states[0].clone()
    replace(run, other)
    message = r"chunk-00000\d.* must have the checksum it was written with.* Or another run was recorded there"
    for read in reads:
        with pytest.raises(ValueError, match=message):
            read(trajectory)
    assert torch.equal(held, before)  # what was read before stays as it was


def test_a_copy_of_the_same_run_is_read_and_unchanged_files_are_not_hashed_again(tmp_path, monkeypatch):
    """Other files, the same content: compared once, and used."""
    run = tmp_path / "run"
    trajectory = record(run, 0)
    expected = [state.clone() for state in trajectory.states]
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "copy", run)
    assert all(torch.equal(a, b) for a, b in zip(trajectory.states, expected, strict=True))
    monkeypatch.setattr("epk_gp.storage.files.verify_file", pytest.fail)
    epk.attribute(trajectory, trajectory.inputs[:2])
