"""Targets as a loop saw them, of networks with one value per row and of outputs derived from what they return."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from helpers import assert_close


@pytest.mark.parametrize("squeeze", [True, False], ids=["n", "n_1"])
@pytest.mark.parametrize("column", [True, False], ids=["targets_n_1", "targets_n"])
def test_mixed_rows_of_a_regression_are_seen_whatever_its_shape(squeeze, column):
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), *([nn.Flatten(0)] if squeeze else [])]
    net, X, y = nn.Sequential(*layers).double(), torch.randn(8, 4).double(), torch.rand(8).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y[:, None] if column else y, loss=nn.MSELoss()) as recorder:
        for batch in torch.arange(8).split(4):
            other = batch.flip(0)
            optimizer.zero_grad()
            F.mse_loss(net(0.7 * X[batch] + 0.3 * X[other]).flatten(), 0.7 * y[batch] + 0.3 * y[other]).backward()
            recorder.batch(batch)
            optimizer.step()
    assert recorder.trajectory.steps[0].passes[0].targets is not None
    parts = epk.attribute(recorder.trajectory, X[:2])
    assert parts.certified
    assert_close(parts.total, parts.network)


class Scores(nn.Module):
    """A network that returns its scores in a dictionary."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x):
        return {"logits": self.scores(x)}


def test_mixed_labels_are_read_where_the_loss_is_and_not_from_derived_outputs():
    net, X, y = Scores().double(), torch.randn(8, 4).double(), torch.arange(8) % 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y, output=lambda returned: returned["logits"][:, :2]) as recorder:
        for batch in torch.arange(8).split(4):
            other = batch.flip(0)
            optimizer.zero_grad()
            z = net(0.7 * X[batch] + 0.3 * X[other])["logits"]
            (0.7 * F.cross_entropy(z, y[batch]) + 0.3 * F.cross_entropy(z, y[other])).backward()
            recorder.batch(batch)
            optimizer.step()
    parts = epk.attribute(recorder.trajectory, X[:2], head="logits")
    assert parts.certified
    assert_close(parts.total, parts.network)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.HuberLoss()])
def test_a_loop_that_broadcasts_targets_is_told_so(loss):
    net, X, y = nn.Linear(4, 1).double(), torch.randn(9, 4).double(), torch.rand(9).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    with epk.Recorder(net, optimizer, X, y, loss=loss) as recorder:
        loss(net(X), y).backward()
        recorder.batch(None)
        with pytest.raises(epk.StepMismatchError, match=r"broadcasts targets .n,. against outputs .n, 1."):
            optimizer.step()
