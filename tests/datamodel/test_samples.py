"""What samples have to do with scores: planted groups, weights, samples that were never drawn, several runs."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from datamodel_cases import TIGHT, Loop, mlp, vectors
from torch import Tensor
from torch.nn import functional as F

import epk_gp as epk
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
M = 11
LABELS = torch.arange(M) % 3
X_ASKED, Y_ASKED = Loop().asked


def train(rate: float = 0.3, seed: int = 1, y: Tensor = LABELS, **options: Any) -> epk.Trajectory:
    torch.manual_seed(seed)
    net = mlp().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.5)
    generator = torch.Generator().manual_seed(4)
    return epk.train(net, vectors(M), y, optimizer=optimizer, steps=14, generator=generator, **options)


def on_batches(batches: Iterable[list[int]], rates: Iterable[float] | None = None) -> epk.Trajectory:
    """Record a loop over batches, at learning rates."""
    torch.manual_seed(1)
    net, X, batches = mlp().double(), vectors(M), list(batches)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with epk.Recorder(net, optimizer, X, LABELS) as recorder:
        for rows, rate in zip(batches, rates or [0.3] * len(batches), strict=True):
            batch = torch.tensor(rows)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), LABELS[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def shares(run: epk.Trajectory) -> Tensor:
    found: Tensor = epk.datamodel(run, X_ASKED, Y_ASKED).trainings[0].sample_weights
    return found


def test_a_group_of_wrong_labels_is_found_and_its_removal_predicted() -> None:
    """Fifty near copies of a point, of which one or ten would change little: the others would take their place."""
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = (X[:, 0] > 0).long()
    place = torch.tensor([0.5, -0.5, 0.5, 0.0], dtype=torch.float64)
    group = place + 0.05 * torch.randn(50, 4, generator=generator, dtype=torch.float64)
    X, y = torch.cat([X, group]), torch.cat([y, torch.zeros(50, dtype=torch.int64)])
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.Adam(net.parameters(), lr=0.02), steps=60)
    model = epk.datamodel(run, (place + 0.02)[None], torch.tensor([1]))
    lowest = model.scores[0].argsort()[:50]
    assert sorted(lowest.tolist()) == list(range(60, 110))
    kept = torch.ones(2, 110, dtype=torch.bool)
    kept[0, 60:] = False
    kept[1, 60:70] = False  # the control: ten of fifty
    found = model.verify(kept)
    raised, little = (found.predicted - model.outputs)[:, 0]
    measured, measured_little = (found.measured - model.outputs)[:, 0]
    assert raised > 2
    assert measured > 2
    assert 0.5 < raised / measured < 2
    assert abs(float(little)) < 0.25 * raised
    assert abs(float(measured_little)) < 0.25 * measured
    assert not set(model.top(0, 20).samples.tolist()) & set(range(60, 110))


@pytest.mark.parametrize("batch_size", [None, 11])
def test_a_sum_at_a_smaller_rate_gives_the_scores_of_a_mean(batch_size: int | None) -> None:
    mean = epk.datamodel(train(batch_size=batch_size), X_ASKED, Y_ASKED)
    added = train(0.3 / M, loss=epk.CrossEntropy("sum"), batch_size=batch_size)
    model = epk.datamodel(added, X_ASKED, Y_ASKED)
    assert_close(model.scores, mean.scores, rounding=TIGHT)
    kept = torch.ones(M)
    kept[2:6] = 0
    assert_close(model.predict(kept), mean.predict(kept), rounding=TIGHT)
    assert_close(model.trainings[0].sample_weights, torch.ones(M).double())
    assert_close(mean.trainings[0].sample_weights, torch.full((M,), 1 / M, dtype=torch.float64))


def test_a_sample_of_twice_the_weight_has_the_scores_of_two_of_it() -> None:
    """A weighted sample, an index that stands twice in each batch, and a sample that is there twice."""
    weight = torch.ones(M).double()
    weight[4] = 2
    weighted = epk.datamodel(train(sample_weight=weight), X_ASKED, Y_ASKED)
    assert_close(weighted.trainings[0].sample_weights, weight / 12)
    drawn = [*range(M), 4]
    assert_close(shares(on_batches([drawn] * 8)), weight / 12)
    torch.manual_seed(1)
    net = mlp().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    twice = epk.train(net, vectors(M)[drawn], LABELS[drawn], optimizer=optimizer, steps=14)
    model = epk.datamodel(twice, X_ASKED, Y_ASKED)
    # the mean diagonal of kernel and curvature, which are means over samples, see the sample twice
    assert_close(model.scores[:, 4], model.scores[:, 11], rounding=TIGHT)
    both = model.scores[:, 4] + model.scores[:, 11]
    assert float((weighted.scores[:, 4] - both).norm() / both.norm()) < 0.05
    kept = torch.ones(12)
    kept[[4, 11]] = 0
    assert float((weighted.predict(kept[:M]) - model.predict(kept)).abs().max()) < 0.05


def test_shares_are_means_over_the_time_of_the_run() -> None:
    batches, rates = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]] * 5, [0.3] * 5 + [0.1] * 5
    expected = torch.zeros(M).double()
    for rows, rate in zip(batches, rates, strict=True):
        expected[rows] += rate / len(rows) / sum(rates)
    assert_close(shares(on_batches(batches, rates)), expected)


def test_samples_that_were_never_drawn_are_absent_and_have_scores() -> None:
    run = on_batches([list(range(8))] * 12)
    model = epk.datamodel(run, X_ASKED, Y_ASKED)
    present = (torch.arange(M) < 8).double()
    assert torch.equal(model.present, present)
    assert torch.equal(model.predict(present), model.outputs)
    assert bool((model.scores[:, 8:] != 0).all())
    assert float((model.predict(torch.ones(M)) - model.outputs).abs().min()) > 1e-3
    # of the others, scores are those of a run that does not know of these samples but for means over samples
    derivative = model.derivative()
    step = 1e-5 * torch.eye(M).double()
    differences = (model.predict(present + step) - model.predict((present - step).clamp(min=0))) / 1e-5
    differences = differences / (1 + present[:, None])
    assert float((derivative - differences.T).norm() / derivative.norm()) < 1e-3
    with pytest.raises(ValueError, match="saw some of them"):
        model.verify(torch.ones(M))
    with pytest.raises(ValueError, match="saw some of them"):
        epk.datamodel(run, X_ASKED, Y_ASKED, pairs=3)


def test_of_two_runs_everything_is_the_mean() -> None:
    runs = train(seed=1), train(seed=2)
    kept = torch.ones(2, M)
    kept[0, :4] = 0
    both = epk.datamodel(runs, X_ASKED, Y_ASKED)
    own = [epk.datamodel(run, X_ASKED, Y_ASKED) for run in runs]
    assert both.trajectories == runs
    for name in ("outputs", "scores", "present"):
        assert_close(getattr(both, name), (getattr(own[0], name) + getattr(own[1], name)) / 2)
    assert_close(both.predict(kept), (own[0].predict(kept) + own[1].predict(kept)) / 2)
    assert_close(both.derivative(), (own[0].derivative() + own[1].derivative()) / 2)
    one = epk.datamodel([runs[0]], X_ASKED, Y_ASKED)
    assert torch.equal(one.scores, own[0].scores)


@pytest.mark.parametrize("change", ["labels", "order", "count"])
def test_runs_on_other_samples_are_refused(change: str) -> None:
    y = LABELS.clone()
    y[0] = 2 if change == "labels" else 0
    own = train(y=y) if change == "labels" else Loop(points=10).run if change == "count" else train(y=LABELS.flip(0))
    with pytest.raises(ValueError, match="must have the same training samples, in the same order"):
        epk.datamodel([train(), own], X_ASKED, Y_ASKED)
