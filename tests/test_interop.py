"""The kernel in other people's models: GPyTorch's own kernels, exact and variational GPs, and BoTorch."""

import warnings

import gpytorch
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal

import epk_gp as epk
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import make_case

C = 3
MODES = ["full", "independent", "trace", "sum", 1]


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=3, batch_size=None)


def kernel_of(case, outputs="trace", **options):
    return epk.EPKKernel(case.trajectory, outputs, "logits", normalize="mean_diagonal", **options)


def everything(case):
    return torch.cat([train_copy(case.trajectory.inputs), test_copy(case.test)])


def on_inputs(kernel, case):
    """A kernel of GPyTorch's that does not see the copy column."""
    kernel.active_dims = torch.arange(case.trajectory.inputs.shape[1])
    return kernel.double()


def multitask_rbf(case):
    return on_inputs(gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=C), case)


# Compositions


@pytest.mark.parametrize("operation", ["sum", "product"])
@pytest.mark.parametrize("outputs", MODES)
def test_sums_and_products_are_those_of_the_matrices(case, outputs, operation):
    epk_kernel, x = kernel_of(case, outputs), everything(case)
    rbf = multitask_rbf(case) if outputs == "full" else on_inputs(gpytorch.kernels.RBFKernel(), case)
    both = epk_kernel + rbf if operation == "sum" else epk_kernel * rbf
    A, B = epk_kernel(x).to_dense(), rbf(x).to_dense()
    expected = A + B if operation == "sum" else A * B
    torch.testing.assert_close(both(x).to_dense(), expected.expand_as(both(x).to_dense()))
    torch.testing.assert_close(both(x, diag=True), expected.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("outputs", MODES)
def test_scales_of_scales_multiply(case, outputs):
    kernel, x = kernel_of(case, outputs), everything(case)
    inner = gpytorch.kernels.ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    outer = gpytorch.kernels.ScaleKernel(inner, batch_shape=kernel.batch_shape).double()
    inner.outputscale, outer.outputscale = 2.0, 3.0
    torch.testing.assert_close(outer(x).to_dense(), 6 * kernel(x).to_dense())


# Exact GPs


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.covar_module = kernel
        self.multitask = y.ndim == 2 and not kernel.batch_shape
        batch = kernel.batch_shape
        mean = gpytorch.means.ConstantMean(batch_shape=batch)
        self.mean_module = gpytorch.means.MultitaskMean(mean, num_tasks=C) if self.multitask else mean

    def forward(self, x):
        kind = MultitaskMultivariateNormal if self.multitask else MultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))


def exact_gp(case, outputs, kernel):
    x, batch = train_copy(case.trajectory.inputs), kernel.batch_shape
    y = torch.nn.functional.one_hot(case.trajectory.targets, C).double()
    if outputs == "full":
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=C)
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch)
        y = y.mT.contiguous() if batch else y[:, 1]
    return ExactGP(x, y, likelihood, kernel).double()


@pytest.mark.parametrize("outputs", MODES)
def test_an_exact_gp_of_the_users_own_fits_and_predicts(case, outputs, monkeypatch):
    kernel = kernel_of(case, outputs)
    calls = []
    for name in ("block", "block_per_class", "trace_block"):
        original = getattr(PathKernel, name)
        monkeypatch.setattr(PathKernel, name, lambda *a, f=original, **k: (calls.append(1), f(*a, **k))[1])
    scaled = gpytorch.kernels.ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    gp = exact_gp(case, outputs, scaled)
    marginal_likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp.train())
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = -marginal_likelihood(gp(*gp.train_inputs), gp.train_targets).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(calls) == 1
    gp.eval()
    with torch.no_grad():
        prediction = gp(test_copy(case.test))
        prior = scaled(test_copy(case.test), diag=True)
    assert prediction.mean.numel() == len(case.test) * (C if outputs in ("full", "independent") else 1)
    assert (prediction.variance.reshape(-1) <= prior.reshape(-1) + 1e-9).all()


def test_a_multitask_gp_on_a_sum_of_kernels_predicts(case):
    kernel = gpytorch.kernels.ScaleKernel(kernel_of(case, "full")) + gpytorch.kernels.ScaleKernel(multitask_rbf(case))
    gp = exact_gp(case, "full", kernel).eval()
    with torch.no_grad():
        prediction = gp(test_copy(case.test))
    assert prediction.mean.shape == (len(case.test), C)
    alone = exact_gp(case, "full", gpytorch.kernels.ScaleKernel(kernel_of(case, "full"))).eval()
    with torch.no_grad():
        assert (alone(test_copy(case.test)).mean - prediction.mean).abs().max() > 1e-3


