"""Monte Carlo through the softmax: the distribution of class probabilities under a Gaussian over logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.quasirandom import SobolEngine

from epk_gp.core.checks import (
    validate_count,
    validate_generator,
    validate_integer,
    validate_number,
    validate_positive,
)
from epk_gp.core.show import SHOWN_POINTS, Displayed, Entry, Summary, Table, columns_note, count, kind_of, number
from epk_gp.gp.posterior import LogitPosterior, validate_posterior

_SOBOL_CELL = 2.0**-30  # width of the grid that torch's Sobol points lie on


@final
@dataclass(frozen=True)
class MonteCarlo:
    """Independent samples: the error falls as 1 / sqrt(number)."""

    def standard_normals(
        self, num_samples: int, dimension: int, generator: torch.Generator | None, reference: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "samples dimension"]:
        """Sample independent vectors.

        Args:
            num_samples: Number of vectors.
            dimension: Of a vector.
            generator: Source of the samples, on the device of `reference`; torch's global one by default.
            reference: A tensor of the dtype and on the device of the result.
        """
        return torch.randn(num_samples, dimension, generator=generator, dtype=reference.dtype, device=reference.device)

    def standard_error(self, samples: Float[Tensor, "*n samples C"]) -> Float[Tensor, "*n C"]:
        """Estimate the error of the mean: the samples' standard deviation by the square root of their number."""
        return samples.std(dim=-2).div(sqrt(samples.shape[-2]))


@final
@dataclass(frozen=True)
class QuasiMonteCarlo:
    """Sobol points, scrambled independently in every group: unbiased, and the spread of the groups estimates the error.

    Owen (1997): for smooth integrands the error falls almost as 1 / number^(3/2) within a group.

    Attributes:
        groups: Independent scramblings, at least 2. Each has num_samples / groups points, best a power of 2.
    """

    groups: int = 16

    def __post_init__(self) -> None:
        """Raise if the groups give no error estimate.

        Raises:
            TypeError: The number of groups is not a whole number.
            ValueError: There are fewer than 2 groups.
        """
        validate_integer(self.groups, "groups")
        if self.groups < 2:
            raise ValueError(f"a standard error needs at least 2 scramblings: got groups={self.groups}.")

    def standard_normals(
        self, num_samples: int, dimension: int, generator: torch.Generator | None, reference: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "samples dimension"]:
        """Map scrambled Sobol points, group after group, to normal quantiles; the generator is on the CPU.

        Raises:
            ValueError: The groups do not divide the number of samples.
        """
        if num_samples % self.groups:
            raise ValueError(
                f"the number of samples must be a multiple of the scramblings: got num_samples={num_samples} for "
                f"groups={self.groups}."
            )
        seeds = torch.randint(2**31, (self.groups,), generator=generator).tolist()
        size = num_samples // self.groups
        points = torch.cat(
            [SobolEngine(dimension, scramble=True, seed=seed).draw(size, dtype=torch.float64) for seed in seeds]
        )
        centred = points + _SOBOL_CELL / 2  # the middle of a grid cell: the normal quantile of 0 is minus infinity
        normals: Tensor = torch.special.ndtri(centred).to(reference)
        return normals

    def standard_error(self, samples: Float[Tensor, "*n samples C"]) -> Float[Tensor, "*n C"]:
        """Divide the standard deviation of the groups' means by the square root of the number of groups."""
        means: Tensor = samples.unflatten(-2, (self.groups, -1)).mean(-2)
        return means.std(dim=-2).div(sqrt(self.groups))


SamplingMethod = MonteCarlo | QuasiMonteCarlo  # how standard normals are sampled, and what the error of their mean is


def validate_method(method: object) -> None:
    """Raise if standard normals cannot be sampled by this.

    Raises:
        TypeError: `method` is neither `MonteCarlo()` nor `QuasiMonteCarlo(groups)`.
    """
    if not isinstance(method, SamplingMethod):
        raise TypeError(f"method must be MonteCarlo() or QuasiMonteCarlo(groups): got {method!r}.")


# Bytes of a chunk of points. Measured for 1024 samples at 4000 points, 3 outputs, float64: 0.50 s in chunks of 64 MB,
# 0.48 in chunks of 4 MB, 0.61 of 0.25 MB, 0.57 of 1 GB.
CHUNK_BYTES = 64 * 2**20
ARRAYS_PER_POINT = 4  # of the size of the samples: logits, probabilities, their shifts, and terms of the entropy


