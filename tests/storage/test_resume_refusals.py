"""Only the same run is resumed: another network, data set, loss or optimizer is an error, and no file changes."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import epk_gp as epk
from loops import data, file_hashes, mlp, sgd
from stored_runs import resumed


def wider():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


OTHERS = {
    "width": ({"net": wider()}, "^shapes must be the recorded one to resume"),
    "layers": (
        {"net": nn.Sequential(mlp()[0], mlp()[1], nn.Sequential(mlp()[2]))},
        "^names must be the recorded one to resume",
    ),
    "activation": ({"net": mlp(activation=nn.ReLU)}, "its outputs at the initial state differ"),
    "inputs": ({"X": data()[0] + 1e-15}, "^data_digest must be the recorded one to resume"),
    "labels": ({"y": data()[1].flip(0)}, "^data_digest must be the recorded one to resume"),
    "fewer": ({"X": data(9)[0], "y": data(9)[1]}, "^num_points must be the recorded one to resume"),
    "loss": ({"loss": epk.CrossEntropy("sum")}, "^loss must be the recorded one to resume"),
    "loss_and_targets": (
        {"loss": epk.MeanSquaredError(), "y": torch.nn.functional.one_hot(data()[1], 3).double()},
        "^loss must be the recorded one to resume",
    ),
    "law": ({"optimizer": lambda net: torch.optim.Adam(net.parameters())}, "^law must be the recorded one to resume"),
    "rate": ({"optimizer": lambda net: sgd(net, 0.2)}, "^optimizer must be the recorded one to resume"),
    "momentum": ({"optimizer": lambda net: sgd(net, momentum=0.1)}, "^optimizer must be the recorded one to resume"),
    "checks": ({"check_every": 3}, "^check_every must be the recorded one to resume"),
    "stateful": ({"stateful": {"g": torch.Generator()}}, r"stateful must have the names \[\]: got \['g'\]"),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_run_is_refused_and_nothing_changes(tmp_path, change, message):
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, folder=tmp_path / "run")
    before = file_hashes(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path / "run", **change)
    assert file_hashes(tmp_path / "run") == before
    assert resumed(tmp_path / "run").num_steps == 2  # the negative control, and the lock was given back


@pytest.mark.usefixtures("unchecked")
def test_what_could_not_be_resumed_to_the_same_end_is_refused_before_it_starts(tmp_path):
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match=r"learning-rate schedule: pass stateful=\{'scheduler': scheduler\}"):
        epk.Recorder(net, optimizer, X, y, folder=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="resume=True needs folder="):
        epk.Recorder(net, sgd(net), X, y, resume=True)
    with pytest.raises(TypeError, match="stateful must be a dictionary of torch.Generators"):
        epk.Recorder(net, sgd(net), X, y, folder=tmp_path / "run", stateful={"random": random.Random(0)})
    recorder = epk.Recorder(net, sgd(net), X, y, folder=tmp_path / "run", stateful={"g": torch.Generator()})
    with recorder, pytest.raises(RuntimeError, match=r"the loop must be 'for step in recorder.until\(steps\):'"):
        recorder.batch(None)


class Strange:
    def state_dict(self):
        return {"function": print}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_state_that_only_a_pickle_could_hold_is_refused(tmp_path):
    net, (X, y) = mlp(), data()
    with pytest.raises(TypeError, match=r"must consist of numbers, texts, .*: got builtin_function_or_method"):
        epk.Recorder(net, sgd(net), X, y, folder=tmp_path / "run", stateful={"strange": Strange()})
    assert not (tmp_path / "run").exists()


def two_groups(net, lr):
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": lr}]
    return torch.optim.SGD(groups, lr=0.1)


DIFFERENCES = {
    "rate": (
        sgd,
        {"optimizer": lambda net: sgd(net, 0.2)},
        r"optimizer must be the recorded one to resume .*: number 0: it has {'lr': 0.1}, got {'lr': 0.2}.",
    ),
    "second_group": (
        lambda net: two_groups(net, 0.3),
        {"optimizer": lambda net: two_groups(net, 0.2)},
        "optimizer must be the recorded one to resume .*: number 1: it has {'lr': 0.3}, got {'lr': 0.2}.",
    ),
    "groups": (
        sgd,
        {"optimizer": lambda net: two_groups(net, 0.1)},
        "optimizer must be the recorded one to resume .*: it has 1, got 2.",
    ),
    "shape": (
        sgd,
        {"net": wider()},
        "shapes must be the recorded one to resume .*: number 0: number 0: it has 6, got 7.",
    ),
    "loss": (sgd, {"loss": epk.CrossEntropy("sum")}, "it has {'reduction': 'mean'}, got {'reduction': 'sum'}."),
}


@pytest.mark.parametrize(("recorded", "change", "message"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_only_what_differs_is_named_with_both_values(tmp_path, recorded, change, message):
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=recorded(net), steps=1, folder=tmp_path / "run")
    with pytest.raises(ValueError, match=rf"{message[:-1]}\.$"):
        resumed(tmp_path / "run", **({"optimizer": recorded} | change))


def test_options_that_are_numbers_of_numpy_are_stored_and_resumed(tmp_path):
    net, (X, y) = mlp(), data()
    rate = np.float32(0.1)
    whole = epk.train(net, X, y, optimizer=sgd(net, rate), steps=4)
    net = mlp()
    epk.train(net, X, y, optimizer=sgd(net, rate), steps=2, folder=tmp_path / "run")
    net = mlp()
    run = epk.train(net, X, y, optimizer=sgd(net, rate), steps=4, folder=tmp_path / "run", resume=True)
    assert run.digest == whole.digest
