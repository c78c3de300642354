"""The logit GP against GPyTorch's own prediction, dense algebra, and the wrong models."""

import copy
import itertools

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood
from gpytorch.utils.warnings import GPInputWarning
from torch import nn

import reference
from epk_gp.core.losses import CrossEntropy, MeanSquaredError
from epk_gp.core.points import Points
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.likelihoods import MultitaskFixedNoiseGaussianLikelihood
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import factorize
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.gp.targets import dirichlet_targets
from epk_gp.gram.path_kernel import gram_block
from epk_gp.kernels import blocks
from epk_gp.kernels.tagging import test_copy, train_copy
from epk_gp.quadrature.rules import gauss_legendre, left_endpoint
from epk_gp.training.train import train

D, C, M, N_TEST = 2, 3, 9, 6
OUTPUTS = ["full", "independent"]
MEANS = ["initial", "constant", "zero", "network"]
TARGETS = ["network", "dirichlet"]
BRUTE_FORCE = [("full", "initial", "network"), ("independent", "zero", "dirichlet")]  # nothing of the engine's in it


def make_run(net, X, y, loss=CrossEntropy(), steps=4):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    return train(net, X, y, optimizer=optimizer, steps=steps, loss=loss)


def make_net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)).to(dtype)


@pytest.fixture(scope="module")
def trajectory():
    torch.manual_seed(3)
    X = torch.randn(M, D, dtype=torch.float64)
    return make_run(make_net(), X, torch.arange(M) % C)


@pytest.fixture
def X_test():
    return 2 * torch.randn(N_TEST, D, dtype=torch.float64)


def per_point(distribution, outputs):
    """GPyTorch's joint prediction as mean (n, C) and covariance (n, C, C)."""
    if outputs == "independent":
        return distribution.mean.mT, torch.diag_embed(distribution.variance.mT)
    n = distribution.mean.shape[0]
    K = distribution.covariance_matrix.reshape(n, C, n, C)
    i = torch.arange(n)
    return distribution.mean, K[i, :, i, :]


def with_hyperparameters(gp):
    """Hyperparameters that are not the initial ones, different for every class."""
    gp.covar_module.outputscale = torch.linspace(0.5, 2, gp.covar_module.outputscale.numel()).reshape(
        gp.covar_module.outputscale.shape
    )
    if hasattr(gp.likelihood, "raw_noise"):
        gp.likelihood.noise = torch.linspace(0.02, 0.05, gp.likelihood.noise.numel()).reshape(gp.likelihood.noise.shape)
    for name, parameter in gp.mean_module.named_parameters():
        assert name.endswith("raw_constant")
        nn.init.normal_(parameter)
    return gp


@pytest.mark.parametrize(("outputs", "mean", "targets"), list(itertools.product(OUTPUTS, MEANS, [*TARGETS, "noisy"])))
def test_the_posterior_is_gpytorchs_own(trajectory, X_test, outputs, mean, targets):
    """Noise learned, that of Dirichlet targets, and known noise of each target. Sums in another order round."""
    noise = 0.03 if targets != "noisy" else torch.linspace(0.01, 0.2, M * C, dtype=torch.float64).view(M, C)
    kind = "network" if targets == "noisy" else targets
    gp = with_hyperparameters(LogitGP(trajectory, outputs, mean, kind, noise=noise))
    posterior = gp.logit_posterior(X_test, block_size=4)
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
    """Equations (2.25) and (2.26) of Rasmussen & Williams with an explicit inverse, on loops or the engine."""
    gp = with_hyperparameters(LogitGP(trajectory, outputs, mean, targets, noise=0.03))
    posterior = gp.logit_posterior(X_test)

    A, B = Points(trajectory.inputs, True), Points(X_test, False)
    brute_force = (outputs, mean, targets) in BRUTE_FORCE
    raw = {
        key: reference.gram_block(trajectory, *pair, "logits", gauss_legendre(4))
        if brute_force
        else gram_block(trajectory, *pair, head="logits")
        for key, pair in {"aa": (A, A), "ba": (B, A), "bb": (B, B)}.items()
    }
    mean_diagonal = torch.einsum("ncnc->nc", raw["aa"]).mean()
    scale = gp.covar_module.outputscale.detach().expand(C)
    weight = (scale[:, None] * scale[None, :]).sqrt() / mean_diagonal
    if outputs == "independent":
        weight = torch.diag(weight.diagonal())
    K = {key: value * weight[:, None, :] for key, value in raw.items()}
    if targets == "network":
        y = network_outputs(trajectory, trajectory.inputs, state=-1)
        noise = gp.likelihood.noise.detach().reshape(-1).expand(M, C)
    else:
        y, noise = dirichlet_targets(trajectory.targets, C)
    inverse = torch.linalg.inv(K["aa"].reshape(M * C, M * C) + torch.diag(noise.reshape(-1)))
    cross = K["ba"].reshape(N_TEST * C, M * C)
    residual = (y - prior_at(gp, trajectory, trajectory.inputs, mean)).reshape(-1)
    expected_mean = prior_at(gp, trajectory, X_test, mean) + (cross @ inverse @ residual).reshape(N_TEST, C)
    joint = (K["bb"].reshape(N_TEST * C, -1) - cross @ inverse @ cross.mT).reshape(N_TEST, C, N_TEST, C)
    i = torch.arange(N_TEST)
    torch.testing.assert_close(posterior.mean, expected_mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.covariance, joint[i, :, i, :], rtol=0, atol=1e-9)


