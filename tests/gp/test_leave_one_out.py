"""Leave-one-out predictions against processes that are not conditioned on the point."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp.regression import leave_one_out
from epk_gp.kernels.tagging import train_copy
from gp_cases import C

OPTIONS = {
    "full": {"outputs": "full"},
    "independent": {"outputs": "independent"},
    "dirichlet": {"outputs": "full", "targets": "dirichlet"},
    "dirichlet_independent": {"outputs": "independent", "targets": "dirichlet"},
}


def noise_of(gp, point):
    """The noise variances of a point's targets: known for each, or learned, and alike at the start."""
    noise = gp.likelihood.noise
    if noise.numel() < 7 * C:
        return noise.mean().expand(C)
    return noise[point] if gp.kernel.outputs == "full" else noise[:, point]


@pytest.mark.parametrize("name", OPTIONS)
def test_leaving_one_out_is_conditioning_on_the_others(case, name):
    options = OPTIONS[name]
    gp = epk.LogitGP(case.trajectory, **options)
    loo = leave_one_out(gp)
    for i in (0, 3, 6):
        others = [j for j in range(7) if j != i]
        peer = epk.LogitGP(case.trajectory, points=others, **options)
        expected = peer.posterior_at(train_copy(case.trajectory.inputs[i : i + 1]))  # the copy that was left out
        mean, covariance = expected.mean[0], expected.covariance[0]
        torch.testing.assert_close(loo.posterior.mean[i], mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(loo.posterior.covariance[i], covariance, rtol=0, atol=1e-9)
        y = gp.train_targets[i] if gp.kernel.outputs == "full" else gp.train_targets[:, i]
        noisy = covariance + torch.diag(noise_of(gp, i))
        density = torch.distributions.MultivariateNormal(mean, noisy)
        assert loo.log_density[i].item() == pytest.approx(density.log_prob(y).item(), abs=1e-8)
        torch.testing.assert_close(loo.standardized[i], (y - mean) / noisy.diagonal().sqrt())


def test_predictions_with_the_point_are_better_than_without(case):
    """The negative control: the residual of a GP that has seen the point is much smaller."""
    gp = epk.LogitGP(case.trajectory)
    mean = gp.posterior_at(gp.train_inputs[0]).mean
    seen = (gp.train_targets - mean).square().mean()
    assert seen < 0.3 * leave_one_out(gp).residual.square().mean()


def test_one_point_cannot_be_left_out(case):
    with pytest.raises(ValueError, match="needs at least 2: the GP is conditioned on 1"):
        leave_one_out(epk.LogitGP(case.trajectory, points=[0]))
