"""Measures of scores, probabilities and kernels: detection, calibration, rank correlation, and the rank of a matrix."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.stats import binned_statistic, rankdata
from sklearn.metrics import roc_auc_score
from sklearn.metrics import roc_curve as curve_of
from torch import Tensor
from torch.nn.functional import cosine_similarity

from epk_gp.core.checks import validate_count, validate_finite, validate_labels, validate_number, validate_tensor


@dataclass(frozen=True)
class OODMetrics:
    """Quality of a score that should be larger for out-of-distribution points.

    Attributes:
        auroc: Probability that an outside point scores higher than an inside point; ties count half, and 0.5 is chance.
        fpr95: Share of outside points below the threshold that 95 % of the inside points stay below.
    """

    auroc: float
    fpr95: float


@dataclass(frozen=True, eq=False)
class ROCCurve:
    """Results of thresholds on a score: each of the k different scores, and a threshold above all of them.

    Attributes:
        threshold: Scores of at least this value are called outside, (k + 1,); the first one is infinite.
        inside: Share of inside points that are called outside, from 0 to 1.
        outside: Share of outside points that are called outside.
    """

    threshold: Float[Tensor, " k1"]
    inside: Float[Tensor, " k1"]
    outside: Float[Tensor, " k1"]


@dataclass(frozen=True, eq=False)
class ErrorDetection:
    """Quality of a score that should be larger for wrong predictions.

    Attributes:
        auroc: Probability that a wrong prediction scores higher than a right one; ties count half. None if all are
            right or all are wrong.
        aurc: Area under the risk-coverage curve (Geifman and El-Yaniv 2017): the mean of `risk`. Smaller is better.
        risk: Share of wrong predictions among the 1 .. n points with the smallest scores. Points with equal scores are
            in random order, and the risk is the expected one.
    """

    auroc: float | None
    aurc: float
    risk: Float[Tensor, " n"]


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


@dataclass(frozen=True, eq=False)
class GramSpectrum:
    """Eigenvalues of a positive semi-definite matrix, and three measures of its effective rank.

    Attributes:
        values: Eigenvalues in descending order; they are negative only by rounding.
        effective_rank: exp of the entropy of the normalised eigenvalues (Roy & Vetterli 2007).
        participation_ratio: (sum of eigenvalues)² / sum of their squares.
        num_principal: Number of largest eigenvalues that contain the requested share of the trace.
    """

    values: Float[Tensor, " n"]
    effective_rank: float
    participation_ratio: float
    num_principal: int


def ood_metrics(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> OODMetrics:
    """Compute the AUROC and the false-positive rate at 95 % true positives of a score.

    Args:
        inside: Scores of n points of the training distribution.
        outside: Scores of m out-of-distribution points.

    Raises:
        TypeError: A set of scores is not a tensor of float32 or float64.
        ValueError: One of the sets is empty, or a score is not finite.
    """
    is_outside, scores = _joined(inside, outside)
    threshold = inside.sort().values[math.ceil(95 * len(inside) / 100) - 1]
    fpr95 = float((outside <= threshold).double().mean())
    return OODMetrics(auroc=float(roc_auc_score(is_outside, scores)), fpr95=fpr95)


def roc_curve(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> ROCCurve:
    """Compute the receiver operating characteristic of a score that should be larger for outside points.

    The area under it, with straight lines between points, is `ood_metrics(inside, outside).auroc`.

    Args:
        inside: Scores of n points of the training distribution.
        outside: Scores of m out-of-distribution points.

    Raises:
        TypeError, ValueError: As in `ood_metrics`.
    """
    of_inside, of_outside, threshold = curve_of(*_joined(inside, outside), drop_intermediate=False)
    return ROCCurve(*(torch.from_numpy(values).to(inside) for values in (threshold, of_inside, of_outside)))


def error_detection(scores: Float[Tensor, " n"], wrong: Bool[Tensor, " n"]) -> ErrorDetection:
    """Measure the quality of a score for detecting wrong predictions, in order to abstain from them.

    Args:
        scores: Scores of n predictions; larger means less certain.
        wrong: Whether each prediction is wrong.

    Raises:
        TypeError: `scores` is not a tensor of float32 or float64, or `wrong` is not a mask.
        ValueError: There are no scores, or one is not finite, or there is not one entry of `wrong` per score.
    """
    _validate_scores(scores, "scores")
    validate_tensor(wrong, "wrong", ndim=1)
    if wrong.dtype != torch.bool:
        raise TypeError(f"wrong must be a mask of torch.bool: got {wrong.dtype}.")
    if len(wrong) != len(scores):
        raise ValueError(f"wrong must have one entry per score: got {len(wrong)} entries for {len(scores)} scores.")
    wrong = wrong.to(scores.device)
    values, group, counts = scores.unique(return_inverse=True, return_counts=True)  # in ascending order
    errors = torch.zeros(len(values), dtype=torch.float64, device=scores.device).index_add_(0, group, wrong.double())
    rate = (errors / counts).repeat_interleave(counts)  # points with equal scores are wrong equally often
    risk = rate.cumsum(0) / torch.arange(1, len(scores) + 1, device=scores.device)
    has_both = bool(wrong.any()) and not bool(wrong.all())
    auroc = float(roc_auc_score(wrong.cpu(), scores.detach().cpu())) if has_both else None
    return ErrorDetection(auroc=auroc, aurc=float(risk.mean()), risk=risk)


def _joined(inside: Tensor, outside: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return whether points lie outside, and their scores, in scikit-learn's form."""
    _validate_scores(inside, "inside")
    _validate_scores(outside, "outside")
    scores = torch.cat([inside, outside.to(inside)]).detach().cpu().numpy()
    return np.arange(len(scores)) >= len(inside), scores


