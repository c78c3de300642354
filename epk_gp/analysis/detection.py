"""How well a score tells points of the training distribution from others."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.stats import mannwhitneyu
from torch import Tensor


@dataclass(frozen=True)
class OODMetrics:
    """Quality of a score that should be larger outside the distribution.

    Attributes:
        auroc: Probability that an outside point scores higher than an inside one, ties counting half; 0.5 for chance.
        fpr95: Share of outside points that are accepted at the threshold that accepts 95 % of the inside points.
    """

    auroc: float
    fpr95: float


def ood_metrics(inside: Float[Tensor, " n"], outside: Float[Tensor, " m"]) -> OODMetrics:
    """Judge a score.

    Args:
        inside: Scores of n points of the distribution.
        outside: Scores of m others.

    Raises:
        ValueError: No points, or scores that are not finite.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if not len(scores) or not torch.isfinite(scores).all():
            raise ValueError(f"{name} must hold finite scores, at least one: got {len(scores)}, or NaN or infinity.")
    n, m = len(inside), len(outside)
    u = mannwhitneyu(outside.double().cpu().numpy(), inside.double().cpu().numpy()).statistic
    threshold = inside.sort().values[-(-95 * n // 100) - 1]
    return OODMetrics(auroc=float(u) / (n * m), fpr95=float((outside <= threshold).double().mean()))
