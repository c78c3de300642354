"""The process on labels: one scalar kernel, one factorisation for all classes."""

import pytest
import torch
from torch.testing import assert_close

from epk_gp.core.checks import ComputeOptions
from epk_gp.core.inputs import Points
from epk_gp.gp.label_process import (
    InputFeatures,
    LabelKernel,
    LabelSettings,
    condition_exactly,
    condition_on_features,
    few_rows,
    median_lengthscale,
    most_likely,
    squared_distances,
    without_rounding,
)
from epk_gp.gram.path_kernel import gram_block
from epk_gp.gram.sketch import nodes_trajectory, trace_coefficients
from epk_gp.quadrature.rules import QuadratureRule
from gp_cases import C, D, make_net, make_run

N = 12


def centred(y):
    return torch.nn.functional.one_hot(y, C).double() - 1 / C


@pytest.fixture
def points(generator):
    X = torch.randn(N, D, dtype=torch.float64, generator=generator)
    return X, (X > 0).sum(1)


@pytest.fixture
def nodes(points):
    torch.manual_seed(0)
    return nodes_trajectory(make_run(make_net(), *points), 4)


def reference_kernel(nodes, X, Y, lengthscale):
    V = trace_coefficients(nodes, 0)

    def trace(a, b):
        """Node by node, one combination of the outputs at each."""
        a, b, total = Points(a, is_train=False), Points(b, is_train=False), 0
        for number, v in enumerate(V):
            weights = torch.zeros(len(V))
            weights[number] = nodes.steps[number].lr
            K = gram_block(
                nodes, a, b, head="logits", rule=QuadratureRule.left_endpoint(), step_weights=weights.double()
            )
            total = total + torch.einsum("ncmd,c,d->nm", K, v, v)
        return total

    lengths = [trace(z, z).diagonal().sqrt() for z in (X, Y)]
    cosine = trace(X, Y) / (lengths[0][:, None] * lengths[1])
    if lengthscale is None:
        return cosine
    return cosine * torch.exp(-torch.cdist(X, Y).square() / (2 * lengthscale**2))


@pytest.mark.parametrize(("lengthscale", "power"), [(None, 1), (0.7, 1), (None, 3), (0.7, 2)])
def test_the_kernel_is_a_power_of_the_cosine_of_combined_outputs_times_an_rbf(
    nodes, points, generator, lengthscale, power
):
    X = points[0]
    Y = torch.randn(5, D, dtype=torch.float64, generator=generator)
    kernel = LabelKernel(nodes, lengthscale, ComputeOptions(), power=power)
    assert_close(kernel.block(Y, X), reference_kernel(nodes, Y, X, lengthscale) ** power)
    gram = kernel.gram(X)
    assert_close(gram, reference_kernel(nodes, X, X, lengthscale) ** power)
    assert (gram.diagonal() == 1).all()


def test_features_of_a_power_are_those_of_the_kernels_power(nodes, points):
    """The mean over seeds comes close; that of the kernel itself, the control, does not."""
    X = points[0]
    kernel = LabelKernel(nodes, 2.0, ComputeOptions(), power=2)
    of_power, of_one = (
        torch.stack([InputFeatures(nodes, 512, seed, 2.0, power=power)(X) for seed in range(8)]).double()
        for power in (2, 1)
    )
    assert_close(of_power.square().sum(2), torch.ones(8, N, dtype=torch.float64), rtol=1e-5, atol=0)
    exact = kernel.gram(X)
    errors = [(z @ z.mT).mean(0).sub(exact).square().mean().sqrt() for z in (of_power, of_one)]
    assert errors[0] < 2 / (8 * 512) ** 0.5 < errors[1]


def test_blocks_do_not_depend_on_the_memory_budget(nodes, points):
    X = points[0]
    small, large = (LabelKernel(nodes, None, ComputeOptions(memory_budget=budget)) for budget in (1 << 20, 1 << 28))
    many = X.repeat(60, 1)
    assert_close(small.gram(many), large.gram(many))
    assert_close(small.block(X, many), large.block(X, many))


