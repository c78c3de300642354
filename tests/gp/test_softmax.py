"""Monte Carlo through the softmax against longer runs, an integral, and exact cases."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import integrate, special, stats
from torch import nn

from epk_gp.core.losses import CrossEntropy, PerSampleLoss, as_loss
from epk_gp.gp import posterior as posteriors
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior, isotropic_softmax_uncertainty, link_of
from epk_gp.gp.regression import leave_one_out
from gp_cases import C, D, make_net, make_run


def make_posterior(n=6, C=4, scale=1.0):
    A = torch.randn(n, C, C, dtype=torch.float64)
    return LogitPosterior(torch.randn(n, C, dtype=torch.float64), scale * A @ A.mT)


def test_two_classes_agree_with_the_logistic_normal_integral(generator):
    """softmax(z)_1 = expit(z_1 - z_2), and the difference is one Gaussian."""
    posterior = make_posterior(n=5, C=2, scale=2.0)
    estimate = posterior.softmax_uncertainty(200_000, generator)
    for i in range(5):
        mu = float(posterior.mean[i, 0] - posterior.mean[i, 1])
        K = posterior.covariance[i]
        sigma = float(K[0, 0] + K[1, 1] - 2 * K[0, 1]) ** 0.5

        def expectation(f, mu=mu, sigma=sigma):
            return integrate.quad(lambda z: f(special.expit(mu + sigma * z)) * stats.norm.pdf(z), -12, 12)[0]

        mean = expectation(lambda p: p)
        assert abs(estimate.mean[i, 0] - mean) < 5 * estimate.standard_error[i, 0]
        assert estimate.std[i, 0] == pytest.approx(expectation(lambda p, mean=mean: (p - mean) ** 2) ** 0.5, abs=3e-3)
        entropy = expectation(lambda p: special.entr(p) + special.entr(1 - p))
        assert estimate.expected_entropy[i] == pytest.approx(entropy, abs=3e-3)
        assert estimate.entropy[i] == pytest.approx(special.entr(mean) + special.entr(1 - mean), abs=3e-3)


def test_quantiles_are_those_of_the_logistic_normal(generator):
    """Two classes: the quantile of expit(d) is expit of the Gaussian's quantile."""
    posterior = make_posterior(n=5, C=2)
    levels = [0.05, 0.5, 0.9]
    u = posterior.softmax_uncertainty(2**17, generator, quantiles=levels)
    assert u.quantiles.shape == (3, 5, 2)
    assert {f"quantile {level:g}" for level in levels} < {name for name, _ in u.to_frame().columns}
    assert posterior.softmax_uncertainty(10).quantiles.shape == (0, 5, 2)
    mu = posterior.mean[:, 0] - posterior.mean[:, 1]
    K = posterior.covariance
    sigma = (K[:, 0, 0] + K[:, 1, 1] - 2 * K[:, 0, 1]).sqrt()
    for level, quantile in zip(levels, u.quantiles, strict=True):
        expected = torch.sigmoid(mu + sigma * float(stats.norm.ppf(level)))
        torch.testing.assert_close(quantile[:, 0], expected, rtol=0, atol=6e-3)


def test_one_logit_goes_through_the_sigmoid(generator):
    """The same numbers as of the logits [0, z] of two classes, with the same draws."""
    posterior = make_posterior(n=5, C=1, scale=3.0)
    mean, variance = posterior.mean[:, 0], posterior.covariance[:, 0, 0]
    with pytest.raises(ValueError, match=r"'sigmoid' for one, the logit of class 1: got 'softmax' for 1\."):
        posterior.softmax_uncertainty()
    zero = torch.zeros(5, 2, 2, dtype=torch.float64)
    zero[:, 1, 1] = variance
    two = LogitPosterior(torch.stack([torch.zeros_like(mean), mean], 1), zero)
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = replace(posterior, link="sigmoid").softmax_uncertainty(64, seeded[0], quantiles=[0.1, 0.9])
    expected = two.softmax_uncertainty(64, seeded[1], quantiles=[0.1, 0.9])
    for name in ("mean", "std", "entropy", "expected_entropy", "mutual_information", "quantiles"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-14)


def test_the_runs_loss_says_what_makes_probabilities():
    binary = PerSampleLoss(nn.functional.binary_cross_entropy_with_logits)
    weighted = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))
    for link, losses in {
        "softmax": (CrossEntropy(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), nn.NLLLoss()),
        "sigmoid": (nn.BCEWithLogitsLoss(), weighted, binary, nn.SoftMarginLoss()),
        None: (nn.BCELoss(), nn.MSELoss(), PerSampleLoss(lambda z, y: (z[:, 0] - y).abs()), None),
    }.items():
        for loss in losses:
            assert link_of(SimpleNamespace(loss=as_loss(loss))) == link, loss


def test_a_process_of_a_network_with_one_logit_has_probabilities_of_two_classes(generator):
    X = torch.randn(12, D, dtype=torch.float64)
    y = (X[:, :1] > 0).double()
    net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    gp = LogitGP(make_run(net, X, y, loss=nn.BCEWithLogitsLoss(), steps=30))
    for posterior in (gp.logit_posterior(3 * X), leave_one_out(gp).posterior):
        u = posterior.softmax_uncertainty(20_000, generator)
        z = posterior.mean[:, 0] + posterior.covariance[:, 0, 0].sqrt() * torch.randn(20_000, 12, dtype=torch.float64)
        assert ((u.mean[:, 1] - z.sigmoid().mean(0)).abs() < 1e-12 + 7 * u.standard_error[:, 1]).all()
        assert u.std.min() > 0
    values = LogitGP(make_run(net, X, y, loss=nn.MSELoss())).logit_posterior(X)
    labels = LogitGP(make_run(make_net(), X, torch.rand(12, C).round().double(), loss=nn.BCEWithLogitsLoss()))
    of_labels = labels.logit_posterior(X)
    for posterior, got in ((values, "'softmax' for 1"), (of_labels, "'sigmoid' for 3"), (values, "'probit' for 1")):
        with pytest.raises(ValueError, match=f"link must be 'softmax' for .* got {got}\\. Take one of several labels"):
            posterior.softmax_uncertainty(link="probit" if "probit" in got else None)
    one = replace(of_labels, mean=of_labels.mean[:, [1]], covariance=of_labels.covariance[:, [1]][:, :, [1]])
    assert one.softmax_uncertainty().mean.shape == (12, 2)  # the cure of several labels


