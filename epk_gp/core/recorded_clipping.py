"""Gradient clipping as a recorded run shows it: by the factors of its gradients."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.update_rules import UpdateCoefficients

EPSILON = 1e-6  # torch adds it to the norm of a gradient that it clips


@dataclass(frozen=True, eq=False)
class ClippedSet:
    """Parameters whose gradients one step clipped together, by their joint 2-norm.

    Attributes:
        factor: What the gradients were multiplied with, below 1.
        is_member: Which of the flat weights, (P,).
    """

    factor: float
    is_member: Bool[Tensor, " P"]


def clipped_sets(update: UpdateCoefficients, sizes: tuple[int, ...], reference: Tensor) -> list[ClippedSet]:
    """Return the sets of parameters that a step clipped; parameters that share a factor belong together.

    Args:
        update: The recorded coefficients of the step.
        sizes: Number of weights of each of the L parameters.
        reference: Tensor on the device of the computation.

    Returns:
        None where nothing was clipped, or entry by entry (`clipped_entries`).
    """
    if len(update.grad_scale) != len(sizes):
        return []
    factors = update.grad_scale.abs().to(reference.device)
    is_clipped = (factors > 0) & (factors < 1)
    repeats = torch.tensor(sizes, device=reference.device)
    return [
        ClippedSet(float(factor), (factors == factor).repeat_interleave(repeats))
        for factor in factors[is_clipped].unique()
    ]


def clipped_entries(
    update: UpdateCoefficients, sizes: tuple[int, ...], reference: Tensor
) -> Float[Tensor, " P"] | None:
    """Return the factors of a step that clipped its gradient entry by entry, (P,); None for any other step."""
    if len(update.grad_scale) == len(sizes):
        return None
    return update.grad_scale.abs().to(reference)
