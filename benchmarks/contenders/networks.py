"""The networks of the NTK problems in torch, with weights given by name."""

import itertools
from typing import Any

import numpy as np
import torch
from architectures import ARCHITECTURES, make_network
from torch import nn


def network(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> nn.Module:
    """Build a problem's network with its weights."""
    if problem["kind"] in ARCHITECTURES:
        net = make_network(problem["kind"])
    else:
        net = _mlp(problem["widths"]) if problem["kind"] == "mlp" else _cnn()
        net = net.to(getattr(torch, problem["dtype"]))
    net.load_state_dict({name: torch.from_numpy(arrays[name]) for name in net.state_dict()})
    return net


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10),
    )  # fmt: skip
