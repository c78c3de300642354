"""How well a score finds points: from outside the training distribution, predicted wrongly, or with a wrong label."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.stats import mannwhitneyu
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_tensor


@dataclass(frozen=True)
class OODMetrics:
    """Quality of a score that should be larger for out-of-distribution points.

    Attributes:
        auroc: Probability that an outside point scores higher than an inside point; ties count half, and 0.5 is chance.
        fpr95: Share of outside points that fall below the threshold below which 95 % of the inside points lie.
    """

    auroc: float
    fpr95: float


def ood_metrics(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> OODMetrics:
    """Compute the AUROC and the false-positive rate at 95 % true positives of a score.

    Args:
        inside: Scores of n points of the training distribution.
        outside: Scores of m out-of-distribution points.

    Raises:
        TypeError: A set of scores is not a tensor of float32 or float64.
        ValueError: One of the sets is empty, or a score is not finite.
    """
    _validate_scores(inside, "inside")
    _validate_scores(outside, "outside")
    threshold = inside.sort().values[-(-95 * len(inside) // 100) - 1]
    return OODMetrics(auroc=_auroc(inside, outside), fpr95=float((outside <= threshold).double().mean()))


@dataclass(frozen=True, eq=False)
class ROCCurve:
    """What a threshold on a score finds, for each of the k different scores and for a threshold above all of them.

    Attributes:
        threshold: Scores from this one on are called outside, (k + 1,); the first one is infinite.
        inside: Share of inside points that are called outside, from 0 to 1.
        outside: Share of outside points that are.
    """

    threshold: Float[Tensor, " k1"]
    inside: Float[Tensor, " k1"]
    outside: Float[Tensor, " k1"]


def roc_curve(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> ROCCurve:
    """Compute the receiver operating characteristic of a score that should be larger for outside points.

    The area under it, joined by straight lines, is `ood_metrics(inside, outside).auroc`.

    Args:
        inside: Scores of n points of the training distribution.
        outside: Scores of m out-of-distribution points.

    Raises:
        TypeError, ValueError: As `ood_metrics`.
    """
    _validate_scores(inside, "inside")
    _validate_scores(outside, "outside")
    values = torch.cat([inside, outside.to(inside)]).unique().flip(0)
    shares = []
    for scores in (inside, outside.to(inside)):
        below = torch.searchsorted(scores.sort().values, values)
        shares.append(torch.cat([values.new_zeros(1), 1 - below.to(values) / len(scores)]))
    return ROCCurve(torch.cat([values.new_full((1,), torch.inf), values]), *shares)


@dataclass(frozen=True, eq=False)
class ErrorDetection:
    """Quality of a score that should be larger for points that are predicted wrongly.

    Attributes:
        auroc: Probability that a wrong prediction scores higher than a right one; ties count half. None if all are
            right or all are wrong.
        aurc: Area under the risk-coverage curve (Geifman and El-Yaniv 2017): the mean of `risk`. Smaller is better.
        risk: Share of wrong predictions among the 1 .. n points with the smallest scores. Points of one score stand in
            random order, and the risk is the expected one.
    """

    auroc: float | None
    aurc: float
    risk: Float[Tensor, " n"]


def error_detection(scores: Float[Tensor, " n"], wrong: Bool[Tensor, " n"]) -> ErrorDetection:
    """Measure how well a score says which predictions are wrong, so that one can abstain from them.

    Args:
        scores: Scores of n predictions; larger means less sure.
        wrong: Whether each prediction is wrong.

    Raises:
        TypeError: `scores` is not a tensor of float32 or float64, or `wrong` is not a mask.
        ValueError: There are no scores, or one is not finite, or there is not one entry of `wrong` per score.
    """
    _validate_scores(scores, "scores")
    wrong = _parse_mask(wrong, "wrong", len(scores)).to(scores.device)
    values, group, counts = scores.unique(return_inverse=True, return_counts=True)  # in ascending order
    errors = torch.zeros(len(values), dtype=torch.float64, device=scores.device).index_add_(0, group, wrong.double())
    rate = (errors / counts).repeat_interleave(
        counts
    )  # of the points of one score, each is wrong as often as the others
    risk = rate.cumsum(0) / torch.arange(1, len(scores) + 1, device=scores.device)
    some_of_each = bool(wrong.any()) and not bool(wrong.all())
    auroc = _auroc(scores[~wrong], scores[wrong]) if some_of_each else None
    return ErrorDetection(auroc=auroc, aurc=float(risk.mean()), risk=risk)


def precision_at_k(scores: Float[Tensor, " n"], sought: Bool[Tensor, " n"], k: int | None = None) -> float:
    """Return the share of sought points among the k points with the largest scores.

    Points that share the k-th largest score stand in random order, and the share is the expected one.

    Args:
        scores: Scores of n points.
        sought: Whether a point is one of those that should be found, such as a wrong label.
        k: From 1 to n; None for the number of points that are sought.

    Raises:
        TypeError: `scores` is not a tensor of float32 or float64, `sought` is not a mask, or k is not a whole number.
        ValueError: There are no scores, or one is not finite; there is not one entry of `sought` per score; k does not
            lie in 1 .. n; or k is None and no point is sought.
    """
    _validate_scores(scores, "scores")
    sought = _parse_mask(sought, "sought", len(scores)).to(scores.device)
    if k is None:
        if not sought.any():
            raise ValueError("sought must hold at least one point that is sought where k is None: got none. Pass k.")
        k = int(sought.sum())
    validate_count(k, "k")
    if k > len(scores):
        raise ValueError(f"k must be at most the number of scores, {len(scores)}: got {k}.")
    last = scores.sort(descending=True).values[k - 1]
    above, tied = scores > last, scores == last
    share = (k - int(above.sum())) / int(tied.sum())
    return float(sought[above].sum() + share * sought[tied].sum()) / k


def _auroc(low: Tensor, high: Tensor) -> float:
    statistic = mannwhitneyu(high.detach().double().cpu().numpy(), low.detach().double().cpu().numpy()).statistic
    return float(statistic) / (len(low) * len(high))


def _validate_scores(scores: Tensor, name: str) -> None:
    validate_tensor(scores, name, ndim=1, floating=True)
    if not len(scores) or not torch.isfinite(scores).all():
        raise ValueError(f"{name} must hold finite scores, at least one: got {len(scores)}, or NaN or infinity.")


def _parse_mask(mask: Tensor, name: str, count: int) -> Tensor:
    validate_tensor(mask, name, ndim=1)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be a mask of torch.bool: got {mask.dtype}.")
    if len(mask) != count:
        raise ValueError(f"{name} must have one entry per score: got {len(mask)} entries for {count} scores.")
    return mask
