"""Effective rank of a Gram matrix, measured in three ways."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import validate_number, validate_tensor


@dataclass(frozen=True, eq=False)
class GramSpectrum:
    """Eigenvalues of a positive semi-definite matrix, and three measures of its effective rank.

    Attributes:
        values: Eigenvalues in descending order; they are negative by rounding only.
        effective_rank: exp of the entropy of the normalised eigenvalues (Roy & Vetterli 2007).
        participation_ratio: (sum of eigenvalues)² / sum of their squares.
        num_principal: Number of largest eigenvalues that hold the requested share of the trace.
    """

    values: Float[Tensor, " n"]
    effective_rank: float
    participation_ratio: float
    num_principal: int


def gram_spectrum(gram: Float[Tensor, "n n"], *, share: float = 0.95) -> GramSpectrum:
    """Decompose a Gram matrix.

    Args:
        gram: Symmetric and positive semi-definite to rounding.
        share: Share of the trace that the principal directions must hold.

    Raises:
        TypeError: The matrix is not a tensor of float32 or float64, or `share` is not a number.
        ValueError: The matrix is not square, is not symmetric, or is zero, or has an eigenvalue that is negative beyond
            rounding.
    """
    validate_tensor(gram, "a Gram matrix", ndim=2, floating=True)
    if gram.shape[0] != gram.shape[1] or not gram.numel():
        raise ValueError(f"a Gram matrix must be square, with at least one row: got shape {tuple(gram.shape)}.")
    size = float(gram.abs().max())
    rounding = len(gram) * torch.finfo(gram.dtype).eps
    if not float((gram - gram.T).abs().max()) <= 16 * rounding * size or not size > 0:
        raise ValueError("a Gram matrix must be symmetric and not zero: it is not. Pass points of one copy only.")
    values = torch.linalg.eigvalsh(gram).flip(0)
    if values[-1] < -16 * rounding * values[0]:
        raise ValueError(f"a Gram matrix must be positive semi-definite: got the eigenvalue {float(values[-1]):.3g}.")
    positive = values.clamp_min(0)
    return GramSpectrum(
        values=values,
        effective_rank=float(torch.special.entr(positive / positive.sum()).sum().exp()),
        participation_ratio=float(positive.sum().square() / positive.square().sum()),
        num_principal=principal_directions(positive, share=share),
    )


def principal_directions(energies: Float[Tensor, " n"], *, share: float = 0.95) -> int:
    """Count the largest energies (eigenvalues or squared singular values) that together hold a share of their sum.

    Raises:
        TypeError: `energies` is not a tensor, or `share` is not a number.
        ValueError: The share lies outside (0, 1], or an energy is negative, or all are zero.
    """
    validate_number(share, "share")
    validate_tensor(energies, "energies", ndim=1)
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1]: got {share}.")
    if not (energies >= 0).all() or not energies.sum() > 0:
        raise ValueError("energies must not be negative, nor all zero: they are.")
    held = energies.sort(descending=True).values.cumsum(0)
    return int((held < share * held[-1]).sum()) + 1
