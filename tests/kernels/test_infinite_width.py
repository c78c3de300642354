"""Infinite-width kernels against random wide networks, their derivative identities, and homogeneity."""

import unittest
from math import pi

import gpytorch
import pytest
import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from epk_gp.kernels.infinite_width import ArcCosineKernel, ErfKernel, angular

KERNELS = {"erf": ErfKernel, **{f"order_{n}": (lambda n=n, **k: ArcCosineKernel(n, **k)) for n in (0, 1, 2)}}
ACTIVATIONS = {
    "erf": torch.erf,
    "order_0": lambda u: 2**0.5 * (u > 0).double(),
    "order_1": lambda u: 2**0.5 * u.clamp_min(0),
    "order_2": lambda u: 2**0.5 * u.clamp_min(0).square(),
}
SLOPES = {"erf": lambda u: 2 / pi**0.5 * torch.exp(-u.square()), "order_1": lambda u: 2**0.5 * (u > 0).double()}


class Peer(BaseKernelTestCase):
    """GPyTorch's 13 tests."""

    seed = 0

    def create_kernel_no_ard(self, **kwargs):
        return self.make(**{k: v for k, v in kwargs.items() if v is not None})


class TestPeerErf(Peer, unittest.TestCase):
    make = staticmethod(lambda **k: ErfKernel(2, **k))


class TestPeerArcCosine(Peer, unittest.TestCase):
    make = staticmethod(lambda **k: ArcCosineKernel(1, 2, bias=True, **k))


class TestPeerOrderTwo(Peer, unittest.TestCase):
    make = staticmethod(lambda **k: ArcCosineKernel(2, **k))


def points(n=4, D=3):
    return torch.randn(n, D, dtype=torch.float64)


def dense(kernel, x, y=None):
    return kernel.double()(x, y).to_dense()