def test_no_variance_gives_the_softmax_exactly():
    mean = torch.randn(5, 3, dtype=torch.float64)
    u = LogitPosterior(mean, torch.zeros(5, 3, 3, dtype=torch.float64)).softmax_uncertainty(100)
    p = torch.softmax(mean, dim=-1)
    assert torch.equal(u.mean, p)
    assert torch.equal(u.entropy, torch.special.entr(p).sum(-1))
    for zero in (u.std, u.standard_error, u.mutual_information):
        assert (zero == 0).all()
    assert u.max_clipped_eigenvalue == 0
    extreme = torch.tensor([[1e4, -1e4, 0.0]])
    u = LogitPosterior(extreme, torch.eye(3)[None]).softmax_uncertainty(100)
    assert torch.equal(u.mean, torch.tensor([[1.0, 0.0, 0.0]]))  # finite, and single precision stays single
    assert u.entropy == u.mutual_information == 0


def test_a_common_shift_of_all_logits_has_no_effect():
    """A covariance that is only semi-definite: all its variance is along (1, .., 1)."""
    mean = torch.randn(5, 3, dtype=torch.float64)
    u = LogitPosterior(mean, 4 * torch.ones(5, 3, 3, dtype=torch.float64)).softmax_uncertainty(100)
    torch.testing.assert_close(u.mean, torch.softmax(mean, dim=-1), rtol=0, atol=1e-14)
    assert u.std.max() < 1e-7  # the square root of rounding


def test_identities_between_the_results():
    u = make_posterior().softmax_uncertainty(256)
    assert len(u) == 6
    torch.testing.assert_close(u.mean.sum(-1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(u.standard_error, u.std / 16)
    torch.testing.assert_close(u.mutual_information, u.entropy - u.expected_entropy)
    assert (u.mutual_information > 0).all()  # Jensen, also for the average over samples
    assert (u.entropy <= torch.tensor(4.0).log()).all()


def test_a_point_does_not_depend_on_the_others_nor_on_the_chunks(monkeypatch):
    posterior = make_posterior(n=9)

    def run(posterior):
        return posterior.softmax_uncertainty(50, torch.Generator().manual_seed(1))

    whole = run(posterior)
    part = run(LogitPosterior(posterior.mean[4:6], posterior.covariance[4:6]))
    torch.testing.assert_close(part.std, whole.std[4:6], rtol=1e-12, atol=0)
    monkeypatch.setattr(posteriors, "CHUNK_BYTES", 1)
    chunked = run(posterior)
    torch.testing.assert_close(chunked.mean, whole.mean, rtol=1e-12, atol=0)
    assert not torch.equal(posterior.softmax_uncertainty(50).mean, whole.mean)  # negative control: other samples


def test_a_negative_eigenvalue_within_rounding_is_set_to_zero_and_reported():
    covariance = torch.diag_embed(torch.tensor([[1.0, -1e-12]], dtype=torch.float64))
    mean = torch.zeros(1, 2, dtype=torch.float64)
    u = LogitPosterior(mean, covariance, eigenvalue_tolerance=1e-11).softmax_uncertainty(100)
    assert u.max_clipped_eigenvalue == pytest.approx(1e-12)
    clean = LogitPosterior(mean, covariance.clamp_min(0)).softmax_uncertainty(100)
    assert clean.max_clipped_eigenvalue == 0


def test_one_variance_for_all_logits_needs_no_matrices():
    mean = torch.randn(5, 4, dtype=torch.float64)
    variance = torch.linspace(0, 3, 5, dtype=torch.float64)
    posterior = LogitPosterior(mean, variance[:, None, None] * torch.eye(4, dtype=torch.float64))
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    expected = posterior.softmax_uncertainty(64, generators[0])
    found = isotropic_softmax_uncertainty(mean, variance, 64, generators[1])
    for name in ("mean", "std", "entropy", "mutual_information", "standard_error"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="variances finite and not negative"):
        isotropic_softmax_uncertainty(mean, variance - 1)


def test_input_without_a_meaning_is_refused(unchecked):
    posterior, negative = make_posterior(), torch.diag_embed(torch.tensor([[1.0, 1.0], [1.0, -1e-12]]).double())
    skew, mean = posterior.covariance.clone(), posterior.mean.clone()
    skew[2, 0, 1] += 0.1
    mean[0, 0] = float("nan")
    below = r"point 1 has the eigenvalue -1e-12, and rounding explains no more"
    for unfit, message in (
        (LogitPosterior(posterior.mean, skew), r"must be symmetric: the one of point 2 is off by 0\.1"),
        (LogitPosterior(mean, posterior.covariance), "the posterior must be finite"),
        (LogitPosterior(posterior.mean, posterior.covariance / 0), "the posterior must be finite"),
        *((LogitPosterior(torch.zeros(2, 2).double(), negative, t), below) for t in (0.0, 1e-13)),
    ):
        with pytest.raises(ValueError, match=message):
            unfit.softmax_uncertainty()
