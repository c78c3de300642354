"""What a GP says of each of its own points without that point: exact, from one factorisation."""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Predictions of each of N conditioning points from the other N - 1, hyperparameters as they are.

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

    Equations (5.10) to (5.12) of Rasmussen & Williams (2006), in blocks: a point takes all its C outputs along.

        A = (scale K + noise)^-1,   cov_i = (A_ii)^-1,   y_i - mean_i = cov_i (A (y - m))_i

    Args:
        gp: A process over N points.

    Returns:
        Predictions and scores, float64. `log_density` averaged is a score of hyperparameters; the posterior goes into
        `softmax_uncertainty` and `calibrated_temperature`.

    Raises:
        ValueError: The observations' covariance is not positive definite, or the GP has fewer than 2 points.
    """
    N, C = len(gp.points), gp.kernel.trajectory.num_outputs
    if N < 2:
        raise ValueError(f"leaving one point out needs at least 2: the GP is conditioned on {N}.")
    with torch.no_grad():
        factorization = gp.factorization()
        A = torch.cholesky_inverse(factorization.factor)  # (K, rows, rows)
        if gp.kernel.source.reduction == "full":
            own = A.reshape(N, C, N, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (N, C, C)
            projected = factorization.weights.reshape(N, C)
            targets, noise = gp.train_targets, gp.likelihood.noise.expand(N, C)
        else:
            own = torch.diag_embed(A.diagonal(dim1=-2, dim2=-1).mT)
            projected = factorization.weights.mT
            targets, noise = gp.train_targets.mT, gp.likelihood.noise.expand(C, N).mT
        noisy = torch.linalg.inv(own)
        noisy = (noisy + noisy.mT) / 2  # the inverse of a symmetric matrix, of which rounding leaves two halves
        residual = (noisy @ projected[..., None])[..., 0]
        log_density = -0.5 * ((residual * projected).sum(-1) - torch.linalg.slogdet(own).logabsdet + C * log(2 * pi))
        rounding = A.shape[-1] * torch.finfo(A.dtype).eps * float(noisy.diagonal(dim1=-2, dim2=-1).max())
        return LeaveOneOut(
            posterior=LogitPosterior(targets - residual, noisy - torch.diag_embed(noise), rounding),
            residual=residual,
            log_density=log_density,
            standardized=residual / noisy.diagonal(dim1=-2, dim2=-1).sqrt(),
        )
