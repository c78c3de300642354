"""Monte Carlo through the softmax: what a Gaussian over logits says about class probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.validation import validate_count, validate_generator, validate_positive
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.sampling import Method, MonteCarlo, standard_error, standard_normals

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class SoftmaxUncertainty:
    """Monte Carlo estimates of the softmax's distribution at n points. Entropies are in nats.

    Attributes:
        mean: Expected probability, (n, C).
        std: Standard deviation of the probability, (n, C).
        entropy: Of the expected probability: the total uncertainty, (n,).
        expected_entropy: Expected entropy of the probability: what more data would not remove, (n,).
        mutual_information: Their difference: between the label and the latent function, (n,).
        standard_error: Monte Carlo standard error of `mean`, (n, C).
        clipped_eigenvalue: Largest size of a negative eigenvalue of a covariance that was set to zero; 0 if none was.
        quantiles: Of the probability, one (n, C) per level asked for.
    """

    mean: Float[Tensor, "n C"]
    std: Float[Tensor, "n C"]
    entropy: Float[Tensor, " n"]
    expected_entropy: Float[Tensor, " n"]
    mutual_information: Float[Tensor, " n"]
    standard_error: Float[Tensor, "n C"]
    clipped_eigenvalue: float
    quantiles: Float[Tensor, "levels n C"]

    def __len__(self) -> int:
        return self.mean.shape[0]


def softmax_uncertainty(
    posterior: LogitPosterior,
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    *,
    method: Method = MonteCarlo(),
    quantiles: Sequence[float] = (),
    temperature: float = 1.0,
) -> SoftmaxUncertainty:
    """Push a Gaussian over logits through the softmax.

    Section 4.2, Bell et al. (2023): p = softmax((mean + covariance^(1/2) eps) / T) with eps ~ N(0, I_C). The same eps
    serve all points: the result at a point does not depend on the other points, maps are smooth, and the Monte Carlo
    errors of different points are correlated.

    Args:
        posterior: Mean (n, C) and covariance (n, C, C), positive semi-definite to rounding.
        num_samples: Draws per point.
        generator: Source of the draws, on the posterior's device; torch's global one by default.
        method: `MonteCarlo()`, or `QuasiMonteCarlo(groups)` for Sobol points.
        quantiles: Levels in [0, 1] at which the probability's quantiles are given.
        temperature: T, see `epk_gp.calibrated_temperature`.

    Returns:
        Moments and entropies with the standard error of the mean.

    Raises:
        TypeError: No posterior, no generator, or no whole number of draws.
        ValueError: Fewer than 2 draws, a level or temperature that means nothing, values that are not finite, or a
            covariance that is not symmetric or has a negative eigenvalue beyond rounding.
    """
    if not isinstance(posterior, LogitPosterior):
        raise TypeError(
            f"posterior must be an epk_gp.LogitPosterior: got {type(posterior).__name__}. "
            "LogitGP.logit_posterior gives one."
        )
    validate_generator(generator)
    validate_count(num_samples, "num_samples, for a standard deviation,", minimum=2)
    validate_positive(temperature, "temperature")
    if not all(0 <= level <= 1 for level in quantiles):
        raise ValueError(f"quantiles must be levels in [0, 1]: got {list(quantiles)}.")
    mean = posterior.mean
    root, clipped = symmetric_root(posterior)
    eps = standard_normals(method, num_samples, mean.shape[1], generator, mean)
    levels = torch.tensor(list(quantiles), dtype=mean.dtype, device=mean.device)
    size = max(1, CHUNK_BYTES // (4 * eps.nbytes))
    pairs = zip((mean / temperature).split(size), (root / temperature).split(size), strict=True)
    chunks = [_moments(mu, A, eps, method, levels) for mu, A in pairs]
    p, std, error, entropy, expected_entropy = (
        torch.cat(parts) for parts in zip(*(c[:5] for c in chunks), strict=True)
    )
    return SoftmaxUncertainty(
        mean=p,
        std=std,
        entropy=entropy,
        expected_entropy=expected_entropy,
        mutual_information=entropy - expected_entropy,
        standard_error=error,
        clipped_eigenvalue=clipped,
        quantiles=torch.cat([c[5] for c in chunks], dim=1),
    )


def _moments(mean: Tensor, root: Tensor, eps: Tensor, method: Method, levels: Tensor) -> tuple[Tensor, ...]:
    """Average over the draws, as differences from the softmax of the mean: without variance they are exactly zero."""
    centre = torch.softmax(mean, dim=-1)  # (n, C)
    p = torch.softmax(mean[:, None] + eps @ root, dim=-1)  # (n, S, C); the root is symmetric
    shift = p - centre[:, None]  # (n, S, C)
    average = shift.mean(dim=1)
    std = ((shift - average[:, None]).square().sum(dim=1) / (len(eps) - 1)).sqrt()
    p_mean = centre + average
    entropy_of_centre = torch.special.entr(centre).sum(-1)
    entropy_shift = (torch.special.entr(p).sum(-1) - entropy_of_centre[:, None]).mean(dim=1)
    return (
        p_mean,
        std,
        standard_error(method, shift),
        torch.special.entr(p_mean).sum(-1),
        entropy_of_centre + entropy_shift,
        torch.quantile(p, levels, dim=1) if len(levels) else p.new_zeros(0, *p_mean.shape),
    )


def symmetric_root(posterior: LogitPosterior) -> tuple[Float[Tensor, "n C C"], float]:
    """Take the symmetric square root of every covariance, which also exists when one is only semi-definite.

    Args:
        posterior: Mean (n, C) and covariance (n, C, C).

    Returns:
        The roots, and the largest size of a negative eigenvalue that was set to zero.

    Raises:
        ValueError: Values that are not finite, or a covariance that is not symmetric or has a negative eigenvalue
            beyond rounding.
    """
    covariance, dtype = posterior.covariance, posterior.covariance.dtype
    if not (torch.isfinite(posterior.mean).all() and torch.isfinite(covariance).all()):
        raise ValueError("the posterior must be finite: its mean or covariance holds NaN or infinity.")
    size = covariance.abs().amax(dim=(-2, -1))  # (n,)
    tolerance = (8 * covariance.shape[-1] * torch.finfo(dtype).eps * size).clamp_min(posterior.rounding)
    skew = (covariance - covariance.mT).abs().amax(dim=(-2, -1))
    if (skew > tolerance).any():
        row = int((skew - tolerance).argmax())
        raise ValueError(f"covariances must be symmetric: the one of point {row} is off by {skew[row].item():.3g}.")
    values, vectors = torch.linalg.eigh(covariance)
    lowest = values[:, 0]
    if (lowest < -tolerance).any():
        row = int((lowest + tolerance).argmin())
        raise ValueError(
            f"covariances must be positive semi-definite: the one of point {row} has the eigenvalue "
            f"{lowest[row].item():.3g}, and rounding explains no more than {tolerance[row].item():.3g}."
        )
    root = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
    return root, float((-lowest).clamp_min(0).max()) if len(lowest) else 0.0
