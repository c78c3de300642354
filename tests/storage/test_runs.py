"""A run on disk: what it holds, which networks and losses open it, and which folders it takes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.core.trajectory import has_memory
from epk_gp.storage import chunks
from epk_gp.storage.schema import read_journal
from loops import CASES, data, file_hashes, mlp, sgd, squares, trained
from stored_runs import HEADER, chunk_files, opened, record, refused


def test_a_run_holds_only_json_and_safetensors_and_counts_every_state_once(run):
    names = sorted(file_hashes(run).keys() - {"writer.lock"})
    assert names[-1] == HEADER
    assert {name.rsplit(".", 1)[1] for name in names} == {"json", "jsonl", "safetensors"}  # and no .part
    journal = read_journal(run)
    assert [chunk.states for chunk in journal.chunks] == [1, 2, 2, 2]
    assert len(chunk_files(run)) == 4
    assert journal.chunks[-1].last == 6
    assert journal.finished


def test_loading_unpickles_nothing_and_changes_neither_files_nor_the_given_network(run, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, forbidden)
    before, net = file_hashes(run), mlp(torch.float32).train()
    with torch.no_grad():
        net[0].weight.fill_(7.0)
    trajectory = epk.load_trajectory(run, net)
    assert trajectory.dtype == torch.float64
    assert torch.isfinite(torch.stack(list(trajectory.states))).all()
    assert not (trajectory.weights(0)["0.weight"] == 7).any()
    assert (net[0].weight == 7).all()
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert file_hashes(run) == before


def test_what_a_run_is_like_is_read_from_its_files_once(run, monkeypatch):
    reads, opened_before = [], chunks.opened_chunk
    monkeypatch.setattr(chunks, "opened_chunk", lambda *args, **own: reads.append(args) or opened_before(*args, **own))
    trajectory = epk.load_trajectory(run, mlp())
    assert trajectory.dtype == torch.float64
    assert not has_memory(trajectory)
    count = len(reads)
    assert trajectory.dtype == trajectory.trained.dtype
    assert not has_memory(trajectory)
    assert len(reads) == count
    assert len(trajectory.states[0]) == trajectory.num_weights
    assert len(reads) == count + 1  # a state is read each time


# --- Folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["run", "file", "folder"])
def test_a_path_that_holds_anything_is_refused_and_untouched(run, kind):
    path = run if kind == "run" else run.with_name("notes")
    file = path / "mine.txt" if kind == "folder" else path
    if kind != "run":
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    before, (net, (X, y)) = file_hashes(run.parent), (mlp(), data())
    for make in (
        lambda: epk.train(net, X, y, optimizer=sgd(net), steps=1, folder=path),
        lambda: epk.Recorder(net, sgd(net), X, y, folder=path),
    ):
        with pytest.raises(FileExistsError, match=r"must be a new or empty folder: .* already holds something"):
            make()
        assert file_hashes(run.parent) == before


def test_an_empty_folder_is_taken_and_a_missing_one_made(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "deep" / "new"):
        record(path, steps=1)
        assert epk.load_trajectory(path, mlp()).digest == record(None, steps=1).digest


# --- A run opens with its own network and loss only -----------------------------------------------------------------


class Tuple(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x


class Failing(nn.Sequential):
    def forward(self, x):
        return super().forward(x.reshape(-1, 3))


def with_buffer():
    net = mlp()
    net.register_buffer("extra", torch.zeros(2))
    return net


def sequential(kind, *layers):
    return kind(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


OTHERS = {
    "must have the recorded weights: '0.weight' is missing": lambda: nn.Sequential(nn.Sequential(*mlp())),
    r"0.weight has shape \[5, 4\], .*": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    r"2.weight has shape \[2, 6\], in the run \[3, 6\]": lambda: mlp(outputs=2),
    "its outputs at the initial state differ": lambda: mlp(activation=nn.ReLU),
    "3.bias has shape .*, in the run None": lambda: nn.Sequential(*mlp(), nn.Linear(3, 3)),
    "extra has shape .*, in the run None": with_buffer,
    "'2.weight' is missing": lambda: nn.Sequential(mlp()[0]),
    "it fails on the recorded inputs": lambda: sequential(Failing, nn.Tanh()),
    "to a tensor of shape .n, C.: got tuple": lambda: sequential(Tuple, nn.Tanh()),
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_network_is_refused(run, message):
    refused(run, message, OTHERS[message](), openings=[opened])


@pytest.fixture(scope="module")
def own_loss_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("loss") / "own"
    trained(CASES["own_loss"], path)
    return path


HUBER = CASES["own_loss"].losses
LOSSES = {
    "none": (None, "the user's own loss 'huber': pass it as loss="),
    "kind": (epk.CrossEntropy(), "must be the recorded one"),
    "name": (epk.PerSampleLoss(HUBER, name="another"), "must be the recorded one"),
    "reduction": (epk.PerSampleLoss(HUBER, "sum", name="huber"), "must be the recorded one"),
    "function": (epk.PerSampleLoss(squares, name="huber"), "step 0 is not a step on the given 'huber'"),
}


@pytest.mark.parametrize(("loss", "message"), LOSSES.values(), ids=LOSSES)
def test_another_loss_function_is_refused(own_loss_run, run, loss, message):
    refused(own_loss_run, message, loss=loss, openings=[opened])
    assert epk.load_trajectory(run, mlp(), loss=epk.CrossEntropy()).loss == epk.CrossEntropy()
    refused(run, "must be the recorded one", loss=epk.CrossEntropy("sum"), openings=[opened])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_on_integers_is_computed_in_its_own_dtype(tmp_path, dtype):
    """Whatever the dtype of the network that it is opened with: integer inputs say nothing of it."""
    tokens, labels = torch.arange(24).reshape(6, 4) % 7, torch.arange(6) % 3
    net = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)).double()
    run = epk.train(net, tokens, labels, optimizer=sgd(net), steps=3, folder=tmp_path / "run")
    loaded = epk.load_trajectory(tmp_path / "run", copy.deepcopy(net).to(dtype))
    assert loaded.dtype == loaded.model.spec.dtype == torch.float64
    assert torch.equal(epk.network_outputs(loaded, tokens), epk.network_outputs(run, tokens))
    assert epk.reconstruct(loaded, tokens).max_error < 1e-12
