"""What a kernel's values are divided by, so that kernels of different runs have one scale."""

from math import isfinite
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from epk_gp.kernels.blocks import block, diagonal_blocks
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.sketched import mean_square_length
from epk_gp.kernels.tagging import train_copy

Normalization = Literal["cosine", "mean_diagonal"] | float | int | None

# Training copies whose diagonal is averaged, at most. The relative standard error of the mean of 1000 is 1/32 of the
# diagonal's relative spread: enough for a scale that is arbitrary, at a cost that does not grow with the training set.
NORMALIZATION_POINTS = 1000


def normalization_scale(config: KernelConfig, matrices: Int[Tensor, "*batch"], normalize: Normalization) -> float:
    """Return what a kernel's values are divided by.

    Args:
        config: The kernel, not normalized.
        matrices: Indices of its matrices that count.
        normalize: None and "cosine" for 1; a positive number for itself; "mean_diagonal" for the mean diagonal of these
            matrices over at most `NORMALIZATION_POINTS` evenly spaced training copies.

    Raises:
        TypeError: `normalize` is not None, a string or a number.
        ValueError: `normalize` is another string or not positive and finite, or the mean diagonal is not positive.
    """
    if normalize is None or is_cosine(normalize):
        return 1.0
    if isinstance(normalize, str):
        if normalize != "mean_diagonal":
            raise ValueError(
                f"normalize must be None, 'cosine', 'mean_diagonal' or a positive number: got {normalize!r}."
            )
        return _validated(_mean_diagonal(config, matrices))
    given: object = normalize  # NumPy's numbers count too
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"normalize must be None, 'cosine', 'mean_diagonal' or a positive number: got {normalize!r}.")
    if not (normalize > 0 and isfinite(normalize)):
        raise ValueError(f"normalize must be a positive, finite number: got {normalize}.")
    return float(normalize)


def gram_scale(config: KernelConfig, x: Shaped[Tensor, "n columns"]) -> float:
    """Return the mean diagonal of all matrices between points, from the matrices, which the kernel's cache then keeps.

    Args:
        config: The kernel, not normalized.
        x: The points.

    Raises:
        ValueError: The mean diagonal is not positive.
    """
    return _validated(float(block(config, x, x).diagonal(dim1=-2, dim2=-1).mean()))


def is_cosine(normalize: object) -> bool:
    """Return whether each value is divided by the square roots of the kernel's own diagonal at both points."""
    return isinstance(normalize, str) and normalize == "cosine"


def _validated(scale: float) -> float:
    if not scale > 0:
        raise ValueError(
            f"the mean diagonal over the training copies must be positive to divide by it: got {scale}. "
            "Use a run whose learning rates, those of the first parameter group, are not all 0."
        )
    return scale


def _mean_diagonal(config: KernelConfig, matrices: Tensor) -> float:
    """Average the diagonals on evenly spaced training copies, in float64."""
    inputs = config.trajectory.inputs
    count = min(len(inputs), NORMALIZATION_POINTS)
    indices = (torch.arange(count) * len(inputs) // count).to(inputs.device)
    x = train_copy(inputs[indices].reshape(len(indices), -1).to(torch.float64))
    if config.sketch is not None:
        return mean_square_length(config, x, matrices)
    return float(config.structure.diagonal(diagonal_blocks(config, x)).cpu()[matrices.cpu()].mean())
