"""The training points that a GP is conditioned on."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from epk_gp.core.checks import as_tensor
from epk_gp.core.trajectory import Trajectory


class NodesWithoutData(Trajectory):
    """What a classifier that was read from a file has in place of its run: the nodes of the path.

    Its inputs are a few training points, by which the network is recognised, not the training data.
    """


def parse_train_indices(points: Int[Tensor, " N"] | Sequence[int] | None, trajectory: Trajectory) -> Int[Tensor, " N"]:
    """Return the indices of the training points that a GP is conditioned on.

    Args:
        points: N different indices; None for all training points.
        trajectory: The run.

    Raises:
        TypeError: `points` is not a list or tensor of whole numbers.
        ValueError: An index is out of range or repeated, or there are none; or the run has no training data.
    """
    if isinstance(trajectory, NodesWithoutData):
        raise ValueError(
            "a recorded run with its training data is needed: a classifier that was read from a file holds no training "
            "data. Read the run itself, load_trajectory(path, net)."
        )
    M = trajectory.inputs.shape[0]
    if points is None:
        return torch.arange(M, device=trajectory.device)
    message = f"points must be a list or tensor of indices of training points: got {points!r}."
    if not isinstance(points, Tensor | Sequence | np.ndarray):
        raise TypeError(message)
    try:
        indices = as_tensor(points, device=trajectory.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(message) from error
    if indices.numel() and (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool):
        raise TypeError(f"points must be indices: got {indices.dtype}. Turn a mask into mask.nonzero()[:, 0].")
    indices = indices.long()
    if indices.ndim != 1 or not len(indices):
        raise ValueError(f"points must be a list of at least one index: got shape {tuple(indices.shape)}.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= M:
        raise ValueError(f"points must lie in 0..{M - 1} (the training points): got {low}..{high}.")
    if len(indices.unique()) < len(indices):
        repeated = len(indices) - len(indices.unique())
        raise ValueError(f"points must not repeat: got {repeated} repeated indices. Use points.unique().")
    return indices
