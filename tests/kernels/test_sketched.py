"""Kernels of sketched features: low-rank operators for GPyTorch, equal to the exact kernel within their error."""

import gpytorch
import pytest
import torch
from linear_operator.operators import LowRankRootLinearOperator, MatmulLinearOperator, RootLinearOperator

import epk_gp as epk
from epk_gp.gram.path_features import path_features
from epk_gp.gram.sketch import PathSketch, nodes_trajectory
from epk_gp.kernels.epk import EPKKernel
from kernel_cases import MODES, C, D, assert_close, make_run, mixed

K = 16


@pytest.fixture(scope="module")
def run():
    return make_run()


def sketched(run, outputs, k=K, **options):
    return EPKKernel(run, outputs, head="logits", features=k, nodes=4, **options)


def exact(run, outputs, **options):
    return EPKKernel(nodes_trajectory(run, 4), outputs, "logits", epk.left_endpoint(), **options)


@pytest.mark.parametrize("outputs", MODES)
def test_values_are_those_of_the_exact_kernel_on_average(run, outputs, unchecked) -> None:
    """In every mode, on its own scale; the control: on another scale they are not."""
    x = torch.randn(4, D, dtype=torch.float64)
    values = torch.stack([sketched(run, outputs, seed=seed)(x).to_dense() for seed in range(60)])
    expected = exact(run, outputs)(x).to_dense()
    standard_error = values.std(0) / 60**0.5
    deviation = ((values.mean(0) - expected) / standard_error).square().mean().sqrt()
    assert deviation < 3
    assert ((values.mean(0) - expected / C) / standard_error).square().mean().sqrt() > 4


def test_the_trace_is_that_of_path_features(run) -> None:
    x = torch.randn(4, D, dtype=torch.float64)
    z = path_features(run, x, K, nodes=4, head="logits", num_probe=0)
    assert_close(sketched(run, "trace")(x).to_dense(), C * z @ z.T)


@pytest.mark.parametrize("outputs", MODES)
def test_matrices_are_low_rank_operators(run, outputs) -> None:
    x = torch.randn(30, D, dtype=torch.float64)
    kernel = sketched(run, outputs)
    K = kernel(x).evaluate_kernel()
    assert isinstance(K, LowRankRootLinearOperator)
    assert isinstance(kernel(x[:3]).evaluate_kernel(), RootLinearOperator)
    assert isinstance(kernel(x, x[:4]).evaluate_kernel(), MatmulLinearOperator)
    dense = K.to_dense()
    assert_close(kernel(x, diag=True), dense.diagonal(dim1=-2, dim2=-1))
    R = C if outputs == "full" else 1
    assert_close(kernel(x, x[:4]).to_dense(), dense[..., : 4 * R])
    assert torch.linalg.eigvalsh(dense).min() > -1e-9 * dense.abs().max()


@pytest.mark.parametrize("outputs", MODES)
def test_cosines_have_a_diagonal_of_ones(run, outputs) -> None:
    x = mixed(6)
    kernel = sketched(run, outputs, normalize="cosine")
    dense, raw = kernel(x).to_dense(), sketched(run, outputs)(x).to_dense()
    length = raw.diagonal(dim1=-2, dim2=-1).sqrt()
    assert_close(dense, raw / length[..., None] / length[..., None, :])
    torch.testing.assert_close(kernel(x, diag=True), torch.ones_like(length), rtol=0, atol=1e-14)


def test_cosines_are_the_exact_ones_within_the_stated_error(run) -> None:
    x = torch.randn(12, D, dtype=torch.float64)
    error = path_features(run, x, 256, nodes=4, head="logits").error
    difference = (
        sketched(run, "trace", 256, normalize="cosine")(x).to_dense()
        - EPKKernel(run, "trace", "logits", epk.gauss_legendre(2), normalize="cosine")(x).to_dense()
    )
    off_diagonal = difference[~torch.eye(12, dtype=torch.bool)]
    assert float(off_diagonal.square().mean().sqrt()) == pytest.approx(error.rms)
    assert float(off_diagonal.abs().max()) == pytest.approx(error.max)
    assert error.rms < 1.15 / 16 + error.nodes_rms


@pytest.mark.parametrize("outputs", ["full", "independent", "trace", 1])
def test_a_mean_diagonal_is_that_of_the_features(run, outputs) -> None:
    x = epk.train_copy(run.inputs)
    kernel = sketched(run, outputs, normalize="mean_diagonal")
    assert float(kernel(x, diag=True).mean()) == pytest.approx(1)
    number = sketched(run, outputs, normalize=4)
    assert_close(number(x).to_dense(), sketched(run, outputs)(x).to_dense() / 4)


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("normalize", [None, "cosine"])
def test_derivatives_in_the_points_are_those_of_the_features(run, outputs, normalize, unchecked) -> None:
    torch.manual_seed(0)  # a length of 5 random features may be small by chance, and its derivatives large
    kernel = sketched(run, outputs, 5, normalize=normalize)
    x = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, D, dtype=torch.float64)

    def values(z):
        return kernel(z, other).to_dense(), kernel(z).to_dense()

    assert torch.autograd.gradcheck(values, x, fast_mode=True)


