"""Regression on a run's own targets in their units, and each point predicted from all others."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.gp.regression import leave_one_out, leave_one_out_targets, predict_targets
from epk_gp.kernels.tagging import test_copy, train_copy
from gp_cases import D, make_run
from helpers import make_case

MSE = epk.MeanSquaredError()
ROWS = 12


def regression_run(num_outputs=1, **options):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, D, dtype=torch.float64, generator=generator)
    y = 3 + X.sin().sum(1, keepdim=True) * torch.arange(1, num_outputs + 1)
    y = y + 0.1 * torch.randn(y.shape, dtype=torch.float64, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, num_outputs)).double()
    return make_run(net, X, y, loss=MSE, **options)


@pytest.fixture(scope="module")
def run():
    return regression_run()


@pytest.fixture(scope="module")
def two_outputs():
    return regression_run(2)


def conditioned(run, outputs="full", mean="constant", **options):
    return epk.LogitGP(run, outputs, mean, "labels", **options)


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_the_process_is_gpytorchs_on_the_targets_with_its_noise_added(two_outputs, outputs):
    gp = conditioned(two_outputs, outputs)
    gp.likelihood.noise = torch.full_like(gp.likelihood.noise, 0.3)
    X = torch.randn(4, D, dtype=torch.float64)
    found = predict_targets(gp, X)
    with torch.no_grad():
        observed = gp.likelihood(gp(test_copy(X)))
    mean, variance = (v.mT if outputs == "independent" else v for v in (observed.mean, observed.variance))
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.variance, variance, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.variance - found.latent_variance, torch.full((4, 2), 0.3, dtype=torch.float64))


def test_noise_is_learned_from_the_targets_not_from_the_networks_outputs(run):
    """The control: the network's outputs are smooth, and have next to no noise."""
    noise = {}
    for name in ("targets", "outputs"):
        gp = conditioned(run) if name == "targets" else epk.LogitGP(run, mean="constant")
        losses = gp.fit(60, lr=0.2)
        assert losses[-1] < losses[0]
        noise[name] = gp.likelihood.noise.item()
    assert noise["targets"] > 10 * noise["outputs"]


def test_around_the_network_only_what_it_misses_is_learned(run):
    gp = conditioned(run, mean="network")
    residual = run.targets - epk.network_outputs(run, run.inputs)
    torch.testing.assert_close(gp._residual(), residual.mT)
    assert len(gp.fit(2)) == 2  # there is a residual now


@pytest.mark.parametrize("outputs", ["full", "independent", "trace"])
def test_predictions_are_in_the_units_of_the_targets(two_outputs, outputs):
    """What a prior mean of zero needs subtracted is added again; without it, the mean is far off."""
    level = two_outputs.targets.mean(0)
    for mean in ("zero", "constant", "network"):
        gp = conditioned(two_outputs, outputs, mean)
        assert (predict_targets(gp, two_outputs.inputs).mean.mean(0) - level).abs().max() < 0.5
        assert bool(gp.target_mean.any()) == (mean == "zero")
    assert level.min() > 2


def test_intervals_are_quantiles_of_a_normal_distribution(run):
    prediction = predict_targets(conditioned(run), torch.randn(3, D, dtype=torch.float64))
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    lower, upper = prediction.interval(0.8)
    torch.testing.assert_close(normal.cdf(upper) - normal.cdf(lower), torch.full((3, 1), 0.8, dtype=torch.float64))
    torch.testing.assert_close(upper + lower, 2 * prediction.mean)


def test_leaving_one_out_predicts_in_units_with_the_noise(run):
    gp = conditioned(run, mean="zero")
    found, latent = leave_one_out_targets(gp), leave_one_out(gp).posterior
    torch.testing.assert_close(found.mean, latent.mean + run.targets.mean(0))
    torch.testing.assert_close(found.variance, latent.covariance[:, 0] + gp.likelihood.noise.detach())


def test_targets_of_one_output_may_be_flat(run):
    flat = make_run(
        nn.Linear(D, 1).double(), run.inputs, run.targets[:, 0],
        loss=epk.PerSampleLoss(lambda z, y: (z[:, 0] - y) ** 2 / 2), steps=1,
    )  # fmt: skip
    assert flat.targets.shape == (ROWS,)
    assert predict_targets(conditioned(flat), run.inputs[:2]).mean.shape == (2, 1)


def test_what_has_no_prediction_is_refused(run, trajectory):
    with pytest.raises(ValueError, match="must have one noise variance for all points"):
        predict_targets(epk.LogitGP(trajectory, targets="dirichlet"), trajectory.inputs)
    with pytest.raises(ValueError, match="level must lie between 0 and 1: got 1.0"):
        predict_targets(conditioned(run), run.inputs).interval(1.0)
    with pytest.raises(ValueError, match="needs at least 2: the GP is conditioned on 1"):
        leave_one_out(epk.LogitGP(trajectory, points=[0]))


LEFT_OUT = {
    "full": {"outputs": "full"},
    "independent": {"outputs": "independent"},
    "trace": {"outputs": "trace", "mean": "zero", "targets": "labels", "normalize": "cosine"},
    "dirichlet": {"outputs": "full", "targets": "dirichlet"},
    "dirichlet_independent": {"outputs": "independent", "targets": "dirichlet"},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_leaving_one_out_is_conditioning_on_the_others(name):
    options, run = LEFT_OUT[name], make_case("tanh", steps=3, batch_size=None).trajectory
    gp = epk.LogitGP(run, **options)
    loo = leave_one_out(gp)
    for i in (0, 3, 6):
        others = [j for j in range(7) if j != i]
        peer = epk.LogitGP(run, points=others, **options)
        expected = peer.posterior_at(train_copy(run.inputs[i : i + 1]))  # the copy that was left out
        mean, covariance = expected.mean[0], expected.covariance[0]
        moving = peer.logit_posterior(run.inputs[i : i + 1]).mean[0]
        assert (moving - mean).abs().max() > 1e-6  # the negative control: a test copy
        torch.testing.assert_close(loo.posterior.mean[i], mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(loo.posterior.covariance[i], covariance, rtol=0, atol=1e-9)
        y, noise = gp.coupling.from_rows(gp.target_rows())[i], gp.coupling.from_rows(gp.noise_rows())[i]
        noisy = covariance + torch.diag(noise.detach())
        density = torch.distributions.MultivariateNormal(mean, noisy)
        assert loo.log_density[i].item() == pytest.approx(density.log_prob(y).item(), abs=1e-8)
        torch.testing.assert_close(loo.residual[i], y - mean)
