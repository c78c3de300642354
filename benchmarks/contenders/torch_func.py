"""torch.func's recipe for finite NTKs: per-sample Jacobians of all weights, multiplied out layer by layer."""

from typing import Any

import numpy as np
import torch
from networks import network
from torch.func import functional_call, jacrev, vmap
from worker import Run, serve


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Set the network up."""
    net = network(problem, arrays)
    weights = {name: value.detach() for name, value in net.named_parameters()}
    X, Y = (torch.from_numpy(arrays[name]) for name in ("X", "Y"))

    def output(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, w, (x[None],))[0]

    def jacobian(points: torch.Tensor) -> dict[str, torch.Tensor]:
        jacobians: dict[str, torch.Tensor] = vmap(jacrev(output), (None, 0))(weights, points)
        return jacobians

    def block() -> torch.Tensor:
        left, right = jacobian(X), jacobian(Y)
        equation = "ncf,mcf->nm" if problem.get("of") == "trace" else "ncf,mdf->ncmd"
        parts = [torch.einsum(equation, left[name].flatten(2), right[name].flatten(2)) for name in weights]
        return torch.stack(parts).sum(0)

    return block


if __name__ == "__main__":
    serve(make)
