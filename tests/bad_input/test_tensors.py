"""Inputs, tagged points and labels of a wrong kind, shape, device or value: one clear error each."""

import pytest
import torch

import epk_gp as epk
from epk_gp.analysis import maps, measures
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gram.thinning import thin_path
from loops import data
from quantities import alignment, boundary, path_geometry, retraining

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN = float("nan")
X, Y = data()
T = epk.test_copy(X)
EYE = torch.eye(3, dtype=torch.float64)
POSTERIOR = LogitPosterior(torch.zeros(10, 3, dtype=torch.float64), EYE.expand(10, 3, 3))
SCORES = torch.linspace(0.1, 1, 10, dtype=torch.float64)


# Calls with n inputs of the network.
INPUTS = {
    "posterior": lambda f, x: f.gp.logit_posterior(x),
    "thinning": lambda f, x: thin_path(f.t, 2, x),
    "outputs": lambda f, x: epk.network_outputs(f.t, x),
    "train_copy": lambda f, x: epk.train_copy(x),
    "plane": lambda f, x: maps.coordinate_plane(x),
    "line": lambda f, x: path_geometry.line_profile(f.t, x, Y),
}
BAD_INPUTS = {
    "array": X.numpy(),
    "list": X.tolist(),
    "nothing": None,
    "scalar": torch.tensor(1.0),
    "one_point": X[0],
    "nan": X * NAN,
    "meta": X.to("meta"),
    "sparse": X.to_sparse(),
    "complex": X.cfloat(),
}