def test_the_wrong_models_give_other_posteriors(trajectory, X_test):
    """The control: training copies for test copies, no coupling, and the noise of observations each show."""
    gp = LogitGP(trajectory)
    posterior = gp.logit_posterior(X_test)
    size = posterior.covariance.abs().max()
    with torch.no_grad():
        frozen = per_point(gp(train_copy(X_test)), "full")[1]
        noisy = per_point(gp.likelihood(gp(test_copy(X_test))), "full")[1]
    uncoupled = LogitGP(trajectory, "independent").logit_posterior(X_test).covariance
    for wrong in (frozen, noisy, uncoupled):
        assert (wrong - posterior.covariance).abs().max() > 1e-3 * size


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_blocks_do_not_change_the_posterior(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs)
    whole = gp.logit_posterior(X_test, block_size=100)
    by_budget = LogitGP(trajectory, outputs, memory_budget=1 << 20).logit_posterior(X_test)
    for other in (gp.logit_posterior(X_test, block_size=4), by_budget):
        torch.testing.assert_close(other.mean, whole.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(other.covariance, whole.covariance, rtol=0, atol=1e-12)


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_covariance_lies_between_zero_and_the_prior(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs)
    posterior = gp.logit_posterior(X_test)
    with torch.no_grad(), gpytorch.settings.prior_mode():
        prior = per_point(gp(test_copy(X_test)), outputs)[1]
    assert torch.linalg.eigvalsh(posterior.covariance).min() > -posterior.rounding
    assert torch.linalg.eigvalsh(prior - posterior.covariance).min() > -posterior.rounding
    assert (prior - posterior.covariance).diagonal(dim1=-2, dim2=-1).max() > 0.1  # the control: data say something
    assert 0 < posterior.rounding < 1e-12
    if outputs == "independent":
        assert torch.equal(posterior.covariance, torch.diag_embed(posterior.covariance.diagonal(dim1=-2, dim2=-1)))


@pytest.mark.parametrize("noise", [1e-2, 1.1e-6])
def test_rounding_bounds_what_a_direction_without_variance_loses(noise):
    """One step at its left end: log-softmax gradients weighted by the probabilities add up to zero."""
    X = torch.randn(30, D, dtype=torch.float64)
    run = make_run(make_net(), X, torch.arange(30) % C, steps=1)
    gp = LogitGP(run, head="log_softmax", rule=left_endpoint(), noise=noise)
    posterior = gp.logit_posterior(torch.cat([X, 3 * torch.randn(30, D, dtype=torch.float64)]))
    lowest = torch.linalg.eigvalsh(posterior.covariance)[:, 0]
    assert lowest.abs().max() < posterior.rounding < 1e-12
    assert lowest.min() < 0  # or the bound is not tested
    assert softmax_uncertainty(posterior).clipped_eigenvalue == pytest.approx(-float(lowest.min()))


def test_conditioning_on_few_points_leaves_more_variance(trajectory, X_test):
    some, every = (LogitGP(trajectory, points=points) for points in ([0, 4], None))
    assert some.points.tolist() == [0, 4]
    assert torch.equal(some.train_inputs[0], train_copy(trajectory.inputs[[0, 4]]))
    variances = [gp.logit_posterior(X_test).covariance.diagonal(dim1=-2, dim2=-1) for gp in (some, every)]
    assert (variances[0] > variances[1] - 1e-12).all()
    assert (variances[0] - variances[1]).max() > 1e-3


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


# Fitting


@pytest.mark.parametrize(("outputs", "mean", "targets"), list(itertools.product(OUTPUTS, MEANS[:3], TARGETS)))
def test_fit_lowers_the_loss_on_one_gram_matrix(trajectory, X_test, outputs, mean, targets, monkeypatch):
    calls = []
    name = "gram_block" if outputs == "full" else "gram_block_per_class"
    original = getattr(blocks, name)
    monkeypatch.setattr(blocks, name, lambda *args, **kwargs: (calls.append(name), original(*args, **kwargs))[1])
    gp = LogitGP(trajectory, outputs, mean, targets)
    before = copy.deepcopy(gp.state_dict())
    losses = gp.fit(steps=10)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len(calls) == 1
    assert not gp.training
    learned = {name.rpartition(".")[2] for name, p in gp.named_parameters() if not torch.equal(p, before[name])}
    expected = {"raw_outputscale"} | ({"raw_noise"} if targets == "network" else set())
    assert learned == expected | ({"raw_constant"} if mean == "constant" else set())
    gp.logit_posterior(X_test)
    assert len(calls) == 2  # and one cross block


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_the_loss_is_the_gaussian_log_density(trajectory, outputs):
    gp = LogitGP(trajectory, outputs)
    x = gp.train_inputs[0]
    with torch.no_grad():
        K = gp.covar_module(x).to_dense()
        mean = gp.mean_module(x)
    covariance = K + 0.01 * torch.eye(K.shape[-1], dtype=torch.float64)
    shape = (-1, M * C) if outputs == "full" else (C, M)
    density = torch.distributions.MultivariateNormal(mean.reshape(shape), covariance.reshape(shape[0], *K.shape[-2:]))
    expected = -density.log_prob(gp.train_targets.reshape(shape)).sum() / shape[1]
    assert gp.fit(steps=1)[0] == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize(("outputs", "mean", "targets"), list(itertools.product(OUTPUTS, MEANS[:3], TARGETS)))
def test_fit_takes_the_steps_of_gpytorchs_marginal_likelihood(trajectory, outputs, mean, targets):
    """GPyTorch's own, by Cholesky, with a prior on the scale."""
    gp = LogitGP(trajectory, outputs, mean, targets)
    two, one = torch.tensor([2.0, 1.0], dtype=torch.float64)
    gp.covar_module.register_prior("scale_prior", gpytorch.priors.GammaPrior(two, one), lambda m: m.outputscale)
    peer = copy.deepcopy(gp)
    losses = gp.fit(steps=4)
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(peer.likelihood, peer.train())
    optimizer = torch.optim.Adam(peer.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        expected = -likelihood(peer(*peer.train_inputs), peer.train_targets).sum()
        assert loss == pytest.approx(expected.item(), rel=1e-9)
        expected.backward()
        optimizer.step()
    for mine, theirs in zip(gp.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)


def test_a_prediction_after_fit_uses_the_new_hyperparameters(trajectory, X_test):
    gp = LogitGP(trajectory)
    before = gp(test_copy(X_test)).mean.detach()
    gp.fit(steps=20)
    after = gp(test_copy(X_test)).mean.detach()
    assert (after - before).abs().max() > 1e-6
    torch.testing.assert_close(after, gp.logit_posterior(X_test).mean, rtol=0, atol=1e-9)


def test_a_covariance_that_is_not_positive_definite_is_refused_without_jitter(trajectory):
    singular = torch.ones(1, 4, 4, dtype=torch.float64) - 1e-9 * torch.eye(4, dtype=torch.float64)
    source = LogitGP(trajectory).kernel.source
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"positive definite in torch.float64: Cholesky stopped at row 2 of 4\. Raise"):
        factorize(source, one, train_copy(trajectory.inputs), singular, torch.zeros(1, 4, dtype=torch.float64))
    gp = LogitGP(trajectory)
    gp.likelihood.raw_noise_constraint = gpytorch.constraints.GreaterThan(-1.0)
    gp.likelihood.noise = torch.tensor([-0.5], dtype=torch.float64)
    with pytest.raises(ValueError, match="must be positive definite: its smallest eigenvalue is -0.5"):
        gp.fit()
    with pytest.raises(ValueError, match="must be positive definite in torch.float64"):
        gp.logit_posterior(trajectory.inputs)


def test_fit_refuses_steps_that_are_none(trajectory):
    gp = LogitGP(trajectory)
    for options, says in (
        ({"steps": 0}, "steps must be at least 1: got 0"),
        ({"lr": 0.0}, "lr must be positive and finite: got 0.0"),
        ({"lr": float("nan")}, "lr must be positive and finite: got nan"),
    ):
        with pytest.raises(ValueError, match=says):
            gp.fit(**options)


# Among GPyTorch's models


@pytest.mark.parametrize("mean", MEANS)
def test_the_network_leaks_no_parameter(trajectory, mean):
    gp = LogitGP(trajectory, mean=mean)
    names = [name for name, _ in gp.named_parameters() if "mean_module" not in name]
    assert names == ["likelihood.raw_noise", "covar_module.raw_outputscale"]
    assert len(list(gp.mean_module.parameters())) == (C if mean == "constant" else 0)
    assert not [name for name in gp.state_dict() if name.endswith(("weight", "bias", "classes", "_anchor"))]


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_deep_copy_predicts_the_same_and_shares_the_run(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs)
    twin = copy.deepcopy(gp)
    assert twin.kernel.trajectory is trajectory
    assert twin.mean_module.source.trajectory is trajectory
    assert torch.equal(twin.logit_posterior(X_test).mean, gp.logit_posterior(X_test).mean)


@pytest.mark.parametrize("mean", ["initial", "network"])
def test_the_network_mean_follows_batches_and_classes(trajectory, mean):
    x = test_copy(torch.randn(12, D, dtype=torch.float64)).reshape(2, 1, 6, D + 1)
    state = 0 if mean == "initial" else -1
    flat = network_outputs(trajectory, x[..., :-1].reshape(-1, D), state=state)
    full, independent = (LogitGP(trajectory, outputs, mean).mean_module for outputs in OUTPUTS)
    assert torch.equal(full(x), flat.reshape(2, 1, 6, C))
    assert torch.equal(independent(x), flat.reshape(2, 6, C).mT)
    assert torch.equal(independent(x[0, 0]), flat[:6].mT)


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_batches_of_test_points_predict_like_single_ones(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs)
    x = test_copy(X_test)
    with torch.no_grad():
        single = per_point(gp(x), outputs)
        x = x[:, None] if outputs == "full" else x[:, None, None]  # the GP's own batch [C] comes last
        batch = gp(x)
    mean = batch.mean.reshape(N_TEST, C)
    torch.testing.assert_close(mean, single[0], rtol=0, atol=1e-9)
    variance = batch.variance.reshape(N_TEST, C)
    torch.testing.assert_close(variance, single[1].diagonal(dim1=-2, dim2=-1), rtol=0, atol=1e-9)


def test_single_precision_runs_are_conditioned_in_double():
    X = torch.randn(M, D)
    run = make_run(make_net(torch.float32), X, torch.arange(M) % C)
    gp = LogitGP(run)
    gp.fit(steps=3)
    posterior = gp.logit_posterior(X)
    assert gp.train_inputs[0].dtype == posterior.mean.dtype == posterior.covariance.dtype == torch.float64
    softmax_uncertainty(posterior)


def test_images_are_conditioned_and_predicted():
    X = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, C)).double()
    run = make_run(net, X, torch.arange(6) % C)
    posterior = LogitGP(run, targets="dirichlet").logit_posterior(X[:2])
    assert posterior.covariance.shape == (2, C, C)
    with pytest.raises(ValueError, match=r"X_test must have shape \(n, 1, 4, 4\)"):
        LogitGP(run).logit_posterior(X[:2].flatten(1))


