"""Leave-one-out predictions against processes that are not conditioned on the point."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp.regression import leave_one_out
from epk_gp.kernels.tagging import train_copy

OPTIONS = {
    "full": {"outputs": "full"},
    "independent": {"outputs": "independent"},
    "trace": {"outputs": "trace", "mean": "zero", "targets": "labels", "normalize": "cosine"},
    "dirichlet": {"outputs": "full", "targets": "dirichlet"},
    "dirichlet_independent": {"outputs": "independent", "targets": "dirichlet"},
}


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
        moving = peer.logit_posterior(case.trajectory.inputs[i : i + 1]).mean[0]
        assert (moving - mean).abs().max() > 1e-6  # the negative control: a test copy
        torch.testing.assert_close(loo.posterior.mean[i], mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(loo.posterior.covariance[i], covariance, rtol=0, atol=1e-9)
        y, noise = gp.coupling.from_rows(gp.target_rows())[i], gp.coupling.from_rows(gp.noise_rows())[i]
        noisy = covariance + torch.diag(noise.detach())
        density = torch.distributions.MultivariateNormal(mean, noisy)
        assert loo.log_density[i].item() == pytest.approx(density.log_prob(y).item(), abs=1e-8)
        torch.testing.assert_close(loo.residual[i], y - mean)


def test_one_point_cannot_be_left_out(case):
    with pytest.raises(ValueError, match="needs at least 2: the GP is conditioned on 1"):
        leave_one_out(epk.LogitGP(case.trajectory, points=[0]))
