"""Blocks of a GPyTorch kernel between sets of tagged points, without a graph: each is computed once.

Nobody may edit the points meanwhile: whoever takes them from a user copies them first (`own_points`).
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.step import content_key
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.tagged_points import as_points, as_set_pairs, same_points


def block(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points.

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1).

    Returns:
        (K, n * R, m * R): K matrices with R rows per point, see `OutputStructure`.
    """
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


def diagonal_blocks(config: KernelConfig, x: Shaped[Tensor, "n columns"]) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the structure.

    Args:
        config: The kernel.
        x: (n, D + 1).

    Returns:
        K(x_i, x_i), at the cost of n blocks, not n^2.
    """
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
