"""A small network with moving statistics, and its checkpoints."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Softplus(), nn.Linear(6, 3)).double()


def trained(net: nn.Module, X: Tensor, y: Tensor, lr: float = 0.02, steps: int = 12, every: int = 4) -> list[dict]:
    """Train with Adam, and return the network's state dict every so many steps."""
    optimizer, states = torch.optim.Adam(net.parameters(), lr), [copy.deepcopy(net.state_dict())]
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        if step % every == every - 1:
            states.append(copy.deepcopy(net.state_dict()))
    return states
