"""A network beside a process on its training labels."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.gp.stacking import Stacking, conformal_sets, stack_logits
from epk_gp.gram.sketch import nodes_trajectory
from gp_cases import DIM, C, gaussian_net, gaussian_run, gaussians


@pytest.fixture(scope="module")
def run():
    return gaussian_run(*gaussians(15, 0))


@pytest.fixture(scope="module", params=["exact", 256])
def model(request, run):
    return epk.UncertainClassifier(run, nodes=4, features=request.param).fit(*gaussians(20, 1))


@pytest.fixture(scope="module")
def points():
    return gaussians(10, 2)


def test_probabilities_are_the_softmax_of_network_and_process(model, run, points):
    X = points[0]
    mean, _ = model.process_.predict(X)
    logits = model.stacking_.network * epk.network_outputs(run, X) + model.stacking_.process * mean
    assert_close(model.predict_proba(X), torch.softmax(logits, 1))
    assert (model.predict(X) == logits.argmax(1)).all()
    assert model.score(X, points[1]) == pytest.approx(float((logits.argmax(1) == points[1]).double().mean()))


def test_scores_are_what_they_are_documented_to_be(model, run, points):
    X = points[0]
    p, u = model.predict_proba(X), model.uncertainty(X)
    own = epk.network_outputs(run, X).argmax(1)
    assert_close(u.error, 1 - p[torch.arange(len(X)), own])
    assert_close(u.entropy, torch.special.entr(p).sum(1))
    assert_close(u.out_of_distribution, model.process_.predict(X)[1])
    assert (u.std > 0).all()
    of_draws = model.logit_posterior(X).softmax_uncertainty(1024)
    assert_close(u.mutual_information / u.entropy, of_draws.mutual_information / of_draws.entropy, rtol=0, atol=0.05)
    assert ((u.mutual_information >= 0) & (u.mutual_information <= u.entropy)).all()


def test_the_posterior_of_the_logits_is_that_of_probabilities_and_scores(model, points):
    """Its mean has the probabilities as softmax; through the softmax it gives the process's part of the bars."""
    X = points[0][:10]
    posterior = model.logit_posterior(X)
    assert_close(posterior.mean.softmax(dim=1), model.predict_proba(X))
    variance = posterior.covariance.diagonal(dim1=1, dim2=2)
    assert torch.equal(posterior.covariance, torch.diag_embed(variance))
    u = posterior.softmax_uncertainty(2**15, torch.Generator().manual_seed(1))
    p = model.predict_proba(X).amax(1)
    of_process = u.std.gather(1, model.predict_proba(X).argmax(dim=1, keepdim=True))[:, 0]
    expected = (of_process**2 + p * (1 - p) / (60 / 2 + 2)).sqrt()  # 60 labels weigh network and process
    assert torch.allclose(model.uncertainty(X, 2**15).std, expected, rtol=0.1, atol=1e-4)
    assert not torch.allclose(model.uncertainty(X, 2**15).std, 2 * expected, rtol=0.1, atol=1e-4)  # the control


def test_the_variance_tells_far_points_from_near_ones(model, run, points):
    u, far = model.uncertainty(points[0]), model.uncertainty(-10 * points[0])
    if model.features == "exact":
        assert far.out_of_distribution.min() > 0.99
    assert far.out_of_distribution.median() > u.out_of_distribution.max()
    control = epk.UncertainClassifier(run, nodes=4, inputs_kernel=None).fit(*gaussians(20, 1))
    assert control.uncertainty(-10 * points[0]).out_of_distribution.min() < 0.9  # gradients far away hardly change


def test_stacking_finds_the_weights_of_the_labels_it_is_given(generator):
    """Labels drawn from the softmax of a known combination."""
    network = torch.randn(20_000, C, dtype=torch.float64, generator=generator)
    process = torch.randn(20_000, C, dtype=torch.float64, generator=generator)
    p = torch.softmax(0.5 * network + 3 * process, 1)
    labels = torch.multinomial(p, 1, generator=generator)[:, 0]
    found = stack_logits(network, process, labels)
    assert found.network == pytest.approx(0.5, abs=0.05)
    assert found.process == pytest.approx(3, abs=0.1)


