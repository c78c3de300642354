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


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5 * 3)

    def forward(self, x):
        return self.linear(x).view(-1, 3, 5)  # three positions, five classes


def record_positions(loss, *, second=False, factor=1.0, smoothing=0.0):
    """A loop whose loss takes other positions in every step."""
    torch.manual_seed(0)
    net, X, y = Positions().double(), torch.randn(8, 4).double(), torch.randint(5, (8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"loss": epk.CrossEntropy(label_smoothing=smoothing), "output": lambda returned: returned.flatten(1)}
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for step, batch in enumerate(torch.arange(8).split(4)):
            labels = y[batch].clone()
            labels[:, step], labels[1] = -100, -100
            z = net(X[batch])
            optimizer.zero_grad()
            (factor * loss(z.transpose(1, 2) if second else z, labels)).backward()
            recorder.batch(batch, weight=factor)
            optimizer.step()
    return recorder.trajectory, y


def mean_over_positions(z, labels, **options):
    z = z if z.shape[1] == 5 else z.transpose(1, 2)
    return F.cross_entropy(z, labels, **options)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("second", [True, False], ids=["classes_second", "classes_last"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_positions_that_the_loss_leaves_out_are_seen(second, smoothing):
    run, y = record_positions(
        lambda z, t: mean_over_positions(z, t, label_smoothing=smoothing),
        second=second,
        factor=0.5,
        smoothing=smoothing,
    )
    for step, (seen, batch) in enumerate((s.passes[0].targets, s.batch) for s in run.steps):
        assert seen.values.dtype == torch.int64
        assert seen.index.tolist() == [0, 1, 2, 3]
        assert (seen.values[:, step] == -100).all()
        assert (seen.values[1] == -100).all()
        is_kept = seen.values != -100
        assert torch.equal(seen.values[is_kept], y[batch][is_kept])
    parts = epk.attribute(run, run.inputs[:2], head="logits")
    assert parts.certified
    assert_close(parts.total, parts.network)
    assert (parts.samples[:, :, [1, 5]] == 0).all()  # of their positions none was left


def test_another_loss_of_positions_is_no_choice_of_positions():
    def focal(z, labels):
        losses = mean_over_positions(z, labels, reduction="none")
        return ((1 - (-losses).exp()) * losses).sum() / (labels != -100).sum()

    with pytest.raises(epk.StepMismatchError, match="step 0"):
        record_positions(focal)
    with pytest.raises(epk.StepMismatchError, match="step 0"):
        record_positions(
            lambda z, labels: mean_over_positions(z, (labels + 1).clamp(max=4).masked_fill(labels < 0, -100))
        )