@pytest.fixture(params=["exact", "sketched"])
def process(request, nodes, points):
    X, y = points
    targets = centred(y)
    if request.param == "exact":
        return condition_exactly(LabelKernel(nodes, 1.0, ComputeOptions(), power=2), X, targets)
    features = InputFeatures(nodes, 64, 0, None)
    return condition_on_features(features, features(X), targets)


def kernel_matrices(process, X, Y):
    if isinstance(process.kernel, LabelKernel):
        return reference_kernel(process.kernel.nodes, X, Y, process.kernel.lengthscale) ** process.kernel.power
    return process.kernel(X).double() @ process.kernel(Y).double().T


def test_predictions_are_those_of_gaussian_process_regression(process, points, generator):
    """Equations (2.25) and (2.26) of Rasmussen & Williams (2006)."""
    X, y = points
    Z = torch.randn(4, D, dtype=torch.float64, generator=generator)
    A = torch.linalg.inv(kernel_matrices(process, X, X) + process.noise * torch.eye(N))
    cross = kernel_matrices(process, Z, X)
    mean, variance = process.predict(Z)
    covariance = kernel_matrices(process, Z, Z) - cross @ A @ cross.T
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if isinstance(process.kernel, InputFeatures) else {}  # float32 features
    assert_close(mean, cross @ A @ centred(y), **tolerance)
    assert_close(variance, covariance.diagonal(), **tolerance)
    assert_close(process.covariance(Z, Z), covariance, **tolerance)
    assert_close(process.covariance(Z, Z.clone()), covariance, **tolerance)


def test_leave_one_out_is_a_process_without_the_point(process, points):
    """By refitting with the same hyperparameters."""
    X, y = points
    K = kernel_matrices(process, X, X)
    mean, variance = process.leave_one_out()
    for i in range(N):
        others = torch.arange(N) != i
        A = torch.linalg.inv(K[others][:, others] + process.noise * torch.eye(N - 1))
        k = K[i, others]
        assert_close(mean[i], k @ A @ centred(y)[others], rtol=1e-5, atol=1e-6)
        assert_close(variance[i], K[i, i] - k @ A @ k, rtol=1e-5, atol=1e-6)


def test_the_noise_is_where_the_marginal_likelihood_is_largest(process, points):
    """Against the density itself, at the noise found and at others; the largest of them is the control."""
    X, y = points
    K, Y = kernel_matrices(process, X, X), centred(y)

    def loss(noise):
        covariance = K + noise * torch.eye(N)
        scale = (Y * torch.linalg.solve(covariance, Y)).sum() / (N * C)
        density = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), scale * covariance)
        return -float(density.log_prob(Y.T).sum()) / (N * C), float(scale)

    best, scale = loss(process.noise)
    assert process.negative_log_likelihood == pytest.approx(best, rel=1e-4)
    assert process.outputscale == pytest.approx(scale, rel=1e-4)
    others = [loss(noise)[0] for noise in torch.logspace(-6, 4, 41, dtype=torch.float64).tolist()]
    assert best < min(others) + 1e-5
    assert max(others) > best + 0.1


def spectral_losses(values, squares, noises):
    """Negative log likelihood per target at some noises, from the eigenvalues of the kernel matrix."""
    shifted = values.clamp_min(0) + noises[:, None]
    scales = (squares / shifted).sum(1) / (len(values) * C)
    return 0.5 * ((2 * torch.pi * scales).log() + 1 + shifted.log().mean(1))


