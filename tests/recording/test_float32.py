"""Recording in float32: no false alarm, and what is small but wrong is still found."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from loops import record


def sgd(p):
    return torch.optim.SGD(p, lr=0.3)


LOOPS = {
    "sgd-cnn": (sgd, "cnn"),
    "momentum-mlp": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4), "mlp"),
    "adam-cnn": (lambda p: torch.optim.Adam(p, lr=0.02), "cnn"),
    "adamw-mlp": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), "mlp"),
    "rmsprop-mlp": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), "mlp"),
}


def problem(kind):
    torch.manual_seed(0)
    if kind == "cnn":
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), torch.randn(24, 1, 8, 8)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)), torch.randn(24, 6)


def loop(optimizer, kind, steps, before=id):
    net, X = problem(kind)
    batches = (torch.randperm(len(X))[:12] for _ in range(steps))
    value = before(net) if before is not id else F.cross_entropy
    return record(net, optimizer(net.parameters()), X, torch.arange(len(X)) % 3, batches, value=value)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "kind"), LOOPS.values(), ids=LOOPS)
def test_a_long_run_that_learns_its_data_by_heart_is_no_false_alarm(optimizer, kind):
    """Where the loss is nearly 0, gradients are sums that cancel."""
    assert loop(optimizer, kind, 110).num_steps == 110


def decayed(rate):
    return lambda net: lambda z, y: F.cross_entropy(z, y) + rate / 2 * sum(p.square().sum() for p in net.parameters())


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("rate", [1e-4, 2e-5])
def test_a_small_penalty_is_recorded_as_weight_decay(rate, kind):
    run = loop(sgd, kind, 20, decayed(rate)).trajectory
    assert epk.reconstruct(run, problem(kind)[1][:3]).certified
    found = torch.stack([run.updates[s].weight_decay for s in range(20)])
    assert (found - rate).abs().max() < 1e-7
