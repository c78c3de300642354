"""Split conformal prediction: sets of classes that hold the true one with a stated probability."""

from math import ceil

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from epk_gp.core.checks import validate_number


def conformity_scores(probability: Float[Tensor, "n C"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return 1 - p of the true class at points that nothing was fitted to, in ascending order."""
    return (1 - probability.gather(1, labels[:, None])[:, 0]).sort().values


def conformal_sets(probability: Float[Tensor, "n C"], scores: Float[Tensor, " m"], alpha: float) -> Bool[Tensor, "n C"]:
    """Return the classes whose score is at most the ceil((m + 1)(1 - alpha))-th smallest of m held-out scores.

    If new points are drawn as the held-out ones were, the set holds the true class with a probability of at least
    1 - alpha: on average over points and over draws of the held-out ones, not for each class or region (Vovk et al.
    2005; Angelopoulos & Bates 2021).

    Args:
        probability: Of n new points.
        scores: Ascending (`conformity_scores`).
        alpha: Allowed share of sets without the true class, in (0, 1). Below 1 / (m + 1) every set holds all classes.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` does not lie between 0 and 1.
    """
    validate_number(alpha, "alpha")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1: got {alpha}. 0.1 asks for sets that are right in 90 %.")
    rank = ceil((len(scores) + 1) * (1 - alpha))
    if rank > len(scores):
        return torch.ones_like(probability, dtype=torch.bool)
    return 1 - probability <= scores[rank - 1]
