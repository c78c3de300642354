"""Samples of standard normals and of whole functions have the moments they should."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp import sampling
from epk_gp.gp.posterior import joint_posterior_at
from epk_gp.gp.sampling import MonteCarlo, QuasiMonteCarlo, sample_functions
from epk_gp.kernels.tagging import test_copy
from gp_cases import C


def test_sobol_normals_have_the_moments_of_normals(generator):
    reference = torch.zeros((), dtype=torch.float64)
    eps = QuasiMonteCarlo(4).standard_normals(4 * 4096, 3, generator, reference)
    assert eps.shape == (4 * 4096, 3)
    assert torch.isfinite(eps).all()
    torch.testing.assert_close(eps.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(eps.mT.cov(), torch.eye(3, dtype=torch.float64), rtol=0, atol=5e-3)
    one, again = (
        QuasiMonteCarlo(4).standard_normals(4 * 4096, 3, torch.Generator().manual_seed(0), reference) for _ in range(2)
    )
    assert torch.equal(one, again)
    groups = QuasiMonteCarlo(4).standard_error(eps)
    assert (groups < 0.2 * MonteCarlo().standard_error(eps)).all()


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_sampled_functions_have_the_joint_posteriors_moments(case, outputs, generator):
    gp = epk.LogitGP(case.trajectory, outputs)
    X = torch.cat([case.test, case.test[:1] + 1e-3])  # two neighbours, and rank that is lost almost
    samples = sample_functions(gp, X, 20_000, generator)
    assert samples.shape == (20_000, 6, C)
    with torch.no_grad():
        mean, covariance = joint_posterior_at(gp.factorization(), gp.prior_mean, test_copy(X))
    rows = samples.reshape(20_000, 1, -1) if outputs == "full" else samples.permute(0, 2, 1)
    scale = covariance.abs().max()
    torch.testing.assert_close(rows.mean(0), mean, rtol=0, atol=float(5 * (scale / 20_000).sqrt()))
    for k in range(len(mean)):
        error = (rows[:, k].mT.cov() - covariance[k]).abs().max()
        assert error < 0.05 * scale
    near = (samples[:, 0] - samples[:, -1]).std(0)
    far = (samples[:, 0] - samples[:, 1]).std(0)
    assert (near < 0.05 * far).all()  # values of one function
    far_samples = (samples[1:, 0] - samples[:-1, -1]).std(0)  # negative control: values of different samples
    assert far_samples.min() > 5 * near.max()


def test_the_joint_posterior_holds_the_posterior_of_each_point(case):
    for outputs in ("full", "independent"):
        gp = epk.LogitGP(case.trajectory, outputs)
        with torch.no_grad():
            mean, joint = joint_posterior_at(gp.factorization(), gp.prior_mean, test_copy(case.test))
        posterior = gp.logit_posterior(case.test)
        if outputs == "full":
            covariance = joint[0].reshape(5, C, 5, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            mean = mean.reshape(5, C)
        else:
            covariance, mean = torch.diag_embed(joint.diagonal(dim1=1, dim2=2).mT), mean.mT
        torch.testing.assert_close(mean, posterior.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(covariance, posterior.covariance, rtol=0, atol=1e-12)


def test_samples_of_functions_that_are_too_many_are_refused(case, monkeypatch):
    gp = epk.LogitGP(case.trajectory)
    with pytest.raises(ValueError, match="num_samples must be at least 1: got 0"):
        sample_functions(gp, case.test, 0)
    monkeypatch.setattr(sampling, "MAX_ROWS", 14)
    with pytest.raises(ValueError, match="at most 14 rows: got 5 points with 3 outputs each"):
        sample_functions(gp, case.test)
