"""Gradients of convolutions from the windows of a max-pool, where it alone sees them."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff import jacobians
from epk_gp.autodiff.dense import all_outputs, flat_columns
from epk_gp.autodiff.jacobians import LayerJacobianBuilder, WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.trajectory import flat_weights

ROWS, OUTPUTS = 4, 3


class Net(nn.Module):
    """A convolution, what is made of it, and a linear layer."""

    def __init__(self, of_convolution, conv):
        super().__init__()
        self.of_convolution, self.conv, self.last = of_convolution, conv, nn.LazyLinear(OUTPUTS)

    def forward(self, x):
        return self.last(torch.tanh(self.of_convolution(self.conv, x)).flatten(1))


def conv2d(channels=1, **options):
    return lambda: nn.Conv2d(channels, 2 * channels, 3, **{"padding": 1, **options})


def mostly_negative():
    conv = conv2d()()
    nn.init.constant_(conv.bias, -1)
    return conv


def pooled(pool, **options):
    return lambda conv, x: pool(F.relu(conv(x)), **options)


pool = pooled(F.max_pool2d, kernel_size=2)
SEEN = {
    "relu": (pool, conv2d()),
    "relu in place": (lambda conv, x: F.max_pool2d(F.relu(conv(x), inplace=True), 2), conv2d()),
    "no relu": (lambda conv, x: F.max_pool2d(conv(x), 2), conv2d()),
    "relu after": (lambda conv, x: F.relu(F.max_pool2d(conv(x), 2)), conv2d()),
    "dead windows": (pool, mostly_negative),
    "overlapping windows": (pooled(F.max_pool2d, kernel_size=3, stride=2, padding=1), conv2d()),
    "dilated windows": (pooled(F.max_pool2d, kernel_size=2, stride=3, dilation=3), conv2d()),
    "parts of windows": (pooled(F.max_pool2d, kernel_size=3, ceil_mode=True), conv2d()),
    "adaptive windows": (pooled(F.adaptive_max_pool2d, output_size=3), conv2d()),
    "indices": (lambda conv, x: F.max_pool2d(F.relu(conv(x)), 2, return_indices=True)[0], conv2d()),
    # the pool alone sees the convolution, and something else the pool
    "other branch": (lambda conv, x: (h := pool(conv, x)) * torch.sigmoid(h.mean(1, keepdim=True)), conv2d()),
    "no bias": (pool, conv2d(bias=False)),
    "strides": (pool, conv2d(stride=2, dilation=2, padding=3)),
    "three dimensions": (pooled(F.max_pool3d, kernel_size=2), lambda: nn.Conv3d(1, 2, 2)),
    "another activation": (lambda conv, x: F.max_pool2d(torch.tanh(conv(x)), 2), conv2d()),
    "means of windows": (pooled(F.avg_pool2d, kernel_size=2), conv2d()),
    "used twice": (lambda conv, x: F.max_pool2d(F.relu(z := conv(x)), 2) + 0.1 * z[:, :, ::2, ::2], conv2d()),
    "relu used twice": (lambda conv, x: F.max_pool2d(h := F.relu(conv(x)), 2) * h.mean((2, 3), keepdim=True), conv2d()),
    "called twice": (lambda conv, x: pool(conv, x) + pool(conv, x.flip(2)), conv2d()),
    "two pools": (lambda conv, x: (lambda z: F.max_pool2d(z, 2) - F.max_pool2d(-z, 2))(conv(x)), conv2d()),
    "groups": (pool, conv2d(2, groups=2)),
    "many inputs": (pool, conv2d(3)),
    "one dimension": (pooled(F.max_pool1d, kernel_size=2), lambda: nn.Conv1d(1, 3, 3)),
}
DENSE = {"another activation", "means of windows", "used twice", "relu used twice", "called twice", "two pools"}
DENSE |= {"groups", "many inputs", "one dimension", "adaptive windows"}


def hooked(where):
    """Double the gradient at one place, unseen by the graph."""

    def of_convolution(conv, x):
        places = {"conv": (z := conv(x)), "relu": (h := F.relu(z)), "pool": (p := F.max_pool2d(h, 2))}
        if p.requires_grad:
            places[where].register_hook(lambda grad: 2 * grad)
        return p

    return of_convolution


@pytest.fixture
def found(monkeypatch):
    """List the convolutions whose gradients end at a pool."""
    listed, original = [], LayerJacobianBuilder.see_through

    def noted(builder, windows):
        listed.append(True)
        original(builder, windows)

    monkeypatch.setattr(LayerJacobianBuilder, "see_through", noted)
    return listed


def recorded(net, X, lr):
    """Train one step, and return the run, its planned network, the weights before it and those after it."""
    net(X)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    run = epk.train(net, X, torch.arange(ROWS) % OUTPUTS, optimizer=optimizer, steps=1)
    return run, plan_for(run, run.model_for(X)), *(flat_weights(run, s, X) for s in (0, 1))


def computed(planned, at, X):
    jacobians = layer_jacobians(planned, at, X, all_outputs("logits"), ContractionCost(OUTPUTS**2, 1))
    return to_flat_order(jacobians, flat_columns(planned, all_dense=False))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", SEEN)
def test_gradients_are_those_of_torch_and_of_all_positions(name, found, monkeypatch):
    torch.manual_seed(0)
    of_convolution, make = SEEN[name]
    net = Net(of_convolution, make()).double()
    size = 8 if net.conv.weight.dim() < 5 else 5
    X = torch.randn(ROWS, net.conv.in_channels, *[size] * (net.conv.weight.dim() - 2), dtype=torch.float64)
    X = X.round(decimals=0) if name == "relu" else X  # equal entries of a window
    run, planned, start, end = recorded(net, X, 0.5)
    t = torch.linspace(0, 1, ROWS, dtype=torch.float64)
    at = WeightLocation(start, end - start, t)
    found.clear()
    with_windows = computed(planned, at, X)
    assert bool(found) == (name not in DENSE)

    def outputs(flat, x):
        return functional_call(net, run.model.unflatten(flat), (x[None],))[0]

    for e in range(ROWS):
        expected = jacrev(outputs)(start + t[e] * (end - start), X[e])
        torch.testing.assert_close(with_windows[:, e], expected, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr(jacobians, "fits_pass", lambda *_: False)
    found.clear()
    torch.testing.assert_close(with_windows, computed(planned, at, X), rtol=1e-12, atol=1e-13)
    assert not found  # windows that do not fit into a pass are not taken


@pytest.mark.parametrize("where", ["conv", "relu", "pool"])
@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_hooks_between_convolution_and_pool_are_found_and_obeyed(where):
    """The plan of a network says what holds; a hook on the pool's output is met in any case."""
    torch.manual_seed(0)
    net = Net(hooked(where), conv2d()()).double()
    X = torch.randn(ROWS, 1, 8, 8, dtype=torch.float64)
    run, planned, start, _ = recorded(net, X, 0.1)
    assert planned.plan.supports_pool_windows == (where == "pool")
    values = computed(planned, WeightLocation(start), X)
    net.load_state_dict(run.model.unflatten(start))
    for e in range(ROWS):
        for own, output in zip(values[:, e], net(X[e : e + 1])[0], strict=True):
            grads = torch.autograd.grad(output, list(net.parameters()), retain_graph=True)
            torch.testing.assert_close(own, torch.cat([grad.flatten() for grad in grads]))
