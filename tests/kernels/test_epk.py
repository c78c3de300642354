"""The kernel's values against blocks of the path kernel, in every mode; points and options that it cannot take."""

import pytest
import torch
from gpytorch.kernels import RBFKernel

from epk_gp.core.inputs import Points
from epk_gp.gram.path_kernel import PathKernel, gram_block
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from epk_gp.quadrature.rules import chords, gauss_legendre, layerwise
from helpers import make_case
from kernel_cases import MODES, C, D, assert_close, make_run, mixed, path_kernel_block, reduced


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_every_mode_is_its_part_of_the_path_kernels_block(trajectory, outputs, head):
    x, y = mixed(5), mixed(4)
    kernel = EPKKernel(trajectory, outputs, head)
    expected = reduced(path_kernel_block(trajectory, x, y, head=head), outputs)
    assert_close(kernel(x, y).to_dense(), expected)
    assert kernel(x, y).shape == expected.shape


@pytest.mark.parametrize("outputs", MODES)
def test_the_diagonal_is_the_matrixs_and_costs_no_matrix(trajectory, outputs, monkeypatch):
    x, y = mixed(6), mixed(6)
    expected, of_two = (EPKKernel(trajectory, outputs)(x, z).to_dense().diagonal(dim1=-2, dim2=-1) for z in (x, y))
    for name in ("block", "block_per_class", "trace_block"):
        monkeypatch.setattr(PathKernel, name, None)
    kernel = EPKKernel(trajectory, outputs)
    assert_close(kernel(x, diag=True), expected)
    assert_close(kernel(x).diagonal(dim1=-1, dim2=-2), expected)
    assert_close(kernel(x, y, diag=True), of_two)


@pytest.mark.parametrize("outputs", MODES)
def test_a_mean_diagonal_makes_the_mean_diagonal_one(trajectory, outputs):
    kernel, raw = EPKKernel(trajectory, outputs, normalize="mean_diagonal"), EPKKernel(trajectory, outputs)
    x = train_copy(trajectory.inputs)
    assert_close(kernel(x, diag=True).mean(), torch.ones((), dtype=torch.float64))
    assert_close(kernel(x).to_dense() * kernel.scale, raw(x).to_dense())
    assert_close(EPKKernel(trajectory, outputs, normalize=4)(x).to_dense() * 4, raw(x).to_dense())


def test_a_mean_diagonal_is_that_of_evenly_spaced_points_in_float64(counter, monkeypatch):
    monkeypatch.setattr("epk_gp.kernels.epk.NORMALIZATION_POINTS", 3)
    run = make_run(dtype=torch.float32)
    scale = EPKKernel(run, normalize="mean_diagonal").scale
    assert counter.points == 3
    x = train_copy(run.inputs[[0, 2, 4]].double())
    assert scale == pytest.approx(float(EPKKernel(run)(x, diag=True).mean()), rel=1e-14)


def test_integers_travel_as_whole_floats():
    case = make_case("attention", steps=2)
    kernel, X = EPKKernel(case.trajectory, normalize="mean_diagonal"), case.test.flatten(1)
    x = train_copy(X.double())
    expected = gram_block(case.trajectory, Points(X, True), Points(X, True))
    assert_close(kernel(x).to_dense() * kernel.scale, reduced(expected, "full"), 1e4)
    assert torch.equal(kernel(train_copy(X)).to_dense().double(), kernel(x).to_dense())
    of_tests = kernel(test_copy(X).double()).to_dense()
    assert torch.equal(kernel(X.double()).to_dense(), of_tests)
    assert torch.equal(kernel(X).to_dense().double(), of_tests)
    with pytest.raises(ValueError, match="must not require gradients where the network takes integers"):
        kernel(x.requires_grad_())
    with pytest.raises(ValueError, match="inputs must be whole numbers"):
        kernel(X + 0.5).to_dense()
    for label in (0, 1, 7, -100):  # one column too many
        for table in (torch.nn.functional.pad(X, (0, 1), value=label), torch.nn.functional.pad(X, (0, 1)).double()):
            with pytest.raises(ValueError, match=r"row 0 ends in .*, which marks no copy"):
                kernel(table)


def test_a_product_with_a_kernel_on_the_inputs_leaves_the_copy_column_out(trajectory):
    """Both copies of a point are one point for it; with all columns (the control) they lie 6e-6 apart."""
    kernel, X = EPKKernel(trajectory, "trace"), torch.zeros(1, D, dtype=torch.float64)
    on_inputs = RBFKernel(active_dims=kernel.input_dims).double()
    assert on_inputs(train_copy(X), test_copy(X)).to_dense().item() == 1
    assert 1 - 1e-9 < RBFKernel().double()(train_copy(X), test_copy(X)).to_dense().item() < 1


ARGUMENTS = [
    *(({"outputs": index}, ValueError, r"class index must lie in 0\.\.2 .*: got") for index in (-1, C)),
    ({"normalize": "trace"}, ValueError, "normalize must be None, 'cosine', .* positive number: got 'trace'"),
    ({"path": layerwise()}, ValueError, "EPKKernel integrates along a path of the weights"),
    ({"progress": True}, TypeError, r"EPKKernel\(\) got an unexpected .* memory_budget, executor as well"),
    ({"checkpoint": "folder"}, TypeError, r"EPKKernel\(\) got an unexpected"),
]


def test_what_a_kernel_cannot_use_is_refused(trajectory, unchecked):
    assert EPKKernel(trajectory, memory_budget=1 << 21).config.options.memory_budget == 1 << 21
    for arguments, error, message in ARGUMENTS:
        with pytest.raises(error, match=message):
            EPKKernel(trajectory, **arguments)
    kernel, x = EPKKernel(trajectory), mixed(4)
    with pytest.raises(ValueError, match="last_dim_is_batch must be False"):
        kernel.forward(x, x, last_dim_is_batch=True)
    with pytest.raises(ValueError, match="got 4 and 3 points"):
        kernel.forward(x, x[:3], diag=True)


def test_a_kernel_says_what_it_is(trajectory):
    kernel = EPKKernel(trajectory, "independent", normalize="cosine", path=chords(2))
    words = "='independent'", "batch_shape=(3,)", "ChordPath(every=2)", "'cosine'", repr(gauss_legendre(4))
    assert all(word in repr(kernel) for word in words)
    assert "path" not in repr(EPKKernel(trajectory))