@pytest.mark.parametrize("ask", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("x", BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_inputs_that_are_none_are_refused(f, ask, x):
    with pytest.raises(
        (TypeError, ValueError), match=r"^(X|X_test|inputs|a plane) (must|needs) .*: got|NaN or infinity"
    ):
        ask(f, x)


# Calls with tagged points.
POINTS = {
    "gp": lambda f, x: f.gp(x),
    "gp_per_class": lambda f, x: f.per_class(x),
    "gp_prior": lambda f, x: f.gp.forward(x),
    "gp_in_training": lambda f, x: epk.LogitGP(f.t, points=[0, 1]).train()(x),
    "kernel": lambda f, x: epk.EPKKernel(f.t)(x),
    "kernel_forward": lambda f, x: epk.EPKKernel(f.t).forward(x, x),
    "kernel_pair": lambda f, x: epk.EPKKernel(f.t)(T, x),
}
BAD_POINTS = {
    "narrow": (X[:, :3], r"must have shape \(..., n, 5\), .* copy column, or \(..., n, 4\), test .*: got \(10, 3\)"),
    "untagged": (X * NAN, "inputs must be finite: got nan"),
    "untagged_integers": (X.long(), "points must be float32 or float64: got torch.int64"),
    "list": (T.tolist(), "points must be a torch.Tensor: got list. Make them with train_copy or test_copy"),
    "nothing": ("x", "points must be a torch.Tensor: got str"),
    "empty": (T[:0], r"there must be at least one point: got shape \(0, 5\)"),
    "one": (T[0], r"must have shape \(..., n, 5\), .*: got \(5,\)"),
    "nan": (T * NAN, "inputs must be finite: got nan"),
    "meta": (T.to("meta"), "must hold values: got a tensor on the device 'meta'"),
    "sparse": (T.to_sparse(), "must be dense: got a tensor of layout torch.sparse_coo"),
    "half": (T.half(), "points must be float32 or float64: got torch.float16"),
    "integers": (T.long(), "points must be float32 or float64: got torch.int64"),
    "column": (T + 0.5, "the last column must be exactly 0 .* or 1"),
}


@pytest.mark.parametrize("ask", POINTS.values(), ids=POINTS.keys())
@pytest.mark.parametrize(("x", "message"), BAD_POINTS.values(), ids=BAD_POINTS.keys())
def test_points_of_another_kind_are_refused(f, ask, x, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ask(f, x)


def test_a_gp_takes_one_set_of_points(f):
    for arguments in ((), (T, T)):
        with pytest.raises(ValueError, match=f"must be called with one tensor of points: got {len(arguments)}"):
            f.gp(*arguments)


def test_a_gp_in_training_takes_its_training_points(f):
    gp = epk.LogitGP(f.t, points=[0, 1]).train()
    assert gp(gp.train_inputs[0]).mean.shape == (2, 3)
    for x in (T, T[:2]):
        with pytest.raises(ValueError, match=r"in training mode .* its training points, .*: got others. Call gp.eval"):
            gp(x)


@pytest.mark.parametrize("diag", [False, True])
@pytest.mark.parametrize("batch", [(2,), (2, 2), (3, 4)])
def test_batches_that_do_not_go_with_the_classes_are_refused(f, batch, diag):
    """Three classes are a batch of three kernels: another batch of points needs a dimension of its own."""
    x = T[:2].expand(*batch, 2, 5) + torch.zeros(*batch, 1, 1, dtype=T.dtype)
    message = (
        r"batches of points must broadcast with the kernel's batch \(3,\), one matrix per class: got points of shape"
    )
    kernel = epk.EPKKernel(f.t, "independent")
    for ask in (kernel, f.per_class) if not diag else (kernel,):
        with pytest.raises(ValueError, match=message):
            ask(x, diag=True) if diag else ask(x)
    with pytest.raises(ValueError, match=message):
        kernel.forward(x, x, diag=diag)
    shape = (*batch, 3, 2) if diag else (*batch, 3, 2, 2)
    values = kernel(x.unsqueeze(-3), diag=diag)  # what the message says works
    assert (values if diag else values.to_dense()).shape == shape


def test_batches_that_do_not_go_with_each_other_are_refused(f):
    with pytest.raises(ValueError, match="batches of points must broadcast with each other: got points of shape"):
        epk.EPKKernel(f.t)(T.expand(2, 10, 5), T.expand(4, 10, 5))


# Calls with one class index per point, for ten points and three classes.
LABELS = {
    "calibration": lambda f, y: measures.calibration(POSTERIOR.mean.softmax(1), y),
    "line": lambda f, y: path_geometry.line_profile(f.t, X, y),
    "alignment": lambda f, y: alignment.gradient_alignment(f.t, X, y, steps=[0], times=[0.5]),
    "margins": lambda f, y: boundary.margins(POSTERIOR.mean, y),
    "support_vector_machines": lambda f, y: retraining.fit_support_vector_machines(torch.eye(10).expand(3, 10, 10), y),
}
LABELS_OF_ANY_CLASS = {
    "near": lambda f, y: boundary.boundary_weight_ratio(SCORES, SCORES, y),
    "platt": lambda f, y: retraining.fit_platt_scaling(POSTERIOR.mean, y),
}
BAD_LABELS = {
    "array": Y.numpy(),
    "list": Y.tolist(),
    "fractions": Y.double(),
    "mask": Y.bool(),
    "meta": Y.to("meta"),
    "column": Y[:, None],
    "fewer": Y[:3],
    "one": Y[:1],
    "none": Y[:0],
}


@pytest.mark.parametrize("y", BAD_LABELS.values(), ids=BAD_LABELS.keys())
@pytest.mark.parametrize("ask", (LABELS | LABELS_OF_ANY_CLASS).values(), ids=(LABELS | LABELS_OF_ANY_CLASS).keys())
def test_labels_that_are_none_are_refused(f, ask, y):
    with pytest.raises((TypeError, ValueError), match=r"^(labels|outputs) must (be|have|hold) .*: got "):
        ask(f, y)


@pytest.mark.parametrize("y", [Y - 1, Y + 1], ids=["negative", "large"])
@pytest.mark.parametrize("ask", LABELS.values(), ids=LABELS.keys())
def test_labels_out_of_range_are_refused(f, ask, y):
    with pytest.raises(ValueError, match=r"^(labels|outputs) must lie in 0..2: got "):
        ask(f, y)