@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxUncertainty(Displayed):
    """Monte Carlo estimates of the softmax's distribution at n points. Entropies are in nats.

    Attributes:
        mean: Expected probability, (n, C).
        std: Standard deviation of the probability, (n, C).
        entropy: Of the expected probability: the total uncertainty, (n,).
        expected_entropy: Expected entropy of the probability: the aleatoric part, which more data do not remove, (n,).
        mutual_information: Their difference, between the label and the latent function: the epistemic part, (n,).
        standard_error: Monte Carlo standard error of `mean`, (n, C).
        max_clipped_eigenvalue: Largest absolute value of a negative eigenvalue of a covariance that was set to zero; 0
            if there was none.
        quantiles: Of the probability, (n, C) for every level.
    """

    mean: Float[Tensor, "n C"]
    std: Float[Tensor, "n C"]
    entropy: Float[Tensor, " n"]
    expected_entropy: Float[Tensor, " n"]
    mutual_information: Float[Tensor, " n"]
    standard_error: Float[Tensor, "n C"]
    max_clipped_eigenvalue: float
    quantiles: Float[Tensor, "levels n C"]

    def __len__(self) -> int:
        return self.mean.shape[0]

    def _summary(self) -> Summary:
        shown, (p, chosen) = min(len(self), SHOWN_POINTS), self.mean.max(dim=1)
        scores = {
            "most likely class": chosen,
            "its probability": p,
            "its standard deviation": self.std.gather(1, chosen[:, None])[:, 0],
            "entropy": self.entropy,
            "mutual information": self.mutual_information,
        }
        rows = tuple((name, *map(number, values[:shown].double().tolist())) for name, values in scores.items())
        table = Table(("", *(f"point {i}" for i in range(shown))), rows, columns_note(shown, len(self)))
        shape = Entry("shape of mean and std", str(tuple(self.mean.shape)), kind_of(self.mean))
        return Summary(f"Class probabilities of {count(len(self), 'point')} under a process", (shape,), table)


def softmax_uncertainty(
    posterior: LogitPosterior,
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    *,
    method: SamplingMethod = MonteCarlo(),
    quantiles: Sequence[float] = (),
    temperature: float = 1.0,
) -> SoftmaxUncertainty:
    """Push a Gaussian over logits through the softmax.

    Section 4.2, Bell et al. (2023): p = softmax((mean + covariance^(1/2) eps) / T) with eps ~ N(0, I_C). All points use
    the same eps: the result at a point does not depend on the other points, maps are smooth, and the Monte Carlo errors
    of different points are correlated. The outputs must be logits: those of a network that was trained on another
    loss than cross entropy, as of `MeanSquaredError`, are not, and their softmax is no class probability.

    Args:
        posterior: Mean (n, C) and covariance (n, C, C), positive semi-definite to rounding.
        num_samples: Samples per point.
        generator: Source of the samples, on the posterior's device; torch's global one by default.
        method: `MonteCarlo()`, or `QuasiMonteCarlo(groups)` for Sobol points.
        quantiles: Levels in [0, 1] at which quantiles of the probability are returned.
        temperature: T, which divides the logits.

    Returns:
        Moments and entropies with the standard error of the mean.

    Raises:
        TypeError: `posterior`, `generator`, `num_samples`, `method` or `quantiles` is of the wrong kind.
        ValueError: There are fewer than 2 samples, a level lies outside [0, 1], the temperature is not positive and
            finite, values are not finite, or a covariance is not symmetric or has a negative eigenvalue beyond
            rounding.
    """
    validate_posterior(posterior)
    _validate_sampling(num_samples, generator, method)
    validate_positive(temperature, "temperature")
    levels = _parse_levels(quantiles)
    root, max_clipped = symmetric_root(posterior)
    eps = method.standard_normals(num_samples, posterior.mean.shape[1], generator, posterior.mean)
    mean, root = posterior.mean / temperature, root / temperature
    if max(float(part.abs().max()) for part in (mean, root) if part.numel()) > torch.finfo(mean.dtype).max ** 0.5:
        raise ValueError(f"temperature must be so large that logits divided by it stay finite: got {temperature}.")
    return _uncertainty(mean, root, eps, method, levels, max_clipped)


def isotropic_softmax_uncertainty(
    mean: Float[Tensor, "n C"],
    variance: Float[Tensor, " n"],
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    *,
    method: SamplingMethod = MonteCarlo(),
) -> SoftmaxUncertainty:
    """Push independent logits of one variance through the softmax: `softmax_uncertainty` without C x C covariances.

    Args:
        mean: Of the logits.
        variance: Of each logit of a point.
        num_samples: Samples per point.
        generator: As in `softmax_uncertainty`.
        method: As there.

    Raises:
        TypeError, ValueError: As there, or a variance is negative.
    """
    _validate_sampling(num_samples, generator, method)
    if not (torch.isfinite(mean).all() and torch.isfinite(variance).all() and (variance >= 0).all()):
        raise ValueError("means must be finite, and variances finite and not negative: some are not.")
    eps = method.standard_normals(num_samples, mean.shape[1], generator, mean)
    return _uncertainty(mean, variance.sqrt()[:, None, None], eps, method, mean.new_zeros(0), 0.0)