def test_the_head_reaches_kernel_mean_and_targets(trajectory, X_test):
    gp = LogitGP(trajectory, mean="network", head="log_softmax")
    assert torch.equal(gp.train_targets, network_outputs(trajectory, trajectory.inputs, head="log_softmax"))
    posterior = gp.logit_posterior(X_test)
    assert torch.equal(posterior.mean, network_outputs(trajectory, X_test, head="log_softmax"))
    assert (posterior.covariance - LogitGP(trajectory).logit_posterior(X_test).covariance).abs().max() > 1e-3


# Targets and likelihoods


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
    assert DirichletClassificationLikelihood(labels).num_classes == 2  # the control: GPyTorch misses it
    gp = LogitGP(trajectory, targets="dirichlet", points=(trajectory.targets < 2).nonzero()[:, 0])
    assert gp.logit_posterior(X_test).mean.shape == (N_TEST, C)


def test_dirichlet_targets_refuse_what_is_no_label():
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2: got -1\.\.2"):
        dirichlet_targets(torch.tensor([-1, 2]), 3)
    with pytest.raises(ValueError, match="alpha_epsilon must be positive"):
        dirichlet_targets(torch.tensor([0]), 3, alpha_epsilon=0.0)
    X = torch.randn(5, D, dtype=torch.float64)
    regression = make_run(make_net(), X, torch.randn(5, C, dtype=torch.float64), MeanSquaredError())
    with pytest.raises(ValueError, match=r"needs class labels, .* torch.float64 targets of shape \(5, 3\)"):
        LogitGP(regression, targets="dirichlet")
    assert LogitGP(regression).train_targets.shape == (5, C)


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
    with pytest.warns(GPInputWarning):  # the control: GPyTorch's own adds nothing
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
    with pytest.raises(
        ValueError, match=r"one variance per point and class \(2, 3\): got shape \(4, 3\)\. Pass noise="
    ):
        likelihood(latent)
    assert torch.equal(likelihood(latent, noise=torch.full((2, C), 0.5)).variance, torch.full((2, C), 1.5))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be positive and finite"):
            MultitaskFixedNoiseGaussianLikelihood(torch.full((2, C), value))


