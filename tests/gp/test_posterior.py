"""The posterior against GPyTorch's own prediction, the textbook's equations, and the wrong models."""

import copy
import itertools

import gpytorch
import pytest
import torch

from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import leave_one_out
from epk_gp.gram.path_kernel import gram_block
from epk_gp.kernels.tagging import test_copy
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre
from epk_gp.recording.recorder import Recorder
from gp_cases import MEANS, OUTPUTS, TARGETS, C, D, M, make_net, make_run, per_point, with_hyperparameters

CASES = [
    *itertools.product(OUTPUTS, MEANS, TARGETS, ["mean_diagonal"]),
    *itertools.product([*OUTPUTS, "trace"], ["zero", "initial"], ["labels"], ["mean_diagonal"]),
    *itertools.product([*OUTPUTS, "trace"], ["constant"], ["labels"], ["cosine"]),
]


@pytest.mark.parametrize(("outputs", "mean", "targets", "normalize"), CASES)
def test_the_posterior_is_gpytorchs_own(trajectory, X_test, outputs, mean, targets, normalize, monkeypatch):
    """Noise learned, and that of Dirichlet targets; of a call too. Sums in another order round."""
    gp = with_hyperparameters(LogitGP(trajectory, outputs, mean, targets, noise=0.03, normalize=normalize))
    monkeypatch.setattr("epk_gp.gp.models.posterior_points", lambda *_: 4)
    posterior = gp.logit_posterior(X_test)
    if outputs == "trace":
        assert gp.covar_module.outputscale.numel() == gp.likelihood.noise.numel() == 1
    with torch.no_grad():
        peer, called = gpytorch.models.ExactGP.__call__(gp, test_copy(X_test)), gp(X_test)
        expected_mean, expected_covariance = per_point(peer, outputs)
    assert type(called) is type(peer)
    torch.testing.assert_close(posterior.mean, expected_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.covariance, expected_covariance, rtol=0, atol=1e-12)
    torch.testing.assert_close(called.mean, peer.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(called.covariance_matrix, peer.covariance_matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalize", ["mean_diagonal", "cosine"])
@pytest.mark.parametrize("outputs", [*OUTPUTS, "trace"])
def test_the_prior_variance_is_that_of_gpytorchs_prior_and_no_smaller_than_the_posteriors(
    trajectory, X_test, outputs, normalize, monkeypatch
):
    gp = with_hyperparameters(LogitGP(trajectory, outputs, noise=0.03, normalize=normalize))
    monkeypatch.setattr("epk_gp.gp.models.posterior_points", lambda *_: 4)
    posterior = gp.logit_posterior(X_test)
    with torch.no_grad(), gpytorch.settings.prior_mode(True):
        covariance = per_point(gp(test_copy(X_test)), outputs)[1]
    variance = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(posterior.prior_variance, variance, rtol=1e-12, atol=0)
    assert (posterior.covariance.diagonal(dim1=1, dim2=2) < variance).all()


def textbook(gp, X, y, noise):
    """Mean (n, C) and joint covariance (n, C, n, C) of a process with the hyperparameters that it has now.

    Equations (2.25) and (2.26) of Rasmussen & Williams (2006) with an explicit inverse, around one constant.
    """
    constants = [p.detach().reshape(-1) for p in gp.mean_module.parameters()]
    prior = torch.cat(constants or [torch.zeros(C, dtype=torch.float64)])
    run, (n, N) = gp.trajectory, (len(X), len(y))
    A, B = Points(run.inputs, True), Points(X, False)
    raw = [gram_block(run, *pair, head="logits", rule=gauss_legendre(4)) for pair in ((A, A), (B, A), (B, B))]
    scale = gp.covar_module.outputscale.detach().expand(C)
    if gp.coupling.kind == "trace":
        shared = [torch.einsum("ncmc->nm", value) for value in raw]
        raw = [value[:, None, :, None] * torch.eye(C, dtype=torch.float64)[:, None, :] for value in shared]
    weight = (scale[:, None] * scale[None, :]).sqrt() / torch.einsum("ncnc->nc", raw[0]).mean()
    weight = torch.diag(weight.diagonal()) if gp.coupling.kind == "independent" else weight
    own, cross, new = (value * weight[:, None, :] for value in raw)
    inverse = torch.linalg.inv(own.reshape(N * C, N * C) + torch.diag(noise.reshape(-1)))
    cross = cross.reshape(n * C, N * C)
    residual = (y - prior).reshape(-1)
    expected_mean = prior + (cross @ inverse @ residual).reshape(n, C)
    return expected_mean, (new.reshape(n * C, -1) - cross @ inverse @ cross.mT).reshape(n, C, n, C)


def joint_prediction(gp, X):
    """What `gp(X)` says, as `textbook` has it."""
    with torch.no_grad():
        found, n, i = gp(X), len(X), torch.arange(C)
        if gp.coupling.kind == "full":
            return found.mean, found.covariance_matrix.reshape(n, C, n, C)
        joint = torch.zeros(n, C, n, C, dtype=torch.float64)
        joint[:, i, :, i] = found.covariance_matrix.expand(C, n, n)
        return found.mean.mT, joint


def _learn(gp):
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.3)
    gp(gp.trajectory.inputs[:2]).mean.square().sum().backward()
    optimizer.step()


def _load(gp):
    other = copy.deepcopy(gp)
    for parameter in other.parameters():
        parameter.data += 0.7
    gp.load_state_dict(other.state_dict())


CHANGES = {
    "nothing": lambda gp: None,
    "a scale that is set": lambda gp: setattr(gp.covar_module, "outputscale", 3.0 * gp.covar_module.outputscale),
    "a noise that is set": lambda gp: setattr(gp.likelihood, "noise", 5.0 * gp.likelihood.noise),
    "the numbers of a parameter": lambda gp: gp.covar_module.raw_outputscale.data.add_(1.0),
    "initialize": lambda gp: gp.initialize(**{"likelihood.noise": 0.2}),
    "a state that is loaded": _load,
    "the docstring's order": lambda gp: gp.covar_module.load_state_dict({"raw_outputscale": torch.full_like(
        gp.covar_module.raw_outputscale, 2.0)}, strict=False),
    "an optimizer's step": _learn,
    "another constraint": lambda gp: gp.covar_module.register_constraint(
        "raw_outputscale", gpytorch.constraints.GreaterThan(0.3)),
    "fit": lambda gp: gp.fit(steps=3),
    "a fit by GPyTorch": lambda gp: (gp.train(), gp(*gp.train_inputs), gp.eval()),
    "targets": lambda gp: gp.set_train_data(targets=gp.train_targets + 1),
    "targets that are edited": lambda gp: gp.train_targets.mul_(2),
    "targets that are assigned": lambda gp: setattr(gp, "train_targets", gp.train_targets - 2),
}  # fmt: skip


@pytest.mark.parametrize(("outputs", "change"), [*zip(itertools.cycle([*OUTPUTS, "trace"]), CHANGES, strict=False)])
def test_a_call_is_conditioned_with_what_there_is_now(trajectory, X_test, outputs, change):
    gp = LogitGP(trajectory, outputs, "constant", "labels", noise=0.03)
    before = joint_prediction(gp, X_test)
    CHANGES[change](gp)
    found = joint_prediction(gp, X_test)
    y = gp.train_targets if outputs == "full" else gp.train_targets.mT
    expected = textbook(gp, X_test, y, gp.likelihood.noise.detach().reshape(-1).expand(M, C))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    moved = max(float((a - b).abs().max()) for a, b in zip(found, before, strict=True))
    assert (moved == 0) if change in ("nothing", "a fit by GPyTorch") else (moved > 1e-6)


@pytest.mark.parametrize("outputs", ["full", "independent", "trace"])
def test_a_call_is_exact_for_any_number_of_rows_and_leaves_gpytorchs_settings_alone(X_test, outputs):
    """GPyTorch would take conjugate gradients from 800 rows on; here also where its settings ask for them."""
    X = torch.randn(267 if outputs == "full" else 40, D, dtype=torch.float64)  # 801 rows, or few under settings
    run = make_run(make_net(), X, torch.arange(len(X)) % C, steps=1)
    gp = LogitGP(run, outputs, "zero", "labels", noise=1e-5)
    before = gpytorch.settings.max_cholesky_size.value()  # 800, or what BoTorch sets when it is imported
    y = gp.train_targets if outputs == "full" else gp.train_targets.mT
    found = joint_prediction(gp, X_test)
    with gpytorch.settings.max_cholesky_size(1), gpytorch.settings.fast_pred_var(), gpytorch.settings.cg_tolerance(9):
        under_settings = joint_prediction(gp, X_test)
        assert gpytorch.settings.max_cholesky_size.value() == 1
    assert gpytorch.settings.max_cholesky_size.value() == before
    expected = textbook(gp, X_test, y, gp.likelihood.noise.detach().reshape(-1)[:1].expand(len(X), C))
    for a, b, c in zip(found, under_settings, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-7)


def test_hyperparameters_and_points_have_the_gradients_of_the_exact_posterior(trajectory, X_test):
    for outputs in OUTPUTS:
        gp = LogitGP(trajectory, outputs, "constant", "labels", noise=0.03)
        raw = gp.covar_module.raw_outputscale

        def total(gp=gp):
            found = gp(X_test)
            return found.mean.square().sum() + found.variance.sum()

        (gradient,) = torch.autograd.grad(total(), raw)
        ends = []
        for step in (1e-5, -1e-5):
            raw.data += step
            ends.append(total().item())
            raw.data -= step
        assert float(gradient.sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


MISSING = {
    "NaN": lambda y: y.index_put((torch.tensor(4), torch.tensor(0)), torch.tensor(float("nan")).double()),
    "infinity": lambda y: y.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(float("inf")).double()),
}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("outputs", [*OUTPUTS, "trace"])
def test_a_missing_target_is_refused_with_its_row(trajectory, X_test, outputs, missing):
    """Also where GPyTorch is told to leave it out of its own predictions."""
    gp = LogitGP(trajectory, outputs, "zero", "labels", points=[8, 2, 3, 5, 7, 1])
    y = MISSING[missing](gp.train_targets if outputs == "full" else gp.train_targets.mT)
    gp.set_train_data(targets=y if outputs == "full" else y.mT)
    message = r"each point must have a target: row 7 of the data has none\. Leave it out of points="
    for ask in (gp, gp.logit_posterior, lambda X: gp.fit(steps=1), lambda X: leave_one_out(gp)):
        with pytest.raises(ValueError, match=message), gpytorch.settings.observation_nan_policy("mask"):
            ask(X_test)


def test_missing_targets_of_a_run_are_left_out_by_points():
    X = torch.randn(9, D, dtype=torch.float64)
    y = X.sum(1, keepdim=True).repeat(1, C)
    y[6, 1] = float("nan")
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Recorder(net, optimizer, X, y, loss=None) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            (net(X) - y)[~y.isnan()].square().mean().backward()
            recorder.batch(torch.arange(9))
            optimizer.step()
    run = recorder.trajectory
    for mean in ("zero", "constant"):
        with pytest.raises(ValueError, match=r"row 6 of the data has none\. Leave it out of points="):
            LogitGP(run, mean=mean, targets="labels")
    rest = [i for i in range(9) if i != 6]
    gp = LogitGP(run, mean="zero", targets="labels", points=rest)
    torch.testing.assert_close(gp.target_mean, y[rest].mean(0))
    assert gp.logit_posterior(X).mean.isfinite().all()
    labels = torch.arange(9) % C
    labels[5] = -100
    left_out = make_run(make_net(), X, labels)
    for targets in ("labels", "dirichlet"):
        with pytest.raises(ValueError, match="row 5 of the data has none"):
            LogitGP(left_out, targets=targets)


@pytest.mark.parametrize("noise", [1e-2, 1.1e-6])
def test_the_eigenvalue_tolerance_bounds_the_rounding_of_a_direction_without_variance(noise):
    """One step at its left end: log-softmax gradients weighted by the probabilities add up to zero."""
    X = torch.randn(30, D, dtype=torch.float64)
    run = make_run(make_net(), X, torch.arange(30) % C, steps=1)
    gp = LogitGP(run, head="log_softmax", rule=QuadratureRule.left_endpoint(), noise=noise)
    posterior = gp.logit_posterior(torch.cat([X, 3 * torch.randn(30, D, dtype=torch.float64)]))
    lowest = torch.linalg.eigvalsh(posterior.covariance)[:, 0]
    assert lowest.abs().max() < posterior.eigenvalue_tolerance < 1e-12
    assert lowest.min() < 0  # or the bound is not tested
    assert posterior.softmax_uncertainty().max_clipped_eigenvalue == pytest.approx(-float(lowest.min()))


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
