"""Known noise per point and output."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.utils.warnings import GPInputWarning

from epk_gp.gp.output_coupling import MultitaskFixedNoiseGaussianLikelihood
from gp_cases import C


@pytest.mark.parametrize("interleaved", [True, False])
def test_fixed_noise_reaches_a_multitask_normal(interleaved):
    noise = torch.rand(4, C, dtype=torch.float64) + 0.1
    K = torch.eye(4 * C, dtype=torch.float64)
    latent = MultitaskMultivariateNormal(torch.zeros(4, C, dtype=torch.float64), K, interleaved=interleaved)
    noisy = MultitaskFixedNoiseGaussianLikelihood(noise)(latent)
    assert torch.equal(noisy.variance, 1 + noise)
    torch.testing.assert_close(
        noisy.covariance_matrix - torch.diag(noisy.covariance_matrix.diagonal()), torch.zeros_like(K)
    )
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


def test_fixed_noise_refuses_points_it_does_not_know():
    likelihood = MultitaskFixedNoiseGaussianLikelihood(torch.ones(4, C))
    latent = MultitaskMultivariateNormal(torch.zeros(2, C), torch.eye(2 * C))
    with pytest.raises(ValueError, match=r"known of \(4, 3\) points and classes only: got points of shape \(2, 3\)"):
        likelihood(latent)
