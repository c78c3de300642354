"""Transformed class labels as regression targets."""

import pytest
import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood

from epk_gp.core.losses import MeanSquaredError
from epk_gp.gp.models import LogitGP
from epk_gp.gp.targets import dirichlet_targets
from gp_cases import N_TEST, C, D, make_net, make_run


def test_dirichlet_targets_are_gpytorchs():
    labels = torch.tensor([0, 2, 1, 2])
    expected = DirichletClassificationLikelihood(labels, alpha_epsilon=0.02, dtype=torch.float64)
    y, noise = dirichlet_targets(labels, 3, alpha_epsilon=0.02)
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
    with pytest.raises(ValueError, match="alpha_epsilon must be positive"):
        dirichlet_targets(torch.tensor([0]), 3, alpha_epsilon=0.0)
    X = torch.randn(5, D, dtype=torch.float64)
    regression = make_run(make_net(), X, torch.randn(5, C, dtype=torch.float64), MeanSquaredError())
    with pytest.raises(ValueError, match=r"needs class labels, .* torch.float64 targets of shape \(5, 3\)"):
        LogitGP(regression, targets="dirichlet")
    assert LogitGP(regression).train_targets.shape == (5, C)
