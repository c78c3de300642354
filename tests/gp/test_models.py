"""The logit GP as a model among GPyTorch's: its inputs of every kind, its targets, its fit, and what it cannot take."""

import copy
import itertools
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood
from gpytorch.utils.warnings import GPInputWarning
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.core.losses import MeanSquaredError
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.data import dirichlet_targets, label_values
from epk_gp.gp.models import LogitGP
from epk_gp.gp.output_coupling import MultitaskFixedNoiseGaussianLikelihood
from epk_gp.gp.regression import leave_one_out
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from gp_cases import MEANS, N_TEST, OUTPUTS, TARGETS, C, D, M, make_net, make_run, per_point
from helpers import assert_close, make_case
from kernel_cases import make_run as make_other_run


@pytest.mark.parametrize("mean", MEANS)
def test_the_network_leaks_no_parameter(trajectory, mean):
    gp = LogitGP(trajectory, mean=mean)
    names = [name for name, _ in gp.named_parameters() if "mean_module" not in name]
    assert names == ["likelihood.raw_noise", "covar_module.raw_outputscale"]
    assert len(list(gp.mean_module.parameters())) == (C if mean == "constant" else 0)
    assert not [name for name in gp.state_dict() if name.endswith(("weight", "bias", "_matrices", "_anchor"))]


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_deep_copy_predicts_the_same_and_shares_the_run(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs)
    twin = copy.deepcopy(gp)
    assert twin.kernel.trajectory is trajectory
    assert twin.mean_module.config.trajectory is trajectory
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


@pytest.mark.mostly_slow
@pytest.mark.parametrize("outputs", ["independent", "full", "trace"])
def test_a_call_takes_points_in_any_precision_and_integers(outputs):
    float32 = make_run(make_net(torch.float32), torch.randn(M, D), torch.arange(M) % C)
    of_words = make_case("attention", steps=2)
    for run, X in ((float32, torch.randn(4, D)), (of_words.trajectory, of_words.test)):
        gp = LogitGP(run, outputs, "initial", "network")
        expected = gp.logit_posterior(X)
        for points in (X.flatten(1), X.flatten(1).double(), test_copy(X), test_copy(X.flatten(1).float())):
            found = gp(points)
            assert found.mean.dtype == found.variance.dtype == torch.float64
            mean, variance = (v if outputs == "full" else v.mT for v in (found.mean, found.variance))
            torch.testing.assert_close(mean, expected.mean, rtol=0, atol=1e-6)
            of_points = expected.covariance.diagonal(dim1=1, dim2=2)
            torch.testing.assert_close(variance, of_points, rtol=0, atol=1e-6 * float(of_points.max()))
            torch.testing.assert_close(gp.prior_mean(points).double(), gp.prior_mean(test_copy(X.double())))


def test_the_head_reaches_kernel_mean_and_targets(trajectory, X_test):
    gp = LogitGP(trajectory, mean="network", head="log_softmax")
    assert torch.equal(gp.train_targets, network_outputs(trajectory, trajectory.inputs, head="log_softmax"))
    posterior = gp.logit_posterior(X_test)
    assert torch.equal(posterior.mean, network_outputs(trajectory, X_test, head="log_softmax"))
    assert (posterior.covariance - LogitGP(trajectory).logit_posterior(X_test).covariance).abs().max() > 1e-3


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_other_training_points_are_refused_and_other_targets_taken(trajectory, X_test, outputs):
    gp = LogitGP(trajectory, outputs, points=[0, 2])
    (x,) = gp.train_inputs
    before = gp.logit_posterior(X_test).mean
    for other in (train_copy(trajectory.inputs[:2]).double(), (x,)):
        for strict in (True, False):
            with pytest.raises(ValueError, match=r"keeps its points: got inputs. Make another, Log"):
                gp.set_train_data(other, gp.train_targets, strict=strict)
    assert gp.train_inputs[0] is x
    assert torch.equal(gp.logit_posterior(X_test).mean, before)
    targets = gp.train_targets + 1
    gp.set_train_data(targets=targets)
    assert torch.equal(gp.train_targets, targets)
    assert not torch.equal(gp.logit_posterior(X_test).mean, before)
    gp.set_train_data(targets=targets - 1)
    assert_close(gp.logit_posterior(X_test).mean, before)
    with pytest.raises(RuntimeError, match="Cannot modify"):  # GPyTorch's own
        gp.set_train_data(targets=targets[:1, :1])


