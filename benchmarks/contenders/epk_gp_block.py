"""epk_gp: an NTK block, or a whole path-kernel block, through the public `gram_block`."""

from typing import Any

import numpy as np
import torch
from networks import network
from worker import Run, serve

import epk_gp as epk
from epk_gp.kernel_machine.reconstruct import tangent_trajectory


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Record a run, or take the NTK at the initial weights if the problem has no steps."""
    net = network(problem, arrays)
    X, Y = (torch.from_numpy(arrays[name]) for name in ("X", "Y"))
    labels = torch.arange(len(Y)) % problem["outputs"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, Y, labels, optimizer=optimizer, steps=max(1, problem["steps"]))
    if not problem["steps"]:
        run = tangent_trajectory(run, 0)
    rule = epk.gauss_legendre(problem["nodes"]) if problem["nodes"] else epk.QuadratureRule.left_endpoint()
    a, b = epk.Points(X, is_train=not problem["nodes"]), epk.Points(Y, is_train=True)
    return lambda: epk.gram_block(run, a, b, head="logits", rule=rule)


if __name__ == "__main__":
    serve(make)