def test_a_prior_keeps_both_weights_where_labels_are_few_and_fades_where_they_are_many(generator):
    """Without it 12 labels that the network alone explains leave the process nothing; 2000 choose as without it."""
    network = 3 * torch.randn(2000, C, dtype=torch.float64, generator=generator)
    process = 0.1 * torch.randn(2000, C, dtype=torch.float64, generator=generator)
    labels = torch.multinomial(network.softmax(1), 1, generator=generator)[:, 0]
    few = network[:12], -process[:12] - network[:12], labels[:12]  # a process that is mostly wrong
    assert stack_logits(*few).process < 1e-3
    assert stack_logits(*few, 5.0).process > 0.1
    many = stack_logits(network, process, labels, 5.0)
    assert many.network == pytest.approx(stack_logits(network, process, labels).network, abs=1e-3)
    assert stack_logits(network[:20], process[:20], labels[:20], 5.0).network < many.network - 0.05  # the control


def test_bars_do_not_vanish_with_the_weight_of_the_process(model, points):
    """They stay those of the process alone, and never below what the labels that weigh the two support."""
    X = points[0]
    bars, weighed = model.uncertainty(X), model.stacking_
    try:
        model.stacking_ = replace(weighed, process=1e-5)
        without, p = model.uncertainty(X), model.predict_proba(X).amax(1)
        model.stacking_ = replace(weighed, process=1e-5, alone=0.0)
        vanished = model.uncertainty(X)
    finally:
        model.stacking_ = weighed
    assert (without.std**2 >= p * (1 - p) / (weighed.num_held_out / 2 + 2)).all()
    assert without.mutual_information.max() > 0.01
    assert bars.std.max() > 0.05
    assert vanished.mutual_information.max() < 1e-9  # the control: a bar that is multiplied by the weight


def test_far_from_all_data_no_class_is_sure(model, points):
    """A ReLU or linear network grows without end there, and so do its probabilities."""
    far = 1e4 * points[0]
    u, p = model.uncertainty(far), model.predict_proba(far)
    assert epk.network_outputs(model.trajectory, far).abs().max() > 0
    if model.features == "exact":
        assert u.error.min() > 0.9 * (1 - 1 / C) / (45 + 60 + 1)
    assert u.error.min() > 0
    assert_close(p.sum(1), torch.ones(len(p), dtype=p.dtype))


