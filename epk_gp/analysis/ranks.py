"""Spearman's rank correlation."""

import numpy as np
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor


def rank_correlation(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float | None:
    """Compute Spearman's rank correlation.

    Args:
        a: n numbers.
        b: n numbers.

    Returns:
        A number in [-1, 1], or None if a or b is constant.

    Raises:
        ValueError: There are fewer than 2 numbers.
    """
    if len(a) < 2:
        raise ValueError(f"a rank correlation needs at least 2 numbers: got {len(a)}.")
    x, y = (v.detach().double().cpu().numpy() for v in (a, b))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(spearmanr(x, y).statistic)
