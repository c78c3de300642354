"""Points to label next."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.datasets import three_gaussians

DIM = 3


def gaussians(count, seed):
    data = three_gaussians(count, dim=DIM, generator=torch.Generator().manual_seed(seed))
    return data.inputs, data.labels


@pytest.fixture(scope="module", params=["exact", 256])
def model(request):
    X, y = gaussians(5, 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=10)
    return epk.UncertainClassifier(run, nodes=4, features=request.param).fit(*gaussians(10, 1))


@pytest.fixture(scope="module")
def pool():
    return gaussians(8, 2)[0]


def test_the_choice_is_the_greedy_one(model, pool):
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
    part = epk.next_to_label(model, pool, 6, num_reference=12)  # points outside of it are candidates too
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
    with pytest.raises(TypeError, match="model must be an UncertainClassifier: got Trajectory"):
        epk.next_to_label(model.trajectory, pool)
