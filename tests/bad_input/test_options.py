"""Numbers of a wrong kind or value in every option, and what else means nothing: one clear error each."""

from typing import Any

import numpy as np
import pytest
import torch

import epk_gp as epk
from epk_gp import datasets
from epk_gp.analysis import maps, measures
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.regression import leave_one_out
from epk_gp.kernel_machine.axes import by_step
from loops import data
from quantities import alignment, boundary, path_geometry, retraining, signal, stationarity

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF = float("nan"), float("inf")
X, Y = data()
T = epk.test_copy(X)
EYE = torch.eye(3, dtype=torch.float64)
POSTERIOR = LogitPosterior(torch.zeros(10, 3, dtype=torch.float64), EYE.expand(10, 3, 3))
SCORES = torch.linspace(0.1, 1, 10, dtype=torch.float64)
PLANE = maps.coordinate_plane(X)


def squares(x):
    return x.square().sum(1)


def products(x, y):
    return x @ y.T


# --- Numbers ---------------------------------------------------------------------------------------------------------

# Calls with one number, the smallest that is accepted, and the name that the message begins with.
COUNTS = {
    "fit": (lambda f, n: epk.LogitGP(f.t, points=[0, 1]).fit(steps=n), 1, "steps"),
    "posterior_block": (lambda f, n: f.gp.logit_posterior(X, block_size=n), 1, "block_size"),
    "softmax_samples": (lambda f, n: epk.softmax_uncertainty(POSTERIOR, n), 2, "num_samples"),
    "cache": (lambda f, n: epk.EPKKernel(f.t, cache_bytes=n), 0, "cache_bytes"),
    "class": (lambda f, n: epk.EPKKernel(f.t, n)(T[:2]).to_dense(), 0, "outputs|a class index"),
    "edge": (lambda f, n: by_step(f.t, [n]), 1, "an edge|edges"),
    "bins": (lambda f, n: measures.calibration(POSTERIOR.mean.softmax(1), Y, bins=n), 1, "bins"),
    "grid": (lambda f, n: maps.square_grid(X[:, :2], n, 0.4), 2, "size|a grid"),
    "line": (lambda f, n: path_geometry.line_profile(f.t, X, Y, size=n), 2, "size"),
    "output": (lambda f, n: signal.input_gradients(f.t, X[:1], n), 0, "output"),
    "step": (lambda f, n: alignment.gradient_alignment(f.t, X[:1], Y[:1], steps=[n], times=[0.5]), 0, "a step|steps"),
    "gaussians": (lambda f, n: datasets.three_gaussians(n, dim=2), 1, "num_per_class"),
    "dim": (lambda f, n: datasets.three_gaussians(1, dim=n), 2, "dim"),
}


@pytest.mark.parametrize(("ask", "minimum", "name"), COUNTS.values(), ids=COUNTS.keys())
def test_a_count_is_a_whole_number_in_range(f, ask, minimum, name):
    for value in (1.5, float(minimum), True, np.True_, None, "x", [1], torch.tensor(minimum), np.array(minimum)):
        if isinstance(value, str) and "class" in name:
            continue  # the name of an output structure, see below
        if value is None and name == "block_size":
            continue  # the default of one of the two
        with pytest.raises(TypeError, match=rf"^({name})\b.* must be .*got "):
            ask(f, value)
    for value in (minimum - 1, -7):
        with pytest.raises(ValueError, match=rf"^({name})\b.* got .*{value}"):
            ask(f, value)


@pytest.mark.parametrize(("ask", "minimum", "name"), COUNTS.values(), ids=COUNTS.keys())
def test_integers_of_numpy_count_everywhere(f, ask, minimum, name):
    """The positive control of the test above."""
    for kind in (int, np.int64, np.int8, np.uint16):
        ask(f, kind(minimum))


def test_a_class_index_of_numpy_gives_the_same_kernel(f):
    expected = epk.EPKKernel(f.t, 1)
    kernel = epk.EPKKernel(f.t, np.int64(1))
    assert type(kernel.outputs) is int
    assert torch.equal(kernel(T).to_dense(), expected(T).to_dense())


