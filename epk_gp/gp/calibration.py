"""One number that makes predicted class probabilities as sure as they should be: Guo et al. (2017)."""

from dataclasses import dataclass
from math import exp, log

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.sampling import Method, MonteCarlo, standard_normals
from epk_gp.gp.softmax import symmetric_root

_LOG_RANGE = 10.0  # temperatures from exp(-10) to exp(10)


@dataclass(frozen=True)
class Temperature:
    """The temperature at which held-out labels are likeliest.

    Attributes:
        value: T: logits are divided by it.
        before: Mean negative log probability of the labels at T = 1.
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
    method: Method = MonteCarlo(),
) -> Temperature:
    """Choose the temperature by the labels of points that the GP has not seen.

        T = argmin  -mean_i log E[softmax((mean_i + covariance_i^(1/2) eps) / T)]_{label_i}

    Take held-out points, or `leave_one_out(gp).posterior` with the labels of the conditioning points. The same draws
    serve all temperatures.

    Args:
        posterior: At n points.
        labels: Their classes.
        num_samples: Draws per point.
        generator: Source of the draws.
        method: How to draw.

    Raises:
        ValueError: Another number of labels than points, labels out of range, or a best temperature that runs off to
            the end of the range (every label is the likeliest class, or no better than chance).
    """
    n, C = posterior.mean.shape
    if labels.shape != (n,):
        raise ValueError(f"labels must have one entry per point: got shape {tuple(labels.shape)} for {n} points.")
    if n and not 0 <= int(labels.min()) <= int(labels.max()) < C:
        raise ValueError(f"labels must lie in 0..{C - 1}: got {int(labels.min())}..{int(labels.max())}.")
    root, _ = symmetric_root(posterior)
    eps = standard_normals(method, num_samples, C, generator, posterior.mean)
    logits = posterior.mean[:, None] + eps @ root  # (n, S, C)

    def loss(log_temperature: float) -> float:
        return _negative_log_probability(logits / exp(log_temperature), labels)

    found = minimize_scalar(loss, bounds=(-_LOG_RANGE, _LOG_RANGE), method="bounded", options={"xatol": 1e-6})
    ends = {end: loss(end) for end in (-_LOG_RANGE, _LOG_RANGE)}
    best_end = min(ends, key=ends.__getitem__)
    if ends[best_end] <= found.fun + 1e-9:
        raise ValueError(
            "a temperature must exist at which the labels are likeliest: the likelihood grows to the end of the range, "
            f"T = {exp(best_end):.3g}. Use more points, some of which are misclassified."
        )
    return Temperature(exp(found.x), loss(0.0), float(found.fun))


def _negative_log_probability(logits: Float[Tensor, "n samples C"], labels: Tensor) -> float:
    log_p = torch.log_softmax(logits, dim=-1)
    index = labels.to(logits.device)[:, None, None].expand(-1, logits.shape[1], 1)
    own = log_p.gather(-1, index)[..., 0]
    return log(logits.shape[1]) - float(torch.logsumexp(own, dim=1).mean())
