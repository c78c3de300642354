"""Runs of networks whose BatchNorm statistics move, recorded by hand."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from epk_gp.core.losses import CrossEntropy
from epk_gp.core.model import functionalize
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import LinearStep, stack_coefficients

LR = 0.1


def moving_statistics(net):
    """Return the names of the floating-point buffers."""
    return tuple(name for name, value in net.named_buffers() if value.is_floating_point())


def train_by_hand(net, X, y, *, num_steps=4, batch=8, lr=LR, statistics=None):
    """Train in training mode by plain SGD on consecutive batches, and keep weights and statistics of every state."""
    names = tuple(name for name, p in net.named_parameters() if p.requires_grad)
    statistics = moving_statistics(net) if statistics is None else statistics
    model = functionalize(net, names, statistics)
    states, kept, steps = [], [], []
    for s in range(num_steps + 1):
        params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        states.append(model.flatten(params))
        kept.append(model.flatten_statistics(buffers).clone())
        if s == num_steps:
            break
        rows = torch.arange(s * batch, (s + 1) * batch) % len(X)
        net.train()
        net.zero_grad()
        F.cross_entropy(net(X[rows]), y[rows]).backward()
        with torch.no_grad():
            for name in names:
                params[name] -= lr * params[name].grad
        steps.append(Step(index=s, lr=lr, batch=rows))
    update = stack_coefficients([LinearStep(lr=lr)] * len(names), model.sizes)
    with torch.no_grad():
        num_outputs = copy.deepcopy(net).eval()(X[:1]).shape[1]
    return Trajectory(
        model=model,
        inputs=X,
        targets=y,
        loss=CrossEntropy(),
        update_rule="SGD",
        states=tuple(states),
        updates=(update,) * num_steps,
        steps=tuple(steps),
        num_outputs=num_outputs,
        digest="by hand",
        data_digest="by hand",
        statistics=tuple(kept),
    )


def rows(num=24, shape=(4,), num_classes=3):
    """Return inputs off the origin and their labels."""
    X = torch.randn(num, *shape, dtype=torch.float64) + 0.3
    return X, torch.randint(num_classes, (num,))


def mlp(activation=nn.Tanh, *, affine=True, momentum=0.1, width=6):
    return nn.Sequential(
        nn.BatchNorm1d(4, affine=affine, momentum=momentum),
        nn.Linear(4, width),
        nn.BatchNorm1d(width, affine=affine, momentum=momentum),
        activation(),
        nn.Linear(width, 3),
    ).double()


def cnn(activation=nn.ReLU, *, affine=True, momentum=0.1, channels=4, norm=nn.BatchNorm2d):
    keys = {"affine": affine, "momentum": momentum}
    if norm is nn.InstanceNorm2d:
        keys["track_running_stats"] = True
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        norm(channels, **keys),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 2),
        norm(channels, **keys),
        activation(),
        nn.Flatten(),
        nn.Linear(4 * channels, 3),
    ).double()
