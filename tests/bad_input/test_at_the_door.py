"""What cannot be used is refused before the work, and what can is used: arrays, folders, names and numbers."""

import stat
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import epk_gp as epk
from distributed_cases import Shuffled
from epk_gp.classifier import EPKClassifier
from epk_gp.gp.data import count_seen
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work import run as jobs
from epk_gp.work.run import Piece, Sums
from epk_gp.work.run import run as carry_out
from loops import data, mlp, sgd


@pytest.fixture(scope="module")
def run():
    net, (X, y) = mlp(), data()
    return epk.train(net, X, y, optimizer=sgd(net), steps=2)


def test_a_checkpoint_that_is_a_file_or_lies_in_one_is_refused(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match="checkpoint must be a folder: .*file is a file"):
            epk.reconstruct(run, run.inputs[:2], checkpoint=path)
    assert file.read_text() == "x"


def test_half_a_surrogate_pair_in_a_name_is_refused_before_the_work(run):
    net, (X, y) = nn.Sequential(), data()
    net.add_module("a\ud800", mlp())
    with pytest.raises(ValueError, match="names of modules, parameters and buffers must be text that can be written"):
        epk.Recorder(net, sgd(net), X, y)
    with pytest.raises(ValueError, match="classes must be text that can be written"):
        epk.UncertainClassifier(run, classes=["a", "b", "\udcff"]).fit(torch.randn(20, 4).double(), ["a", "b"] * 10)


def test_reversed_and_read_only_arrays_are_taken(run):
    X = np.arange(80.0).reshape(20, 4)[::-1] / 40
    y = (np.arange(20) % 3)[::-1]
    X.flags.writeable = y.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = epk.UncertainClassifier(run, nodes=2).fit(X, y)
        assert np.array_equal(model.predict_proba(X), model.predict_proba(X.copy()))
        classifier = EPKClassifier(steps=1).fit(X, y)
        assert classifier.predict(X).shape == (20,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_training_points_in_another_dtype_were_seen(run, dtype):
    with pytest.raises(ValueError, match="the network has not seen: 10 of 10 are training points"):
        count_seen(run.inputs.to(dtype), run)
    assert count_seen((run.inputs + 0.1).to(dtype), run) == 0


def test_weights_that_are_not_finite_are_refused(run):
    influence = epk.influence(run, run.inputs[:1])
    with pytest.raises(ValueError, match="weights must be finite"):
        influence.predict(torch.full((10,), torch.nan))


def test_float_targets_without_a_loss_name_the_loss():
    net, (X, _) = mlp(outputs=1), data()
    for y in (X[:, 0], X[:, :1]):
        with pytest.raises(ValueError, match=r"state loss=nn\.MSELoss\(\)"):
            epk.Recorder(net, sgd(net), X, y)


def test_an_unknown_optimizer_is_named_with_its_module():
    class Adafactor(torch.optim.SGD):
        pass

    net, (X, y) = mlp(), data()
    with pytest.raises(ValueError, match=rf"that of {__name__}.Adafactor is not. Use one of torch.optim's"):
        epk.Recorder(net, Adafactor(net.parameters(), lr=0.1), X, y)


class Told:
    """An executor that computes here what it was sent, and looks at the job's file."""

    def __init__(self, file):
        self.file, self.modes = file, []

    def submit(self, *call):
        self.modes.append(stat.S_IMODE(self.file.stat().st_mode))
        return Shuffled().submit(*call)


@dataclass
class Ones:
    place: int
    piece_bytes = 8
    device = torch.device("cpu")

    @property
    def pieces(self):
        return [Piece("a", (self.place,))]

    def identity(self):
        return "1"

    def compute(self, place, saved):
        if place[0] < 0:
            raise KeyError("no such piece")
        yield Sums({"one": torch.ones(1)}, steps=1)

    def check(self):
        pass


@pytest.mark.parametrize("place", [1, -1], ids=["success", "failure"])
def test_a_job_is_private_and_removed_when_it_ends(tmp_path, place):
    file = PartialSums(tmp_path / "sums", "1").folder / jobs.JOB
    file.with_name("job.pickle.part").write_text("left by another, for all to read")
    executor = Told(file)
    try:
        list(carry_out(Ones(place), epk.ComputeOptions(executor=executor, checkpoint=file.parent), "ones"))
    except KeyError:
        assert place < 0
    assert executor.modes == [0o600]
    assert not file.exists()