def _uncertainty(
    mean: Tensor, root: Tensor, eps: Tensor, method: SamplingMethod, levels: Tensor, max_clipped: float
) -> SoftmaxUncertainty:
    """Estimate in chunks of points; roots are symmetric matrices (n, C, C) or standard deviations (n, 1, 1)."""
    size = max(1, CHUNK_BYTES // (ARRAYS_PER_POINT * eps.nbytes))
    chunks = [
        _moments(mu, A, eps, method, levels.to(mean)) for mu, A in zip(mean.split(size), root.split(size), strict=True)
    ]
    p, std, error, entropy, expected_entropy, quantiles = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return SoftmaxUncertainty(
        mean=p,
        std=std,
        entropy=entropy,
        expected_entropy=expected_entropy,
        mutual_information=entropy - expected_entropy,
        standard_error=error,
        max_clipped_eigenvalue=max_clipped,
        quantiles=quantiles.movedim(1, 0),
    )


def _validate_sampling(num_samples: int, generator: torch.Generator | None, method: SamplingMethod) -> None:
    validate_generator(generator)
    validate_count(num_samples, "num_samples, for a standard deviation,", minimum=2)
    validate_method(method)


def _parse_levels(quantiles: object) -> Tensor:
    """Return the levels of quantiles, float64."""
    if isinstance(quantiles, str) or not isinstance(quantiles, Sequence | Tensor | np.ndarray):
        raise TypeError(f"quantiles must be a list of levels in [0, 1]: got {quantiles!r}.")
    levels = list(quantiles) if isinstance(quantiles, Sequence) else quantiles.tolist()
    for level in levels:
        validate_number(level, "a quantile's level")
    if not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"quantiles must be levels in [0, 1]: got {levels}.")
    return torch.tensor(levels, dtype=torch.float64)


def _moments(mean: Tensor, root: Tensor, eps: Tensor, method: SamplingMethod, levels: Tensor) -> tuple[Tensor, ...]:
    """Average differences from the softmax of the mean over the samples: they are exactly zero without variance."""
    centre = torch.softmax(mean, dim=-1)  # (n, C)
    deviations = eps @ root if root.shape[-1] == eps.shape[-1] else eps * root  # (n, S, C); the root is symmetric
    p = torch.softmax(mean[:, None] + deviations, dim=-1)
    shift = p - centre[:, None]  # (n, S, C)
    average = shift.mean(dim=1)
    std = ((shift - average[:, None]).square().sum(dim=1) / (len(eps) - 1)).sqrt()
    p_mean = centre + average
    entropy_of_centre = torch.special.entr(centre).sum(-1)
    entropy_shift = (torch.special.entr(p).sum(-1) - entropy_of_centre[:, None]).mean(dim=1)
    return (
        p_mean,
        std,
        method.standard_error(shift),
        torch.special.entr(p_mean).sum(-1),
        entropy_of_centre + entropy_shift,
        torch.quantile(p, levels, dim=1).movedim(0, 1) if len(levels) else p.new_zeros(len(p), 0, p.shape[2]),
    )


def symmetric_root(posterior: LogitPosterior) -> tuple[Float[Tensor, "n C C"], float]:
    """Compute the symmetric square root of every covariance, which also exists where one is only semi-definite.

    Args:
        posterior: Mean (n, C) and covariance (n, C, C).

    Returns:
        The roots, and the largest absolute value of a negative eigenvalue that was set to zero.

    Raises:
        ValueError: Values are not finite, or a covariance is not symmetric or has a negative eigenvalue beyond
            rounding.
    """
    covariance, dtype = posterior.covariance, posterior.covariance.dtype
    if not (torch.isfinite(posterior.mean).all() and torch.isfinite(covariance).all()):
        raise ValueError("the posterior must be finite: its mean or covariance holds NaN or infinity.")
    size = covariance.abs().amax(dim=(-2, -1))  # (n,)
    rounding = 8 * covariance.shape[-1] * torch.finfo(dtype).eps * size  # of eigenvalues, with a margin of 8
    tolerance = rounding.clamp_min(posterior.eigenvalue_tolerance)
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
