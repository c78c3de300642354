"""Processes whose outputs share one covariance: one factorisation, C right-hand sides."""

from contextlib import contextmanager

import gpytorch
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import leave_one_out
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from gp_cases import C, D, with_hyperparameters
from kernel_cases import make_run as make_other_run

NORMALIZE = ["cosine", "mean_diagonal"]
MEANS = ["initial", "constant", "zero"]


def process(trajectory, mean="zero", normalize="cosine", **options):
    return with_hyperparameters(LogitGP(trajectory, "trace", mean, "labels", normalize=normalize, **options))


class ScalarGP(gpytorch.models.ExactGP):
    """One output, as any user writes it."""

    def __init__(self, x, y, kernel, noise):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.ScaleKernel(kernel)
        self.double()
        likelihood.noise = noise

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("mean", MEANS)
def test_shared_outputs_are_as_many_scalar_processes(trajectory, X_test, mean, normalize):
    """GPyTorch's, one for each output, with the same kernel, scale and noise."""
    gp = process(trajectory, mean, normalize)
    posterior, joint = gp.logit_posterior(X_test, block_size=4), gp(X_test)
    x, scale, noise = train_copy(trajectory.inputs), gp.covar_module.outputscale, gp.likelihood.noise
    assert (scale.numel(), noise.numel()) == (1, 1)
    for c in range(C):
        y = gp.coupling.from_rows(gp.target_rows())[:, c] - gp.prior_mean(x)[:, c]
        peer = ScalarGP(x, y.detach(), EPKKernel(trajectory, "trace", "logits", normalize=normalize), noise)
        peer.covar_module.outputscale = scale
        expected = peer.eval()(test_copy(X_test))
        torch.testing.assert_close(posterior.mean[:, c], expected.mean + gp.prior_mean(X_test)[:, c], rtol=0, atol=1e-9)
        torch.testing.assert_close(posterior.covariance[:, c, c], expected.variance, rtol=0, atol=1e-9)
        torch.testing.assert_close(joint.covariance_matrix[c], expected.covariance_matrix, rtol=0, atol=1e-9)
    torch.testing.assert_close(joint.mean.mT, posterior.mean, rtol=0, atol=1e-9)
    off_diagonal = posterior.covariance - torch.diag_embed(posterior.covariance.diagonal(dim1=1, dim2=2))
    assert (off_diagonal == 0).all()
    if normalize == "cosine":
        far = gp.logit_posterior(1e6 * X_test).covariance
        assert far.max() <= scale.detach()  # the prior variance, whatever the length of the gradients


def test_a_test_point_without_a_direction_is_named_by_its_number(trajectory, monkeypatch):
    gp = process(trajectory)
    original = PathKernel.diagonal_blocks
    monkeypatch.setattr(
        PathKernel, "diagonal_blocks", lambda k, a, o: original(k, a, o) * (a.X[:, :1, None] != 7.0).double()
    )
    X = torch.ones(9, D, dtype=torch.float64)
    X[7, 0] = 7.0
    with pytest.raises(ValueError, match=r"needs k\(x, x\) > 0 at every point: got 0 at point 7,"):
        gp.logit_posterior(X, block_size=3)


class LargeStorages(TorchDispatchMode):
    """The most storages of at least some bytes that were alive at once, and the largest."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes, self.alive, self.most, self.largest = num_bytes, [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            self.largest = max(self.largest, storage.nbytes())
            if storage.nbytes() >= self.num_bytes and all(ref.cdata != storage._weak_ref() for ref in self.alive):
                self.alive.append(StorageWeakRef(storage))
        self.alive = [ref for ref in self.alive if not ref.expired()]
        self.most = max(self.most, len(self.alive))
        return found


@contextmanager
def large_matrices(N):
    with LargeStorages(8 * N * N) as count:
        yield count
    assert count.largest == 8 * N * N  # one matrix, not one for each output


def test_conditioning_holds_few_matrices_at_once(monkeypatch):
    """Counted: those of N x N numbers that are made; the factorisations' own workspaces are LAPACK's."""
    N = 150
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 8)  # what is made of some rows at a time
    monkeypatch.setattr("epk_gp.kernels.values._ROWS", 8)
    run = make_other_run(points=N)
    gp = LogitGP(run, "trace", "zero", "labels", normalize="cosine")
    X = torch.randn(20, D, dtype=torch.float64)
    gp.logit_posterior(X[:1])  # makes the plan
    gp.kernel.config.cache.clear()
    with large_matrices(N) as fit:
        gp.fit(steps=2)
    with large_matrices(N) as predict:
        gp.logit_posterior(X)
    with large_matrices(N) as left_out:
        leave_one_out(gp)
    assert fit.most == 3  # the cached Gram matrix, its copy, eigenvectors
    assert predict.most == left_out.most == 2  # beside the cached one: its copy and the factor; factor and inverse
    with LargeStorages(8 * N * N) as count:
        LogitGP(run, "independent", "zero", "labels").fit(steps=1)
    assert count.largest >= 3 * 8 * N * N  # the negative control