@pytest.fixture
def differentiated(monkeypatch):
    """The numbers of points whose features are differentiated, call by call."""
    sizes, original = [], PathSketch.input_gradients
    monkeypatch.setattr(
        PathSketch,
        "input_gradients",
        lambda sketch, points, weights: sizes.append(len(points)) or original(sketch, points, weights),
    )
    return sizes


def test_only_points_whose_features_are_used_are_differentiated(run, differentiated) -> None:
    """A posterior joins the test points with all training points."""
    x = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    sketched(run, "trace")(x).to_dense()[:2, :2].sum().backward()
    assert differentiated == [2]
    assert torch.equal(x.grad[2:], torch.zeros(4, D, dtype=torch.float64))


def test_points_that_were_joined_with_learned_ones_are_not_differentiated(run, differentiated) -> None:
    """SVGP joins each batch of data with its inducing points."""
    learned, data = torch.randn(2, D, dtype=torch.float64, requires_grad=True), torch.randn(6, D, dtype=torch.float64)
    joint, kernel = torch.cat([learned, data]), sketched(run, "trace")
    kernel(joint[:2], joint[2:]).to_dense().sum().backward()
    assert differentiated == [2]
    (expected,) = torch.autograd.grad(kernel(learned, data).to_dense().sum(), learned)
    assert_close(learned.grad, expected, 1e4)


def test_batches_of_points_have_their_own_matrices(run, unchecked) -> None:
    x = mixed(2, 4)
    for outputs in MODES:
        kernel = sketched(run, outputs)
        batched = kernel(x.unsqueeze(-3) if outputs == "independent" else x).to_dense()
        assert_close(batched, torch.stack([kernel(single).to_dense() for single in x]))
    independent = sketched(run, "independent")
    assert_close(independent[1](x[0]).to_dense(), sketched(run, 1)(x[0]).to_dense())
    own = mixed(C, 4)
    assert_close(independent(own).to_dense(), torch.stack([independent[c](own[c]).to_dense() for c in range(C)]))


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("scaled", [False, True])
def test_an_exact_gp_is_linear_regression_on_the_features(run, scaled) -> None:
    """Posterior and marginal likelihood equal those of the dense matrix."""
    x, test = torch.randn(40, D, dtype=torch.float64), torch.randn(5, D, dtype=torch.float64)
    y = torch.sin(x[:, 0])
    kernel = sketched(run, "trace", normalize="cosine")
    model = Model(x, y, gpytorch.kernels.ScaleKernel(kernel) if scaled else kernel).double()
    model.likelihood.noise = 0.1
    if scaled:
        model.covar_module.outputscale = 2.0
    factor = 2.0 if scaled else 1.0
    dense = factor * kernel(torch.cat([x, test])).to_dense().detach()
    A = dense[:40, :40] + 0.1 * torch.eye(40, dtype=torch.float64)
    log_likelihood = torch.distributions.MultivariateNormal(torch.zeros(40, dtype=torch.float64), A).log_prob(y)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = mll(model(x), y)
    assert float(value.detach()) == pytest.approx(float(log_likelihood) / 40, rel=1e-6)
    value.backward()
    assert model.likelihood.raw_noise.grad.abs() > 0
    model.eval()
    with torch.no_grad():
        posterior = model(test)
        solved = torch.linalg.solve(A, dense[:40, 40:])
        torch.testing.assert_close(posterior.mean, solved.T @ y)
        torch.testing.assert_close(
            posterior.covariance_matrix, dense[40:, 40:] - dense[40:, :40] @ solved, rtol=1e-5, atol=1e-7
        )


def test_copies_of_one_kernel_share_their_features(run) -> None:
    x = mixed(5)
    kernel = sketched(run, "trace")
    first = kernel(x).to_dense()
    assert torch.equal(kernel.expand_batch(torch.Size([2]))(x).to_dense(), first.expand(2, -1, -1))
    assert kernel.config.cache.hits >= 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": 0}, ValueError, "features must be at least 1: got 0"),
        ({"features": 2.5}, TypeError, "features must be a whole number"),
        ({"features": 8, "nodes": 0}, ValueError, "nodes must be at least 1"),
        ({"features": 8, "seed": None}, TypeError, "seed must be a whole number"),
    ],
)
def test_what_cannot_be_used_is_refused(run, unchecked, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        EPKKernel(run, **arguments)
