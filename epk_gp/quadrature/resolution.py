"""How fast a function is resolved on an interval, and which rule will therefore suffice there.

f' is smooth on an interval if its Legendre coefficients c_k fall geometrically. The first of them follow from what an
interval has anyway: df/dt at its nodes, and f at its nodes and ends. The errors of larger rules are predicted from
them. A kink makes the coefficients fall slowly, so that no rule promises to suffice.
"""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.quadrature.rules import QuadratureRule

# Coefficients that a predicted error is summed over, and the slowest fall that is predicted from.
NUM_TERMS, _SLOWEST = 80, 0.95


def spectrum(nodes: tuple[float, ...], points: tuple[float, ...]) -> np.ndarray:
    """Return the matrix that maps data of f on [0, 1] to Legendre coefficients of f'.

    Args:
        nodes: Where f' is known, n numbers.
        points: Where f is known besides the ends, m numbers in rising order.

    Returns:
        The inverse of the collocation matrix, (K, K), K = n + m + 1: for f' at the nodes, then the differences of f
        between neighbouring points.
    """
    ends = 2 * np.array([0.0, *points, 1.0]) - 1
    K = len(nodes) + len(ends) - 1
    integrals = [np.polynomial.legendre.Legendre.basis(k).integ(lbnd=-1)(ends) / 2 for k in range(K)]
    values = np.polynomial.legendre.legvander(2 * np.array(nodes) - 1, K - 1)
    return np.linalg.inv(np.concatenate([values, np.diff(np.stack(integrals, axis=1), axis=0)]))


def legendre_errors(rule: QuadratureRule, degree: int) -> np.ndarray:
    """Return |rule(P_k) - integral of P_k| on [0, 1] for the first `NUM_TERMS` Legendre polynomials.

    Args:
        rule: The rule.
        degree: Up to which it is exact: there the errors are zero, without rounding.
    """
    sums = np.polynomial.legendre.legvander(2 * np.array(rule.nodes) - 1, NUM_TERMS - 1).T @ np.array(rule.weights)
    return np.where(np.arange(NUM_TERMS) <= degree, 0.0, np.abs(sums))


def predicted_errors(coefficients: Float[Tensor, "E K C"], errors: Float[Tensor, "R J"]) -> Float[Tensor, "E R"]:
    """Predict the errors of rules from the first Legendre coefficients of a function.

    A line is fitted to log max_c |c_k|, k from 1 to K - 1. The coefficients that follow are taken to fall like it, from
    the larger one of the last two: every other one may vanish.

    Args:
        coefficients: The first K coefficients on each of the E intervals.
        errors: Errors of the R rules for each Legendre polynomial, `legendre_errors`.
    """
    K = coefficients.shape[1]
    size = coefficients.abs().amax(dim=2).clamp(min=torch.finfo(coefficients.dtype).tiny)
    k = torch.arange(1, K, dtype=size.dtype, device=size.device)
    k = k - k.mean()
    fall = ((size[:, 1:].log() * k).sum(dim=1) / (k * k).sum()).exp().clamp(max=_SLOWEST)
    terms = torch.arange(errors.shape[1], dtype=size.dtype, device=size.device) - (K - 1.5)
    following = torch.where(terms > -1, fall[:, None] ** terms, 0.0)
    return size[:, -2:].amax(dim=1)[:, None] * (following @ errors.T)


def extrapolated_errors(
    error: Float[Tensor, " E"],
    before: Float[Tensor, " E"],
    degree: Int64[Tensor, " E"],
    degree_before: Int64[Tensor, " E"],
    degree_after: Int64[Tensor, " E"],
) -> Float[Tensor, " E"]:
    """Predict errors from those of two rules: they fall geometrically with the degree of exactness."""
    tiny = torch.finfo(error.dtype).tiny
    fall = (error.clamp(min=tiny) / before.clamp(min=tiny)).log() / (degree - degree_before).clamp(min=1)
    return error * (fall * (degree_after - degree)).exp()
