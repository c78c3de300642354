"""How well a score separates points of the training distribution from out-of-distribution points."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.stats import mannwhitneyu
from torch import Tensor

from epk_gp.core.validation import validate_tensor


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
    for name, scores in (("inside", inside), ("outside", outside)):
        validate_tensor(scores, name, ndim=1, floating=True)
        if not len(scores) or not torch.isfinite(scores).all():
            raise ValueError(f"{name} must hold finite scores, at least one: got {len(scores)}, or NaN or infinity.")
    n, m = len(inside), len(outside)
    u = mannwhitneyu(outside.double().cpu().numpy(), inside.double().cpu().numpy()).statistic
    threshold = inside.sort().values[-(-95 * n // 100) - 1]
    return OODMetrics(auroc=float(u) / (n * m), fpr95=float((outside <= threshold).double().mean()))
