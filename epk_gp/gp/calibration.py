"""Calibration of predicted class probabilities by one temperature: Guo et al. (2017)."""

from dataclasses import dataclass
from math import exp, log

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_generator, validate_labels
from epk_gp.gp.posterior import LogitPosterior, validate_posterior
from epk_gp.gp.sampling import MonteCarlo, SamplingMethod, validate_method
from epk_gp.gp.softmax import symmetric_root

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
