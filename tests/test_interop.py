"""The kernel in other people's models: GPyTorch's own kernels, exact and sparse GPs, and BoTorch."""

import warnings

import gpytorch
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal

import epk_gp as epk
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import make_case

C = 3
MODES = ["full", "independent", "trace", 1]


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=3, batch_size=None)


def kernel_of(case, outputs="trace", normalize="mean_diagonal"):
    return epk.EPKKernel(case.trajectory, outputs, "logits", normalize=normalize)


def learn(model, loss, steps, lr=0.05):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("normalize", ["mean_diagonal", "cosine"])
@pytest.mark.parametrize("outputs", MODES)
def test_sums_and_products_are_those_of_the_matrices(case, outputs, normalize):
    kernel, D = kernel_of(case, outputs, normalize), case.trajectory.inputs.shape[1]
    x = torch.cat([train_copy(case.trajectory.inputs), test_copy(case.test)])
    rbf = gpytorch.kernels.RBFKernel(active_dims=range(D)).double()
    if outputs == "full":
        rbf = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=C).double()
        rbf.active_dims = torch.arange(D)
    A, B = kernel(x).to_dense(), rbf(x).to_dense()
    for both, expected in ((kernel + rbf, A + B), (kernel * rbf, A * B)):
        torch.testing.assert_close(both(x).to_dense(), expected)
        torch.testing.assert_close(both(x, x[:2]).to_dense(), expected[..., : 2 * (C if outputs == "full" else 1)])
        torch.testing.assert_close(both(x, diag=True), expected.diagonal(dim1=-2, dim2=-1))


class ExactGP(gpytorch.models.ExactGP):
    """As any user writes it."""

    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.covar_module, batch = kernel, kernel.batch_shape
        self.multitask = y.ndim == 2 and not batch
        mean = gpytorch.means.ConstantMean(batch_shape=batch)
        self.mean_module = gpytorch.means.MultitaskMean(mean, num_tasks=C) if self.multitask else mean

    def forward(self, x):
        kind = MultitaskMultivariateNormal if self.multitask else MultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("outputs", MODES)
def test_an_exact_gp_of_the_users_own_fits_on_one_gram_matrix_and_predicts(case, outputs, monkeypatch):
    kernel = kernel_of(case, outputs)
    calls = []
    for name in ("block", "block_per_class", "trace_block"):
        original = getattr(PathKernel, name)
        monkeypatch.setattr(PathKernel, name, lambda *a, f=original, **k: (calls.append(1), f(*a, **k))[1])
    batch, y = kernel.batch_shape, torch.nn.functional.one_hot(case.trajectory.targets, C).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch)
    if outputs == "full":
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=C)
    else:
        y = y.mT.contiguous() if batch else y[:, 1]
    scaled = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
    gp = ExactGP(train_copy(case.trajectory.inputs), y, likelihood, scaled).double()
    marginal_likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp.train())
    learn(gp, lambda: -marginal_likelihood(gp(*gp.train_inputs), y).sum(), 20, lr=0.1)
    assert len(calls) == 1
    gp.eval()
    with torch.no_grad():
        prediction = gp(test_copy(case.test))
        prior = scaled(test_copy(case.test), diag=True)
    assert prediction.mean.numel() == len(case.test) * (C if outputs in ("full", "independent") else 1)
    assert (prediction.variance.reshape(-1) <= prior.reshape(-1) + 1e-9).all()


def test_an_exact_gp_on_plain_inputs_is_the_textbooks(case):
    """Rows without a copy column, and a product of kernels."""
    x, X, y = case.trajectory.inputs, case.test, torch.linspace(-1, 1, 7, dtype=torch.float64)
    kernel = gpytorch.kernels.ScaleKernel(kernel_of(case, normalize="cosine") * gpytorch.kernels.RBFKernel())
    gp = ExactGP(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double().eval()
    with torch.no_grad():
        posterior, joint = gp(X), kernel(torch.cat([x, X])).to_dense()
        K = joint[:7, :7] + gp.likelihood.noise * torch.eye(7, dtype=torch.float64)
        weights = torch.linalg.solve(K, joint[:7, 7:])
        mean = gp.mean_module.constant
        torch.testing.assert_close(posterior.mean, mean + weights.T @ (y - mean), rtol=0, atol=1e-10)
        covariance = joint[7:, 7:] - joint[7:, :7] @ weights
        torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=0, atol=1e-10)


