"""Runs of networks whose BatchNorm statistics move, and their derivatives by loops."""

import copy

import torch
from torch import nn
from torch.func import functional_call
from weighted_loops import record


def train_by_hand(net, X, y, *, num_steps=4):
    """Train in training mode by plain SGD on consecutive batches of eight."""
    batches = [torch.arange(8 * s, 8 * s + 8) % len(X) for s in range(num_steps)]
    return record(net, torch.optim.SGD(net.parameters(), lr=0.1), X, y, batches)


def rows(num=24, shape=(4,), num_classes=3):
    X = torch.randn(num, *shape, dtype=torch.float64) + 0.3
    return X, torch.randint(num_classes, (num,))


class PlainNorm(nn.Module):
    """Batch normalisation in evaluation mode, as it stands in a textbook: no call of torch's function."""

    def __init__(self, norm, *, detaches=False):
        super().__init__()
        self.detaches = detaches
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias
        for name, value in norm.named_buffers():
            self.register_buffer(name, value.clone())

    def forward(self, x):
        def channels(v):
            return v.view(1, -1, *[1] * (x.ndim - 2))

        mean, variance = self.running_mean, self.running_var
        if self.detaches:
            mean, variance = mean.detach(), variance.detach()
        y = (x - channels(mean)) / (channels(variance) + self.eps).sqrt()
        return y if self.weight is None else y * channels(self.weight) + channels(self.bias)


def in_plain_words(net, *, detaches=False):
    """Return a copy of a network whose normalisations are `PlainNorm`; names of parameters and buffers are the same."""
    net = copy.deepcopy(net)
    for name, part in list(net.named_modules()):
        if hasattr(part, "running_mean"):
            net.set_submodule(name, PlainNorm(part, detaches=detaches))
    return net


def reference_outputs(net, trajectory, state, X):
    return functional_call(in_plain_words(net).eval(), trajectory.model.unflatten(state), (X,))


def reference_jacobian(net, trajectory, state, X, head="logits"):
    """Differentiate f in weights and statistics by loops over autograd.grad: (n, C, P + Q)."""
    rows = []
    for x in X:
        leaf = state.detach().clone().requires_grad_()
        f = reference_outputs(net, trajectory, leaf, x[None])[0]
        f = f.log_softmax(0) if head == "log_softmax" else f
        rows.append(torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in f]))
    return torch.stack(rows)


def mlp(activation=nn.Tanh, *, affine=True, momentum=0.1, width=6):
    return nn.Sequential(
        nn.BatchNorm1d(4, affine=affine, momentum=momentum), nn.Linear(4, width),
        nn.BatchNorm1d(width, affine=affine, momentum=momentum), activation(), nn.Linear(width, 3),
    ).double()  # fmt: skip


def cnn(activation=nn.ReLU, *, affine=True, momentum=0.1, channels=4, norm=nn.BatchNorm2d):
    keys = {"affine": affine, "momentum": momentum}
    if norm is nn.InstanceNorm2d:
        keys["track_running_stats"] = True
    return nn.Sequential(
        nn.Conv2d(1, channels, 3), norm(channels, **keys), activation(), nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 2), norm(channels, **keys), activation(), nn.Flatten(),
        nn.Linear(4 * channels, 3),
    ).double()  # fmt: skip


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.last(self.norm(self.first(self.norm(self.first(x)).tanh())).relu())
