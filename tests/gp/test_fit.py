"""Fitting by the marginal likelihood: one Gram matrix, GPyTorch's values and steps."""

import copy
import itertools

import gpytorch
import pytest
import torch

from epk_gp.gp.models import LogitGP
from epk_gp.gram.path_kernel import PathKernel
from gp_cases import MEANS, OUTPUTS, TARGETS

CASES = [*itertools.product(OUTPUTS, MEANS[:3], TARGETS), *itertools.product(["trace"], MEANS[:3], ["labels"])]


@pytest.mark.parametrize(("outputs", "mean", "targets"), CASES)
def test_fit_takes_the_steps_of_gpytorchs_marginal_likelihood_on_one_gram_matrix(
    trajectory, X_test, outputs, mean, targets, monkeypatch
):
    """GPyTorch's own, by Cholesky, with a prior on the scale; the loss falls."""
    calls = []
    name = {"full": "block", "independent": "block_per_class", "trace": "trace_block"}[outputs]
    original = getattr(PathKernel, name)
    monkeypatch.setattr(PathKernel, name, lambda *args, **kwargs: (calls.append(name), original(*args, **kwargs))[1])
    gp = LogitGP(trajectory, outputs, mean, targets)
    if outputs != "trace":  # GPyTorch counts the prior of a scale that outputs share once for each of them
        two, one = torch.tensor([2.0, 1.0], dtype=torch.float64)
        gp.covar_module.register_prior("scale_prior", gpytorch.priors.GammaPrior(two, one), lambda m: m.outputscale)
    peer = copy.deepcopy(gp)
    before = copy.deepcopy(gp.state_dict())
    losses = gp.fit(steps=10)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len(calls) == 1
    assert not gp.training
    learned = {name.rpartition(".")[2] for name, p in gp.named_parameters() if not torch.equal(p, before[name])}
    expected = {"raw_outputscale"} | (set() if targets == "dirichlet" else {"raw_noise"})
    assert learned == expected | ({"raw_constant"} if mean == "constant" else set())
    gp.logit_posterior(X_test)
    assert len(calls) == 2  # and one cross block
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(peer.likelihood, peer.train())
    optimizer = torch.optim.Adam(peer.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        value = -likelihood(peer(*peer.train_inputs), peer.train_targets).sum()
        assert loss == pytest.approx(value.item(), rel=1e-9)
        value.backward()
        optimizer.step()
    for mine, theirs in zip(gp.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("mean", "count"), [("initial", 1), ("zero", 1), ("constant", 7)])
def test_fit_evaluates_a_prior_mean_once_unless_it_is_learned(trajectory, mean, count, monkeypatch):
    gp, calls = LogitGP(trajectory, mean=mean, targets="dirichlet"), []
    kind, name = type(gp.mean_module), "at" if mean == "initial" else "forward"
    original = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda mean, x: (calls.append(x), original(mean, x))[1])
    gp.fit(steps=7)
    assert len(calls) == count


def test_training_copies_that_are_edited_in_place_are_those_that_are_conditioned_on(trajectory, X_test):
    gp = LogitGP(trajectory)
    before = gp.logit_posterior(X_test).mean
    edited = gp.train_inputs[0]
    edited[0, :-1] += 1.0
    other = LogitGP(trajectory)
    other.train_inputs = (edited.clone(),)
    after = gp.logit_posterior(X_test).mean
    torch.testing.assert_close(after, other.logit_posterior(X_test).mean, rtol=1e-12, atol=1e-12)
    assert (after - before).abs().max() > 1e-6