def _validate_scores(scores: Tensor, name: str) -> None:
    validate_tensor(scores, name, ndim=1, floating=True)
    if not len(scores) or not torch.isfinite(scores).all():
        raise ValueError(f"{name} must hold finite scores, at least one: got {len(scores)}, or NaN or infinity.")


def reliability_bins(
    probability: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], *, bins: int = 10
) -> ReliabilityBins:
    """Compare confidence and accuracy, bin by bin, for a reliability diagram.

    Args:
        probability: Class probabilities of n points; rows sum to 1.
        labels: Classes of the points.
        bins: Number B of bins.

    Raises:
        TypeError: `bins` is not an integer, or a tensor has a wrong type.
        ValueError: There are no points, or not one label per point in 0 .. C - 1. Or a row of `probability` is negative
            or does not sum to 1, or there is no bin.
    """
    validate_count(bins, "bins")
    validate_tensor(probability, "probability", ndim=2, floating=True)
    if not probability.numel():
        raise ValueError(f"probability must hold at least one point: got shape {tuple(probability.shape)}.")
    validate_labels(labels, *probability.shape)
    sums = probability.sum(dim=1)
    if not (probability >= 0).all() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-6, rtol=0):
        raise ValueError("probability must hold rows of probabilities that sum to 1: some do not. Apply a softmax.")
    confidence, chosen = (values.detach().cpu() for values in probability.double().max(dim=1))
    both = torch.stack([confidence, (chosen == labels.cpu()).double()])
    places = confidence.clamp(max=1.0).numpy()  # rounding may put one above 1
    count = binned_statistic(places, places, "count", bins=int(bins), range=(0, 1)).statistic
    means = binned_statistic(places, both.numpy(), "mean", bins=int(bins), range=(0, 1)).statistic
    return ReliabilityBins(
        torch.from_numpy(count).long().to(probability.device), *torch.from_numpy(means).to(probability)
    )


def calibration(probability: Float[Tensor, "n C"], labels: Int64[Tensor, " n"], *, bins: int = 15) -> Calibration:
    """Measure the calibration of class probabilities; arguments and errors as in `reliability_bins`."""
    found = reliability_bins(probability, labels, bins=bins)
    gaps = found.count * (found.confidence - found.accuracy).abs()
    right = probability.gather(1, labels.long()[:, None])[:, 0]
    return Calibration(
        accuracy=float((probability.argmax(dim=1) == labels).double().mean()),
        ece=float(gaps.nansum() / len(labels)),
        nll=float(-right.log().mean()),
    )


def rank_correlation(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float | None:
    """Compute Spearman's rank correlation of n >= 2 numbers with n others; None if a or b is constant.

    Raises:
        TypeError: a or b is not a tensor.
        ValueError: The numbers are not finite, a and b have different lengths, or there are fewer than 2 numbers.
    """
    for name, values in (("a", a), ("b", b)):
        validate_tensor(values, name, ndim=1)
    value = float(rank_correlations(a[None], b[None]))
    return None if math.isnan(value) else value


def rank_correlations(a: Float[Tensor, "n m"], b: Float[Tensor, "n m"]) -> Float64[Tensor, " n"]:
    """Compute Spearman's rank correlation of each row of a with the same row of b: NaN if one of them is constant.

    Raises:
        ValueError: The numbers are not finite, a and b have different shapes, or there are fewer than 2 columns.
    """
    for name, values in (("a", a), ("b", b)):
        validate_finite(values, name)
    if a.shape != b.shape or a.shape[1] < 2:
        raise ValueError(f"a and b must both be (n, m), m >= 2: got {tuple(a.shape)} and {tuple(b.shape)}.")
    return row_correlations(*(torch.from_numpy(rankdata(v.detach().double().cpu(), axis=1)) for v in (a, b)))


def is_constant(values: Float[Tensor, "n m"]) -> Bool[Tensor, " n"]:
    """Return a mask of the rows with only one distinct number."""
    return (values == values[:, :1]).all(dim=1)


def row_correlations(a: Float[Tensor, "n m"], b: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """Compute Pearson's correlation of each row of a with the same row of b: NaN if one of them is constant."""
    x, y = (values - values.mean(dim=1, keepdim=True) for values in (a, b))
    return cosine_similarity(x, y, eps=0.0).masked_fill(is_constant(a) | is_constant(b), math.nan)


def gram_spectrum(gram: Float[Tensor, "n n"], *, share: float = 0.95) -> GramSpectrum:
    """Decompose a Gram matrix.

    Args:
        gram: Symmetric and positive semi-definite to rounding.
        share: Share of the trace that the principal directions must contain.

    Raises:
        TypeError: The matrix is not a tensor of float32 or float64, or `share` is not a number.
        ValueError: The matrix is not square, is not symmetric, is zero, or has an eigenvalue that is negative beyond
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
    """Count the largest energies (eigenvalues or squared singular values) that together contain a share of their sum.

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