# Errors


def test_unknown_options_are_refused(trajectory, unchecked):
    with pytest.raises(ValueError, match="outputs must be 'full' or 'independent': got 'trace'"):
        LogitGP(trajectory, "trace")
    with pytest.raises(ValueError, match=r"mean must be one of \['initial', 'constant', 'zero', 'network'\]: got 'b'"):
        LogitGP(trajectory, mean="b")
    with pytest.raises(ValueError, match="targets must be 'network' or 'dirichlet': got 'labels'"):
        LogitGP(trajectory, targets="labels")
    with pytest.raises(ValueError, match="head must be one of"):
        LogitGP(trajectory, head="softmax")
    for noise in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="noise must be a finite variance above"):
            LogitGP(trajectory, noise=noise)


def test_points_that_are_no_choice_of_training_points_are_refused(trajectory, unchecked):
    for points in ([], torch.zeros(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match="at least one index"):
            LogitGP(trajectory, points=points)
    for points in ([-1], [0, M]):
        with pytest.raises(ValueError, match=r"points must lie in 0\.\.8 \(the training points\): got"):
            LogitGP(trajectory, points=points)
    with pytest.raises(ValueError, match="points must not repeat: got 2 repeated"):
        LogitGP(trajectory, points=[1, 1, 2, 2])
    for points in (torch.ones(M, dtype=torch.bool), [0.5]):
        with pytest.raises(TypeError, match=r"points must be indices: got .* mask\.nonzero"):
            LogitGP(trajectory, points=points)


def test_test_points_are_checked_at_the_door(trajectory, X_test):
    gp = LogitGP(trajectory)
    with pytest.raises(ValueError, match="X_test must have shape"):
        gp.logit_posterior(test_copy(X_test))
    X_test[1, 0] = float("nan")
    with pytest.raises(ValueError, match="X_test must be finite: row 1"):
        gp.logit_posterior(X_test)
    with pytest.raises(ValueError, match="block_size must be at least 1: got 0"):
        gp.logit_posterior(trajectory.inputs, block_size=0)
