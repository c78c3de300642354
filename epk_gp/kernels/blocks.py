"""Blocks of a GPyTorch kernel between sets of tagged points: each is computed once, and can be differentiated once."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.fingerprint import content_key
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.derivatives import ValuesOfPairs, with_derivatives
from epk_gp.kernels.output_structure import FullOutputs
from epk_gp.kernels.tagged_points import as_points, as_set_pairs, requires_graph, same_points


def block(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points; differentiable, once, in both.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1).

    Returns:
        (K, n * R, m * R): K matrices with R rows per point, see `OutputStructure`.
    """
    if requires_graph(x) or requires_graph(y):
        values = block(config, x.detach(), x.detach() if x is y else y.detach())
        matrices = torch.arange(len(values), device=x.device)
        return with_derivatives(values, x, y, ValuesOfPairs(config, config.structure, matrices))
    x, y = _snapshots(x, y)
    key = ("block", config.cache_key, content_key(x, y))
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    a = as_points(config.trajectory, x)
    b = a if x is y or same_points(x, y) else as_points(config.trajectory, y)
    with torch.no_grad():
        values = config.structure.evaluate(config.path_kernel, a, b, config.options)
    values = values.to(config.trajectory.model.spec_for(x).dtype)
    config.cache.put(key, values)
    return values


def diagonal_blocks(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "n columns"] | None = None
) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the structure; differentiable, once.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: The same points, if each side is to get its own derivatives; x by default.

    Returns:
        K(x_i, x_i), at the cost of n blocks, not n^2.
    """
    y = x if y is None else y
    if requires_graph(x) or requires_graph(y):
        values = diagonal_blocks(config, x.detach())
        whole = ValuesOfPairs(
            config, FullOutputs(values.shape[1]), torch.zeros(len(x), dtype=torch.long, device=x.device)
        )
        return with_derivatives(values, x[:, None], y[:, None], whole)
    x, _ = _snapshots(x, x)
    key = ("diagonal", config.cache_key, content_key(x))
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    with torch.no_grad():
        values = config.path_kernel.diagonal_blocks(as_points(config.trajectory, x), config.options)
    values = values.to(config.trajectory.model.spec_for(x).dtype)
    config.cache.put(key, values)
    return values


def pairs_of_sets(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*k"],
) -> Float[Tensor, "*d n m"]:
    """Evaluate one output's kernel between the sets of each element of a batch, and no other output's.

    Args:
        config: The kernel, whose structure has a matrix per output.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1).
        matrices: The output of each element, (*k); b, c and k broadcast to d.
    """
    x, y = _snapshots(x, y)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)
    key = (
        "pairs",
        config.cache_key,
        content_key(x, y),
        x.shape,
        y.shape,
        tuple(matrices.shape),
        tuple(matrices.flatten().tolist()),
    )
    cached = config.cache.get(key)
    if cached is not None:
        return cached
    pairs = as_set_pairs(config.trajectory, x, y, batch)
    pairs = replace(pairs, classes=matrices.expand(batch).flatten())
    values = config.path_kernel.pairs_block(pairs, config.options)[:, 0, :, 0].reshape(*batch, x.shape[-2], y.shape[-2])
    values = values.to(config.trajectory.model.spec_for(x).dtype)
    config.cache.put(key, values)
    return values


def _snapshots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Copy points: should another thread edit them meanwhile, a block and its key still are of the same points."""
    own = x.detach().clone()
    return own, own if x is y else y.detach().clone()
