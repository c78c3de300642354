"""Batches of blocks; points that visibly repeat are computed once."""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.kernels.blocks import block, diagonal_blocks, pairs_of_sets
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.output_structure import PerClassOutputs, diagonals
from epk_gp.kernels.tagged_points import own_points, same_points, squeeze_repeated

# Points on each side of the blocks that a batch of small blocks is joined into. Measured for 256 pairs of sets of 2
# points and a network of 200,000 weights: 3.8 s with 16, 1.8 with 64, 1.6 with 128, 2.0 with 256, 3.0 with 512. Small
# networks are 2 times faster with 64, but each block reads every weight state of a run on disk: few blocks are better.
PAIR_POINTS = 256


def batch_of_blocks(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*k"],
) -> Float[Tensor, "*d rows cols"]:
    """Evaluate one matrix of one block per element of a batch.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1).
        matrices: Which of the structure's K matrices, (*k); b, c and k broadcast.

    Returns:
        (*d, n * R, m * R). A batch dimension along which x, y and the matrices only repeat themselves has size 1 or is
        missing.
    """
    x, y = _distinct_points(x, y)
    if _every_set_has_its_matrix(config, x, y, matrices):
        return pairs_of_sets(config, x, y, matrices)
    return _select(_every_matrix(config, x, y), matrices, 2)


def _distinct_points(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Copy points, each set that visibly repeats once; what is the same object stays the same object."""
    own = own_points(x, y)
    left = squeeze_repeated(own[0])
    return left, left if own[0] is own[1] else squeeze_repeated(own[1])


def _every_matrix(config: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate all K matrices of each element of a batch, (*d, K, n R, m R)."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    n, m = x.shape[-2], y.shape[-2]
    P, Q = x.shape[:-2].numel(), y.shape[:-2].numel()
    if P == 1 or Q == 1:  # one set against many sets is one block against one long set
        joint = block(config, x.reshape(P * n, -1), y.reshape(Q * m, -1))
        K, R = joint.shape[0], config.structure.rows_per_point
        parts = joint.reshape(K, P, n * R, Q, m * R).permute(1, 3, 0, 2, 4)
        return parts.reshape(*batch, K, n * R, m * R)
    pairs = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3), y.expand(*batch, *y.shape[-2:]).flatten(0, -3))
    blocks = _self_blocks(config, pairs[0]) if n == 1 and same_points(*pairs) else _paired_blocks(config, *pairs)
    return blocks.reshape(*batch, *blocks.shape[1:])


def batch_of_diagonals(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c n columns"],
    matrices: Int64[Tensor, "*k"],
) -> Float[Tensor, "*d rows"]:
    """Evaluate only the diagonals of `batch_of_blocks`.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, n, D + 1), usually the same points.
        matrices: (*k).

    Returns:
        (*d, n * R).
    """
    x, y = _distinct_points(x, y)
    R, n = config.structure.rows_per_point, x.shape[-2]
    if same_points(x, y):
        batch = x.shape[:-2]
        diagonal = config.structure.diagonal(diagonal_blocks(config, x.reshape(-1, x.shape[-1])))
    else:
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        single_points = (z.expand(*batch, *z.shape[-2:]).reshape(-1, 1, z.shape[-1]) for z in (x, y))
        diagonal = diagonals(_paired_blocks(config, *single_points))
    K = diagonal.shape[0]
    return _select(diagonal.reshape(K, -1, n * R).movedim(0, 1).reshape(*batch, K, n * R), matrices, 1)


def _select(values: Tensor, matrices: Tensor, value_ndim: int) -> Tensor:
    """Select a matrix, or a diagonal, for each element of a batch: (*d, K, ...) becomes (*d, ...)."""
    batch = values.shape[: -value_ndim - 1]
    if values.shape[-value_ndim - 1] == 1:  # no choice, and no copy
        return values.squeeze(-value_ndim - 1)
    position = torch.arange(batch.numel(), device=values.device).view(batch)
    return values.reshape(-1, *values.shape[-value_ndim - 1 :])[position, matrices]


def _every_set_has_its_matrix(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> bool:
    """Return whether the sets differ, as inducing points of each class do, and each is asked about one output only."""
    sides = [z.shape[:-2] for z in (x, y) if z.shape[:-2].numel() > 1]
    if not (sides and matrices.numel() > 1 and isinstance(config.structure, PerClassOutputs)):
        return False
    batch = torch.broadcast_shapes(*sides, matrices.shape)
    return all(batch == torch.broadcast_shapes(side, [1] * len(batch)) for side in sides)


def _self_blocks(config: KernelConfig, x: Tensor) -> Tensor:
    """Evaluate the blocks of P single points with themselves, (P, K, R, R)."""
    blocks = diagonal_blocks(config, x.reshape(x.shape[0], -1))
    return config.structure.reduce_blocks(blocks)


def _paired_blocks(config: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate the blocks of x_p against y_p for P pairs of sets, (P, K, n R, m R).

    A group of pairs is computed as one block of which only the diagonal blocks are kept. Layer Jacobians, which cost
    most, are computed once per point; the size of a group bounds the products that are thrown away.
    """
    P, n, m, R = x.shape[0], x.shape[-2], y.shape[-2], config.structure.rows_per_point
    group = max(1, PAIR_POINTS // max(n, m))
    parts = []
    for start in range(0, P, group):
        u, v = x[start : start + group], y[start : start + group]
        g = u.shape[0]
        joint = block(config, u.flatten(0, 1), v.flatten(0, 1)).reshape(-1, g, n * R, g, m * R)
        parts.append(joint.diagonal(dim1=1, dim2=3).movedim(-1, 0))
    return torch.cat(parts)
