"""The scikit-learn face: its own checks, the recorded network behind it, and precomputed kernels."""

import threading

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import epk_gp as epk
from epk_gp.classifier import EPKClassifier, one_hidden_layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks provoke warnings on purpose
@parametrize_with_checks([EPKClassifier(steps=60)])
def test_scikit_learns_own_checks_pass(estimator, check, unchecked):
    check(estimator)


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


@pytest.mark.slow
def test_the_record_serves_the_rest_of_the_package(data, fitted):
    X_test = torch.as_tensor(data[0][45:50].copy())
    assert epk.reconstruct(fitted.trajectory_, X_test).max_error < 1e-12
    assert epk.attribute(fitted.trajectory_, X_test).samples.shape == (5, 3, 45)


@pytest.mark.slow
def test_the_uncertainty_is_that_of_the_logit_gp(data, fitted):
    X = data[0][45:]
    u = fitted.predict_uncertainty(X, 256)
    gp = epk.LogitGP(fitted.trajectory_)
    gp.fit(50)
    posterior = gp.logit_posterior(torch.as_tensor(X))
    generator = torch.Generator().manual_seed(0)
    expected = epk.softmax_uncertainty(posterior, 256, generator)
    torch.testing.assert_close(u.mean, expected.mean)
    torch.testing.assert_close(u.std, expected.std)
    assert torch.equal(fitted.predict_uncertainty(X, 256).mean, u.mean)
    few = clone(fitted).set_params(num_condition=10).fit(data[0][:45], data[1][:45])
    assert len(few.gp().points) == 10
    assert (few.predict_uncertainty(X).std > u.std).float().mean() > 0.6


def test_a_given_network_is_copied_and_not_changed(data):
    X, y = data
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    before = [p.clone() for p in net.parameters()]
    classifier = EPKClassifier(net, steps=3).fit(X, y)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    start = classifier.trajectory_.weights(0)["0.weight"]
    torch.testing.assert_close(start, before[0].double())
    built = EPKClassifier(lambda d, c: one_hidden_layer(d, c, width=5), steps=3, random_state=1).fit(X, y)
    assert built.trajectory_.weights(0)["0.weight"].shape == (5, 4)


def test_one_seed_gives_one_run(data):
    X, y = data
    runs = [EPKClassifier(steps=3, batch_size=10, random_state=s).fit(X, y).trajectory_.digest for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_fits_in_several_threads_are_reproducible(data):
    """As with joblib's threading backend; the initial weights are not drawn from the generator that threads share."""
    X, y = data
    classifier = EPKClassifier(steps=1, batch_size=10, random_state=0)
    expected = clone(classifier).fit(X, y).trajectory_.digest
    before = torch.get_rng_state()
    fits = joblib.Parallel(n_jobs=8, backend="threading")(joblib.delayed(clone(classifier).fit)(X, y) for _ in range(8))
    assert {fit.trajectory_.digest for fit in fits} == {expected}
    assert torch.equal(torch.get_rng_state(), before)


def test_what_another_thread_draws_does_not_change_the_initial_weights(data):
    X, y = data

    def disturbed(num_features, num_classes):
        for draw in (torch.rand, torch.manual_seed):
            other = threading.Thread(target=draw, args=(3,))
            other.start()
            other.join()
        return one_hidden_layer(num_features, num_classes)

    found, expected = (EPKClassifier(f, steps=1, random_state=0).fit(X, y) for f in (disturbed, one_hidden_layer))
    assert found.trajectory_.digest == expected.trajectory_.digest


def test_it_works_in_pipelines_and_cross_validation(data):
    X, y = data
    pipeline = make_pipeline(StandardScaler(), EPKClassifier(steps=20, random_state=0))
    assert cross_val_score(pipeline, 100 * X, y, cv=3).mean() > 0.7


def test_a_support_vector_machine_takes_the_matrix(data, fitted):
    X, y = (torch.as_tensor(data[0]), data[1])
    kernel, train = epk.EPKKernel(fitted.trajectory_, "trace", normalize="mean_diagonal"), epk.train_copy(X[:45])
    svc = SVC(kernel="precomputed").fit(kernel(train).to_dense().numpy(), y[:45])
    assert svc.score(kernel(epk.test_copy(X[45:]), train).to_dense().numpy(), y[45:]) > 0.8


def test_arguments_without_a_meaning_are_refused(data, fitted, unchecked):
    X, y = data
    with pytest.raises(TypeError, match="network must be a torch.nn.Module or a function that returns one: got 3"):
        EPKClassifier(lambda d, c: 3).fit(X, y)
    with pytest.raises(ValueError, match="at least 2 classes: got 1 class"):
        EPKClassifier().fit(X, np.zeros(len(X)))


@pytest.mark.parametrize("extra", [-1, 1, 20])
@pytest.mark.parametrize("as_module", [False, True], ids=["function", "module"])
def test_a_network_has_one_output_per_class(data, extra, as_module):
    """More outputs than classes trained without a word, and `predict` failed where one of them was largest."""
    X, y = data
    features, classes = X.shape[1], len(np.unique(y))
    network = nn.Linear(features, classes + extra) if as_module else lambda d, c: nn.Linear(d, c + extra)
    message = f"network must have one output per class of y, {classes}: it has {classes + extra}. Change its last layer"
    with pytest.raises(ValueError, match=message):
        EPKClassifier(network, steps=1).fit(X, y)


OPTIONS = {
    "condition_negative": ({"num_condition": -1}, ValueError, "num_condition must be at least 1: got -1"),
    "condition_none": ({"num_condition": 0}, ValueError, "num_condition must be at least 1: got 0"),
    "condition_a_fraction": ({"num_condition": 1.5}, TypeError, "num_condition must be a whole number.*got 1.5"),
    "condition_true": ({"num_condition": True}, TypeError, "num_condition must be a whole number.*got True"),
    "condition_a_text": ({"num_condition": "all"}, TypeError, "num_condition must be a whole number.*got 'all'"),
    "condition_nan": ({"num_condition": float("nan")}, TypeError, "num_condition must be a whole number.*got nan"),
    "rate_negative": ({"lr": -1}, ValueError, "lr must be positive and finite: got -1"),
    "rate_nan": ({"lr": float("nan")}, ValueError, "lr must be positive and finite: got nan"),
    "rate_a_text": ({"lr": "x"}, TypeError, "lr must be a positive number: got 'x'"),
    "network_a_number": ({"network": 3}, TypeError, "network must be a torch.nn.Module or a function .*: got 3"),
    "network_of_one_number": ({"network": lambda d: nn.Linear(d, 3)}, TypeError, "takes 1 positional argument but 2"),
    "optimizer_a_number": ({"optimizer": 3}, TypeError, "optimizer must be a function of parameters: got 3"),
}


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options_are_checked_before_the_training(data, unchecked, options, error, message):
    """Also those of the Gaussian process, which is built later."""
    with pytest.raises(error, match=message):
        EPKClassifier(**{"steps": 1} | options).fit(*data)


@pytest.mark.parametrize("count", [np.int64(3), 10**9, 1 << 70])
def test_the_conditioning_points_are_at_most_all(data, unchecked, count):
    X, y = data
    gp = EPKClassifier(steps=1, gp_steps=1, num_condition=count, batch_size=np.int64(8)).fit(X[:20], y[:20]).gp()
    assert len(gp.points) == min(int(count), 20)
