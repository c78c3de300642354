"""Calibration of predicted class probabilities."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.validation import validate_count, validate_labels, validate_tensor


@dataclass(frozen=True)
class Calibration:
    """Quality of predicted class probabilities.

    Attributes:
        accuracy: Share of points whose most probable class is right.
        ece: Expected calibration error: mean |confidence − accuracy| over bins of equal width, weighted by their
            points (Naeini et al. 2015).
        nll: Mean negative log probability of the right class, in nats.
    """

    accuracy: float
    ece: float
    nll: float


def calibration(probability: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], *, bins: int = 15) -> Calibration:
    """Measure how well class probabilities are calibrated.

    Args:
        probability: Class probabilities of n points; rows sum to 1.
        labels: Classes of the points.
        bins: Number of bins of the confidence, of equal width on [0, 1].

    Raises:
        TypeError: `bins` is not a whole number, or a tensor is of the wrong kind.
        ValueError: There are no points, or not one label per point in 0 .. C - 1. Or a row of `probability` is negative
            or does not sum to 1, or there is no bin.
    """
    validate_count(bins, "bins")
    validate_tensor(probability, "probability", ndim=2, floating=True)
    if not probability.numel():
        raise ValueError(f"probability must hold at least one point: got shape {tuple(probability.shape)}.")
    validate_labels(labels, *probability.shape)
    bins, labels = int(bins), labels.long()
    sums = probability.sum(dim=1)
    if not (probability >= 0).all() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6, rtol=0):
        raise ValueError("probability must hold rows of probabilities that sum to 1: some do not. Apply a softmax.")
    confidence, chosen = probability.max(dim=1)
    correct = (chosen == labels).to(probability)
    bin_of = (confidence * bins).long().clamp_max(bins - 1)
    gaps = torch.zeros(bins, dtype=probability.dtype, device=probability.device)
    gaps.index_add_(0, bin_of, confidence - correct)
    of_label = probability.gather(1, labels[:, None])[:, 0]
    return Calibration(
        accuracy=float(correct.mean()),
        ece=float(gaps.abs().sum() / len(labels)),
        nll=float(-of_label.log().mean()),
    )
