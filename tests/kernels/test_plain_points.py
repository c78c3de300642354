"""Rows without a copy column are test copies: the kernel in models of one's own, on plain inputs."""

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP

import epk_gp as epk
from epk_gp.gp.output_coupling import NetworkMean, parse_coupling
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import make_case
from kernel_cases import MODES, C, D, assert_close


@pytest.fixture(scope="module")
def X():
    return torch.randn(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("normalize", [None, "cosine"])
@pytest.mark.parametrize("outputs", MODES)
def test_rows_without_a_copy_column_are_test_copies(trajectory, X, outputs, normalize):
    kernel = EPKKernel(trajectory, outputs, normalize=normalize)
    x, train = test_copy(X), train_copy(trajectory.inputs)
    calls = {
        "matrix": (lambda z: kernel(z).to_dense()),
        "forward": (lambda z: kernel.forward(z, z.clone())),
        "diagonal": (lambda z: kernel(z, diag=True)),
        "lazy diagonal": (lambda z: kernel(z).diagonal(dim1=-1, dim2=-2)),
        "against training copies": (lambda z: kernel(z, train).to_dense()),
        "training copies against them": (lambda z: kernel(train, z).to_dense()),
        "forward against training copies": (lambda z: kernel.forward(z, train)),
        "diagonal of two kinds": (lambda z: kernel(z, train[:5], diag=True)),
        "batch": (lambda z: kernel(z.reshape(5, 1, 1, -1), train).to_dense()),
        "some rows": (lambda z: kernel(z)[..., :1, :].to_dense()),
    }
    for name, call in calls.items():
        assert torch.equal(call(X), call(x)), name
    assert (kernel(X).to_dense() - kernel(train_copy(X)).to_dense()).abs().max() > 1e-3  # the negative control


def test_active_dims_may_leave_the_copy_column_out(trajectory, X):
    wide = torch.cat([X[:, 1:], torch.full((5, 1), 7.0).double(), X[:, :1]], 1)
    kernel = EPKKernel(trajectory, "trace", normalize="cosine", active_dims=[2, 0])
    assert torch.equal(kernel(wide).to_dense(), EPKKernel(trajectory, "trace", normalize="cosine")(X).to_dense())
    assert_close(kernel(wide, wide[:2]).to_dense(), kernel(wide).to_dense()[:, :2])


@pytest.mark.parametrize("normalize", [None, "cosine"])
def test_gradients_flow_back_to_rows_without_a_copy_column(trajectory, X, normalize):
    kernel, train = EPKKernel(trajectory, "trace", normalize=normalize), train_copy(trajectory.inputs)
    gradients = []
    for make in (lambda z: z, test_copy):
        z = X.clone().requires_grad_()
        total = kernel(make(z), train).to_dense().square().sum() + kernel(make(z)).to_dense()[0].sum()
        gradients.extend(torch.autograd.grad(total, z))
    assert gradients[0].abs().min() > 0
    assert torch.equal(*gradients)


def test_whole_numbers_are_taken_as_gpytorch_hands_them_over():
    """Floating-point tensors, for a network that takes integers."""
    case = make_case("attention", steps=1)
    kernel = EPKKernel(case.trajectory, "trace", normalize="cosine", rule=epk.gauss_legendre(2))
    tokens = case.test.flatten(1)
    expected = kernel(test_copy(tokens).double()).to_dense()
    assert torch.equal(kernel(tokens.double()).to_dense(), expected)
    assert torch.equal(kernel(tokens).to_dense().double(), expected)
    with pytest.raises(ValueError, match="inputs must be whole numbers"):
        kernel(tokens + 0.5).to_dense()


@pytest.mark.parametrize("coupling", [parse_coupling("full", C), parse_coupling("independent", C)])
def test_a_network_is_the_mean_at_rows_without_a_copy_column(trajectory, X, coupling):
    mean = NetworkMean(EPKKernel(trajectory).config, coupling, state=-1)
    assert torch.equal(mean(X), mean(test_copy(X)))
    z = X.clone().requires_grad_()
    assert_close(torch.autograd.grad(mean(z).sum(), z)[0], torch.autograd.grad(mean(test_copy(z)).sum(), z)[0])


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_a_process_predicts_at_rows_without_a_copy_column(trajectory, X, outputs):
    gp = epk.LogitGP(trajectory, outputs, points=range(5))
    found, expected = gp(X), gp(test_copy(X))
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(gp.forward(X).mean, gp.forward(test_copy(X)).mean)
    assert torch.equal(gp.prior_mean(X), gp.prior_mean(test_copy(X)))
    z = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gp(z).mean.sum(), z)
    assert gradient.abs().min() > 0
    with pytest.raises(ValueError, match="in training mode a LogitGP must be called with its training points"):
        epk.LogitGP(trajectory, outputs, points=range(5)).train()(trajectory.inputs[:5])


