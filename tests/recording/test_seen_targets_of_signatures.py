"""Targets as a loop saw them, of networks with one value per row and of outputs derived from what they return."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from helpers import assert_close
from loops import record, sgd

BATCHES = torch.arange(8).split(4)


def assert_exact(run):
    parts = epk.attribute(run, run.inputs[:2], head="logits")
    assert parts.certified
    assert_close(parts.total, parts.network)
    return parts


def mixed(net, x):
    return net(0.7 * x + 0.3 * x.flip(0))


@pytest.mark.parametrize("squeeze", [True, False], ids=["n", "n_1"])
@pytest.mark.parametrize("column", [True, False], ids=["targets_n_1", "targets_n"])
def test_mixed_rows_of_a_regression_are_seen_whatever_its_shape(squeeze, column):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), *([nn.Flatten(0)] if squeeze else [])).double()
    X, y = torch.randn(8, 4).double(), torch.rand(8, *[1] * column).double()
    targets = [0.7 * y[rows] + 0.3 * y[rows].flip(0) for rows in BATCHES]

    def value(z, t):
        return F.mse_loss(z.flatten(), 0.7 * t.flatten() + 0.3 * t.flatten().flip(0))

    options = {"call": mixed, "value": value, "loss": nn.MSELoss(), "targets": targets}
    run = record(net, sgd(net), X, y, BATCHES, **options).trajectory
    seen = run.steps[0].passes[0]
    assert seen.cotangents is None
    assert_close(seen.targets.values.flatten(), targets[0].flatten())
    assert_exact(run)


class Scores(nn.Linear):
    """A network that returns its scores in a dictionary."""

    def forward(self, x):
        return {"logits": super().forward(x)}


def test_mixed_labels_are_read_where_the_loss_is_and_not_from_derived_outputs():
    net, X, y = Scores(4, 4).double(), torch.randn(8, 4).double(), torch.arange(8) % 4

    def value(returned, t):
        z = returned["logits"]
        return 0.7 * F.cross_entropy(z, t) + 0.3 * F.cross_entropy(z, t.flip(0))

    options = {"call": mixed, "value": value, "output": lambda returned: returned["logits"][:, :2]}
    run = record(net, sgd(net), X, y, BATCHES, **options).trajectory
    assert [seen.cotangents for step in run.steps for seen in step.passes] == [None, None]
    assert_exact(run)


def record_positions(loss, shape=(3, 5), smoothing=0.0):
    """A loop whose loss takes other positions of three in every step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 15), nn.Unflatten(1, shape)).double()
    X, y, steps = torch.randn(8, 4).double(), torch.randint(5, (8, 3)), iter(range(2))

    def value(z, labels):
        labels = labels.clone()
        labels[:, next(steps)], labels[1] = -100, -100
        return 0.5 * loss(z if shape == (5, 3) else z.transpose(1, 2), labels)

    options = {"loss": epk.CrossEntropy(label_smoothing=smoothing), "output": lambda returned: returned.flatten(1)}
    return record(net, sgd(net), X, y, BATCHES, value=value, weight=0.5, **options).trajectory, y


@pytest.mark.mostly_slow
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)], ids=["classes_second", "classes_last"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_positions_that_the_loss_leaves_out_are_seen(shape, smoothing):
    run, y = record_positions(lambda z, t: F.cross_entropy(z, t, label_smoothing=smoothing), shape, smoothing)
    for step, (seen, batch) in enumerate((s.passes[0].targets, s.batch) for s in run.steps):
        assert seen.values.dtype == torch.int64
        assert seen.index.tolist() == [0, 1, 2, 3]
        assert (seen.values[:, step] == -100).all()
        assert (seen.values[1] == -100).all()
        is_kept = seen.values != -100
        assert torch.equal(seen.values[is_kept], y[batch][is_kept])
    assert (assert_exact(run).samples[:, :, [1, 5]] == 0).all()  # of their positions none was left


def test_another_loss_of_positions_is_no_choice_of_positions():
    def focal(z, labels):
        losses = F.cross_entropy(z, labels, reduction="none")
        return ((1 - (-losses).exp()) * losses).sum() / (labels != -100).sum()

    def next_class(z, labels):
        return F.cross_entropy(z, (labels + 1).clamp(max=4).masked_fill(labels < 0, -100))

    for loss in (focal, next_class):
        with pytest.warns(UserWarning, match="step 0: [23] of 4 rows do not follow"):  # row 1 has no position
            run, _ = record_positions(loss)
        assert_exact(run)
