"""The scikit-learn classifier: the recorded network behind it, and what is refused."""

import threading

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.preprocessing import StandardScaler
from torch import nn

import epk_gp as epk
from epk_gp.estimator import LinearAndHidden, line
from epk_gp.estimators import EPKClassifier


@pytest.fixture(scope="module")
def data():
    X, y = make_blobs(60, centers=3, n_features=4, cluster_std=2.0, random_state=0)
    return StandardScaler().fit_transform(X), np.array(["ant", "bee", "cat"])[y]


@pytest.fixture(scope="module")
def fitted(data):
    X, y = data
    return EPKClassifier(steps=30, random_state=0).fit(X[:45], y[:45])


def test_read_only_arrays_are_copied_without_a_warning(data, recwarn):
    """Those of a DataFrame are read-only."""
    X, y = data
    X = X.copy()
    X.setflags(write=False)
    model = EPKClassifier(steps=2).fit(X, y)
    assert np.array_equal(model.predict(X), model.predict(X[::-1])[::-1])
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_predictions_are_the_recorded_networks(data, fitted):
    X, y = data
    z = epk.network_outputs(fitted.trajectory_, torch.as_tensor(X[45:]))
    np.testing.assert_array_equal(fitted.predict_proba(X[45:]), torch.softmax(z, 1).numpy())
    assert set(fitted.predict(X[45:])) <= {"ant", "bee", "cat"}
    assert fitted.score(X[45:], y[45:]) > 0.8
    untrained = epk.network_outputs(fitted.trajectory_, torch.as_tensor(X[45:]), state=0)
    assert (fitted.classes_[untrained.argmax(1)] == y[45:]).mean() < fitted.score(X[45:], y[45:])  # negative control


def test_a_given_network_is_copied_and_not_changed(data):
    X, y = data
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    before = [p.clone() for p in net.parameters()]
    classifier = EPKClassifier(net, steps=20).fit(X, y)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    start = classifier.trajectory_.weights(0)["net.0.weight"]
    torch.testing.assert_close(start, before[0].double())
    built = EPKClassifier(lambda d, c: LinearAndHidden(d, c, width=5), steps=3, random_state=1).fit(X, y)
    assert built.trajectory_.weights(0)["net.hidden.weight"].shape == (5, 4)


def test_one_seed_gives_one_run(data):
    X, y = data
    runs = [EPKClassifier(steps=3, batch_size=10, random_state=s).fit(X, y).trajectory_.digest for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_what_another_thread_draws_does_not_change_the_initial_weights(data):
    X, y = data

    def disturbed(num_features, num_classes):
        for draw in (torch.rand, torch.manual_seed):
            other = threading.Thread(target=draw, args=(3,))
            other.start()
            other.join()
        return LinearAndHidden(num_features, num_classes)

    found, expected = (EPKClassifier(f, steps=1, random_state=0).fit(X, y) for f in (disturbed, LinearAndHidden))
    assert found.trajectory_.digest == expected.trajectory_.digest
    before = torch.get_rng_state()
    EPKClassifier(steps=1, batch_size=10, random_state=0).fit(X, y)
    assert torch.equal(torch.get_rng_state(), before)


OUTPUTS = r"network must have one output per class or target of y, 3: it maps 2 rows to shape \(2, {}\). Change"
OPTIONS = [
    ({"steps": 0}, ValueError, "steps must be at least 1"),
    ({"steps": "many"}, TypeError, "steps must be"),
    ({"batch_size": 0, "steps": None}, ValueError, "batch_size must be at least 1"),
    ({"cv": 1}, ValueError, "at least one train/test split"),
    ({"lr": float("nan")}, ValueError, "lr must be positive and finite: got nan"),
    ({"lr": "x"}, TypeError, "lr must be a positive number: got 'x'"),
    ({"network": 3}, TypeError, "network must be a torch.nn.Module or a function .*: got 3"),
    ({"network": lambda d, c: 3}, TypeError, "network must be a torch.nn.Module or a function .*: got 3"),
    ({"network": lambda d: nn.Linear(d, 3)}, TypeError, "takes 1 positional argument but 2"),
    ({"network": lambda d, c: nn.Linear(d, c - 1)}, ValueError, OUTPUTS.format(2)),
    ({"network": nn.Linear(4, 4)}, ValueError, OUTPUTS.format(4)),
    ({"optimizer": 3}, TypeError, "optimizer must be a function of parameters: got 3"),
]


def test_options_are_checked_before_the_training(data, unchecked):
    X, y = data
    for options, error, message in OPTIONS:
        with pytest.raises(error, match=message):
            EPKClassifier(**{"steps": 1} | options).fit(X, y)
    with pytest.raises(ValueError, match="at least 2 classes: got 1 class"):
        EPKClassifier().fit(X, np.zeros(len(X)))


def test_logits_of_its_folds_weigh_its_uncertain_classifier(data):
    X, y = data
    held_out = X[20:] + 0.1, y[20:]
    settings = {"steps": 30, "random_state": 0}
    one, several = EPKClassifier(line, **settings), EPKClassifier([line, LinearAndHidden], **settings)
    plain, judged = (own.fit(X[:45], y[:45]).uncertain_classifier(*held_out, nodes=3) for own in (one, several))
    assert (plain.stacking_.num_labels, judged.stacking_.num_labels) == (40, 85)
    assert (len(plain.conformity_scores_), len(judged.conformity_scores_)) == (20, 40)
