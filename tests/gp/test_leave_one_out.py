"""Leave-one-out predictions against GPs that really lack the point; temperatures; samples of whole functions."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp import sample_functions as functions
from epk_gp.gp.calibration import calibrated_temperature
from epk_gp.gp.leave_one_out import leave_one_out
from epk_gp.gp.posterior import LogitPosterior, joint_posterior_at
from epk_gp.gp.sample_functions import sample_functions
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import make_case

C = 3
OPTIONS = {
    "full": {"outputs": "full"},
    "independent": {"outputs": "independent"},
    "dirichlet": {"outputs": "full", "targets": "dirichlet"},
    "dirichlet_independent": {"outputs": "independent", "targets": "dirichlet"},
    "known_noise": {"outputs": "full", "noise": torch.linspace(0.01, 0.3, 21, dtype=torch.float64).view(7, 3)},
    "known_noise_independent": {
        "outputs": "independent",
        "noise": torch.linspace(0.01, 0.3, 21, dtype=torch.float64).view(7, 3),
    },
}


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=3, batch_size=None)


@pytest.mark.parametrize("name", OPTIONS)
def test_leaving_one_out_is_conditioning_on_the_others(case, name):
    options = OPTIONS[name]
    gp = epk.LogitGP(case.trajectory, **options)
    found = leave_one_out(gp)
    noise = gp.likelihood.noise
    for i in (0, 3, 6):
        others = [j for j in range(7) if j != i]
        without = {key: value[others] if key == "noise" else value for key, value in options.items()}
        peer = epk.LogitGP(case.trajectory, points=others, **without)
        with torch.no_grad():  # a test point that is a training copy: the GP's own, without its target
            x = train_copy(case.trajectory.inputs[i : i + 1])
            mean, joint = joint_posterior_at(peer.factorization(), peer.prior_mean, x)
        covariance = joint[0] if gp.kernel.source.reduction == "full" else torch.diag(joint[:, 0, 0])
        torch.testing.assert_close(found.posterior.mean[i], mean.reshape(-1), rtol=0, atol=1e-9)
        torch.testing.assert_close(found.posterior.covariance[i], covariance, rtol=0, atol=1e-9)
        y = gp.train_targets[i] if gp.kernel.source.reduction == "full" else gp.train_targets[:, i]
        own = noise.reshape(-1, C)[i if len(noise.reshape(-1, C)) > 1 else 0] if noise.numel() == 21 else noise.mean()
        if name.endswith("independent") and noise.numel() == 21:
            own = noise[:, i]
        noisy = covariance + torch.diag(own.expand(C))
        density = torch.distributions.MultivariateNormal(mean.reshape(-1), noisy)
        assert found.log_density[i].item() == pytest.approx(density.log_prob(y).item(), abs=1e-8)
        torch.testing.assert_close(found.standardized[i], (y - mean.reshape(-1)) / noisy.diagonal().sqrt())


def test_predictions_with_the_point_are_better_than_without(case):
    """The control: the residual of a GP that has seen the point is much smaller."""
    gp = epk.LogitGP(case.trajectory)
    x = gp.train_inputs[0]
    with torch.no_grad():
        mean, _ = joint_posterior_at(gp.factorization(), gp.prior_mean, x)
    seen = (gp.train_targets - mean.reshape(-1, C)).square().mean()
    assert seen < 0.3 * leave_one_out(gp).residual.square().mean()


def test_one_point_cannot_be_left_out(case):
    with pytest.raises(ValueError, match="needs at least 2: the GP is conditioned on 1"):
        leave_one_out(epk.LogitGP(case.trajectory, points=[0]))


def test_known_noise_stays_and_bad_noise_is_refused(case, unchecked):
    noise = torch.rand(7, C, dtype=torch.float64) + 0.1
    gp = epk.LogitGP(case.trajectory, noise=noise)
    assert gp.fit(steps=5)[-1] < gp.fit(steps=1)[0] + 1
    assert torch.equal(gp.likelihood.noise, noise)
    assert not any("noise" in name for name, _ in gp.named_parameters())
    with pytest.raises(ValueError, match=r"one variance per point and output \(7, 3\): got shape \(3, 7\)"):
        epk.LogitGP(case.trajectory, noise=noise.mT)
    with pytest.raises(ValueError, match="must be positive and finite: got -1"):
        epk.LogitGP(case.trajectory, noise=-torch.ones(7, C))
    with pytest.raises(ValueError, match="must not be given with targets='dirichlet'"):
        epk.LogitGP(case.trajectory, targets="dirichlet", noise=noise)


# Temperature


def labelled(temperature, generator, n=4000):
    """Logits z, and labels drawn from softmax(z / temperature)."""
    mean = 3 * torch.randn(n, C, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(mean / temperature, -1), 1, generator=generator)[:, 0]
    return LogitPosterior(mean, torch.zeros(n, C, C, dtype=torch.float64)), labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_of_labels_is_found(temperature, generator):
    posterior, labels = labelled(temperature, generator)
    found = calibrated_temperature(posterior, labels, 2)
    assert found.value == pytest.approx(temperature, rel=0.1)
    assert found.after <= found.before
    shuffled = calibrated_temperature(posterior, labels.roll(1), 2) if temperature == 3.0 else None  # the control
    assert shuffled is None or shuffled.value > 10 * temperature


def test_the_loss_is_the_negative_log_of_the_expected_probability(generator):
    posterior, labels = labelled(1.0, generator, n=50)
    A = torch.randn(50, C, C, generator=generator, dtype=torch.float64)
    posterior = LogitPosterior(posterior.mean, 0.3 * A @ A.mT)
    found = calibrated_temperature(posterior, labels, 512, torch.Generator().manual_seed(3))
    for T, loss in ((1.0, found.before), (found.value, found.after)):
        u = epk.softmax_uncertainty(posterior, 512, torch.Generator().manual_seed(3), temperature=T)
        p = u.mean.gather(1, labels[:, None])[:, 0]
        assert loss == pytest.approx(-float(p.log().mean()), abs=1e-10)


def test_labels_that_leave_the_temperature_open_are_refused(generator):
    posterior, labels = labelled(1.0, generator, n=20)
    with pytest.raises(ValueError, match="grows to the end of the range"):
        calibrated_temperature(posterior, posterior.mean.argmax(-1))
    with pytest.raises(ValueError, match=r"one entry per point: got shape \(19,\) for 20"):
        calibrated_temperature(posterior, labels[:-1])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
        calibrated_temperature(posterior, labels + 1)


# Functions


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_sampled_functions_have_the_joint_posteriors_moments(case, outputs, generator):
    gp = epk.LogitGP(case.trajectory, outputs)
    X = torch.cat([case.test, case.test[:1] + 1e-3])  # two neighbours, and rank that is lost almost
    draws = sample_functions(gp, X, 20_000, generator)
    assert draws.shape == (20_000, 6, C)
    with torch.no_grad():
        mean, covariance = joint_posterior_at(gp.factorization(), gp.prior_mean, test_copy(X))
    rows = draws.reshape(20_000, 1, -1) if outputs == "full" else draws.permute(0, 2, 1)
    scale = covariance.abs().max()
    torch.testing.assert_close(rows.mean(0), mean, rtol=0, atol=float(5 * (scale / 20_000).sqrt()))
    for k in range(len(mean)):
        error = (rows[:, k].mT.cov() - covariance[k]).abs().max()
        assert error < 0.05 * scale
    near = (draws[:, 0] - draws[:, -1]).std(0)
    far = (draws[:, 0] - draws[:, 1]).std(0)
    assert (near < 0.05 * far).all()  # one function: independent draws per point (the control) would not be near
    assert (draws[1:, 0] - draws[:-1, -1]).std(0).min() > 5 * near.max()


def test_the_joint_posterior_holds_the_posterior_of_each_point(case):
    for outputs in ("full", "independent"):
        gp = epk.LogitGP(case.trajectory, outputs)
        with torch.no_grad():
            mean, joint = joint_posterior_at(gp.factorization(), gp.prior_mean, test_copy(case.test))
        posterior = gp.logit_posterior(case.test)
        if outputs == "full":
            own = joint[0].reshape(5, C, 5, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            mean = mean.reshape(5, C)
        else:
            own, mean = torch.diag_embed(joint.diagonal(dim1=1, dim2=2).mT), mean.mT
        torch.testing.assert_close(mean, posterior.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(own, posterior.covariance, rtol=0, atol=1e-12)


def test_samples_of_functions_refuse_what_they_cannot_draw(case, monkeypatch):
    gp = epk.LogitGP(case.trajectory)
    with pytest.raises(ValueError, match="num_samples must be at least 1: got 0"):
        sample_functions(gp, case.test, 0)
    monkeypatch.setattr(functions, "MAX_ROWS", 14)
    with pytest.raises(ValueError, match="at most 14 rows: got 5 points with 3 outputs each"):
        sample_functions(gp, case.test)
