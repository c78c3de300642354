"""The logit GP as a model among GPyTorch's, its inputs of every kind, and options that it cannot take."""

import copy

import pytest
import torch

from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.models import LogitGP
from epk_gp.kernels.tagging import test_copy, train_copy
from gp_cases import MEANS, N_TEST, OUTPUTS, C, D, M, make_net, make_run, per_point
from helpers import assert_close, make_case


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
