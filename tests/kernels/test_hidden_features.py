"""Any GPyTorch kernel on the hidden features of a recorded network."""

import copy
import pickle
import unittest
from concurrent.futures import ThreadPoolExecutor

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from torch import nn
from torch.autograd import gradcheck

import epk_gp as epk
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.hidden_features import HiddenFeaturesKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from kernel_cases import D, assert_close, make_run, mixed


def hidden(trajectory, X):
    """The features of the small run's network, by hand."""
    w = trajectory.weights(-1)
    return torch.tanh(X @ w["0.weight"].to(X).T + w["0.bias"].to(X))


def rbf(phi, psi, lengthscale=1.0):
    return torch.exp(-(torch.cdist(phi, psi) ** 2) / (2 * lengthscale**2))


def test_values_are_those_of_the_base_kernel_on_the_input_of_the_last_linear_layer(trajectory):
    base = RBFKernel().double()
    kernel, X, Y = HiddenFeaturesKernel(trajectory, base, normalize=False), mixed(5)[:, :-1], mixed(3)[:, :-1]
    expected = rbf(hidden(trajectory, X), hidden(trajectory, Y), base.lengthscale.item())
    assert_close(kernel(X, Y).to_dense(), expected)
    assert_close(kernel(train_copy(X), test_copy(Y)).to_dense(), expected)  # both copies are the same points
    assert_close(kernel(test_copy(X), diag=True), torch.ones(5, dtype=torch.float64))


def test_normalized_features_have_the_mean_squared_distance_one(trajectory):
    phi = hidden(trajectory, trajectory.inputs)
    kernel = HiddenFeaturesKernel(trajectory, LinearKernel().double())
    scaled = phi / kernel.features.scale
    distances = torch.cdist(scaled, scaled)[~torch.eye(len(phi), dtype=torch.bool)]
    assert (distances**2).mean() == pytest.approx(1.0)
    expected = kernel.base_kernel.variance.squeeze() * scaled @ scaled.T
    assert_close(kernel(trajectory.inputs).to_dense(), expected)


def test_a_named_layer_gives_its_output(trajectory):
    kernel = HiddenFeaturesKernel(trajectory, RBFKernel().double(), layer="2", normalize=False)
    X, lengthscale = mixed(4)[:, :-1], kernel.base_kernel.lengthscale.item()
    z = epk.network_outputs(trajectory, X)
    assert_close(kernel(X).to_dense(), rbf(z, z, lengthscale))


