"""Contributions to the outputs of ExPLAIND's example, trained by AdamW with weight decay: `attribute` of epk_gp."""

from typing import Any

import numpy as np
import torch
from modulo_network import modulo_network
from torch import Tensor, nn
from worker import Run, serve

import epk_gp as epk


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Train the network, recorded."""
    X, Y, labels = (torch.from_numpy(arrays[name]) for name in ("X", "Y", "labels"))
    net = modulo_network(problem)
    optimizer = torch.optim.AdamW(net.parameters(), lr=problem["lr"], weight_decay=problem["decay"])
    loss = epk.PerSampleLoss(_negative_log_likelihood)
    with epk.Recorder(net, optimizer, Y, labels, loss=loss) as recorder:
        for _ in range(problem["steps"]):
            optimizer.zero_grad()
            nn.functional.nll_loss(net(Y), labels).backward()
            recorder.batch(torch.arange(len(Y)))
            optimizer.step()
    run = recorder.trajectory

    def error() -> torch.Tensor:
        parts = epk.attribute(run, X, rule=epk.adaptive(problem["tol"]))
        return (parts.total - parts.network).abs().max()

    return error


def _negative_log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.nll_loss(outputs, targets, reduction="none")


if __name__ == "__main__":
    serve(make)
