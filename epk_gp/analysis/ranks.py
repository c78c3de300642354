"""Spearman's rank correlation."""

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

from epk_gp.core.checks import validate_tensor


def rank_correlation(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float | None:
    """Compute Spearman's rank correlation.

    Args:
        a: n numbers.
        b: n numbers.

    Returns:
        A number in [-1, 1], or None if a or b is constant.

    Raises:
        TypeError: a or b is not a tensor.
        ValueError: The numbers are not finite, or not as many in a as in b, or there are fewer than 2 numbers.
    """
    for name, values in (("a", a), ("b", b)):
        validate_tensor(values, name, ndim=1)
        if not torch.isfinite(values).all():
            raise ValueError(f"{name} must be finite: it holds NaN or infinity.")
    if len(a) != len(b):
        raise ValueError(f"a and b must hold as many numbers as each other: got {len(a)} and {len(b)}.")
    if len(a) < 2:
        raise ValueError(f"a rank correlation needs at least 2 numbers: got {len(a)}.")
    x, y = (v.detach().double().cpu().numpy() for v in (a, b))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(spearmanr(x, y).statistic)
