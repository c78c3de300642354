"""Calibration of predicted class probabilities."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_labels, validate_tensor


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


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """Predictions by their confidence, the probability of the most probable class, in B bins of equal width on [0, 1].

    Attributes:
        count: Points in each bin.
        confidence: Their mean confidence; NaN in an empty bin.
        accuracy: Share of them whose most probable class is right; NaN in an empty bin.
    """

    count: Int64[Tensor, " B"]
    confidence: Float[Tensor, " B"]
    accuracy: Float[Tensor, " B"]


def reliability_bins(
    probability: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], *, bins: int = 10
) -> ReliabilityBins:
    """Compare confidence and accuracy, bin by bin: what a reliability diagram shows.

    Args:
        probability: Class probabilities of n points; rows sum to 1.
        labels: Classes of the points.
        bins: Number B of bins.

    Raises:
        TypeError, ValueError: As `calibration`.
    """
    bin_of, confidence, correct = _binned(probability, labels, bins)
    count = torch.bincount(bin_of, minlength=int(bins))
    sums = torch.zeros(2, int(bins), dtype=probability.dtype, device=probability.device)
    sums.index_add_(1, bin_of, torch.stack([confidence, correct]))
    return ReliabilityBins(count, *(sums / count))


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
    bin_of, confidence, correct = _binned(probability, labels, bins)
    gaps = torch.zeros(int(bins), dtype=probability.dtype, device=probability.device)
    gaps.index_add_(0, bin_of, confidence - correct)
    of_label = probability.gather(1, labels.long()[:, None])[:, 0]
    return Calibration(
        accuracy=float(correct.mean()),
        ece=float(gaps.abs().sum() / len(labels)),
        nll=float(-of_label.log().mean()),
    )


def _binned(probability: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bin of each point's confidence, the confidence, and whether the most probable class is right."""
    validate_count(bins, "bins")
    validate_tensor(probability, "probability", ndim=2, floating=True)
    if not probability.numel():
        raise ValueError(f"probability must hold at least one point: got shape {tuple(probability.shape)}.")
    validate_labels(labels, *probability.shape)
    sums = probability.sum(dim=1)
    if not (probability >= 0).all() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6, rtol=0):
        raise ValueError("probability must hold rows of probabilities that sum to 1: some do not. Apply a softmax.")
    confidence, chosen = probability.max(dim=1)
    correct = (chosen == labels.long()).to(probability)
    return (confidence * int(bins)).long().clamp_max(int(bins) - 1), confidence, correct