# Calls with one real number, values out of its range, and the name that the message begins with.
NUMBERS = {
    "lr": (lambda f, v: epk.LogitGP(f.t, points=[0, 1]).fit(steps=1, lr=v), (0, -1, NAN, INF), "lr"),
    "noise": (lambda f, v: epk.LogitGP(f.t, points=[0, 1], noise=v), (0, -1, NAN, INF), "noise"),
    "quantile": (
        lambda f, v: epk.softmax_uncertainty(POSTERIOR, 4, quantiles=[v]),
        (-1, 2, NAN),
        "a quantile|quantiles",
    ),
    "tolerance": (
        lambda f, v: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean, POSTERIOR.covariance, v), 4),
        (-1, NAN, INF),
        "the posterior's eigenvalue_tolerance",
    ),
    "normalize": (lambda f, v: epk.EPKKernel(f.t, normalize=v), (0, -1, NAN, INF), "normalize"),
    "margin": (lambda f, v: maps.square_grid(X[:, :2], 3, v), (-1, NAN, INF), "margin|the margin"),
    "share": (lambda f, v: measures.gram_spectrum(EYE, share=v), (0, 2, NAN), "share"),
    "near": (lambda f, v: boundary.boundary_weight_ratio(SCORES, SCORES, Y, share=v), (0, 1, NAN), "share"),
    "penalty": (
        lambda f, v: retraining.fit_support_vector_machines(EYE.expand(3, 3, 3), torch.arange(3), penalty=v),
        (0, NAN),
        "penalty",
    ),
    "time": (
        lambda f, v: alignment.gradient_alignment(f.t, X[:1], Y[:1], steps=[0], times=[v]),
        (-1, 2, NAN),
        "a time|times",
    ),
}


@pytest.mark.parametrize(("ask", "outside", "name"), NUMBERS.values(), ids=NUMBERS.keys())
def test_a_number_is_a_number_in_range(f, ask, outside, name):
    for value in (True, np.True_, "x", [0.5], 0.5j, *(() if name == "normalize" else (None,))):
        kinds = (TypeError, ValueError) if name == "normalize" else TypeError  # a text may be a name there
        with pytest.raises(kinds, match=rf"^({name})\b.* must be .*got "):
            ask(f, value)
    for value in outside:
        with pytest.raises(ValueError, match=rf"^({name})\b.* got .*{value}"):
            ask(f, value)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_of_numpy_count(f, kind):
    assert epk.EPKKernel(f.t, normalize=kind(2)).scale == 2.0
    epk.LogitGP(f.t, points=[0, 1], noise=kind(0.25)).fit(steps=1, lr=kind(0.5))
    epk.softmax_uncertainty(POSTERIOR, 4, quantiles=np.array([0.5], dtype=kind))


