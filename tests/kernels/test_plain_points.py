"""Rows without a copy column are test copies: the kernel in models of one's own, on plain inputs."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp.output_coupling import NetworkMean, OutputCoupling
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from kernel_cases import MODES, C, D, assert_close


@pytest.fixture(scope="module")
def X():
    return torch.randn(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("normalize", [None, "cosine"])
@pytest.mark.parametrize("outputs", MODES)
def test_rows_without_a_copy_column_are_test_copies(trajectory, X, outputs, normalize):
    kernel = EPKKernel(trajectory, outputs, normalize=normalize)
    x, train = test_copy(X), train_copy(trajectory.inputs)
    calls = {
        "matrix": (lambda z: kernel(z).to_dense()),
        "diagonal": (lambda z: kernel(z, diag=True)),
        "training copies against them": (lambda z: kernel(train, z).to_dense()),
        "forward against training copies": (lambda z: kernel.forward(z, train)),
        "diagonal of two kinds": (lambda z: kernel(z, train[:5], diag=True)),
    }
    for name, call in calls.items():
        assert torch.equal(call(X), call(x)), name
    assert (kernel(X).to_dense() - kernel(train_copy(X)).to_dense()).abs().max() > 1e-3  # the negative control


def test_active_dims_may_leave_the_copy_column_out(trajectory, X):
    wide = torch.cat([X[:, 1:], torch.full((5, 1), 7.0).double(), X[:, :1]], 1)
    kernel = EPKKernel(trajectory, "trace", normalize="cosine", active_dims=[2, 0])
    assert torch.equal(kernel(wide).to_dense(), EPKKernel(trajectory, "trace", normalize="cosine")(X).to_dense())
    assert_close(kernel(wide, wide[:2]).to_dense(), kernel(wide).to_dense()[:, :2])


@pytest.mark.parametrize("coupling", [OutputCoupling("full", C), OutputCoupling("independent", C)])
def test_a_network_is_the_mean_at_rows_without_a_copy_column(trajectory, X, coupling):
    mean = NetworkMean(EPKKernel(trajectory).config, coupling, state=-1)
    assert torch.equal(mean(X), mean(test_copy(X)))
    z = X.clone().requires_grad_()
    assert_close(torch.autograd.grad(mean(z).sum(), z)[0], torch.autograd.grad(mean(test_copy(z)).sum(), z)[0])


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_a_process_predicts_at_rows_without_a_copy_column(trajectory, X, outputs):
    gp = epk.LogitGP(trajectory, outputs, points=range(5))
    found, expected = gp(X), gp(test_copy(X))
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(gp.prior_mean(X), gp.prior_mean(test_copy(X)))
    z = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gp(z).mean.sum(), z)
    assert gradient.abs().min() > 0
    with pytest.raises(ValueError, match="in training mode call a LogitGP with gp.train_inputs"):
        epk.LogitGP(trajectory, outputs, points=range(5)).train()(trajectory.inputs[:5])
