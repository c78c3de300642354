"""Suspicious labels, and points to label next."""

import pytest
import torch
from scipy.stats import rankdata
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.analysis.labels import area_under_margin, margins
from gp_cases import gaussian_run, gaussians

NUM_WRONG = 5


@pytest.fixture(scope="module")
def wrong_run():
    """45 points of three Gaussians, 5 of them with the label of another class."""
    (X, y), wrong = gaussians(15, 0), torch.randperm(45, generator=torch.Generator().manual_seed(1))[:NUM_WRONG]
    y[wrong] = (y[wrong] + 1) % 3
    return gaussian_run(X, y, steps=40), wrong


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


def test_the_area_under_the_margin_is_the_mean_over_states(wrong_run, monkeypatch):
    run, _ = wrong_run
    X, y = run.inputs, run.targets
    of_states = [margins(epk.network_outputs(run, X, state=s), y) for s in range(1, 41)]
    assert_close(area_under_margin(run, X, y), torch.stack(of_states).mean(0))
    monkeypatch.setattr("epk_gp.analysis.labels.AUM_STATES", 4)
    assert_close(area_under_margin(run, X, y), torch.stack(of_states)[[9, 19, 29, 39]].mean(0))


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
    with pytest.raises(ValueError, match=r"integrates along a path.*got layerwise"):
        epk.label_errors(run, path=epk.layerwise())


@pytest.fixture(scope="module", params=["exact", 256])
def model(request):
    run = gaussian_run(*gaussians(5, 0), steps=10)
    return epk.UncertainClassifier(run, nodes=4, features=request.param).fit(*gaussians(10, 1))


@pytest.fixture(scope="module")
def pool():
    return gaussians(8, 2)[0]


def test_the_choice_is_the_greedy_one(model, pool, monkeypatch):
    """Against the posterior covariance over the whole pool, conditioned anew on every set of points."""
    prior, noise = model.process_.covariance(pool, pool), model.process_.noise
    mistaken = 1 - model.predict_proba(pool).amax(1)

    def conditioned(points):
        K = prior[points][:, points] + noise * torch.eye(len(points))
        return prior - prior[:, points] @ torch.linalg.solve(K, prior[points])

    chosen = []
    found = epk.next_to_label(model, pool, 4)
    for number in range(4):
        now = conditioned(chosen)
        removed = torch.stack([(now.diagonal() - conditioned([*chosen, j]).diagonal()).sum() for j in range(len(pool))])
        score = removed * mistaken
        score[chosen] = -1
        best = int(score.argmax())
        assert int(found.indices[number]) == best
        assert_close(found.scores[number], score[best], rtol=1e-4, atol=1e-6)
        share = removed[best] / prior.diagonal().sum()
        assert_close(found.variance_removed[number], share, rtol=1e-4, atol=1e-6)
        chosen.append(best)
    assert_close(found.misclassification, mistaken[chosen])
    variance = model.uncertainty(pool).out_of_distribution
    assert set(variance.topk(4).indices.tolist()) != set(chosen)  # the control
    monkeypatch.setattr("epk_gp.analysis.labels.NUM_REFERENCE", 12)
    part = epk.next_to_label(model, pool, 6)  # points outside of it are candidates too
    assert len(part.indices.unique()) == 6


def test_a_point_that_is_there_twice_is_chosen_once_at_first(model, pool):
    """A label of a point removes nearly all that its double could."""
    first = epk.next_to_label(model, pool, 1)
    twice = torch.cat([pool, pool[first.indices]])
    found = epk.next_to_label(model, twice, 2)
    doubles = {int(first.indices[0]), len(pool)}
    assert int(found.indices[0]) in doubles
    assert found.variance_removed[1] < found.variance_removed[0]
    if model.features == "exact":  # whose noise is small
        assert int(found.indices[1]) not in doubles


def test_more_points_than_there_are_cannot_be_chosen(model, pool, unchecked):
    with pytest.raises(ValueError, match="at most the number of points in the pool, 24: got 25"):
        epk.next_to_label(model, pool, 25)
    with pytest.raises(TypeError, match="model must be a fitted UncertainClassifier: got Trajectory"):
        epk.next_to_label(model.trajectory, pool)
