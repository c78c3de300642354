"""Derivatives of the kernel with respect to its points, against finite differences and a graph over the definition."""

import gpytorch
import pytest
import torch
from torch.autograd import gradcheck

import epk_gp as epk
import reference
from epk_gp.gp.output_coupling import NetworkMean, OutputCoupling
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import assert_close, make_case

MODES = ["full", "independent", "trace", 1]
RULE = epk.gauss_legendre(2)
TWICE = "an EPKKernel must be differentiated at most once: got a second derivative, .* Take finite differences"


def kernel_of(case, outputs="full", head="log_softmax", **options):
    return epk.EPKKernel(case.trajectory, outputs, head, RULE, **options)


def points(case):
    """A training copy, a test copy and the column that tells them apart, which finite differences must not move."""
    x = case.test[:2].flatten(1).clone()
    return x.requires_grad_(), torch.cat([train_copy(x[:1]), test_copy(x[1:])])[:, -1:].detach()


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "normalize"), [("full", None), *((mode, "cosine") for mode in MODES)])
def test_every_mode_has_the_derivative_of_its_values(outputs, normalize):
    case = make_case("tanh", steps=1)
    kernel, (x, copy) = kernel_of(case, outputs, normalize=normalize), points(case)
    y = torch.cat([test_copy(case.test[2:4]), train_copy(case.trajectory.inputs[:2])])
    calls = {
        "against others": lambda z: kernel.forward(z, y),
        "others against them": lambda z: kernel.forward(y, z),
        "against themselves": lambda z: kernel.forward(z, z),
        "diagonal": lambda z: kernel.forward(z, z, diag=True),
        "diagonal of two sets": lambda z: kernel.forward(z, y[:2], diag=True),
        "single points": lambda z: kernel.forward(z[:, None, None], z[:, None, None]),
        "repeated points": lambda z: kernel.forward(z.expand(3, 1, 2, -1), y),
    }
    for name, call in calls.items():
        assert gradcheck(lambda x, call=call: call(torch.cat([x, copy], 1)), (x,), fast_mode=True), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv1d", "wide_conv", "twice", "tied", "transformer", "cosine", "one_class"])
def test_every_kind_of_layer_has_the_derivative_of_its_values(name):
    case = make_case(name, steps=1)
    kernel, (x, copy) = kernel_of(case, head=case.heads[-1]), points(case)
    calls = [lambda z: kernel.forward(z, z), lambda z: kernel.forward(z, z, diag=True)]
    if name in ("conv1d", "tied"):  # a set for each class
        own, y = kernel_of(case, "independent"), train_copy(case.trajectory.inputs[:2])
        calls += [lambda z: own.forward(of_classes(z), y), lambda z: own.forward(of_classes(z), of_classes(z))]
        calls += [lambda z: own.forward(of_classes(z), of_classes(z), diag=True)]
    for call in calls:
        assert gradcheck(lambda x, call=call: call(torch.cat([x, copy], 1)), (x,), fast_mode=True)


def of_classes(z):
    return torch.stack([z, z.flip(0), z])


def test_derivatives_equal_a_graph_over_the_definition():
    """Sums over loops of `autograd.grad`, differentiated as they stand; across a ReLU too, inside its linear piece."""
    case = make_case("relu", steps=2)
    x = case.test[:2].clone().requires_grad_()
    start = case.trajectory.weights(0)
    total = torch.zeros((), dtype=torch.float64)
    for step in case.trajectory.steps:
        start, end = case.trajectory.weights(step.index), case.trajectory.weights(step.index + 1)
        for t, omega in RULE:
            params = {name: (start[name] + t * (end[name] - start[name])).requires_grad_() for name in start}
            f = [reference.output(case.trajectory, params, row, "log_softmax")[1] for row in x]
            J = [torch.autograd.grad(value, list(params.values()), create_graph=True) for value in f]
            total = total + step.lr * omega * sum((a * b).sum() for a, b in zip(*J, strict=True))
    (expected,) = torch.autograd.grad(total, x)
    tagged = test_copy(x.detach()).requires_grad_()
    K = kernel_of(case, 1).forward(tagged, tagged)
    (gradient,) = torch.autograd.grad(K[0, 1], tagged)
    assert_close(gradient[:, :-1], expected)


@pytest.mark.parametrize("outputs", MODES)
def test_the_copy_column_gets_the_gradient_zero(outputs):
    case = make_case("tanh", steps=1)
    x = train_copy(case.test).requires_grad_()
    kernel = gpytorch.kernels.ScaleKernel(kernel_of(case, outputs))
    kernel(x).to_dense().square().sum().backward()
    assert (x.grad[:, -1] == 0).all()
    assert (x.grad[:, :-1] != 0).all()


