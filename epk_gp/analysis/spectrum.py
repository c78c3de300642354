"""How many directions a Gram matrix has, counted in three ways."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GramSpectrum:
    """Eigenvalues of a positive semi-definite matrix, and what they say of its rank.

    Attributes:
        values: In descending order; negative ones by rounding only.
        effective_rank: exp of the entropy of the normalised eigenvalues (Roy & Vetterli 2007).
        participation: (sum of eigenvalues)² / sum of their squares.
        principal: Number of eigenvalues, from the largest, that hold the asked share of their sum.
    """

    values: Float[Tensor, " n"]
    effective_rank: float
    participation: float
    principal: int


def gram_spectrum(gram: Float[Tensor, "n n"], *, share: float = 0.95) -> GramSpectrum:
    """Decompose a Gram matrix.

    Args:
        gram: Symmetric and positive semi-definite to rounding.
        share: Part of the trace that the principal directions must hold.

    Raises:
        ValueError: A matrix that is not symmetric or has a negative eigenvalue beyond rounding, or is zero.
    """
    size = float(gram.abs().max())
    rounding = len(gram) * torch.finfo(gram.dtype).eps
    if not float((gram - gram.T).abs().max()) <= 16 * rounding * size or not size > 0:
        raise ValueError("a Gram matrix must be symmetric and not zero: got one that is not. Pass one copy only.")
    values = torch.linalg.eigvalsh(gram).flip(0)
    if values[-1] < -16 * rounding * values[0]:
        raise ValueError(f"a Gram matrix must be positive semi-definite: got the eigenvalue {float(values[-1]):.3g}.")
    part = values.clamp_min(0)
    return GramSpectrum(
        values=values,
        effective_rank=float(torch.special.entr(part / part.sum()).sum().exp()),
        participation=float(part.sum().square() / part.square().sum()),
        principal=principal_directions(part, share=share),
    )


def principal_directions(energies: Float[Tensor, " n"], *, share: float = 0.95) -> int:
    """Count the largest energies (eigenvalues, squared singular values) that hold a share of their sum.

    Raises:
        ValueError: A share outside (0, 1], or energies that are negative or all zero.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1]: got {share}.")
    if not (energies >= 0).all() or not energies.sum() > 0:
        raise ValueError("energies must not be negative, nor all zero: got some that are.")
    held = energies.sort(descending=True).values.cumsum(0)
    return int((held < share * held[-1]).sum()) + 1
