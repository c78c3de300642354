"""A small run of plain gradient descent, with the same by hand, and loaders of its data."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk

M, STEPS, LR = 12, 10, 0.4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3)).double()


def data(kind):
    """Training and test points of three groups: their classes, the first two of which are wrong, or numbers."""
    X = torch.randn(M + 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(M + 6) % 3
    X[:, :3] += 3 * F.one_hot(y, 3)
    y = y if kind == "classes" else X[:, :3].sin()
    if kind == "classes":
        y[:2] = (y[:2] + 1) % 3
    return TensorDataset(X[:M], y[:M]), TensorDataset(X[M:], y[M:])


def loaders(kind, batch_size=5):
    return tuple(DataLoader(points, batch_size=batch_size) for points in data(kind))


@functools.cache
def record(kind):
    net, (X, y) = network(), data(kind)[0].tensors
    loss = epk.CrossEntropy() if kind == "classes" else epk.MeanSquaredError()
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=LR), steps=STEPS, loss=loss)


def losses(net, X, y):
    z = net(X)
    return (z - y).square().mean(1) if y.is_floating_point() else F.cross_entropy(z, y, reduction="none")


def states(kind, weights=None):
    """The state of the network before each step and after the last one, trained by hand with weights of the samples."""
    net, (X, y) = network(), data(kind)[0].tensors
    found = [{name: value.clone() for name, value in net.state_dict().items()}]
    for _ in range(STEPS):
        net.zero_grad()
        ((1 if weights is None else weights) * losses(net, X, y)).sum().div(M).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= LR * p.grad
        found.append({name: value.clone() for name, value in net.state_dict().items()})
    return found


def losses_of_test_points(kind, weights):
    net = network()
    net.load_state_dict(states(kind, weights)[-1])
    return losses(net, *data(kind)[1].tensors).detach()


def leave_one_out(kind):
    """By how much each test loss rises without each sample, (n, M): trained again, M times."""
    whole = losses_of_test_points(kind, torch.ones(M, dtype=torch.float64))
    masks = 1 - torch.eye(M, dtype=torch.float64)
    return torch.stack([losses_of_test_points(kind, mask) - whole for mask in masks], dim=1)