def test_the_default_is_the_linear_layer_that_is_called_last_not_the_one_that_was_registered_last():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.first = nn.Linear(5, 2), nn.Linear(3, 5)

        def forward(self, x):
            return self.out(self.first(x).relu())

    net = Net().double()
    X = torch.randn(6, 3).double()
    run = epk.train(net, X, torch.arange(6) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    features = HiddenFeaturesKernel(run, RBFKernel()).features
    assert_close(features(X), net.first(X).relu().detach())


def test_convolutions_are_flattened():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    X = torch.randn(4, 1, 4, 4).double()
    run = epk.train(net, X, torch.arange(4) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    kernel = HiddenFeaturesKernel(run, RBFKernel().double(), layer="0")
    assert kernel.features(X).shape == (4, 8)
    assert kernel(X.flatten(1)).shape == (4, 4)


def test_values_can_be_differentiated_with_respect_to_the_points(trajectory):
    kernel, y = HiddenFeaturesKernel(trajectory, RBFKernel().double()), mixed(3)
    X, x = mixed(2)[:, :-1].requires_grad_(), mixed(2).requires_grad_()
    assert gradcheck(lambda X: kernel(X, y[:, :-1]).to_dense(), X)
    assert gradcheck(lambda X: kernel(X).to_dense(), X)
    kernel(x, y).to_dense().sum().backward()
    assert (x.grad[:, -1] == 0).all()


def test_it_composes_with_the_path_kernel_by_gpytorchs_operators(trajectory):
    path = EPKKernel(trajectory, "trace", normalize="mean_diagonal")
    own, x, y = HiddenFeaturesKernel(trajectory, RBFKernel().double()), mixed(4), mixed(3)
    product, total = (path(x, y).to_dense() * own(x, y).to_dense()), path(x, y).to_dense() + own(x, y).to_dense()
    assert_close((path * own)(x, y).to_dense(), product)
    assert_close((path + own)(x, y).to_dense(), total)
    assert [name for name, _ in ScaleKernel(path * own).named_parameters()] == [
        "raw_outputscale",
        "base_kernel.kernels.1.base_kernel.raw_lengthscale",
    ]


def test_a_process_learns_the_base_kernels_lengthscale(trajectory):
    class GP(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(X, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = ScaleKernel(HiddenFeaturesKernel(trajectory, RBFKernel()))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    X, y = trajectory.inputs, trajectory.inputs.sin().sum(1)
    gp = GP().double().train()
    before = gp.covar_module.base_kernel.base_kernel.lengthscale.item()
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
    optimizer, losses = torch.optim.Adam(gp.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -bound(gp(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert abs(gp.covar_module.base_kernel.base_kernel.lengthscale.item() - before) > 0.1


def test_copies_share_the_network_and_pickles_carry_it(trajectory):
    kernel, x = HiddenFeaturesKernel(trajectory, RBFKernel().double()), mixed(3)
    K = kernel(x).to_dense()
    assert copy.deepcopy(kernel).features is kernel.features
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(x).to_dense(), K)
    cold = HiddenFeaturesKernel(trajectory, RBFKernel().double(), cache_bytes=0)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(K, own) for own in pool.map(lambda _: cold(x).to_dense().detach(), range(16)))


def test_features_are_computed_once_for_the_same_points(trajectory, monkeypatch):
    kernel, x = HiddenFeaturesKernel(trajectory, RBFKernel().double()), mixed(3)
    K = kernel(x).to_dense()
    monkeypatch.setattr(type(kernel.features), "_evaluate", lambda *_: pytest.fail("computed again"))
    assert torch.equal(kernel(x.clone()).to_dense(), K)


def test_what_it_cannot_take_is_refused(trajectory):
    with pytest.raises(TypeError, match="base_kernel"):
        HiddenFeaturesKernel(trajectory, "rbf")
    with pytest.raises(ValueError, match=r"layer must be None, or a module .* one of \['0', '1', '2'\]: got '7'"):
        HiddenFeaturesKernel(trajectory, RBFKernel(), layer="7")
    with pytest.raises(ValueError, match="layer"):
        HiddenFeaturesKernel(trajectory, RBFKernel(), layer=2)
    with pytest.raises(ValueError, match=r"points must have shape \(\.\.\., n, 3\)"):
        HiddenFeaturesKernel(trajectory, RBFKernel()).forward(torch.zeros(2, 7), torch.zeros(2, 7))
    with pytest.raises(ValueError, match="last_dim_is_batch must be False"):
        HiddenFeaturesKernel(trajectory, RBFKernel()).forward(mixed(2), mixed(2), last_dim_is_batch=True)


def test_a_network_without_a_usable_layer_is_refused():
    X = torch.randn(4, 1, 2, 2).double()
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten()).double()
    run = epk.train(net, X, torch.arange(4) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    with pytest.raises(ValueError, match=r"must have the input of the linear layer called last: it calls none"):
        HiddenFeaturesKernel(run, RBFKernel())
    with pytest.raises(ValueError, match="training points must have different features"):
        HiddenFeaturesKernel(make_run(points=1), RBFKernel())


class TestPeer(BaseKernelTestCase, unittest.TestCase):
    """GPyTorch's own tests of a kernel, on plain inputs."""

    seed = 0
    _width = D
    _runs: dict = {}  # noqa: RUF012

    def run_of(self, width):
        if width not in self._runs:
            self._runs[width] = make_run(width, 2, torch.float32)
        return self._runs[width]

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None):
        shape = torch.Size() if batch_shape is None else batch_shape
        if active_dims is not None:
            self._width = len(active_dims)
        kernel = HiddenFeaturesKernel(self.run_of(self._width), RBFKernel(batch_shape=shape))
        if active_dims is not None:
            kernel.active_dims = torch.tensor(active_dims)
        return kernel


def test_fractions_are_no_integers():
    """A network of tokens: GPyTorch hands numbers over as floating-point numbers, and none may be cut."""
    torch.manual_seed(0)
    X = torch.randint(0, 6, (10, 3))
    net = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 2))
    run = epk.train(net, X, torch.arange(10) % 2, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    kernel = HiddenFeaturesKernel(run, RBFKernel())
    assert torch.isfinite(kernel(X.float()).to_dense()).all()
    with pytest.raises(ValueError, match="inputs must be whole numbers"):
        kernel(X + 0.5).to_dense()
