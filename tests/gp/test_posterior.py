"""The posterior against GPyTorch's own prediction, the textbook's equations, and the wrong models."""

import itertools

import gpytorch
import pytest
import torch

import reference
from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.data import dirichlet_targets
from epk_gp.gp.models import LogitGP
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.gram.path_kernel import gram_block
from epk_gp.kernels.tagging import test_copy
from epk_gp.quadrature.rules import gauss_legendre, left_endpoint
from gp_cases import MEANS, N_TEST, OUTPUTS, TARGETS, C, D, M, make_net, make_run, per_point, with_hyperparameters

BRUTE_FORCE = [("full", "initial", "network"), ("independent", "zero", "dirichlet")]  # by loops over `autograd.grad`


CASES = [
    *itertools.product(OUTPUTS, MEANS, TARGETS),
    *itertools.product([*OUTPUTS, "trace"], ["zero", "initial"], ["labels"]),
]


@pytest.mark.parametrize("normalize", ["mean_diagonal", "cosine"])
@pytest.mark.parametrize(("outputs", "mean", "targets"), CASES)
def test_the_posterior_is_gpytorchs_own(trajectory, X_test, outputs, mean, targets, normalize, monkeypatch):
    """Noise learned, and that of Dirichlet targets. Sums in another order round."""
    gp = with_hyperparameters(LogitGP(trajectory, outputs, mean, targets, noise=0.03, normalize=normalize))
    monkeypatch.setattr("epk_gp.gp.models.posterior_points", lambda *_: 4)
    posterior = gp.logit_posterior(X_test)
    if outputs == "trace":
        assert gp.covar_module.outputscale.numel() == gp.likelihood.noise.numel() == 1
    with torch.no_grad():
        expected_mean, expected_covariance = per_point(gp(test_copy(X_test)), outputs)
    torch.testing.assert_close(posterior.mean, expected_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.covariance, expected_covariance, rtol=0, atol=1e-12)


def prior_at(gp, trajectory, X, mean):
    if mean == "zero":
        return torch.zeros(len(X), C, dtype=torch.float64)
    if mean == "constant":
        constants = [p.detach().reshape(-1) for p in gp.mean_module.parameters()]
        return torch.cat(constants).expand(len(X), C)
    return network_outputs(trajectory, X, state=0 if mean == "initial" else -1)


@pytest.mark.parametrize(("outputs", "mean", "targets"), list(itertools.product(OUTPUTS, MEANS, TARGETS)))
def test_the_posterior_is_the_textbooks(trajectory, X_test, outputs, mean, targets):
    """Equations (2.25) and (2.26) of Rasmussen & Williams (2006) with an explicit inverse."""
    gp = with_hyperparameters(LogitGP(trajectory, outputs, mean, targets, noise=0.03))
    posterior = gp.logit_posterior(X_test)

    A, B = Points(trajectory.inputs, True), Points(X_test, False)
    block = reference.gram_block if (outputs, mean, targets) in BRUTE_FORCE else gram_block
    raw = [block(trajectory, *pair, head="logits", rule=gauss_legendre(4)) for pair in ((A, A), (B, A), (B, B))]
    mean_diagonal = torch.einsum("ncnc->nc", raw[0]).mean()
    scale = gp.covar_module.outputscale.detach().expand(C)
    weight = (scale[:, None] * scale[None, :]).sqrt() / mean_diagonal
    if outputs == "independent":
        weight = torch.diag(weight.diagonal())
    own, cross, new = (value * weight[:, None, :] for value in raw)
    if targets == "network":
        y = network_outputs(trajectory, trajectory.inputs, state=-1)
        noise = gp.likelihood.noise.detach().reshape(-1).expand(M, C)
    else:
        y, noise = dirichlet_targets(trajectory.targets, C)
    inverse = torch.linalg.inv(own.reshape(M * C, M * C) + torch.diag(noise.reshape(-1)))
    cross = cross.reshape(N_TEST * C, M * C)
    residual = (y - prior_at(gp, trajectory, trajectory.inputs, mean)).reshape(-1)
    expected_mean = prior_at(gp, trajectory, X_test, mean) + (cross @ inverse @ residual).reshape(N_TEST, C)
    joint = (new.reshape(N_TEST * C, -1) - cross @ inverse @ cross.mT).reshape(N_TEST, C, N_TEST, C)
    i = torch.arange(N_TEST)
    torch.testing.assert_close(posterior.mean, expected_mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.covariance, joint[i, :, i, :], rtol=0, atol=1e-9)


@pytest.mark.parametrize("noise", [1e-2, 1.1e-6])
def test_the_eigenvalue_tolerance_bounds_the_rounding_of_a_direction_without_variance(noise):
    """One step at its left end: log-softmax gradients weighted by the probabilities add up to zero."""
    X = torch.randn(30, D, dtype=torch.float64)
    run = make_run(make_net(), X, torch.arange(30) % C, steps=1)
    gp = LogitGP(run, head="log_softmax", rule=left_endpoint(), noise=noise)
    posterior = gp.logit_posterior(torch.cat([X, 3 * torch.randn(30, D, dtype=torch.float64)]))
    lowest = torch.linalg.eigvalsh(posterior.covariance)[:, 0]
    assert lowest.abs().max() < posterior.eigenvalue_tolerance < 1e-12
    assert lowest.min() < 0  # or the bound is not tested
    assert softmax_uncertainty(posterior).max_clipped_eigenvalue == pytest.approx(-float(lowest.min()))


def test_the_network_as_mean_and_target_is_the_posterior_mean(trajectory, X_test):
    gp = LogitGP(trajectory, mean="network")
    posterior = gp.logit_posterior(X_test)
    assert torch.equal(posterior.mean, network_outputs(trajectory, X_test, state=-1))
    with pytest.raises(ValueError, match=r"there must be a residual to fit: .* Fit LogitGP\(mean='initial'\)"):
        gp.fit()
    fitted = LogitGP(trajectory)
    fitted.fit(steps=3)
    gp.covar_module.load_state_dict(fitted.covar_module.state_dict())  # the recipe of the docstring
    gp.likelihood.load_state_dict(fitted.likelihood.state_dict())
    fixed, free = gp.logit_posterior(X_test), fitted.logit_posterior(X_test)
    torch.testing.assert_close(fixed.covariance, free.covariance, rtol=0, atol=1e-12)
    assert (fixed.mean - free.mean).abs().max() > 1e-6  # the posterior mean of a GP is not the network


def test_a_covariance_that_is_not_positive_definite_is_refused_without_jitter(trajectory):
    gp = LogitGP(trajectory)
    gp.likelihood.raw_noise_constraint = gpytorch.constraints.GreaterThan(-1.0)
    gp.likelihood.noise = torch.tensor([-0.5], dtype=torch.float64)
    with pytest.raises(ValueError, match="must be positive definite: its smallest eigenvalue is -0.5"):
        gp.fit()
    with pytest.raises(ValueError, match=r"definite in torch.float64: Cholesky stopped at row \d+ of 27\. Raise"):
        gp.logit_posterior(trajectory.inputs)