@pytest.mark.parametrize("is_sketched", [False, True])
def test_some_points_say_where_to_look_and_all_of_them_choose_the_noise(is_sketched, monkeypatch):
    """Against the eigenvalues of all points; the noise that the twenty alone would take is another one."""
    monkeypatch.setattr("epk_gp.gp.label_process._FEW_POINTS", 20)
    gains = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(60 + 5 * seed, 1 + seed % 3, dtype=torch.float64, generator=generator)
        y = centred((X[:, 0] > 0).long() + (torch.rand(len(X), generator=generator) > 0.7))
        K = torch.exp(-torch.cdist(X, X).square() / (0.5 + seed % 4))
        values, vectors = torch.linalg.eigh(K)
        F = vectors * values.clamp_min(0).sqrt()
        few = few_rows(len(X), K.device)
        of_features = (F.T @ y,) if is_sketched else ()
        found = most_likely(F.T @ F if is_sketched else K, y, K[few][:, few], 1e-14, *of_features)
        squares = (vectors.T @ y).square().sum(1)

        noises = torch.logspace(-6, 4, 2000, dtype=torch.float64)
        best = float(spectral_losses(values, squares, noises).min())
        assert best - 1e-5 < found["negative_log_likelihood"] < best + 1e-6, seed
        alone = most_likely(K[few][:, few], y[few], K[few][:, few], 1e-14)["noise"]
        gains.append(float(spectral_losses(values, squares, torch.tensor([alone]))) - best)
    assert max(gains) > 0.01


def test_the_lengthscale_is_the_median_distance(generator):
    X = torch.randn(40, 2, 3, dtype=torch.float64, generator=generator)
    distances = torch.pdist(X.flatten(1))
    assert median_lengthscale(X) == pytest.approx(float(distances.square().median() ** 0.5))
    assert_close(squared_distances(X, X), torch.cdist(X.flatten(1), X.flatten(1)).square(), atol=1e-12, rtol=1e-7)


def test_distances_that_are_rounding_errors_are_no_lengthscale(generator):
    X = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    expected = median_lengthscale(X)
    assert median_lengthscale(X + 1e3) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"got a median distance of \S+ at 2e\+05 from 0. Train on inputs whose mean"):
        median_lengthscale(X + 1e5)
    far = torch.cat([X[1:], torch.full((1, 4), 1e6)])  # one that is far from all others does not count
    assert median_lengthscale(far) == pytest.approx(expected, rel=0.1)
    X[:27] = X[0].clone()
    with pytest.raises(ValueError, match=r"inputs must differ .* Use inputs_kernel=None"):
        median_lengthscale(X)
    X[:12] += 1e-3 * torch.randn(12, 4, dtype=torch.float64, generator=generator)
    assert 5e-4 < median_lengthscale(X) < 1e-2


def test_only_rounding_is_set_to_zero():
    values = torch.tensor([2.0, -1e-12, 0.0], dtype=torch.float64)
    assert without_rounding(values, 1e-11, "variances").tolist() == [2.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="variances must not be negative: the smallest is -1e-12, and rounding"):
        without_rounding(values, 1e-13, "variances")


def test_a_point_without_gradient_has_no_cosine(points):
    """A network of one ReLU layer without bias: at 0 nothing depends on the weights."""
    X, y = points
    torch.manual_seed(0)
    layers = [torch.nn.Linear(D, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, C, bias=False)]
    run = make_run(torch.nn.Sequential(*layers).double(), X, y)
    nodes, dead = nodes_trajectory(run, 2), torch.stack([X[0], torch.zeros_like(X[0])])
    for kernel in (LabelKernel(nodes, None, ComputeOptions()).gram, InputFeatures(nodes, 8, 0, None)):
        with pytest.raises(ValueError, match="that of point 1 is zero"):
            kernel(dead)


@pytest.mark.parametrize(("num_outputs", "expected"), [(2, 20), (10, 20), (20, 20), (21, 24), (100, 104), (1000, 256)])
def test_there_are_nodes_for_all_outputs(num_outputs, expected):
    assert LabelSettings().num_nodes(num_outputs) == expected
    assert LabelSettings(nodes=7).num_nodes(num_outputs) == 7


def test_a_matrix_that_costs_too_much_gives_way_to_features(nodes, points, monkeypatch):
    kernel, X = LabelKernel(nodes, None, ComputeOptions()), points[0]
    cost = kernel.combined.multiplications_per_pair(X)
    assert cost == 4 * sum(parameter.numel() for parameter in make_net().parameters())
    assert LabelSettings().num_features(kernel, X) is None
    monkeypatch.setattr("epk_gp.gp.label_process.EXACT_MULTIPLICATIONS", N**2 * cost // 2 - 1)
    assert LabelSettings().num_features(kernel, X) == 4096
    assert LabelSettings(features="exact").num_features(kernel, X) is None
