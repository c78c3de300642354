"""A bias in front of BatchNorm has a gradient of pure rounding, which Adam makes steps of."""

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


@cache
def record(dtype, eps=1e-8, *, dropout=0.0, mixes=False):
    torch.manual_seed(0)
    X, y = torch.randn(18, 5, dtype=dtype), torch.arange(18) % 3
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)]
    net = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=eps)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        net.train()
        for batch in torch.arange(18).repeat(2).split(6):
            optimizer.zero_grad()
            x, labels = X[batch], y[batch]
            z = net(0.7 * x + 0.3 * x.flip(0) if mixes else x)
            loss = F.cross_entropy(z, labels)
            if mixes:
                loss = 0.7 * loss + 0.3 * F.cross_entropy(z, labels.flip(0))
            loss.backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def check(trajectory, X, tolerance):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)
        parts, machine = epk.attribute(trajectory, X, head="logits"), epk.reconstruct(trajectory, X, head="logits")
    assert machine.certified
    change = (parts.network - parts.initial).norm()
    share = float(parts.unexplained.abs().sum() / (parts.network - parts.initial).abs().sum())
    assert parts.certified == (share <= 0.01)
    assert parts.certified or f"{share:.1%} of the change of the outputs is `unexplained`" in parts.findings[0]
    assert (parts.total - parts.network).norm() < tolerance * change
    assert (machine.outputs - machine.network).norm() < (1e-4 if trajectory.dtype == torch.float32 else 1e-11) * change
    return float(parts.unexplained.norm() / change)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_in_float32_is_explained_in_either_precision(dropout, dtype):
    trajectory = record(torch.float32, dropout=dropout)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    assert check(trajectory, trajectory.inputs[:2].to(dtype), tolerance) > 1e-4  # the rounding, as a term


def test_losses_that_are_rounded_otherwise_are_explained_in_float64():
    """Mixed targets follow from the gradient, and round differently from the loop's two losses."""
    trajectory = record(torch.float64, mixes=True, eps=1e-10)
    assert 1e-12 < check(trajectory, trajectory.inputs[:2], 1e-11) < 1e-5


def test_rounding_of_one_parameter_explains_no_other():
    """Adam's steps of that bias are as large as a fault in the others, which attribution did not see in float32."""
    trajectory = record(torch.float32, dropout=0.2)
    steps = list(trajectory.steps)
    forward = replace(steps[2].passes[0], random_state=steps[3].passes[0].random_state)
    steps[2] = replace(steps[2], passes=(forward,))
    fault = replace(trajectory, steps=tuple(steps))
    for result in (epk.attribute, epk.reconstruct):
        with pytest.warns(epk.CertificateWarning, match="step 2 differs from the step"):
            assert not result(fault, trajectory.inputs[:2]).certified


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_compared_in_the_precision_that_moved_them(dtype):
    """Under autocast BatchNorm's statistics carry bfloat16's rounding of the layers before it."""
    torch.manual_seed(0)
    X, y = torch.randn(12, 1, 5, 5), torch.arange(12) % 3
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y, unexplained=0.2) as recorder:
        net.train()
        for batch in torch.arange(12).split(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(X[batch]), y[batch])
            loss.backward()
            recorder.batch(batch)
            optimizer.step()
    for result in (epk.attribute, epk.reconstruct):
        assert result(recorder.trajectory, X[:2].to(dtype)).certified