ARGUMENTS = [
    ({"outputs": "sum"}, ValueError, "outputs must be 'full', 'independent' or 'trace': got 'sum'"),
    ({"normalize": None}, ValueError, "normalize must be 'cosine' or 'mean_diagonal': got None"),
    ({"mean": "b"}, ValueError, r"mean must be one of \['initial', 'constant', 'zero', 'network'\]: got 'b'"),
    ({"targets": "label"}, ValueError, "targets must be 'network', 'dirichlet' or 'labels': got 'label'"),
    *(({"points": points}, ValueError, "at least one index") for points in ([], torch.zeros(2, 2, dtype=torch.long))),
    *(({"points": points}, ValueError, r"points must lie in 0\.\.8: got") for points in ([-1], [0, M])),
    ({"points": [1, 1, 2, 2]}, ValueError, "points must not repeat: got 2 repeated"),
    ({"points": torch.ones(M, dtype=torch.bool)}, TypeError, r"points must be indices: got .* mask\.nonzero"),
    ({"points": [0.5]}, TypeError, "points must be indices: got"),
    ({"progress": True}, TypeError, r"LogitGP\(\) got an unexpected keyword argument"),
    ({"outputs": "trace", "targets": "dirichlet"}, ValueError, "outputs='trace' shares .* noise must be one"),
]


def test_what_a_process_cannot_use_is_refused(trajectory, X_test, unchecked):
    assert LogitGP(trajectory, memory_budget=1 << 21).kernel.config.options.memory_budget == 1 << 21
    for arguments, error, message in ARGUMENTS:
        with pytest.raises(error, match=message):
            LogitGP(trajectory, **arguments)
    with pytest.raises(ValueError, match="X_test must have shape"):
        LogitGP(trajectory).logit_posterior(test_copy(X_test))


CASES = [
    *itertools.product(OUTPUTS, MEANS[:2], TARGETS),
    *[("full", "zero", "network"), ("trace", "zero", "labels"), ("trace", "constant", "labels")],
]


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


def test_dirichlet_targets_are_gpytorchs():
    labels = torch.tensor([0, 2, 1, 2])
    expected = DirichletClassificationLikelihood(labels, dtype=torch.float64)
    y, noise = dirichlet_targets(labels, 3)
    torch.testing.assert_close(y, expected.transformed_targets.mT, rtol=1e-14, atol=0)
    torch.testing.assert_close(noise, expected.noise.mT, rtol=1e-14, atol=0)


def test_dirichlet_targets_know_a_class_without_a_point(trajectory, X_test):
    labels = torch.tensor([0, 1, 1])
    assert dirichlet_targets(labels, 3)[0].shape == (3, 3)
    assert DirichletClassificationLikelihood(labels).num_classes == 2  # the negative control: GPyTorch misses it
    gp = LogitGP(trajectory, targets="dirichlet", points=(trajectory.targets < 2).nonzero()[:, 0])
    assert gp.logit_posterior(X_test).mean.shape == (N_TEST, C)


def test_dirichlet_targets_need_labels():
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2: got -1\.\.2"):
        dirichlet_targets(torch.tensor([-1, 2]), 3)
    X = torch.randn(5, D, dtype=torch.float64)
    regression = make_run(make_net(), X, torch.randn(5, C, dtype=torch.float64), MeanSquaredError())
    with pytest.raises(ValueError, match=r"needs class labels: .* torch.float64, \(5, 3\)"):
        LogitGP(regression, targets="dirichlet")
    assert LogitGP(regression).train_targets.shape == (5, C)


def test_labels_are_one_hot_and_centred(trajectory):
    gp = LogitGP(trajectory, "trace", "zero", "labels", points=[0, 4, 7])
    y = gp.coupling.from_rows(gp.target_rows())
    assert torch.equal(y + gp.target_mean, torch.eye(C, dtype=torch.float64)[trajectory.targets[[0, 4, 7]]])
    assert torch.equal(gp.target_mean, torch.full((C,), 1 / C, dtype=torch.float64))
    assert y.sum(1).abs().max() < 1e-15
    assert torch.equal(LogitGP(trajectory).target_mean, torch.zeros(C, dtype=torch.float64))


def test_the_targets_of_a_regression_are_its_own_minus_their_mean():
    X, Y = torch.randn(5, D, dtype=torch.float64), torch.randn(5, C, dtype=torch.float64)
    run = make_run(make_net(), X, Y, MeanSquaredError())
    for outputs in ("trace", "full", "independent"):
        gp = LogitGP(run, outputs, "zero", "labels", points=[1, 2, 4])
        assert torch.equal(gp.target_mean, Y[[1, 2, 4]].mean(0))
        y = gp.coupling.from_rows(gp.target_rows())
        torch.testing.assert_close(y + gp.target_mean, Y[[1, 2, 4]], rtol=0, atol=1e-15)
    one = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    scalar = make_run(one, X, Y[:, 0], MeanSquaredError())
    values, mean = label_values(scalar, torch.arange(5))
    assert torch.equal(values, Y[:, :1])
    assert torch.equal(mean, Y[:, :1].mean(0))