class ExactModel(gpytorch.models.ExactGP):
    """As any user writes it."""

    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("compose", [lambda k, rbf: k * rbf, lambda k, rbf: k + rbf, lambda k, rbf: k])
def test_an_exact_gp_of_ones_own_takes_plain_inputs(trajectory, X, compose):
    kernel = compose(EPKKernel(trajectory, "trace", normalize="cosine"), gpytorch.kernels.RBFKernel())
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    x, y = trajectory.inputs, torch.linspace(-1, 1, 7, dtype=torch.float64)
    gp = ExactModel(x, y, likelihood, gpytorch.kernels.ScaleKernel(kernel)).double()
    likelihood.double()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -objective(gp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    gp.eval()
    with torch.no_grad():
        posterior = gp(X)
        joint = gp.covar_module(torch.cat([x, X])).to_dense()
        K = joint[:7, :7] + likelihood.noise * torch.eye(7, dtype=torch.float64)
        weights = torch.linalg.solve(K, joint[:7, 7:])
        mean = gp.mean_module.constant + weights.T @ (y - gp.mean_module.constant)
        assert_close(posterior.mean, mean, multiple=1e5)  # a solve in another order
        assert_close(posterior.covariance_matrix, joint[7:, 7:] - joint[7:, :7] @ weights, multiple=1e5)


class SparseGP(gpytorch.models.ApproximateGP):
    """With inducing points that are learned."""

    def __init__(self, kernel, Z):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        strategy = gpytorch.variational.VariationalStrategy(self, Z, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_a_sparse_gp_learns_plain_inducing_points(trajectory, X):
    kernel = EPKKernel(trajectory, "trace", normalize="cosine") * gpytorch.kernels.RBFKernel()
    gp, likelihood = SparseGP(kernel, X[:3].clone()).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, 7)
    y = torch.linspace(-1, 1, 7, dtype=torch.float64)
    optimizer = torch.optim.Adam([*gp.parameters(), *likelihood.parameters()], lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = -bound(gp(trajectory.inputs), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = (gp.variational_strategy.inducing_points - X[:3]).abs()
    assert moved.min() > 0
    assert gp.eval()(X).mean.shape == (5,)


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
def test_botorchs_gp_takes_the_kernel_on_plain_inputs(trajectory, X):
    kernel = EPKKernel(trajectory, "trace", normalize="cosine") * gpytorch.kernels.RBFKernel()
    x, y = trajectory.inputs, torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    gp = SingleTaskGP(x, y, covar_module=gpytorch.kernels.ScaleKernel(kernel), outcome_transform=None)
    fit_gpytorch_mll(
        gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp), optimizer_kwargs={"options": {"maxiter": 5}}
    )
    z = X[:4].reshape(2, 2, D).clone().requires_grad_()
    posterior = gp.posterior(z)
    (gradient,) = torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), z)
    assert gradient.abs().min() > 0
    single = gp.posterior(X[:4])
    assert_close(posterior.mean.detach().reshape(-1), single.mean.detach().reshape(-1), multiple=1e5)
    fantasy = gp.condition_on_observations(X[:1], y[:1])
    assert fantasy.posterior(X[:1]).variance < 0.99 * gp.posterior(X[:1]).variance