def test_what_is_surer_than_labels_support_is_lowered_to_it_and_nothing_else_changes():
    weights = Stacking(1.0, 1.0, 0.0, alone=1.0, num_training=90, num_held_out=9)
    logits = torch.tensor([[50.0, 0, 0], [2.0, 0, 0], [0.0, 0, 0], [800.0, 0, 0]], dtype=torch.float64)
    v = torch.tensor([1.0, 1, 1, 0.5], dtype=torch.float64)
    p = weights.without_certainty(logits, v).softmax(1)
    assert_close(p[[0, 3], 0], 1 - 2 / 3 / 100 * v[[0, 3]])
    assert_close(p[1:3], logits[1:3].softmax(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
def test_sets_hold_the_true_class_as_often_as_promised(generator, alpha):
    """Exchangeable scores: coverage lies between 1 - alpha and 1 - alpha + 1 / (m + 1), here within four deviations."""
    p = torch.softmax(2 * torch.randn(40_000, C, dtype=torch.float64, generator=generator), 1)
    labels = torch.multinomial(p, 1, generator=generator)[:, 0]
    own = p.gather(1, labels[:, None])[:, 0]
    held_out, asked = slice(0, 20_000), slice(20_000, None)
    sets = conformal_sets(p[asked], (1 - own[held_out]).sort().values, alpha)
    coverage = float(sets.gather(1, labels[asked, None]).double().mean())
    deviation = (2 * alpha * (1 - alpha) / 20_000) ** 0.5
    assert abs(coverage - (1 - alpha)) < 4 * deviation + 1e-4
    assert conformal_sets(p[:1], torch.linspace(0, 0.1, 8).double(), 0.1).all()  # too few scores
    scores = torch.arange(149).double() / 200
    assert conformal_sets(1 - scores[None], scores, 0.18).sum() == 123  # 0.82 of 150, which rounding makes more


def test_a_threshold_for_each_class_holds_the_promise_within_each(generator):
    """A class of 7 % that others hide: one threshold covers few of it; too few labels put it into every set."""
    labels = (torch.rand(40_000, generator=generator) < 0.07).long()
    z = torch.randn(40_000, dtype=torch.float64, generator=generator) + 1.5 * labels
    p = torch.stack([1 - 0.3 * torch.sigmoid(z), 0.3 * torch.sigmoid(z)], 1)
    own = 1 - p.gather(1, labels[:, None])[:, 0]
    order = own[:20_000].argsort()
    scores, of_scores, asked = own[order], labels[order], slice(20_000, None)
    by_class, one = conformal_sets(p[asked], scores, 0.1, of_scores), conformal_sets(p[asked], scores, 0.1)
    for c in (0, 1):
        is_own = labels[asked] == c
        count = int(is_own.sum())
        coverage = float(by_class[is_own, c].double().mean())
        assert abs(coverage - 0.9) < 4 * (2 * 0.09 / min(count, int((of_scores == c).sum()))) ** 0.5 + 1e-3
    assert one[is_own, 1].double().mean() < 0.5
    few = torch.cat([torch.zeros(100).long(), torch.ones(8).long()])  # 9 would be enough
    sets = conformal_sets(p[:500], torch.linspace(0, 0.1, 108).double(), 0.1, few)
    assert sets[:, 1].all()
    assert not sets[:, 0].all()


def test_sets_without_a_class_get_the_most_likely_one(model, points):
    X = points[0]
    sets, may_be_empty = model.predict_set(X, 0.6), model.predict_set(X, 0.6, allow_empty=True)
    is_empty = ~may_be_empty.any(1)
    assert 0 < int(is_empty.sum()) < len(X)
    assert torch.equal(sets[~is_empty], may_be_empty[~is_empty])
    assert torch.equal(sets[is_empty], nn.functional.one_hot(model.predict(X), C).bool()[is_empty])


def test_each_class_has_the_threshold_of_its_own_validation_labels(run, points, tmp_path):
    """Also when it was read from a file. A class without a label is named, and in every set."""
    X, y = gaussians(30, 1)
    names = np.array(["ant", "bee", "cat"])
    model = epk.UncertainClassifier(run, nodes=4, classes=names).fit(X, names[y])
    model.save(tmp_path / "whole")
    read = epk.UncertainClassifier.load(tmp_path / "whole", gaussian_net())
    p = model.set_stacking_.probability(model._judged(points[0]))
    expected = conformal_sets(p, model.conformity_scores_, 0.2, model.conformity_labels_)
    for own in (model, read):
        assert torch.equal(own.predict_set(points[0], 0.2, by_class=True, allow_empty=True), expected)
    assert not torch.equal(expected, model.predict_set(points[0], 0.2, allow_empty=True))
    read.conformity_labels_ = torch.zeros_like(read.conformity_labels_)
    with pytest.warns(UserWarning, match=r"too few labels calibrate are in every set: \['bee', 'cat'\]"):
        assert read.predict_set(points[0], 0.2, by_class=True)[:, 1:].all()


@pytest.fixture(scope="module")
def folds():
    """Logits of the run's training points by networks that were trained on the other fold."""
    X, y = gaussians(15, 0)
    logits = torch.empty(len(X), C, dtype=torch.float64)
    for others in (torch.arange(45) % 2 == 0, torch.arange(45) % 2 == 1):
        logits[others] = epk.network_outputs(gaussian_run(X[~others], y[~others]), X[others])
    return logits


def test_out_of_fold_logits_weigh_and_leave_all_validation_labels_to_sets(run, folds):
    """Weights of sets are those of training labels alone; those of probabilities take the validation labels too."""
    (X, y), rows = gaussians(20, 1), torch.arange(5, 45)
    given = torch.full_like(folds, torch.nan)
    given[rows] = folds[rows]  # others are not used
    model = epk.UncertainClassifier(run, nodes=4, points=rows, out_of_fold=given.numpy()).fit(X, y)
    left_out, labels = model.process_.leave_one_out()[0], run.targets[rows]
    f, (m, v) = epk.network_outputs(run, X), model.process_.predict(X)
    alone = model.stacking_.alone
    of_sets = stack_logits(folds[rows], left_out, labels, alone, 40, 0)
    assert asdict(model.set_stacking_) == pytest.approx(asdict(of_sets), rel=1e-9)
    both = torch.cat([folds[rows], f]), torch.cat([left_out, m]), torch.cat([labels, y])
    assert asdict(model.stacking_) == pytest.approx(asdict(stack_logits(*both, alone, 40, 60)), rel=1e-9)
    p = of_sets.without_certainty(of_sets.logits(f, m), v).softmax(1)
    scores = 1 - p.gather(1, y[:, None])[:, 0]
    assert_close(model.conformity_scores_, scores.sort().values)
    assert torch.equal(model.conformity_labels_, y[scores.argsort()])
    without = epk.UncertainClassifier(run, nodes=4, points=rows).fit(X, y)
    assert (without.stacking_.num_labels, without.set_stacking_.num_labels) == (60, 30)
    assert len(without.conformity_scores_) == 30
    assert without.set_stacking_ != model.set_stacking_


def test_points_in_no_fold_weigh_nothing(run, folds):
    X, y = gaussians(20, 1)
    some, none = folds.clone(), torch.full_like(folds, torch.nan)
    some[30:] = torch.nan
    fitted = [epk.UncertainClassifier(run, nodes=4, out_of_fold=given).fit(X, y) for given in (some, none, None)]
    assert [model.stacking_.num_labels for model in fitted] == [90, 60, 60]
    assert [len(model.conformity_scores_) for model in fitted] == [60, 30, 30]
    assert fitted[1].stacking_ == fitted[2].stacking_


def test_validation_points_that_the_run_was_trained_on_are_warned_of(run):
    X, y = gaussians(20, 1)
    own = run.inputs[:4], run.targets[:4]
    with pytest.warns(UserWarning, match="4 of 64 validation points are equal to training points"):
        epk.UncertainClassifier(run, nodes=4).fit(torch.cat([X, own[0]]), torch.cat([y, own[1]]))


def test_out_of_fold_logits_that_cannot_be_are_refused(run, folds, unchecked):
    hole, gap = folds.clone(), folds.clone()
    hole[7, 1], gap[7, 1] = torch.inf, torch.nan
    for given, message in (
        (folds[:-1], r"logits of shape \(45, 3\): got shape \(44, 3\)"),
        (folds[:, 0], r"got shape \(45,\)"),
        (hole, "row 7 is not"),
        (gap, "row 7 is not"),
        (epk.network_outputs(run, run.inputs), "these are the run's own"),
    ):
        with pytest.raises(ValueError, match=message):
            epk.UncertainClassifier(run, nodes=4, out_of_fold=given).fit(*gaussians(20, 1))


def test_weights_of_a_process_that_gains_nothing_say_so(generator):
    """Labels drawn from the network's softmax. A temperature that the network needs is no gain of the process."""
    logits = 2 * torch.randn(300, C, dtype=torch.float64, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    noise, known = 0.1 * torch.randn_like(logits), nn.functional.one_hot(labels, C).double()
    overconfident, always_right = (5 * logits, torch.zeros_like(logits)), (40 * known, noise)
    for network, process in ((logits, noise), overconfident, always_right):
        assert "gains  nothing that 300 labels would show" in str(stack_logits(network, process, labels, 3.0))
    nothing, something = (stack_logits(logits, mean, labels, 3.0) for mean in (noise, known))
    assert "nothing" not in str(something)
    assert something.network_loss == pytest.approx(nothing.network_loss)
    assert something.network_loss - something.loss > 2 * something.gain_error


def test_a_score_may_be_weighted(model, points):
    X, y = points[0], points[1].roll(1)
    right = (model.predict(X) == y).double()
    weights = torch.linspace(0, 1, len(X)).double()
    assert 0 < right.mean() < 1
    assert model.score(X, y, sample_weight=weights) == pytest.approx(float((weights * right).sum() / weights.sum()))
    assert model.score(X, y, weights.numpy()) != model.score(X, y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.score(X, y, weights[:-1])


def test_a_classifier_that_was_read_cannot_be_fitted(model, points, tmp_path):
    model.save(tmp_path)
    read = epk.UncertainClassifier.load(tmp_path, gaussian_net())
    fits = [model.fit for model in (read, clone(read), epk.UncertainClassifier(read.trajectory))]
    for use in (*fits, lambda *_: epk.label_errors(read.trajectory), lambda *_: epk.LogitGP(read.trajectory)):
        with pytest.raises(ValueError, match="read from a file holds no training data"):
            use(*gaussians(20, 1))
    with pytest.raises(FileExistsError, match="new or empty folder"):
        model.save(tmp_path)


def test_a_damaged_file_is_recognised(model, tmp_path):
    model.save(tmp_path)
    file = tmp_path / "classifier.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        epk.UncertainClassifier.load(tmp_path, gaussian_net())
    (tmp_path / "classifier.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        epk.UncertainClassifier.load(tmp_path, gaussian_net())
    with pytest.raises(FileNotFoundError, match="that UncertainClassifier.save wrote"):
        epk.UncertainClassifier.load(tmp_path / "nothing", gaussian_net())
    model.save(tmp_path / "whole")
    other = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, C)).double()
    with pytest.raises(ValueError, match="the network must be the recorded one"):
        epk.UncertainClassifier.load(tmp_path / "whole", other)


@pytest.mark.parametrize(("features", "power", "expected"), [("exact", None, 2), (64, None, 1), (64, 3, 3)])
def test_a_classifier_follows_chords_and_keeps_its_power_and_says_the_same_when_read(
    features, power, expected, run, points, tmp_path
):
    """Its process is that of nodes on them; straight steps give another. The exact kernel is squared by default."""
    asked = {"nodes": 4, "features": features, "power": power}
    model = epk.UncertainClassifier(run, path=epk.chords(10), **asked).fit(*gaussians(20, 1))
    assert model.process_.kernel.nodes.digest == nodes_trajectory(run, 4, path=epk.chords(10)).digest
    straight = epk.UncertainClassifier(run, **asked).fit(*gaussians(20, 1))
    assert straight.process_.kernel.nodes.digest == nodes_trajectory(run, 4).digest
    p = model.predict_proba(points[0])
    assert not torch.equal(p, straight.predict_proba(points[0]))
    for name, fitted in (("chords", model), ("straight", straight)):
        fitted.save(tmp_path / name)
        read = epk.UncertainClassifier.load(tmp_path / name, gaussian_net())
        assert read.get_params()["path"] == fitted.path
        assert read.power == power
        assert fitted.process_.kernel.power == read.process_.kernel.power == expected
        assert_close(read.predict_proba(points[0]), fitted.predict_proba(points[0]), rtol=1e-9, atol=1e-12)
        variances = (other.uncertainty(points[0]).out_of_distribution for other in (read, fitted))
        assert_close(*variances, rtol=1e-9, atol=1e-12)
        assert (read.predict_set(points[0]) == fitted.predict_set(points[0])).all()
    assert "chords" not in (tmp_path / "straight" / "classifier.json").read_text()


SETTINGS = [
    ({"features": "fast"}, ValueError, "features must be a number, 'exact' or None: got 'fast'"),
    ({"inputs_kernel": "linear"}, ValueError, "inputs_kernel must be 'rbf' or None"),
    ({"nodes": 0}, ValueError, "nodes must be at least 1"),
    ({"power": 0}, ValueError, "power must be"),
    ({"seed": 0.5, "features": "exact"}, TypeError, "seed must be a whole number"),
    ({"points": [0, 0]}, ValueError, "points must not repeat"),
    ({"path": epk.layerwise()}, ValueError, r"integrates along a path.*got layerwise\(every=1\)"),
    ({"path": "chords"}, TypeError, "path must be a path such as .*: got 'chords'"),
]


def test_what_cannot_be_used_is_named(model, run, unchecked):
    X, y = gaussians(20, 1)
    for change, error, message in SETTINGS:
        with pytest.raises(error, match=message):
            epk.UncertainClassifier(run, **change).fit(X, y)
    fresh, seen = epk.UncertainClassifier(run, nodes=4), torch.cat([run.inputs, X[:5]])
    for points, labels, message in (
        (X[:10], y[:10], "at least 20 validation points: got 10"),
        (X, y[:-1], r"got shape \(59,\) for 60 points"),
        (X[:, :2], y, "must have shape"),
        (X, y + 1, r"must lie in 0..2"),
        (seen, torch.cat([run.targets, y[:5]]), "must be unseen: 45 of 50 are training points"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.fit(points, labels)
    with pytest.raises(RuntimeError, match="must be fitted first"):
        fresh.predict(X)
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1: got 1.5"):
        model.predict_set(X, 1.5)
    regression = replace(run, loss=epk.MeanSquaredError(), targets=torch.zeros(45, C).double())
    with pytest.raises(ValueError, match="UncertainClassifier needs the run of a classifier"):
        epk.UncertainClassifier(regression).fit(X, y)
