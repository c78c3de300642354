"""Monte Carlo through the softmax: the distribution of class probabilities, and a temperature for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from epk_gp.core.checks import (
    validate_count,
    validate_generator,
    validate_labels,
    validate_number,
    validate_positive,
)
from epk_gp.core.show import SHOWN_POINTS, Displayed, Entry, Summary, Table, columns_note, count, kind_of, number
from epk_gp.gp.posterior import LogitPosterior, validate_posterior
from epk_gp.gp.sampling import MonteCarlo, SamplingMethod, validate_method

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
        temperature: T, see `calibrated_temperature`.

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


_LOG_RANGE = 10.0  # temperatures from exp(-10) = 4.5e-5 to exp(10) = 2.2e4
_LOG_TOLERANCE = 1e-6  # of the logarithm of the temperature: a relative error of 1e-6
_FLAT = 1e-9  # nats per point by which the best temperature must beat those at the ends of the range


@dataclass(frozen=True)
class Temperature:
    """The temperature at which held-out labels are most likely.

    Attributes:
        value: T: logits are divided by it.
        before: Mean negative log probability of the labels at T = 1, in nats.
        after: The same at T.
    """

    value: float
    before: float
    after: float


def calibrated_temperature(
    posterior: LogitPosterior,
    labels: Int[Tensor, " n"],
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    *,
    method: SamplingMethod = MonteCarlo(),
) -> Temperature:
    """Choose the temperature by the labels of points that the GP is not conditioned on.

        T = argmin  -mean_i log E[softmax((mean_i + covariance_i^(1/2) eps) / T)]_{label_i}

    Take held-out points, or `leave_one_out(gp).posterior` with the labels of the conditioning points. All temperatures
    use the same samples.

    Args:
        posterior: At n points.
        labels: Their classes.
        num_samples: Samples per point.
        generator: Source of the samples.
        method: `MonteCarlo()`, or `QuasiMonteCarlo(groups)` for Sobol points.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: There are no points, more or fewer labels than points, labels are out of range, or the likelihood is
            largest at an end of the range of temperatures (every label is the most likely class, or no better than
            chance).
    """
    validate_posterior(posterior)
    n, C = posterior.mean.shape
    if not n:
        raise ValueError("the posterior must be at at least one point: got none.")
    validate_labels(labels, n, C)
    labels = labels.long()
    validate_count(num_samples, "num_samples")
    validate_generator(generator)
    validate_method(method)
    root, _ = symmetric_root(posterior)
    eps = method.standard_normals(num_samples, C, generator, posterior.mean)
    logits = posterior.mean[:, None] + eps @ root  # (n, S, C)

    def loss(log_temperature: float) -> float:
        return _negative_log_probability(logits / exp(log_temperature), labels)

    bounds = (-_LOG_RANGE, _LOG_RANGE)
    minimum = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": _LOG_TOLERANCE})
    losses_at_ends = {end: loss(end) for end in bounds}
    best_end = min(losses_at_ends, key=losses_at_ends.__getitem__)
    if losses_at_ends[best_end] <= minimum.fun + _FLAT:
        raise ValueError(
            "a temperature must exist at which the labels are most likely: the likelihood grows to the end of the "
            f"range, T = {exp(best_end):.3g}. Use more points, some of which are misclassified."
        )
    return Temperature(exp(minimum.x), loss(0.0), float(minimum.fun))


def _negative_log_probability(logits: Float[Tensor, "n samples C"], labels: Tensor) -> float:
    log_p = torch.log_softmax(logits, dim=-1)
    index = labels.to(logits.device)[:, None, None].expand(-1, logits.shape[1], 1)
    log_p_label = log_p.gather(-1, index)[..., 0]
    return log(logits.shape[1]) - float(torch.logsumexp(log_p_label, dim=1).mean())
