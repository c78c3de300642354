"""Layers along a line of weights: one call per convolution, and torch's own derivative."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.autodiff.dense import PlannedModel, WeightSegment, directional_derivatives, values
from epk_gp.autodiff.verification import build_plan
from epk_gp.core.model import functionalize
from epk_gp.core.torch_overrides import forward_mode, split_dual

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(2, 4, 3, padding=1),
    "without_bias": lambda: nn.Conv2d(2, 4, 3, stride=2, bias=False),
    "in_groups": lambda: nn.Conv2d(2, 4, 3, groups=2),
    "dilated": lambda: nn.Conv2d(2, 4, (2, 1), dilation=2, padding="same"),
}


def segment_of(net, X):
    model = functionalize(net.double())
    w, d = model.flatten(dict(net.named_parameters())), torch.randn(model.num_weights, dtype=torch.float64)
    return WeightSegment(PlannedModel(model, build_plan(model, w, X)), w, 0.1 * d, "logits", 1 << 26)


def network(make):
    after = (nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    return nn.Sequential(make(), *after)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_derivatives_along_a_line_are_torchs(name):
    X = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    segment = segment_of(network(CONVOLUTIONS[name]), X)
    assert segment.net.plan.supports_interpolation
    t = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    f, slope = directional_derivatives(segment, X, t)
    model = segment.net.model
    for x, u, own, own_slope in zip(X, t, f, slope, strict=True):
        there = model.unflatten(segment.w + u * segment.d)
        expected = jvp(lambda w, x=x: model.evaluate(w, x[None])[0], (there,), (model.unflatten(segment.d),))
        torch.testing.assert_close((own, own_slope), expected[:2], rtol=1e-12, atol=1e-13)


class CallCounter(TorchDispatchMode):
    """Counts the operations that torch carries out."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def num_convolutions(name, evaluate):
    X = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    segment = segment_of(network(CONVOLUTIONS[name]), X)
    with CallCounter() as calls:
        evaluate(segment, X, torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64))
    return calls.counts[torch.ops.aten.convolution]


def test_a_convolution_with_w_and_with_d_is_one_call():
    """The negative control are groups: joined, the channels of w and d would be put into other groups."""
    assert num_convolutions("plain", values) == 2
    assert num_convolutions("plain", directional_derivatives) == 3  # the second one's input has a tangent
    assert num_convolutions("in_groups", values) == 3


def test_another_thread_at_the_level_changes_nothing():
    """Torch would make a view of the tensor, and add gradients up in another order."""
    x = torch.randn(3, requires_grad=True)
    with forward_mode(), ThreadPoolExecutor(1) as pool:
        assert split_dual(x)[0] is not x
        primal, tangent = pool.submit(split_dual, x).result()
    assert primal is x
    assert tangent is None