def test_gpytorchs_dirichlet_classification_equals_the_logit_gp(case):
    """The same model twice: GPyTorch's likelihood and batch of GPs, and LogitGP's."""
    ours = epk.LogitGP(case.trajectory, "independent", "zero", "dirichlet")
    likelihood = gpytorch.likelihoods.DirichletClassificationLikelihood(case.trajectory.targets, dtype=torch.float64)
    kernel = gpytorch.kernels.ScaleKernel(kernel_of(case, "independent"), batch_shape=[C])

    class DirichletGP(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(train_copy(case.trajectory.inputs), likelihood.transformed_targets, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(batch_shape=[C]), kernel

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    gp = DirichletGP().double().eval()
    kernel.outputscale = torch.ones(C, dtype=torch.float64)
    with torch.no_grad():
        theirs = gp(test_copy(case.test))
    posterior = ours.logit_posterior(case.test)
    torch.testing.assert_close(posterior.mean, theirs.mean.mT, rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.covariance.diagonal(dim1=-2, dim2=-1), theirs.variance.mT, rtol=0, atol=1e-10)


# Inducing points


class SparseGP(gpytorch.models.ApproximateGP):
    """One variational GP per class with inducing points that are learned: test copies, which stay test copies."""

    def __init__(self, kernel, Z):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(Z.shape[-2], batch_shape=[C])
        strategy = gpytorch.variational.VariationalStrategy(self, Z, distribution, learn_inducing_locations=True)
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=C))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=[C])
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=[C])

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def learn(model, loss, steps, lr=0.05):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.slow
def test_a_variational_gp_per_class_learns_its_inducing_points(case):
    Z = test_copy(case.test[:3]).clone()
    gp = SparseGP(kernel_of(case, "independent"), Z.expand(C, -1, -1).clone()).double()
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=C, num_classes=C, mixing_weights=False)
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, len(case.trajectory.inputs))
    x, y = train_copy(case.trajectory.inputs), case.trajectory.targets
    with gpytorch.settings.num_likelihood_samples(100):
        losses = learn(gp, lambda: -bound(gp(x), y), 8)
    assert losses[-1] < losses[0]
    moved = gp.variational_strategy.base_variational_strategy.inducing_points
    assert (moved[..., -1] == 0).all()
    assert (moved[..., :-1] - Z[:, :-1]).abs().min() > 1e-6


def test_an_inducing_point_kernel_approximates_and_learns(case):
    x, y = train_copy(case.trajectory.inputs), case.trajectory.inputs[:, 0]
    base = gpytorch.kernels.ScaleKernel(kernel_of(case)).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    kernel = gpytorch.kernels.InducingPointKernel(base, inducing_points=x[:3].clone(), likelihood=likelihood)

    class RegressionGP(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    gp = RegressionGP().double().train()
    with torch.no_grad():
        K, Z = base(x).to_dense(), x[:3]
        nystrom = base(x, Z).to_dense() @ torch.linalg.solve(base(Z).to_dense(), base(Z, x).to_dense())
        with gpytorch.settings.sgpr_diagonal_correction(False):
            approximation = kernel.eval()(x).to_dense()
        kernel.train()
    # GPyTorch adds jitter to the inducing points' matrix
    torch.testing.assert_close(approximation, nystrom, rtol=0, atol=1e-3)
    assert (approximation - K).abs().max() > 1e-2
    marginal_likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    losses = learn(gp, lambda: -marginal_likelihood(gp(x), y), 5)
    assert losses[-1] < losses[0]
    assert (kernel.inducing_points[:, -1] == 1).all()  # a training copy stays one
    assert (kernel.inducing_points - x[:3]).abs().max() > 1e-3


# BoTorch


@pytest.fixture
def botorch_gp(case):
    kernel = gpytorch.kernels.ScaleKernel(kernel_of(case))
    x = train_copy(case.trajectory.inputs)
    y = case.trajectory.inputs[:, :1].sin() + 0.1 * torch.randn(len(x), 1, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Data .* is not", category=UserWarning)  # raw scales: the run's
        gp = SingleTaskGP(x, y, covar_module=kernel, outcome_transform=None)
        fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp))
    return gp


def test_a_posterior_over_b_batches_of_q_points_is_that_of_each_batch(case, botorch_gp):
    X = test_copy(torch.randn(4, 2, 8, dtype=torch.float64).flatten(0, 1)).reshape(4, 2, -1)
    with torch.no_grad():
        batch = botorch_gp.posterior(X)
        for b in range(4):
            one = botorch_gp.posterior(X[b])
            torch.testing.assert_close(batch.mean[b], one.mean, rtol=0, atol=1e-9)
            torch.testing.assert_close(
                batch.distribution.covariance_matrix[b], one.distribution.covariance_matrix, rtol=0, atol=1e-9
            )


@pytest.mark.slow
def test_expected_improvement_climbs_and_leaves_the_copy_column_alone(case, botorch_gp):
    D = case.trajectory.inputs.shape[1]
    acquisition = LogExpectedImprovement(botorch_gp, best_f=botorch_gp.train_targets.max())
    start = test_copy(case.test[:2])[:, None]
    bounds = torch.stack([torch.full((D + 1,), -3.0), torch.full((D + 1,), 3.0)]).double()
    candidate, value = optimize_acqf(
        acquisition,
        bounds=bounds,
        q=1,
        num_restarts=2,
        batch_initial_conditions=start,
        fixed_features={D: 0.0},
        options={"maxiter": 5},
    )
    with torch.no_grad():
        before = acquisition(start)
    assert candidate[0, -1] == 0
    assert value > before.max() + 0.1


def test_fantasies_lower_the_variance_where_they_are(case, botorch_gp):
    X = test_copy(case.test[:2])
    fantasy = botorch_gp.fantasize(X[:1], SobolQMCNormalSampler(torch.Size([4]), seed=0))
    with torch.no_grad():
        after, before = fantasy.posterior(X).variance, botorch_gp.posterior(X).variance
    assert after.shape == (4, 2, 1)
    assert (after[:, 0] < 0.9 * before[0]).all()
