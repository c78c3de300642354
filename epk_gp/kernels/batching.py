"""Batches of blocks, with no point computed twice where that can be seen."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.kernels.blocks import block, diagonal_matrices, reduce_diagonal
from epk_gp.kernels.config import KernelConfig, needs_graph, same_points

PAIR_POINTS = 256  # points that are joined into one block when a batch asks for many small ones


def batch_of_blocks(
    source: KernelConfig, x: Shaped[Tensor, "*b n columns"], y: Shaped[Tensor, "*c m columns"]
) -> Float[Tensor, "*d K rows cols"]:
    """Evaluate one block per element of a batch, with no point computed twice where that can be seen.

    Args:
        source: Run, rule and reduction.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1); b and c broadcast.

    Returns:
        (*d, K, n * R, m * R). A batch dimension along which both x and y only repeat themselves has size 1, unless
        their derivatives are wanted.
    """
    x, y = _without_copies(x), _without_copies(y)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    n, m = x.shape[-2], y.shape[-2]
    P, Q = x.shape[:-2].numel(), y.shape[:-2].numel()
    if P == 1 or Q == 1:  # one set against many: the many are one long set
        joint = block(source, x.reshape(P * n, -1), y.reshape(Q * m, -1))
        K, R = joint.shape[0], source.num_rows
        parts = joint.reshape(K, P, n * R, Q, m * R).permute(1, 3, 0, 2, 4)
        return parts.reshape(*batch, K, n * R, m * R)
    pairs = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3), y.expand(*batch, *y.shape[-2:]).flatten(0, -3))
    blocks = _self_blocks(source, *pairs) if n == 1 and same_points(*pairs) else _paired_blocks(source, *pairs)
    return blocks.reshape(*batch, *blocks.shape[1:])


def batch_of_diagonals(
    source: KernelConfig, x: Shaped[Tensor, "*b n columns"], y: Shaped[Tensor, "*c n columns"]
) -> Float[Tensor, "*d K rows"]:
    """Evaluate only the diagonals of `batch_of_blocks`.

    Args:
        source: Run, rule and reduction.
        x: (*b, n, D + 1).
        y: (*c, n, D + 1), usually the same points.

    Returns:
        (*d, K, n * R).
    """
    x, y = _without_copies(x), _without_copies(y)
    R, n = source.num_rows, x.shape[-2]
    if same_points(x, y):
        batch = x.shape[:-2]
        rows = x.reshape(-1, x.shape[-1])
        diagonal = reduce_diagonal(source, diagonal_matrices(source, rows, rows if y is x else y.reshape(rows.shape)))
    else:
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        singles = (z.expand(*batch, *z.shape[-2:]).reshape(-1, 1, z.shape[-1]) for z in (x, y))
        blocks = _paired_blocks(source, *singles)  # (P * n, K, R, R)
        diagonal = blocks.diagonal(dim1=-2, dim2=-1).movedim(1, 0).flatten(1)
    K = diagonal.shape[0]
    return diagonal.reshape(K, -1, n * R).movedim(0, 1).reshape(*batch, K, n * R)


def _self_blocks(source: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Blocks of single points with themselves, (P, K, R, R)."""
    blocks = diagonal_matrices(source, x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1))
    if source.reduction == "full":
        return blocks[:, None]
    return reduce_diagonal(source, blocks).mT[..., None, None]


def _paired_blocks(source: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Blocks x_p against y_p, (P, K, n R, m R).

    A group of pairs is computed as one block of which only the diagonal blocks are kept: features, which cost the most,
    are computed once per point, and the group's size bounds what is thrown away.
    """
    P, n, m, R = x.shape[0], x.shape[-2], y.shape[-2], source.num_rows
    group = max(1, PAIR_POINTS // max(n, m))
    parts = []
    for start in range(0, P, group):
        u, v = x[start : start + group], y[start : start + group]
        g = u.shape[0]
        joint = block(source, u.flatten(0, 1), v.flatten(0, 1)).reshape(-1, g, n * R, g, m * R)
        parts.append(joint.diagonal(dim1=1, dim2=3).movedim(-1, 0))
    return torch.cat(parts)


def _without_copies(x: Tensor) -> Tensor:
    """Cut a batch dimension whose slices are all equal down to one slice: SVGP and BoTorch pass such copies.

    Not where derivatives are wanted: each slice has its own.
    """
    if needs_graph(x):
        return x
    for dim in range(x.ndim - 2):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and (x.stride(dim) == 0 or torch.equal(x, first.expand_as(x))):
            x = first
    return x
