"""Contributions of every training point to predictions, the purpose of the paper's Algorithm 1, computed in three ways.

The variant "attribute" calls `attribute`; "algorithm 1" does what the algorithm says for one test point after another:
dense Jacobians of training and test points, the test point's averaged over 100 Riemann nodes per step; "algorithm 1,
points together" shares the training points' Jacobians among all test points. All return (n, C, M), which must sum to
the change of the network's outputs.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from worker import Run, serve

import epk_gp as epk

NODES = 100


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Train a network by gradient descent, recorded."""
    torch.manual_seed(0)
    X, Y = (torch.from_numpy(arrays[name]) for name in ("X", "Y"))
    labels = torch.arange(len(Y)) % 3
    net = nn.Sequential(nn.Linear(Y.shape[1], problem["width"]), nn.ReLU(), nn.Linear(problem["width"], 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, Y, labels, optimizer=optimizer, steps=problem["steps"])
    outputs = epk.network_outputs(run, X) - epk.network_outputs(run, X, state=0)
    if problem["variant"] == "attribute":
        return lambda: _with_error(epk.attribute(run, X, head="logits", rule=epk.adaptive(1e-12)).samples, outputs)
    size = 1 if problem["variant"] == "algorithm 1" else len(X)

    def algorithm() -> torch.Tensor:
        return torch.cat([_algorithm_1(run, net, part, Y, labels) for part in X.split(size)])

    return lambda: _with_error(algorithm(), outputs)


def _with_error(contributions: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    return (contributions.sum(2) - change).abs().max()


def _algorithm_1(
    run: epk.Trajectory, net: nn.Module, X: torch.Tensor, Y: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    def output(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, w, (x[None],))[0]

    def dense(w: dict[str, torch.Tensor], points: torch.Tensor) -> torch.Tensor:
        parts = vmap(jacrev(output), (None, 0))(w, points)
        return torch.cat([parts[name].flatten(2) for name in w], dim=2)

    total = torch.zeros(len(X), 3, len(Y), dtype=torch.float64)
    for s, step in enumerate(run.steps):
        w, end = run.weights(s), run.weights(s + 1)
        training = dense(w, Y)
        test = sum(
            dense({name: w[name] + k / NODES * (end[name] - w[name]) for name in w}, X) / NODES for k in range(NODES)
        )
        slopes = (functional_call(net, w, (Y,)).softmax(1) - nn.functional.one_hot(labels, 3)) / len(Y)
        total -= step.lr * torch.einsum("nkp,mlp,ml->nkm", test, training, slopes)
    return total


if __name__ == "__main__":
    serve(make)
