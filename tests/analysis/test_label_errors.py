"""Suspicious labels."""

import pytest
import torch
from scipy.stats import rankdata
from torch import nn
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.analysis.labels import area_under_margin, margins
from epk_gp.datasets import three_gaussians

NUM_WRONG = 5


@pytest.fixture(scope="module")
def wrong_run():
    """45 points of three Gaussians, 5 of them with the label of another class."""
    generator = torch.Generator().manual_seed(0)
    data = three_gaussians(15, dim=3, generator=generator)
    wrong = torch.randperm(45, generator=generator)[:NUM_WRONG]
    y = data.labels.clone()
    y[wrong] = (y[wrong] + 1) % 3
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    run = epk.train(net, data.inputs, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=40)
    return run, wrong


@pytest.mark.parametrize("features", ["exact", 256])
def test_wrong_labels_come_first(wrong_run, features):
    run, wrong = wrong_run
    found = epk.label_errors(run, nodes=4, features=features)
    assert set(found.indices[:NUM_WRONG].tolist()) == set(wrong.tolist())
    assert (found.predicted[wrong] != run.targets[wrong]).all()
    assert (found.margin[wrong] < 0).all()


def test_scores_join_the_ranks_of_process_and_run(wrong_run):
    run, _ = wrong_run
    found = epk.label_errors(run, nodes=4)
    ranks = [(rankdata(values.numpy()) - 0.5) / 45 for values in (found.log_probability, found.aum)]
    assert_close(found.scores, torch.from_numpy(1 - (ranks[0] + ranks[1]) / 2))
    assert (found.scores[found.indices].diff() <= 0).all()
    assert len(found) == 45


@pytest.mark.parametrize("path", [epk.straight(), epk.chords(10)])
def test_the_process_leaves_each_point_out(wrong_run, path):
    """Its prediction of a point does not depend on the point's own label, up to the noise that was fitted."""
    run, _ = wrong_run
    model = epk.UncertainClassifier(run, nodes=4, path=path).fit(run.inputs + 0.1, run.targets)
    mean, _ = model.process_.leave_one_out()
    found = epk.label_errors(run, nodes=4, path=path)
    assert_close(found.margin, margins(mean, run.targets))
    assert_close(found.own_label, mean[torch.arange(45), run.targets])
    assert torch.equal(found.margin, epk.label_errors(run, nodes=4).margin) == (path == epk.straight())


def test_the_area_under_the_margin_is_the_mean_over_states(wrong_run):
    run, _ = wrong_run
    X, y = run.inputs, run.targets
    of_states = [margins(epk.network_outputs(run, X, state=s), y) for s in range(1, 41)]
    assert_close(area_under_margin(run, X, y), torch.stack(of_states).mean(0))
    assert_close(area_under_margin(run, X, y, 4), torch.stack(of_states)[[9, 19, 29, 39]].mean(0))


def test_some_points_are_judged_from_each_other(wrong_run, unchecked):
    run, wrong = wrong_run
    points = torch.arange(44, -1, -2)
    found = epk.label_errors(run, nodes=4, points=points)
    assert (found.points == points).all()
    assert set(found.indices.tolist()) == set(points.tolist())
    assert int(points[found.scores.argmax()]) == int(found.indices[0])
    assert int(found.indices[0]) in wrong
    with pytest.raises(ValueError, match="at least 2: got 1"):
        epk.label_errors(run, points=[3])
    with pytest.raises(ValueError, match=r"a node is one state of all weights.*got layerwise"):
        epk.label_errors(run, path=epk.layerwise())
