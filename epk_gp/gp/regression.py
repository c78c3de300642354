"""Predictions of targets in their units, and of each conditioning point from all others."""

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_number
from epk_gp.core.inputs import Inputs
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
        `softmax_uncertainty` takes.

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


@dataclass(frozen=True, eq=False)
class TargetPrediction:
    """Gaussian predictions of new observations at n points: one normal distribution per point and output.

    Attributes:
        mean: (n, C), in the units of the targets.
        variance: Of an observation: the latent variance and the noise, (n, C).
        latent_variance: Of the function that is observed, (n, C).
    """

    mean: Float[Tensor, "n C"]
    variance: Float[Tensor, "n C"]
    latent_variance: Float[Tensor, "n C"]

    @property
    def std(self) -> Float[Tensor, "n C"]:
        """Standard deviation of an observation."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
        """Return the central interval that holds an observation with a given probability.

        Args:
            level: The probability, between 0 and 1.

        Returns:
            Its lower and its upper end.

        Raises:
            TypeError: `level` is not a number.
            ValueError: It does not lie between 0 and 1.
        """
        return self.quantile((1 - _parse_level(level)) / 2), self.quantile((1 + level) / 2)

    def quantile(self, probability: float) -> Float[Tensor, "n C"]:
        """Return the value below which an observation lies with a given probability.

        Raises:
            TypeError: `probability` is not a number.
            ValueError: It does not lie between 0 and 1.
        """
        z = torch.special.ndtri(torch.tensor(_parse_level(probability, "probability"), dtype=self.mean.dtype))
        values: Tensor = self.mean + z.to(self.mean.device) * self.std
        return values

    def coverage(self, y: Shaped[Tensor, "n *C"], level: float = 0.9) -> Float[Tensor, " C"]:
        """Return the share of observations inside the interval, for each output: `level` if it is calibrated.

        Args:
            y: Observations, (n, C), or (n,) for one output.
            level: The probability of the interval.

        Raises:
            TypeError: `level` is not a number.
            ValueError: It does not lie between 0 and 1, or `y` has another shape.
        """
        y, (lower, upper) = self._observations(y), self.interval(level)
        return ((y >= lower) & (y <= upper)).to(self.mean).mean(0)

    def log_density(self, y: Shaped[Tensor, "n *C"]) -> Float[Tensor, "n C"]:
        """Return the logarithm of the predicted density at observations.

        Args:
            y: Observations, (n, C), or (n,) for one output.

        Raises:
            ValueError: `y` has another shape.
        """
        z = (self._observations(y) - self.mean) / self.std
        return -(z**2) / 2 - self.std.log() - log(2 * pi) / 2

    def _observations(self, y: Tensor) -> Tensor:
        shape = tuple(self.mean.shape)
        if tuple(y.shape) != shape and not (shape[1] == 1 and tuple(y.shape) == shape[:1]):
            raise ValueError(f"y must have one value per point and output {shape}: got shape {tuple(y.shape)}.")
        return y.to(self.mean).view(shape)


def predict_targets(gp: LogitGP, X: Inputs, noise: Float[Tensor, "n C"] | None = None) -> TargetPrediction:
    """Predict observations at new points.

    Args:
        gp: A process whose targets are observations, `LogitGP(trajectory, targets="labels")`.
        X: n inputs.
        noise: Variances of the new observations, (n, C); by default that of the process, if it is one number for all
            points.

    Returns:
        The prediction, float64.

    Raises:
        TypeError: `gp` is not a `LogitGP`, or the network cannot take the points.
        ValueError: The noise of the process differs between its points, and `noise` is not given; or it has another
            shape, or is negative; or the network cannot take the points.
    """
    validate_gp(gp)
    posterior = gp.logit_posterior(X)
    if noise is None:
        of_points = gp.coupling.from_rows(gp.noise_rows().detach())
        if not bool((of_points == of_points[:1]).all()):
            raise ValueError(
                "noise must be given for a process whose points have noise variances of their own: got none. Pass "
                f"noise= with shape {tuple(posterior.mean.shape)}."
            )
        noise = of_points[:1].expand_as(posterior.mean)
    if noise.shape != posterior.mean.shape or not bool((noise >= 0).all()):
        raise ValueError(
            f"noise must be one variance per point and output {tuple(posterior.mean.shape)}, none negative: got shape "
            f"{tuple(noise.shape)}."
        )
    return _prediction(gp, posterior, noise)


def leave_one_out_targets(gp: LogitGP) -> TargetPrediction:
    """Predict the observation at each conditioning point from all others, with the hyperparameters as they are.

    Args:
        gp: A process over N points.

    Raises:
        TypeError, ValueError: As `epk_gp.gp.regression.leave_one_out`.
    """
    posterior = leave_one_out(gp).posterior
    return _prediction(gp, posterior, gp.coupling.from_rows(gp.noise_rows().detach()))


def _prediction(gp: LogitGP, posterior: LogitPosterior, noise: Tensor) -> TargetPrediction:
    latent = posterior.covariance.diagonal(dim1=-2, dim2=-1).clone()
    return TargetPrediction(posterior.mean + gp.target_mean, latent + noise.to(latent), latent)


def _parse_level(level: object, name: str = "level") -> float:
    validate_number(level, name)
    if not 0 < float(level) < 1:  # type: ignore[arg-type]
        raise ValueError(f"{name} must lie between 0 and 1: got {level}.")
    return float(level)  # type: ignore[arg-type]