class SparseGP(gpytorch.models.ApproximateGP):
    """With inducing points that are learned."""

    def __init__(self, kernel, Z):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, distribution))
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("copy", [lambda X: X, test_copy], ids=["plain", "tagged"])
def test_a_sparse_gp_learns_its_inducing_points_which_stay_test_copies(case, copy):
    x, y, Z = copy(case.trajectory.inputs), torch.linspace(-1, 1, 7, dtype=torch.float64), copy(case.test[:3])
    kernel = kernel_of(case, normalize="cosine") * gpytorch.kernels.RBFKernel(active_dims=range(8))
    gp, likelihood = SparseGP(kernel, Z.clone()).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, 7)
    learn(torch.nn.ModuleList([gp, likelihood]), lambda: -bound(gp(x), y), 4)
    moved = gp.variational_strategy.inducing_points - Z
    assert moved[:, :8].abs().min() > 0
    assert (moved[:, 8:] == 0).all()


def botorch_gp(case, x, kernel):
    y = case.trajectory.inputs[:, :1].sin() + 0.1 * torch.randn(len(x), 1, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Data .* is not", category=UserWarning)  # raw scales: the run's
        gp = SingleTaskGP(x, y, covar_module=gpytorch.kernels.ScaleKernel(kernel), outcome_transform=None)
        options = {"options": {"maxiter": 5}}
        fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp), optimizer_kwargs=options)
    return gp


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
def test_botorch_predicts_in_batches_differentiates_and_fantasizes(case):
    X, x = case.test[:4], case.trajectory.inputs
    gp = botorch_gp(case, x, kernel_of(case, normalize="cosine") * gpytorch.kernels.RBFKernel())
    z = X.reshape(2, 2, -1).clone().requires_grad_()
    batch, single = gp.posterior(z), gp.posterior(X)
    torch.testing.assert_close(batch.mean.reshape(-1), single.mean.reshape(-1), rtol=0, atol=1e-9)
    for b in range(2):
        covariance = gp.posterior(X[2 * b : 2 * b + 2]).distribution.covariance_matrix
        torch.testing.assert_close(batch.distribution.covariance_matrix[b], covariance, rtol=0, atol=1e-9)
    (gradient,) = torch.autograd.grad(batch.mean.sum() + batch.variance.sum(), z)
    assert gradient.abs().min() > 0
    fantasy = gp.condition_on_observations(X[:1], torch.zeros(1, 1, dtype=torch.float64))
    assert fantasy.posterior(X[:1]).variance < 0.99 * single.variance[0]


@pytest.mark.slow
def test_expected_improvement_climbs_and_leaves_the_copy_column_alone(case):
    D, gp = case.trajectory.inputs.shape[1], botorch_gp(case, train_copy(case.trajectory.inputs), kernel_of(case))
    acquisition = LogExpectedImprovement(gp, best_f=gp.train_targets.max())
    start = test_copy(case.test[:2])[:, None]
    candidate, value = optimize_acqf(
        acquisition, bounds=torch.tensor([[-3.0], [3.0]], dtype=torch.float64).expand(2, D + 1), q=1, num_restarts=2,
        batch_initial_conditions=start, fixed_features={D: start[0, 0, -1].item()}, options={"maxiter": 5},
    )  # fmt: skip
    with torch.no_grad():
        before = acquisition(start)
    assert candidate[0, -1] == start[0, 0, -1]
    assert value > before.max() + 0.1
