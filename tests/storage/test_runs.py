"""A run on disk: what it holds, how it is opened, and which folders it takes."""

import pickle

import pytest
import torch

import epk_gp as epk
from epk_gp.storage.journal import read_journal
from loops import CASES, data, file_hashes, mlp, sgd, trained
from stored_runs import HEADER, chunk_files, record


def test_a_run_holds_only_json_and_safetensors(run):
    names = sorted(file_hashes(run).keys() - {"writer.lock"})
    assert names[-1] == HEADER
    assert {name.rsplit(".", 1)[1] for name in names} == {"json", "jsonl", "safetensors"}
    assert len(chunk_files(run)) == 4


def test_loading_unpickles_nothing(run, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, forbidden)
    trajectory = epk.load_trajectory(run, mlp())
    assert torch.isfinite(torch.stack(list(trajectory.states))).all()


@pytest.mark.slow
def test_chunks_do_not_change_the_run(tmp_path):
    for chunk_bytes, chunks in ((1, 7), (500, 4), (1500, 3), (1 << 24, 2)):
        path = tmp_path / str(chunk_bytes)
        assert record(path, chunk_bytes=chunk_bytes).digest == record(None).digest
        assert len(chunk_files(path)) == chunks


def test_the_journal_counts_every_state_once(run):
    journal = read_journal(run)
    assert [chunk.states for chunk in journal.chunks] == [1, 2, 2, 2]
    assert journal.chunks[-1].last == 6
    assert journal.finished


def test_no_partial_file_is_left(run):
    assert not list(run.glob("*.part"))


def test_loading_changes_no_file(run):
    before = file_hashes(run)
    epk.load_trajectory(run, mlp())
    assert file_hashes(run) == before


def test_loading_leaves_the_given_network_alone(run):
    net = mlp().train()
    with torch.no_grad():
        net[0].weight.fill_(7.0)
    trajectory = epk.load_trajectory(run, net)
    assert (net[0].weight == 7).all()
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert not (trajectory.weights(0)["0.weight"] == 7).any()


def test_a_float32_network_opens_a_float64_run(run):
    assert epk.load_trajectory(run, mlp(torch.float32)).dtype == torch.float64


def test_buffers_and_frozen_weights_come_from_the_run(tmp_path):
    case = CASES["frozen_batch_norm"]
    trajectory = trained(case, tmp_path / "run")
    net = case.make_net()
    net[1].running_mean.zero_()
    loaded = epk.load_trajectory(tmp_path / "run", net)
    X = case.make_data()[0]
    assert torch.equal(epk.network_outputs(loaded, X), epk.network_outputs(trajectory, X))


def test_a_folder_that_holds_a_run_is_refused_and_untouched(run):
    before = file_hashes(run)
    net, (X, y) = mlp(), data()
    for make in (
        lambda: epk.train(net, X, y, optimizer=sgd(net), steps=1, folder=run),
        lambda: epk.Recorder(net, sgd(net), X, y, folder=run, storage=epk.Storage()),
    ):
        with pytest.raises(FileExistsError, match=r"must be a new or empty folder: .*run already holds something"):
            make()
        assert file_hashes(run) == before
    assert epk.load_trajectory(run, mlp()).num_steps == 6


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_path_that_holds_anything_else_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "notes"
    (path if kind == "file" else path / "mine.txt").parent.mkdir(exist_ok=True)
    (path if kind == "file" else path / "mine.txt").write_text("mine")
    before, (net, (X, y)) = file_hashes(tmp_path), (mlp(), data())
    with pytest.raises(FileExistsError, match="already holds something"):
        epk.train(net, X, y, optimizer=sgd(net), steps=1, folder=path)
    assert file_hashes(tmp_path) == before


def test_an_empty_folder_is_taken_and_a_missing_one_made(tmp_path):
    (tmp_path / "empty").mkdir()
    record(tmp_path / "empty", steps=1)
    record(tmp_path / "deep" / "new", steps=1)
    assert epk.load_trajectory(tmp_path / "deep" / "new", mlp()).digest == record(None, steps=1).digest


@pytest.mark.parametrize("wrong", ["data", "labels", "optimizer", "steps"])
def test_nothing_is_written_for_a_run_that_is_refused_before_it_starts(tmp_path, wrong):
    net, (X, y) = mlp(), data()
    X, y = (X * float("nan") if wrong == "data" else X), (y + 3 if wrong == "labels" else y)
    make = torch.optim.LBFGS if wrong == "optimizer" else torch.optim.SGD
    optimizer = make(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must"):
        epk.train(net, X, y, optimizer=optimizer, steps=0 if wrong == "steps" else 1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
