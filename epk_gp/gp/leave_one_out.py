"""Leave-one-out predictions: exact, for all points from one factorisation."""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.gp.models import LogitGP, validate_gp
from epk_gp.gp.posterior import LogitPosterior


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Predictions of each of N conditioning points from the other N - 1, with the hyperparameters as they are.

    Attributes:
        posterior: Of the latent outputs, without noise.
        residual: Target minus predicted mean, (N, C).
        log_density: Of the targets under the prediction with noise, (N,). Their sum is the log pseudo-likelihood.
        standardized: Residual divided by the predictive standard deviation, per output: near 1 in mean square if the
            GP is calibrated, (N, C).
    """

    posterior: LogitPosterior
    residual: Float[Tensor, "N C"]
    log_density: Float[Tensor, " N"]
    standardized: Float[Tensor, "N C"]


def leave_one_out(gp: LogitGP) -> LeaveOneOut:
    """Predict each conditioning point from the others.

    Equations (5.10) to (5.12) of Rasmussen & Williams (2006), in blocks: all C outputs of a point are left out.

        A = (scale K + noise)^-1,   cov_i = (A_ii)^-1,   y_i - mean_i = cov_i (A (y - m))_i

    Args:
        gp: A process over N points.

    Returns:
        Predictions and scores, float64. The mean of `log_density` is a score of hyperparameters; the posterior is what
        `softmax_uncertainty` and `calibrated_temperature` take.

    Raises:
        TypeError: `gp` is not a `LogitGP`.
        ValueError: The observations' covariance is not positive definite, or the GP has fewer than 2 points.
    """
    validate_gp(gp)
    N, C = len(gp.points), gp.kernel.trajectory.num_outputs
    if N < 2:
        raise ValueError(f"leaving one point out needs at least 2: the GP is conditioned on {N}.")
    with torch.no_grad():
        coupling, factorization = gp.coupling, gp.factorization()
        inverse = torch.cholesky_inverse(factorization.factor)  # A, (K, rows, rows)
        A = coupling.point_blocks(inverse)  # A_ii, (N, C, C)
        projected = coupling.from_rows(factorization.weights)  # A (y - m), (N, C)
        targets, noise = coupling.from_rows(gp.target_rows()), coupling.from_rows(gp.noise_rows())
        noisy = torch.linalg.inv(A)
        noisy = (noisy + noisy.mT) / 2  # rounding makes the inverse of a symmetric matrix slightly unsymmetric
        residual = (noisy @ projected[..., None])[..., 0]
        log_density = -0.5 * ((residual * projected).sum(-1) - torch.linalg.slogdet(A).logabsdet + C * log(2 * pi))
        largest_variance = float(noisy.diagonal(dim1=-2, dim2=-1).max())
        tolerance = inverse.shape[-1] * torch.finfo(A.dtype).eps * largest_variance
        return LeaveOneOut(
            posterior=LogitPosterior(targets - residual, noisy - torch.diag_embed(noise), tolerance),
            residual=residual,
            log_density=log_density,
            standardized=residual / noisy.diagonal(dim1=-2, dim2=-1).sqrt(),
        )