def test_equal_points_on_both_sides_share_no_gradient():
    case = make_case("tanh", steps=1)
    x = test_copy(case.test[:3]).requires_grad_()
    for K in (lambda y: kernel_of(case).forward(x, y), lambda y: kernel_of(case).forward(x, y, diag=True)):
        (one,) = torch.autograd.grad(K(x.detach()).sum(), x)
        (both,) = torch.autograd.grad(K(x).sum(), x)
        assert_close(both, 2 * one)  # K is symmetric


def hessian(call, x, **options):
    return torch.autograd.functional.hessian(lambda z: call(z).sum(), x, **options)


def penalty(call, x):
    x = x.clone().requires_grad_()
    value = call(x).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (value + gradient.square().sum()).backward()


def weighted(call, x, **options):
    x = x.clone().requires_grad_()
    weights = torch.ones(2, 2, 2, dtype=torch.float64)
    return torch.autograd.grad(call(x), x, weights, is_grads_batched=True)


def tangent(call, x):
    call(x)  # the kernel keeps the block, which has no tangent
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


INSIDE = "points must be plain tensors: got one inside a transformation .*autograd"
REFUSED = {
    "hessian": (hessian, RuntimeError, TWICE),
    "vectorized hessian": (lambda call, x: hessian(call, x, vectorize=True), RuntimeError, TWICE),
    "gradient penalty": (penalty, RuntimeError, TWICE),
    "grad": (lambda call, x: torch.func.grad(lambda z: call(z).sum())(x), TypeError, INSIDE),
    "vmap": (lambda call, x: torch.func.vmap(lambda z: call(z[None]))(x), TypeError, INSIDE),
    "jvp": (lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)), TypeError, INSIDE),
    "batched weights": (weighted, TypeError, "must have plain tensors as weights: got one inside a transformation"),
    "tangent": (tangent, TypeError, "points must be plain tensors: got one .* with a forward-mode tangent"),
}


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_derivatives_that_would_be_wrong_are_refused(ask, error, message):
    case = make_case("tanh", steps=1)
    kernel, x = kernel_of(case, "trace"), test_copy(case.test[:2])
    calls = [lambda z: kernel.forward(z, z), lambda z: kernel.forward(z, x + 0), lambda z: kernel.forward(x, z)]
    if ask is not weighted:
        calls.append(lambda z: kernel.forward(z, z, diag=True))
    if error is TypeError and ask is not weighted:
        mean, gp = NetworkMean(kernel.config, OutputCoupling("full", 3), 0), epk.LogitGP(case.trajectory, rule=RULE)
        calls += [mean, lambda z: gp(z).mean]
    for call in calls:
        with pytest.raises(error, match=message):
            ask(call, x)


def test_a_gradient_with_a_graph_that_nobody_differentiates_is_the_same():
    """`create_graph=True` alone, as libraries pass it; a constant made of it, and what else is differentiated twice."""
    case = make_case("tanh", steps=1)
    kernel, x = kernel_of(case, "trace"), test_copy(case.test[:3]).requires_grad_()
    joint = torch.cat([train_copy(case.trajectory.inputs[:2]), x])  # the gradient of the first two points is left out
    calls = {"itself": lambda: kernel.forward(x, x), "joined": lambda: kernel.forward(joint[:2], joint[2:])}
    for name, call in calls.items():
        (expected,) = torch.autograd.grad(call().square().sum(), x)
        value = call().square().sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        assert gradient.requires_grad, name
        assert torch.equal(gradient, expected), name
        (again,) = torch.autograd.grad(value + gradient.detach().square().sum(), x)
        assert torch.equal(again, expected), name
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernel.forward(x, x).sum() + weight**3, weight, create_graph=True)
    assert torch.autograd.grad(gradient, weight)[0] == 12  # nothing of the kernel's is in it


@pytest.mark.parametrize("state", [0, -1])
def test_the_network_as_prior_mean_has_its_own_derivative(state):
    case = make_case("tanh", steps=2)
    mean, (x, copy) = NetworkMean(kernel_of(case).config, OutputCoupling("full", 3), state), points(case)
    assert gradcheck(lambda x: mean(torch.cat([x, copy], 1)), (x,))
    tagged = torch.cat([x, copy], 1).detach()
    assert torch.equal(mean(tagged.clone().requires_grad_()), mean(tagged))
