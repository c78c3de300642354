"""Class labels as regression targets, transformed or as they are, and their known noise."""

from dataclasses import replace

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood
from gpytorch.utils.warnings import GPInputWarning
from torch import nn

from epk_gp.core.losses import MeanSquaredError
from epk_gp.gp.data import dirichlet_targets, label_values
from epk_gp.gp.models import LogitGP
from epk_gp.gp.output_coupling import MultitaskFixedNoiseGaussianLikelihood
from gp_cases import N_TEST, C, D, M, make_net, make_run


def test_dirichlet_targets_are_gpytorchs():
    labels = torch.tensor([0, 2, 1, 2])
    expected = DirichletClassificationLikelihood(labels, dtype=torch.float64)
    y, noise = dirichlet_targets(labels, 3)
    torch.testing.assert_close(y, expected.transformed_targets.mT, rtol=1e-14, atol=0)
    torch.testing.assert_close(noise, expected.noise.mT, rtol=1e-14, atol=0)


def test_dirichlet_targets_know_a_class_without_a_point(trajectory, X_test):
    labels = torch.tensor([0, 1, 1])
    y, noise = dirichlet_targets(labels, 3)
    assert y.shape == noise.shape == (3, 3)
    assert DirichletClassificationLikelihood(labels).num_classes == 2  # the negative control: GPyTorch misses it
    gp = LogitGP(trajectory, targets="dirichlet", points=(trajectory.targets < 2).nonzero()[:, 0])
    assert gp.logit_posterior(X_test).mean.shape == (N_TEST, C)


def test_dirichlet_targets_need_labels():
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2: got -1\.\.2"):
        dirichlet_targets(torch.tensor([-1, 2]), 3)
    X = torch.randn(5, D, dtype=torch.float64)
    regression = make_run(make_net(), X, torch.randn(5, C, dtype=torch.float64), MeanSquaredError())
    with pytest.raises(ValueError, match=r"needs class labels: .* torch.float64, \(5, 3\)"):
        LogitGP(regression, targets="dirichlet")
    assert LogitGP(regression).train_targets.shape == (5, C)


def test_labels_are_one_hot_and_centred(trajectory):
    gp = LogitGP(trajectory, "trace", "zero", "labels", points=[0, 4, 7])
    y = gp.coupling.from_rows(gp.target_rows())
    assert torch.equal(y + gp.target_mean, torch.eye(C, dtype=torch.float64)[trajectory.targets[[0, 4, 7]]])
    assert torch.equal(gp.target_mean, torch.full((C,), 1 / C, dtype=torch.float64))
    assert y.sum(1).abs().max() < 1e-15
    assert torch.equal(LogitGP(trajectory).target_mean, torch.zeros(C, dtype=torch.float64))


def test_the_targets_of_a_regression_are_its_own_minus_their_mean():
    X, Y = torch.randn(5, D, dtype=torch.float64), torch.randn(5, C, dtype=torch.float64)
    run = make_run(make_net(), X, Y, MeanSquaredError())
    for outputs in ("trace", "full", "independent"):
        gp = LogitGP(run, outputs, "zero", "labels", points=[1, 2, 4])
        assert torch.equal(gp.target_mean, Y[[1, 2, 4]].mean(0))
        y = gp.coupling.from_rows(gp.target_rows())
        torch.testing.assert_close(y + gp.target_mean, Y[[1, 2, 4]], rtol=0, atol=1e-15)
    one = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    scalar = make_run(one, X, Y[:, 0], MeanSquaredError())
    values, mean = label_values(scalar, torch.arange(5))
    assert torch.equal(values, Y[:, :1])
    assert torch.equal(mean, Y[:, :1].mean(0))


def test_targets_that_are_no_labels_are_refused(trajectory):
    for targets in (torch.zeros(M, 4).long(), torch.zeros(M, C).long(), torch.zeros(M, 2).double()):
        with pytest.raises(ValueError, match=r"one class label per point, or a real number for each of the 3 outputs:"):
            label_values(replace(trajectory, targets=targets), torch.arange(M))


@pytest.mark.parametrize("interleaved", [True, False])
def test_fixed_noise_reaches_a_multitask_normal(interleaved):
    noise = torch.rand(4, C, dtype=torch.float64) + 0.1
    K = torch.eye(4 * C, dtype=torch.float64)
    latent = MultitaskMultivariateNormal(torch.zeros(4, C, dtype=torch.float64), K, interleaved=interleaved)
    noisy = MultitaskFixedNoiseGaussianLikelihood(noise)(latent)
    assert torch.equal(noisy.variance, 1 + noise)
    assert torch.equal(noisy.covariance_matrix, torch.diag(noisy.covariance_matrix.diagonal()))
    with pytest.warns(GPInputWarning):  # the negative control: GPyTorch's own adds nothing
        assert torch.equal(FixedNoiseGaussianLikelihood(noise.reshape(-1))(latent).variance, latent.variance)


def test_fixed_noise_serves_samples_and_expectations():
    noise = torch.rand(4, C, dtype=torch.float64) + 0.1
    likelihood = MultitaskFixedNoiseGaussianLikelihood(noise)
    f = torch.randn(4, C, dtype=torch.float64)
    assert torch.equal(likelihood(f).variance, noise.sqrt() ** 2)
    latent = MultitaskMultivariateNormal(f, 0.3 * torch.eye(4 * C, dtype=torch.float64))
    expected = (torch.distributions.Normal(f, noise.sqrt()).log_prob(f + 1) - 0.3 / (2 * noise)).sum(-1)
    torch.testing.assert_close(likelihood.expected_log_prob(f + 1, latent), expected)
    with pytest.raises(ValueError, match=r"known of \(4, 3\) points and classes only: got points of shape \(2, 3\)"):
        likelihood(MultitaskMultivariateNormal(f[:2], torch.eye(2 * C).double()))