def random_layer(x, width, kernel, generator):
    """Pre-activations of a wide random layer, its biases first."""
    x = torch.cat([x.new_ones(len(x), 1), x], 1) if kernel.bias else x
    variances = [kernel.bias_variance.item()] if kernel.bias else []
    variances += [kernel.weight_variance.item()] * (x.shape[1] - len(variances))
    root = torch.tensor(variances, dtype=x.dtype).sqrt().diag()
    return x @ root @ torch.randn(x.shape[1], width, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_one_layer_is_the_average_over_random_units(name, bias, generator):
    x, kernel = points(), KERNELS[name](bias=bias).double()
    kernel.weight_variance = 0.7
    if bias:
        kernel.bias_variance = 0.4
    with torch.no_grad():
        h = ACTIVATIONS[name](random_layer(x, 400_000, kernel, generator))
        products = h[:, None] * h[None]
        error = products.std(-1) / 400_000**0.5
        assert ((products.mean(-1) - dense(kernel, x)).abs() < 5 * error).all()
        assert not ((products.mean(-1) - 1.05 * dense(kernel, x)).abs() < 5 * error).all()  # the negative control


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_depth_is_the_recursion_of_wide_random_networks(name, generator):
    """20 networks with three hidden layers of 1000 units: part of their error, 1/width, does not average out."""
    width, x, kernel = 1000, points(), KERNELS[name](depth=3, bias=True).double()
    kernel.weight_variance, kernel.bias_variance = 0.5, 0.3
    grams = []
    with torch.no_grad():
        for _ in range(20):
            h = ACTIVATIONS[name](random_layer(x, width, kernel, generator))
            for _ in range(2):
                W = torch.randn(width, width, generator=generator, dtype=torch.float64) * (0.5 / width) ** 0.5
                h = ACTIVATIONS[name](h @ W + 0.3**0.5 * torch.randn(width, generator=generator, dtype=torch.float64))
            grams.append(h @ h.mT / width)
        average, error = torch.stack(grams).mean(0), torch.stack(grams).std(0) / 20**0.5
        K = dense(kernel, x)
        assert ((average - K).abs() < 5 * error + 30 * K.abs() / width).all()
        shallow = KERNELS[name](depth=2, bias=True).double()
        shallow.weight_variance, shallow.bias_variance = 0.5, 0.3
        assert ((average - dense(shallow, x)).abs() > 5 * error + 30 * K.abs() / width).any()


# Derivatives


@pytest.mark.parametrize("name", SLOPES)
def test_derivatives_are_expectations_of_slopes(name, generator):
    """d K / d x_i = E[psi'(u) psi(v) w_i], d2 K / d x_i d y_j = E[psi'(u) psi'(v) w_i w_j]."""
    x, y = points(2)
    kernel = KERNELS[name](bias=False).double()
    W = torch.randn(400_000, 3, generator=generator, dtype=torch.float64)
    psi, slope = ACTIVATIONS[name], SLOPES[name]

    def value(x, y):
        return kernel(x[None], y[None]).to_dense()[0, 0]

    first = slope(W @ x)[:, None] * psi(W @ y)[:, None] * W
    derivative = torch.autograd.functional.jacobian(lambda x: value(x, y), x)
    assert ((first.mean(0) - derivative).abs() < 5 * first.std(0) / 400_000**0.5).all()
    mixed = (slope(W @ x) * slope(W @ y))[:, None, None] * W[:, :, None] * W[:, None, :]
    hessian = torch.autograd.functional.hessian(value, (x, y))[0][1]
    assert ((mixed.mean(0) - hessian).abs() < 5 * mixed.std(0) / 400_000**0.5).all()
    torch.testing.assert_close(hessian, hessian.mT)  # w_i w_j is symmetric, whatever x and y
    wrong = psi(W @ x)[:, None] * slope(W @ y)[:, None] * W  # negative control: the derivative with respect to y
    assert ((first - wrong).mean(0).abs() > 20 * first.std(0) / 400_000**0.5).any()


@pytest.mark.parametrize("order", [1, 2])
def test_homogeneity_gives_eulers_identities(order):
    """Degree n in each argument: sum x_i y_j d2K/dx_i dy_j = n^2 K, sum x_i x_j d2K/dx_i dx_j = n (n - 1) K."""
    x, y = points(2)
    kernel = ArcCosineKernel(order).double()

    def value(x, y):
        return kernel(x[None], y[None]).to_dense()[0, 0]

    H = torch.autograd.functional.hessian(value, (x, y))
    K = value(x, y).detach()
    torch.testing.assert_close(x @ H[0][1] @ y, order**2 * K)
    torch.testing.assert_close(x @ H[0][0] @ x, order * (order - 1) * K, rtol=0, atol=1e-12 * float(K))
    torch.testing.assert_close(y @ H[1][1] @ y, order * (order - 1) * K, rtol=0, atol=1e-12 * float(K))
    with torch.no_grad():
        torch.testing.assert_close(value(3 * x, y), 3**order * K)
        erf = ErfKernel(bias=False).double()
        control = erf(3 * x[None], y[None]).to_dense() / erf(x[None], y[None]).to_dense()
        assert abs(float(control) - 3) > 0.1


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_angular_part_climbs_its_ladder_of_derivatives(order):
    c = torch.linspace(-0.95, 0.95, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: angular(c, order), (c,))
    assert torch.autograd.gradgradcheck(lambda c: angular(c, order), (c,))
    theta = c.detach().acos()
    expected = {
        0: pi - theta,
        1: theta.sin() + (pi - theta) * theta.cos(),
        2: 3 * theta.sin() * theta.cos() + (pi - theta) * (1 + 2 * theta.cos() ** 2),
    }[order]
    torch.testing.assert_close(angular(c, order).detach(), expected)
    ends = torch.tensor([-1.0, 1.0, 1 + 1e-16], dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(angular(ends, order).sum(), ends)
    assert torch.isfinite(slopes).all()


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_finite_where_points_coincide(name):
    x = points().requires_grad_()
    kernel = KERNELS[name](depth=2, bias=True).double()
    kernel(x).to_dense().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in kernel.parameters())
    with torch.no_grad():
        torch.testing.assert_close(kernel(x, diag=True), dense(kernel, x).diagonal(), rtol=1e-12, atol=0)
        assert torch.linalg.eigvalsh(dense(kernel, x)).min() > 0


def test_the_origin_has_a_value_except_for_a_step():
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1] = 1.0
    for order in (1, 2):
        K = dense(ArcCosineKernel(order), x.clone().requires_grad_())
        assert (K[0] == 0).all()
        K.sum().backward()
    with pytest.raises(ValueError, match="order 0 has no value at the origin: use bias=True"):
        dense(ArcCosineKernel(0), x)
    assert torch.isfinite(dense(ArcCosineKernel(0, bias=True), x)).all()


def test_a_process_learns_the_variances():
    x = torch.linspace(-2, 2, 15, dtype=torch.float64)[:, None]
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class GP(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, x[:, 0].sin(), likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), ArcCosineKernel(1, 2, bias=True)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    gp = GP().double().train()
    marginal_likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = -marginal_likelihood(gp(x), gp.train_targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_arguments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="depth must be at least 1 hidden layer: got 0"):
        ErfKernel(0)
    with pytest.raises(ValueError, match=r"order must be one of \[0, 1, 2\]: got 3"):
        ArcCosineKernel(3)
    with pytest.raises(ValueError, match="last_dim_is_batch must be False"):
        ErfKernel().forward(points(), points(), last_dim_is_batch=True)
