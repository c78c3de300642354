"""Predictions of targets in their units, and of each conditioning point from all others."""

from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import validate_number
from epk_gp.core.inputs import Inputs
from epk_gp.core.show import Tabular
from epk_gp.gp.models import LogitGP, validate_gp
from epk_gp.gp.posterior import LogitPosterior, link_of


@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut(Tabular):
    """Predictions of each of N conditioning points from the other N - 1, with unchanged hyperparameters.

    Attributes:
        posterior: Posterior of the latent outputs, without noise.
        residual: Target minus predicted mean, (N, C).
        log_density: Log density of the targets under the prediction with noise, (N,). Its sum is the log
            pseudo-likelihood.
    """

    posterior: LogitPosterior
    residual: Float[Tensor, "N C"]
    log_density: Float[Tensor, " N"]

    def _frame(self) -> tuple[Any, ...]:
        points, terms, _ = self.posterior._frame()
        terms |= {"residual": self.residual, "log_density": self.log_density[:, None]}
        return {"point": points["point"]}, terms, [("output", points["output"])]


def leave_one_out(gp: LogitGP) -> LeaveOneOut:
    """Predict each conditioning point from the others.

    Equations (5.10) to (5.12) of Rasmussen & Williams (2006), in blocks: all C outputs of a point are left out.

        A = (scale K + noise)^-1,   cov_i = (A_ii)^-1,   y_i - mean_i = cov_i (A (y - m))_i

    Args:
        gp: A process over N points.

    Returns:
        Predictions and scores, float64. The mean of `log_density` is a score of hyperparameters; see also its
        `posterior.softmax_uncertainty`.

    Raises:
        TypeError: `gp` is not a `LogitGP`.
        ValueError: The observations' covariance is not positive definite, or the GP has fewer than 2 points.
    """
    validate_gp(gp)
    N, C = len(gp.points), gp.kernel.trajectory.num_outputs
    if N < 2:
        raise ValueError(f"leaving one point out needs at least 2: the GP is conditioned on {N}.")
    with torch.no_grad():
        coupling, (factor, weights) = gp.coupling, gp.factorize()
        inverse = torch.cholesky_inverse(factor)  # A, (K, rows, rows)
        A = coupling.point_blocks(inverse)  # A_ii, (N, C, C)
        projected = coupling.from_rows(weights)  # A (y - m), (N, C)
        targets, noise = coupling.from_rows(gp.target_rows()), coupling.from_rows(gp.noise_rows())
        noisy = torch.linalg.inv(A)
        noisy = (noisy + noisy.mT) / 2  # rounding makes the inverse of a symmetric matrix slightly unsymmetric
        residual = (noisy @ projected[..., None])[..., 0]
        log_density = -0.5 * ((residual * projected).sum(-1) - torch.linalg.slogdet(A).logabsdet + C * log(2 * pi))
        largest_variance = float(noisy.diagonal(dim1=-2, dim2=-1).max())
        tolerance = inverse.shape[-1] * torch.finfo(A.dtype).eps * largest_variance
        covariance = noisy - torch.diag_embed(noise)
        posterior = LogitPosterior(targets - residual, covariance, tolerance, link_of(gp.trajectory))
        return LeaveOneOut(posterior, residual, log_density).labelled(point=gp.points.tolist())


class NormalPredictions(Tabular):
    """Normal predictions of observations, each with a `mean` and a `std`."""

    def interval(self, level: float = 0.9) -> tuple[Any, Any]:
        """Return the lower and the upper end of the central interval that contains an observation with a probability.

        Args:
            level: The probability, between 0 and 1.

        Raises:
            TypeError: `level` is not a number.
            ValueError: It does not lie between 0 and 1.
        """
        validate_number(level, "level")
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1: got {level}.")
        own: Any = self
        half = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))) * own.std
        return own.mean - half, own.mean + half


@dataclass(frozen=True, eq=False, repr=False)
class TargetPrediction(NormalPredictions):
    """Gaussian predictions of new observations at n points: one normal distribution per point and output.

    Attributes:
        mean: (n, C), in the units of the targets.
        variance: Variance of an observation: the latent variance plus the noise, (n, C).
        latent_variance: Variance of the observed function, (n, C).
    """

    mean: Float[Tensor, "n C"]
    variance: Float[Tensor, "n C"]
    latent_variance: Float[Tensor, "n C"]
    _columns = ("mean", "std", "variance", "latent_variance")

    @property
    def std(self) -> Float[Tensor, "n C"]:
        """Standard deviation of an observation."""
        return self.variance.sqrt()


def predict_targets(gp: LogitGP, X: Inputs) -> TargetPrediction:
    """Predict observations at new points.

    Args:
        gp: A process whose targets are observations, `LogitGP(trajectory, targets="labels")`.
        X: n inputs.

    Returns:
        The prediction, float64.

    Raises:
        TypeError: `gp` is not a `LogitGP`, or the network cannot take the points.
        ValueError: The points of the process have separate noise variances, or the network cannot take the points.
    """
    validate_gp(gp)
    noise = gp.coupling.from_rows(gp.noise_rows().detach())
    if not bool((noise == noise[:1]).all()):
        raise ValueError("the process must have one noise variance for all points, as with targets='labels'.")
    posterior = gp.logit_posterior(X)
    return _prediction(gp, posterior, noise[:1].expand_as(posterior.mean))


def leave_one_out_targets(gp: LogitGP) -> TargetPrediction:
    """Predict the observation at each conditioning point from all others, with unchanged hyperparameters.

    Args:
        gp: A process over N points.

    Raises:
        TypeError, ValueError: As in `epk_gp.gp.regression.leave_one_out`.
    """
    posterior = leave_one_out(gp).posterior
    found = _prediction(gp, posterior, gp.coupling.from_rows(gp.noise_rows().detach()))
    return found.labelled(point=gp.points.tolist())


def _prediction(gp: LogitGP, posterior: LogitPosterior, noise: Tensor) -> TargetPrediction:
    latent = posterior.covariance.diagonal(dim1=-2, dim2=-1).clone()
    return TargetPrediction(posterior.mean + gp.target_mean, latent + noise.to(latent), latent)
