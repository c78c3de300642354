"""Influence takes second derivatives from torch, which are compared with differences of gradients, or refused."""

import pytest
import torch
from checked_networks import GradientReversal, StopGradient, StraightThrough
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import register_parametrization
from weighted_loops import CLASSES, Apply, WeightedLoop, mlp, operation, record

import epk_gp as epk


def sgd(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.5)


def scaled() -> nn.Module:
    """An embedding whose gradient is divided by how often each entry is used."""
    entries, mean = Apply(lambda x: (2 * x.abs()).long() % 5), Apply(lambda h: h.mean(dim=1).tanh())
    return nn.Sequential(entries, nn.Embedding(5, 4, scale_grad_by_freq=True), mean, nn.Linear(4, CLASSES))


def quantised(dtype: torch.dtype | None = None, scale: float = 0.02) -> nn.Module:
    """A layer whose weights are rounded, in a dtype whatever the network's is, with a gradient as if they were not."""
    net = mlp()
    rounded = lambda w: torch.fake_quantize_per_tensor_affine(w.to(dtype or w.dtype), scale, 0, -128, 127)  # noqa: E731
    register_parametrization(net[0], "weight", Apply(lambda w: rounded(w).to(w.dtype)))
    return net


NO_FUNCTIONS = {
    "straight_through": StraightThrough, "stop_gradient": StopGradient, "reversal": GradientReversal, "scaled": scaled,
    "quantised": quantised, "quantised_in_float32": lambda: quantised(torch.float32, 0.05),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
@pytest.mark.parametrize("make", NO_FUNCTIONS.values(), ids=NO_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_that_of_no_function_is_said(make, dtype):
    X, y, net = torch.randn(12, 4, dtype=dtype), torch.arange(12) % CLASSES, make().to(dtype)
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=3)
    for call in (lambda: epk.influence(run, X[:1]), lambda: epk.influence(run, own=True)):
        with pytest.warns(epk.CertificateWarning, match="torch's derivative of the gradient differs by"):
            call()


@pytest.mark.parametrize("make", [lambda p: sgd(p), lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)])
def test_a_row_that_gets_no_gradient_is_no_false_alarm(make):
    """As that of a padding index, on which the outputs depend all the same."""
    mean, entries = Apply(lambda h: h.mean(dim=1).tanh()), Apply(lambda x: (2 * x.abs()).long() % 5)
    net = lambda: nn.Sequential(entries, nn.Embedding(5, 4, padding_idx=0), mean, nn.Linear(4, CLASSES))  # noqa: E731
    loop = WeightedLoop(make, net)
    effect, expected = epk.influence(loop.record(), loop.test_points), loop.slopes(3)
    assert effect.certified
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
def test_a_kernel_of_gradients_that_depend_on_the_other_points_is_refused():
    X, y, net = torch.randn(12, 4).double(), torch.arange(12) % CLASSES, scaled().double()
    run = epk.train(net, X, y, optimizer=sgd(list(net.parameters())), steps=2)
    points = epk.Points(X[:3], is_train=False)
    for call in (lambda: epk.gram_block(run, points, points), lambda: epk.path_features(run, X[:3], 8)):
        with pytest.raises(ValueError, match=r"divides them by how often .* scale_grad_by_freq=False"):
            call()


def test_a_wrong_second_derivative_of_any_operation_is_found():
    a_tenth_too_large = lambda x: 3 * (x * x + 0.1 * (x * x - (x * x).detach()))  # noqa: E731
    loop = WeightedLoop(sgd, lambda: mlp(activation=operation(lambda x: x**3, a_tenth_too_large)))
    run = loop.record()
    assert epk.attribute(run, loop.test_points).certified
    with pytest.warns(epk.CertificateWarning, match="or torch's second derivative of an operation is wrong"):
        epk.influence(run, loop.test_points)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kinks_random_numbers_and_float32_are_no_false_alarm(dtype):
    """Measured on 27 kinds of networks; warnings are errors in this suite."""
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 8, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    ).to(dtype)  # fmt: skip
    X, y = torch.randn(24, 4, dtype=dtype), torch.arange(24) % CLASSES
    run = record(net, torch.optim.AdamW(net.parameters(), lr=1e-2), X, y, [None] * 4)
    assert epk.influence(run, X[:1]).certified


def test_an_operation_without_a_second_derivative_is_named():
    square = operation(torch.square, lambda x: 2 * x, once_differentiable)
    loop = WeightedLoop(sgd, lambda: mlp(nn.BatchNorm1d(6), activation=square))
    run, says = loop.record(), r"@once_differentiable \(operations of one's own here: Operation\)"
    with pytest.raises(ValueError, match=f"must have second derivatives.*{says}.*use epk_gp.attribute"):
        epk.influence(run, loop.test_points)
    assert epk.attribute(run, loop.test_points).certified  # double backward would leave its part out in silence
