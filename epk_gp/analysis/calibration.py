"""Whether probabilities mean what they say."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """Quality of predicted class probabilities.

    Attributes:
        accuracy: Share of points whose most probable class is right.
        error: Expected calibration error: mean |confidence − accuracy| over bins of equal width, weighted by their
            points (Naeini et al. 2015).
        nll: Mean negative log probability of the right class, in nats.
    """

    accuracy: float
    error: float
    nll: float


def calibration(probability: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], *, bins: int = 15) -> Calibration:
    """Judge class probabilities.

    Args:
        probability: Of n points; rows sum to 1.
        labels: Their classes.
        bins: Of the confidence, on [0, 1].

    Raises:
        ValueError: Rows that are no probabilities, or fewer than 1 bin.
    """
    if bins < 1:
        raise ValueError(f"calibration needs at least 1 bin: got {bins}.")
    sums = probability.sum(dim=1)
    if not (probability >= 0).all() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6, rtol=0):
        raise ValueError("probability must hold rows of probabilities that sum to 1: got others. Apply a softmax.")
    confidence, chosen = probability.max(dim=1)
    right = (chosen == labels).to(probability)
    bin_of = (confidence * bins).long().clamp_max(bins - 1)
    gaps = torch.zeros(bins, dtype=probability.dtype, device=probability.device)
    gaps.index_add_(0, bin_of, confidence - right)
    own = probability.gather(1, labels[:, None])[:, 0]
    return Calibration(
        accuracy=float(right.mean()),
        error=float(gaps.abs().sum() / len(labels)),
        nll=float(-own.log().mean()),
    )
