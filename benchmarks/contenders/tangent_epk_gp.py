"""epk_gp: the tangent kernel of a network, by `epk.ntk`, or by an `epk.NTKKernel` that is kept."""

from typing import Any

import numpy as np
import torch
from networks import network
from worker import Run, serve

import epk_gp as epk


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Set the network up; a kernel that is kept has computed a first block."""
    net, outputs = network(problem, arrays), problem["of"]
    X, Y = (torch.from_numpy(arrays[name]) for name in ("X", "Y"))
    if outputs == "predictions":
        return lambda: _predictions(net, X, Y, torch.from_numpy(arrays["targets"]))
    if problem["variant"] == "epk.ntk":
        return lambda: epk.ntk(net, X, Y, outputs=outputs)
    kernel = epk.NTKKernel(net, X, outputs=outputs, cache_bytes=0)
    kernel(kernel.rows(X), kernel.rows(Y)).to_dense()

    def block() -> torch.Tensor:
        K = kernel(kernel.rows(X), kernel.rows(Y)).to_dense()
        return K if outputs == "trace" else K.reshape(len(X), -1, len(Y), K.shape[1] // len(Y))

    return block


@torch.no_grad()
def _predictions(net: torch.nn.Module, X: torch.Tensor, Y: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return gradient flow of the linearised network at time 5, and a posterior with noise in proportion."""
    K, k, prior = (epk.ntk(net, *points).flatten(2).flatten(0, 1) for points in ((X,), (Y, X), (Y,)))
    f, g = net(X), net(Y)
    values, V = torch.linalg.eigh(K)
    residual, reached = V.T @ (y - f).flatten(), -torch.expm1(-5 * values.clamp(min=0) / y.numel())
    train = f.flatten() + V @ (reached * residual)
    test = g.flatten() + k @ (V @ (reached / values.abs() * residual))
    L = torch.linalg.cholesky(K + 0.1 * K.diagonal().mean() * torch.eye(len(K), dtype=K.dtype))
    mean = k @ torch.cholesky_solve(y.reshape(-1, 1), L)[:, 0]
    covariance = prior - k @ torch.cholesky_solve(k.T, L)
    return torch.cat([train, test, mean, covariance.flatten()])


if __name__ == "__main__":
    serve(make)
