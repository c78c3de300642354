"""Numbers, points, labels and all else that public functions take, of a wrong kind or value: one clear error each."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp import datasets
from epk_gp.analysis import maps, measures
from epk_gp.core.checks import parse_options
from epk_gp.core.model import zero_final_layer
from epk_gp.estimators import EPKClassifier
from epk_gp.gp.data import count_seen
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.regression import leave_one_out
from epk_gp.kernel_machine.axes import by_step
from helpers import refusal
from loops import CASES, data, mlp, sgd, trained

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF = float("nan"), float("inf")
X, Y = data()
T = epk.test_copy(X)
TS, AB, WIDE = T.expand(4, 10, 5), [epk.Points(X, True)] * 2, {"accumulate": torch.float64}
EYE, SCORES = torch.eye(3, dtype=torch.float64), torch.linspace(0.1, 1, 10, dtype=torch.float64)
MEAN, COVARIANCE = torch.zeros(10, 3, dtype=torch.float64), EYE.expand(10, 3, 3)
WRONG = (TypeError, ValueError)


@pytest.fixture(scope="module")
def f():
    """A run and the two kinds of Gaussian process over its first points."""
    t = trained(CASES["minibatch"])
    per_class = epk.LogitGP(t, "independent", points=[0, 1])
    return SimpleNamespace(t=t, gp=epk.LogitGP(t, points=[0, 1, 2]), per_class=per_class)


def gp(f, **options):
    return epk.LogitGP(f.t, **{"points": [0, 1]} | options)


def softmax(mean=MEAN, covariance=COVARIANCE, *tolerance, num_samples=4, **options):
    return LogitPosterior(mean, covariance, *tolerance).softmax_uncertainty(num_samples, **options)


# Calls with one number, the smallest that is accepted, and the name that the message begins with.
COUNTS = {
    "fit": (lambda f, n: gp(f).fit(steps=n), 1, "steps"),
    "softmax_samples": (lambda f, n: softmax(num_samples=n), 2, "num_samples"),
    "cache": (lambda f, n: epk.EPKKernel(f.t, cache_bytes=n), 0, "cache_bytes"),
    "class": (lambda f, n: epk.EPKKernel(f.t, n)(T[:2]).to_dense(), 0, "outputs|a class index"),
    "edge": (lambda f, n: by_step(f.t, [n]), 1, "an edge|edges"),
    "bins": (lambda f, n: measures.calibration(MEAN.softmax(1), Y, bins=n), 1, "bins"),
    "grid": (lambda f, n: maps.grid_over(X[:, :2], n, 0.4), 2, "size|a grid"),
    "gaussians": (lambda f, n: datasets.three_gaussians(n, dim=2), 1, "num_per_class"),
    "dim": (lambda f, n: datasets.three_gaussians(1, dim=n), 2, "dim"),
}


@pytest.mark.parametrize(("ask", "minimum", "name"), COUNTS.values(), ids=COUNTS.keys())
def test_a_count_is_a_whole_number_in_range(f, ask, minimum, name):
    for value in (1.5, float(minimum), True, np.True_, None, "x", [1], torch.tensor(minimum), np.array(minimum)):
        if not (isinstance(value, str) and "class" in name):  # a text names an output structure
            assert refusal(TypeError, rf"^({name})\b.* must be .*got ", ask, f, value) is None, value
    for value in (minimum - 1, -7):
        assert refusal(ValueError, rf"^({name})\b.* got .*{value}", ask, f, value) is None, value
    for kind in (int, np.int64, np.int8, np.uint16):  # the positive control
        ask(f, kind(minimum))


# Calls with one real number, values out of its range, and the name that the message begins with.
NUMBERS = {
    "lr": (lambda f, v: gp(f).fit(steps=1, lr=v), (0, -1, NAN, INF), "lr"),
    "noise": (lambda f, v: gp(f, noise=v), (0, -1, NAN, INF), "noise"),
    "quantile": (lambda f, v: softmax(quantiles=[v]), (-1, 2, NAN), "a quantile|quantiles"),
    "tolerance": (lambda f, v: softmax(MEAN, COVARIANCE, v), (-1, NAN, INF), ".*eigenvalue_tolerance"),
    "normalize": (lambda f, v: epk.EPKKernel(f.t, normalize=v), (0, -1, NAN, INF), "normalize"),
    "margin": (lambda f, v: maps.grid_over(X[:, :2], 3, v), (-1, NAN, INF), "margin|the margin"),
    "share": (lambda f, v: measures.gram_spectrum(EYE, share=v), (0, 2, NAN), "share"),
}


@pytest.mark.parametrize(("ask", "outside", "name"), NUMBERS.values(), ids=NUMBERS.keys())
def test_a_number_is_a_number_in_range(f, ask, outside, name):
    kinds = WRONG if name == "normalize" else TypeError  # a text may be a name there, and None is its default
    for value in (True, np.True_, "x", [0.5], 0.5j, *(() if name == "normalize" else (None,))):
        assert refusal(kinds, rf"^({name})\b.* must be .*got ", ask, f, value) is None, value
    for value in outside:
        assert refusal(ValueError, rf"^({name})\b.* got .*{value}", ask, f, value) is None, value


def test_numbers_of_numpy_count(f):
    for kind in (np.float32, np.float64):
        assert epk.EPKKernel(f.t, normalize=kind(2)).scale == 2.0
        gp(f, noise=kind(0.25)).fit(steps=1, lr=kind(0.5))
        softmax(quantiles=np.array([0.5], dtype=kind))
    kernel = epk.EPKKernel(f.t, np.int64(1))
    assert type(kernel.outputs) is int
    assert torch.equal(kernel(T).to_dense(), epk.EPKKernel(f.t, 1)(T).to_dense())
    for kind in (np.uint64, np.int8):
        assert torch.equal(gp(f, points=np.array([0, 1, 2], dtype=kind)).points, f.gp.points)


OF_ANOTHER_KIND = {
    "order must be a whole number, at least 1: got 2.5": lambda f: epk.adaptive(order=2.5),
    "max_evaluations must be a whole": lambda f: epk.adaptive(max_evaluations=2.5),
    "tol must be a positive number: got 'x'": lambda f: epk.adaptive("x"),
    "the number of nodes must be a whole number.*got True": lambda f: epk.gauss_legendre(True),
    "the number of nodes must be a whole number.*got 2.5": lambda f: epk.QuadratureRule.midpoint(2.5),
    "the loss must be a function of outputs and targets: got None": lambda f: epk.PerSampleLoss(None),
    r"a must be epk_gp.Points\(X, is_train=...\).*got": lambda f: epk.gram_block(f.t, X, X),
    r"step_weights must be a torch.Tensor, .*: got list": lambda f: epk.gram_block(f.t, *AB, step_weights=[1.0] * 7),
    "points must be a list or tensor of indices .*: got '?abc": lambda f: gp(f, points="abc"),
    "points must be a torch.Tensor: got list. Make them": lambda f: epk.EPKKernel(f.t)([[1.0] * 5]),
    "inputs must be a torch.Tensor: got list. Convert it": lambda f: epk.train_copy([[1.0]]),
    "X must be a dense tensor": lambda f: epk.reconstruct(f.t, X.to_sparse()),
    "state must be a whole number: got 'a'": lambda f: f.t.weights("a"),
    "net must be a torch.nn.Module: got NoneType": lambda f: zero_final_layer(None),
    "the posterior's mean must be float32 or float64: got torch.float16": lambda f: softmax(MEAN.half()),
    "a posterior must have one dtype: got torch.float32 and torch.float64": lambda f: softmax(MEAN.float()),
    "the posterior's mean must be a torch.Tensor: got ndarray": lambda f: softmax(MEAN.numpy()),
    "noise must be a number: got": lambda f: gp(f, noise=[[0.1] * 3]),
    "points must be indices: got torch.complex64": lambda f: gp(f, points=[1j]),
    "must be a list of levels": lambda f: softmax(quantiles=0.5),
    "gp must be a LogitGP: got NoneType": lambda f: leave_one_out(None),
    "plane must be a Plane: got Tensor": lambda f: maps.uncertainty_on_plane(f.gp, X),
    "inside must be float32 or float64: got": lambda f: measures.ood_metrics(SCORES > 0, SCORES),
    "a Gram matrix must be float32 or float64: got": lambda f: measures.gram_spectrum(EYE.long()),
    "counts must be a function of the targets, or None: got 3": lambda f: epk.PerSampleLoss(min, counts=3),
    r"f\(\) got an unexpected keyword argument 'budget'. It takes mem": lambda f: parse_options("f", budget=1),
    r"reconstruct\(\) got an unexpected keyword argument 'accumulate'": lambda f: epk.reconstruct(f.t, X, **WIDE),
    "generator must be a torch.Generator": lambda f: datasets.three_gaussians(1, generator=3),
}
WITHOUT_MEANING = {
    r"there must be at least one point: got shape \(0": lambda f: epk.EPKKernel(f.t)(T[:0]).to_dense(),
    r"got shape \(4,\). One point is X\[None\]": lambda f: epk.train_copy(X[0]),
    r"a posterior is .*: got .*3\) and \(1, 3, 3\)": lambda f: softmax(MEAN, EYE[None]),
    r"the posterior's covariance must have 3 dimensions: got shape \(3, 3\)": lambda f: softmax(MEAN, EYE),
    r"at least one index: got shape \(\)": lambda f: gp(f, points=torch.tensor(1)),
    r"outside must have 1 dimension: got shape \(10, 4\)": lambda f: measures.ood_metrics(SCORES, X),
    "b must be finite: row 0 holds NaN or": lambda f: measures.rank_correlation(SCORES, SCORES * NAN),
    "a and b must both be": lambda f: measures.rank_correlation(SCORES, SCORES[:3]),
    r"a Gram matrix must be square, .*: got shape \(10, 4\)": lambda f: measures.gram_spectrum(X),
    r"probability must hold at": lambda f: measures.calibration(MEAN[:0], Y[:0]),
    r"outputs must be one of .* or a class index: got 'x'": lambda f: epk.EPKKernel(f.t, "x"),
    "accumulate must be torch.float64 or None: got torch.float16": lambda f: epk.PathKernel(f.t).block(
        *AB, accumulate=torch.half
    ),
    "weights must be finite": lambda f: epk.influence(f.t, X[:1]).predict(torch.full((10,), NAN)),
    "must be called with one tensor of points: got 0": lambda f: f.gp(),
    "must broadcast with each other: got points of shape": lambda f: epk.EPKKernel(f.t)(T.expand(2, 10, 5), TS),
}


@pytest.mark.parametrize(("error", "calls"), [(TypeError, OF_ANOTHER_KIND), (ValueError, WITHOUT_MEANING)])
def test_what_is_of_another_kind_or_means_nothing_is_refused_in_one_sentence(f, error, calls):
    faults = {message: refusal(error, message, ask, f) for message, ask in calls.items()}
    assert not {message: fault for message, fault in faults.items() if fault is not None}


def test_a_gp_in_training_takes_its_training_points(f):
    training = gp(f).train()
    assert training(training.train_inputs[0]).mean.shape == (2, 3)
    for x in (T, T[:2]):
        with pytest.raises(ValueError, match=r"in training mode .* gp.train_inputs.*; to predict, gp.eval"):
            training(x)


@pytest.mark.parametrize("diag", [False, True])
@pytest.mark.parametrize("batch", [(2,), (2, 2), (3, 4)])
def test_batches_that_do_not_go_with_the_classes_are_refused(f, batch, diag):
    """Three classes are a batch of three kernels: another batch of points needs a dimension of its own."""
    x = T[:2].expand(*batch, 2, 5) + torch.zeros(*batch, 1, 1, dtype=T.dtype)
    kernel = epk.EPKKernel(f.t, "independent")
    message = r"must broadcast with the kernel's batch \(3,\), one matrix per class: got points of shape"
    for ask in (kernel, f.per_class) if not diag else (kernel,):
        assert refusal(ValueError, message, ask, x, **{"diag": True} if diag else {}) is None
    assert refusal(ValueError, message, kernel.forward, x, x, diag=diag) is None
    values = kernel(x.unsqueeze(-3), diag=diag)  # what the message says works
    assert (values if diag else values.to_dense()).shape == ((*batch, 3, 2) if diag else (*batch, 3, 2, 2))


# What the doors of a kind do not take, and what they say.
NO_INPUTS = [
    (x, r"^(X|X_test|inputs|a plane) (must|needs) .*: got|NaN or infinity")
    for x in (X.numpy(), X.tolist(), None, torch.tensor(1.0), X[0], X * NAN, X.to("meta"), X.to_sparse(), X.cfloat())
]
NO_POINTS = [
    (X[:, :3], r"must have shape \(..., n, 5\), .* copy column, or \(..., n, 4\), test .*: got \(10, 3\)"),
    (X * NAN, "inputs must be finite: got nan"),
    (X.long(), "points must be float32 or float64: got torch.int64"),
    (T.tolist(), "points must be a torch.Tensor: got list. Make them with train_copy or test_copy"),
    ("x", "points must be a torch.Tensor: got str"),
    (T[:0], r"there must be at least one point: got shape \(0, 5\)"),
    (T[0], r"must have shape \(..., n, 5\), .*: got \(5,\)"),
    (T * NAN, "inputs must be finite: got nan"),
    (T.to("meta"), "must hold values: got a tensor on the device 'meta'"),
    (T.to_sparse(), "must be dense: got a tensor of layout torch.sparse_coo"),
    (T.half(), "points must be float32 or float64: got torch.float16"),
    (T.long(), "points must be float32 or float64: got torch.int64"),
    (
        T + 0.5,
        r"must have 4 columns, or 5 as train_copy and test_copy make them: row 0 ends in .* marks no copy",
    ),
]
NO_LABELS = [
    (y, r"^(labels|outputs) must (be|have|hold) .*: got ")
    for y in (Y.numpy(), Y.tolist(), Y.double(), Y.bool(), Y.to("meta"), Y[:, None], Y[:3], Y[:1], Y[:0])
]
NO_CLASSES = [*NO_LABELS, *((y, r"^(labels|outputs) must lie in 0..2: got ") for y in (Y - 1, Y + 1))]
DOORS = {
    "train_copy": (lambda f, x: epk.train_copy(x), NO_INPUTS),
    "plane": (lambda f, x: maps.coordinate_plane(x), NO_INPUTS),
    "gp": (lambda f, x: f.gp(x), NO_POINTS),
    "gp_per_class": (lambda f, x: f.per_class(x), NO_POINTS),
    "gp_prior": (lambda f, x: f.gp.forward(x), NO_POINTS),
    "gp_in_training": (lambda f, x: gp(f).train()(x), NO_POINTS),
    "kernel": (lambda f, x: epk.EPKKernel(f.t)(x), NO_POINTS),
    "kernel_forward": (lambda f, x: epk.EPKKernel(f.t).forward(x, x), NO_POINTS),
    "kernel_pair": (lambda f, x: epk.EPKKernel(f.t)(T, x), NO_POINTS),
    "calibration": (lambda f, y: measures.calibration(MEAN.softmax(1), y), NO_CLASSES),
}


@pytest.mark.parametrize(("ask", "wrong"), DOORS.values(), ids=DOORS.keys())
def test_a_door_refuses_what_it_does_not_take(f, ask, wrong):
    assert not [fault for x, message in wrong if (fault := refusal(WRONG, message, ask, f, x))]


def test_a_checkpoint_that_is_a_file_or_lies_in_one_is_refused(f, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        message = "checkpoint must be a folder: .*file is a file"
        assert refusal(ValueError, message, epk.reconstruct, f.t, X[:2], checkpoint=path) is None
    assert file.read_text() == "x"


def test_half_a_surrogate_pair_in_a_name_is_refused_before_the_work(f):
    net = nn.Sequential()
    net.add_module("a\ud800", mlp())
    message = "names of modules, parameters and buffers must be text that can be written"
    assert refusal(ValueError, message, epk.Recorder, net, sgd(net), X, Y) is None
    with pytest.raises(ValueError, match="classes must be text that can be written"):
        epk.UncertainClassifier(f.t, classes=["a", "b", "\udcff"]).fit(torch.randn(20, 4).double(), ["a", "b"] * 10)


@pytest.mark.filterwarnings("error")
def test_reversed_and_read_only_arrays_are_taken(f):
    x, y = np.arange(80.0).reshape(20, 4)[::-1] / 40, (np.arange(20) % 3)[::-1]
    x.flags.writeable = y.flags.writeable = False
    model = epk.UncertainClassifier(f.t, nodes=2).fit(x, y)
    assert np.array_equal(model.predict_proba(x), model.predict_proba(x.copy()))
    learned = (np.arange(20) // 7)[::-1]  # which a few steps tell apart better than a constant does
    learned.flags.writeable = False
    assert EPKClassifier(steps=20).fit(x, learned).predict(x).shape == (20,)


def test_training_points_in_another_dtype_were_seen(f):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        message = "must be unseen: 10 of 10 are training points"
        assert refusal(ValueError, message, count_seen, f.t.inputs.to(dtype), f.t) is None
        assert count_seen((f.t.inputs + 0.1).to(dtype), f.t) == 0