SMALL = {
    "posterior_shape": (
        lambda f: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean, POSTERIOR.covariance[:1])),
        r"must have a mean \(n, C\) and covariances \(n, C, C\) .*: got shapes \(10, 3\) and \(1, 3, 3\)",
    ),
    "posterior_rank": (
        lambda f: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean, EYE)),
        r"the posterior's covariance must have 3 dimensions: got shape \(3, 3\)",
    ),
    "posterior_dtypes": (
        lambda f: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean.float(), POSTERIOR.covariance)),
        "a posterior must have one dtype: got torch.float32 and torch.float64",
    ),
    "posterior_half": (
        lambda f: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean.half(), POSTERIOR.covariance.half())),
        "the posterior's mean must be float32 or float64: got torch.float16",
    ),
    "posterior_array": (
        lambda f: epk.softmax_uncertainty(LogitPosterior(POSTERIOR.mean.numpy(), POSTERIOR.covariance)),
        "the posterior's mean must be a torch.Tensor: got ndarray",
    ),
    "posterior_of_none": (
        lambda f: epk.softmax_uncertainty(None, 4),
        "posterior must be a LogitPosterior: got NoneType",
    ),
    "noise_list": (lambda f: epk.LogitGP(f.t, points=[0], noise=[[0.1] * 3]), "noise must be a number: got"),
    "points_scalar": (lambda f: epk.LogitGP(f.t, points=torch.tensor(1)), r"at least one index: got shape \(\)"),
    "points_complex": (lambda f: epk.LogitGP(f.t, points=[1j]), "points must be indices: got torch.complex64"),
    "quantile_number": (lambda f: epk.softmax_uncertainty(POSTERIOR, 4, quantiles=0.5), "must be a list of levels"),
    "left_out_gp": (lambda f: leave_one_out(None), "gp must be a LogitGP: got NoneType"),
    "map_plane": (lambda f: maps.uncertainty_on_plane(f.gp, X), "plane must be a Plane: got Tensor"),
    "path_of_none": (
        lambda f: path_geometry.path_profile(None),
        "trajectory must be an epk_gp.Trajectory: got NoneType",
    ),
    "ntk_state": (
        lambda f: alignment.gradient_alignment(f.t, X[:1], Y[:1], steps=[0], times=[0.5], ntk_state=99),
        r"ntk_state must lie in 0..\d+ \(or be negative\): got 99",
    ),
    "two_points": (lambda f: signal.input_gradients(f.t, X[:2], 0), r"x must be one point, of shape \(1, ...\): got"),
    "energies": (lambda f: signal.signal_energies(SCORES), r"gradients must have 2 dimensions: got shape \(10,\)"),
    "scores": (lambda f: measures.ood_metrics(SCORES, X), r"outside must have 1 dimension: got shape \(10, 4\)"),
    "scores_mask": (lambda f: measures.ood_metrics(SCORES > 0, SCORES), "inside must be float32 or float64: got"),
    "ranks_nan": (lambda f: measures.rank_correlation(SCORES, SCORES * NAN), "b must be finite: it holds NaN or"),
    "ranks_lengths": (lambda f: measures.rank_correlation(SCORES, SCORES[:3]), "as many numbers as each other: got"),
    "gram_rectangle": (lambda f: measures.gram_spectrum(X), r"a Gram matrix must be square, .*: got shape \(10, 4\)"),
    "gram_integers": (lambda f: measures.gram_spectrum(EYE.long()), "a Gram matrix must be float32 or float64: got"),
    "empty_calibration": (lambda f: measures.calibration(POSTERIOR.mean[:0], Y[:0]), r"probability must hold at"),
    "kernel_number": (lambda f: stationarity.location_variance_share(3, X, X), "kernel must be a function of .*: got"),
    "kernel_shape": (lambda f: stationarity.location_variance_share(lambda x, y: x, X, X), r"kernel must return one"),
    "kernel_nan": (
        lambda f: stationarity.location_variance_share(lambda x, y: products(x, y) * NAN, X, X),
        "kernel must return finite values",
    ),
    "radii_list": (
        lambda f: stationarity.diagonal_growth_exponent(squares, X[0], X, [1.0, 2.0]),
        "radii must be a torch.Tensor: got list",
    ),
    "radii_infinite": (
        lambda f: stationarity.diagonal_growth_exponent(squares, X[0], X, torch.tensor([1.0, INF]).double()),
        "radii must be positive, finite and increase",
    ),
    "support_vector_machines_shape": (
        lambda f: retraining.fit_support_vector_machines(torch.zeros(3, 4, 5), Y),
        r"gram must be one square matrix per class, \(C, M, M\): got shape \(3, 4, 5\)",
    ),
    "outputs_name": (lambda f: epk.EPKKernel(f.t, "x"), r"outputs must be one of .* or a class index: got 'x'"),
    "dataset_generator": (lambda f: datasets.three_gaussians(1, generator=3), "generator must be a torch.Generator"),
}


@pytest.mark.parametrize(("ask", "message"), SMALL.values(), ids=SMALL.keys())
def test_what_means_nothing_is_refused_in_one_sentence(f, ask, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ask(f)


def test_indices_of_any_integer_kind_condition_a_gp(f):
    expected = f.gp.points
    for kind in (np.uint64, np.int8):
        points: Any = np.array([0, 1, 2], dtype=kind)
        assert torch.equal(epk.LogitGP(f.t, points=points).points, expected)