def test_targets_that_are_no_labels_are_refused(trajectory):
    for targets in (torch.zeros(M, 4).long(), torch.zeros(M, C).long(), torch.zeros(M, 2).double()):
        with pytest.raises(ValueError, match=r"one class label per point, or a real number for each of the 3 outputs:"):
            label_values(replace(trajectory, targets=targets), torch.arange(M))


@pytest.mark.parametrize("interleaved", [True, False])
def test_fixed_noise_reaches_a_multitask_normal(interleaved):
    noise = torch.rand(4, C, dtype=torch.float64) + 0.1
    K = torch.eye(4 * C, dtype=torch.float64)
    latent = MultitaskMultivariateNormal(torch.zeros(4, C, dtype=torch.float64), K, interleaved=interleaved)
    noisy = MultitaskFixedNoiseGaussianLikelihood(noise)(latent)
    assert torch.equal(noisy.variance, 1 + noise)
    assert torch.equal(noisy.covariance_matrix, torch.diag(noisy.covariance_matrix.diagonal()))
    with pytest.warns(GPInputWarning):  # the negative control: GPyTorch's own adds nothing
        assert torch.equal(FixedNoiseGaussianLikelihood(noise.reshape(-1))(latent).variance, latent.variance)


def test_fixed_noise_serves_samples_and_expectations():
    noise = torch.rand(4, C, dtype=torch.float64) + 0.1
    likelihood = MultitaskFixedNoiseGaussianLikelihood(noise)
    f = torch.randn(4, C, dtype=torch.float64)
    assert torch.equal(likelihood(f).variance, noise.sqrt() ** 2)
    latent = MultitaskMultivariateNormal(f, 0.3 * torch.eye(4 * C, dtype=torch.float64))
    expected = (torch.distributions.Normal(f, noise.sqrt()).log_prob(f + 1) - 0.3 / (2 * noise)).sum(-1)
    torch.testing.assert_close(likelihood.expected_log_prob(f + 1, latent), expected)
    with pytest.raises(ValueError, match=r"known of \(4, 3\) points and classes only: got points of shape \(2, 3\)"):
        likelihood(MultitaskMultivariateNormal(f[:2], torch.eye(2 * C).double()))


def test_a_test_point_without_a_direction_is_named_by_its_number(trajectory, monkeypatch):
    gp = LogitGP(trajectory, "trace", "zero", "labels", normalize="cosine")
    original = PathKernel.diagonal_blocks
    monkeypatch.setattr(
        PathKernel, "diagonal_blocks", lambda k, a, **o: original(k, a, **o) * (a.X[:, :1, None] != 7.0).double()
    )
    X = torch.ones(9, D, dtype=torch.float64)
    X[7, 0] = 7.0
    monkeypatch.setattr("epk_gp.gp.models.posterior_points", lambda *_: 3)
    with pytest.raises(ValueError, match=r"needs k\(x, x\) > 0 at every point: got 0 at point 7,"):
        gp.logit_posterior(X)


class LargeStorages(TorchDispatchMode):
    """The most storages of at least some bytes that were alive at once, and the largest."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes, self.alive, self.most, self.largest = num_bytes, [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            self.largest = max(self.largest, storage.nbytes())
            if storage.nbytes() >= self.num_bytes and all(ref.cdata != storage._weak_ref() for ref in self.alive):
                self.alive.append(StorageWeakRef(storage))
        self.alive = [ref for ref in self.alive if not ref.expired()]
        self.most = max(self.most, len(self.alive))
        return found


def test_conditioning_holds_few_matrices_at_once(monkeypatch):
    """Counted: those of N x N numbers that are made; the factorisations' own workspaces are LAPACK's."""
    N = 150
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 8)  # what is made of some rows at a time
    monkeypatch.setattr("epk_gp.kernels.values._ROWS", 8)
    run = make_other_run(points=N)
    gp = LogitGP(run, "trace", "zero", "labels", normalize="cosine")
    X = torch.randn(20, D, dtype=torch.float64)
    gp.logit_posterior(X[:1])  # makes the plan
    gp.kernel.config.cache.clear()
    for call, most in (
        (lambda: gp.fit(steps=2), 3),  # the cached Gram matrix, its copy, eigenvectors
        (lambda: gp.logit_posterior(X), 2),  # beside the cached one: its copy and the factor
        (lambda: leave_one_out(gp), 2),  # factor and inverse
    ):
        with LargeStorages(8 * N * N) as count:
            call()
        assert (count.most, count.largest) == (most, 8 * N * N)  # one matrix, not one for each output
    with LargeStorages(8 * N * N) as count:
        LogitGP(run, "independent", "zero", "labels").fit(steps=1)
    assert count.largest >= 3 * 8 * N * N  # the negative control
