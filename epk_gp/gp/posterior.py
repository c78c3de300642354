"""The Gaussian posterior of latent outputs, and the distribution of class probabilities by Monte Carlo."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from epk_gp.core.checks import validate_count, validate_generator, validate_number, validate_tensor
from epk_gp.core.losses import ClassLoss
from epk_gp.core.show import SHOWN_POINTS, Entry, Summary, Table, Tabular, columns_note, count, kind_of, number
from epk_gp.core.trajectory import Trajectory

_SHOWN_OUTPUTS = 10  # rows of a table

# Bytes of a chunk of points. Measured for 1024 samples at 4000 points, 3 outputs, float64: 0.50 s in chunks of 64 MB,
# 0.48 in chunks of 4 MB, 0.61 of 0.25 MB, 0.57 of 1 GB.
CHUNK_BYTES = 64 * 2**20
ARRAYS_PER_POINT = 4  # as large as the samples: logits, probabilities, their shifts, and terms of the entropy

_LOGISTIC = nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss


def link_of(run: Trajectory) -> str | None:
    """Return the function from a run's outputs to probabilities, "softmax" or "sigmoid", if its loss determines it."""
    function = getattr(run.loss, "function", None)
    is_logistic = isinstance(function, _LOGISTIC) or function is nn.functional.binary_cross_entropy_with_logits
    return "softmax" if isinstance(run.loss, ClassLoss) else "sigmoid" if is_logistic else None


@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxUncertainty(Tabular):
    """Monte Carlo estimates of the softmax's distribution at n points. Entropies are in nats.

    Attributes:
        mean: Expected probability, (n, C).
        std: Standard deviation of the probability, (n, C).
        entropy: Entropy of the expected probability: the total uncertainty, (n,).
        expected_entropy: Expected entropy of the probability: the aleatoric part, which more data do not remove, (n,).
        mutual_information: Their difference, between the label and the latent function: the epistemic part, (n,).
        standard_error: Monte Carlo standard error of `mean`, (n, C).
        max_clipped_eigenvalue: Largest absolute value of a negative eigenvalue of a covariance that was set to zero; 0
            if there was none.
        quantiles: Quantiles of the probability, (n, C) for every level.
        levels: Levels of the quantiles, in [0, 1].
    """

    mean: Float[Tensor, "n C"]
    std: Float[Tensor, "n C"]
    entropy: Float[Tensor, " n"]
    expected_entropy: Float[Tensor, " n"]
    mutual_information: Float[Tensor, " n"]
    standard_error: Float[Tensor, "n C"]
    max_clipped_eigenvalue: float
    quantiles: Float[Tensor, "levels n C"]
    levels: tuple[float, ...] = ()

    def __len__(self) -> int:
        return self.mean.shape[0]

    def _frame(self) -> tuple[Any, ...]:
        names = ("mean", "std", "standard_error", "entropy", "expected_entropy", "mutual_information")
        terms = {name: getattr(self, name).reshape(len(self), -1) for name in names}
        terms |= {f"quantile {level:g}": values for level, values in zip(self.levels, self.quantiles, strict=True)}
        return {"point": range(len(self))}, terms, [("output", range(self.mean.shape[1]))]

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


@dataclass(frozen=True, eq=False, repr=False)
class LogitPosterior(Tabular):
    """Gaussian posterior of the C latent outputs at n points, without the noise of observations.

    Attributes:
        mean: (n, C).
        covariance: Covariance of the C outputs at one point, (n, C, C). Nothing is kept between points.
        eigenvalue_tolerance: Eigenvalues of a covariance between minus this number and 0 are rounding errors of a
            semi-definite matrix. The covariance is a difference of larger numbers, so the tolerance is relative to the
            prior variance; 0 if that is unknown.
        link: The function to probabilities, "softmax" or "sigmoid", if the run's loss determines it; otherwise None.
        prior_variance: Variance of each output before any observation, (n, C); None if it is unknown.
    """

    mean: Float[Tensor, "n C"]
    covariance: Float[Tensor, "n C C"]
    eigenvalue_tolerance: float = 0.0
    link: str | None = None
    prior_variance: Float[Tensor, "n C"] | None = None
    _columns = ("mean", "std")

    def __len__(self) -> int:
        return self.mean.shape[0]

    @property
    def std(self) -> Float[Tensor, "n C"]:
        """Standard deviation of each output; NaN if a variance is negative beyond rounding."""
        variance = self.covariance.diagonal(dim1=1, dim2=2)
        is_rounding = (variance < 0) & (variance >= -self.eigenvalue_tolerance)
        return variance.masked_fill(is_rounding, 0).sqrt()

    def softmax_uncertainty(
        self,
        num_samples: int = 1024,
        generator: torch.Generator | None = None,
        *,
        quantiles: Sequence[float] = (),
        link: str | None = None,
    ) -> SoftmaxUncertainty:
        """Push the Gaussian over logits through the softmax, or through the sigmoid for one logit.

        Section 4.2, Bell et al. (2023): p = softmax(mean + covariance^(1/2) eps) with eps ~ N(0, I_C). All points use
        the same eps: the result at a point does not depend on the other points, maps are smooth, and the Monte Carlo
        errors of different points are correlated. The outputs must be logits. A network that was trained on another
        loss than cross entropy, such as `MeanSquaredError`, has none: the softmax of its outputs is not a
        class probability. A single logit z, as for `BCEWithLogitsLoss`, belongs to class 1, and class 0 has the logit
        0: the result has these two classes.

        Args:
            num_samples: Samples per point.
            generator: Source of the samples, on the posterior's device; torch's global generator by default.
            quantiles: Levels in [0, 1] at which quantiles of the probability are returned.
            link: "softmax" for C >= 2 logits, or "sigmoid" for one. None takes the posterior's own link, which the
                run's loss determines, or the softmax for C >= 2 outputs without one.

        Returns:
            Moments and entropies with the standard error of the mean.

        Raises:
            TypeError: `generator`, `num_samples`, `quantiles` or a tensor of the posterior has a wrong type.
            ValueError: There are fewer than 2 samples, a level lies outside [0, 1], values are not finite, a covariance
                is not symmetric or has a negative eigenvalue beyond rounding, or the function from outputs to
                probabilities is unknown.
        """
        _validate_posterior(self)
        C, link = self.mean.shape[1], link or self.link or "softmax"
        if link != ("sigmoid" if C == 1 else "softmax"):
            raise ValueError(
                "link must be 'softmax' for two logits or more, or 'sigmoid' for one, the logit of class 1: got "
                f"{link!r} for {C}. Take one of several labels at a time; values and probabilities are no logits."
            )
        _validate_sampling(num_samples, generator)
        levels = _parse_levels(quantiles)
        mean, (root, max_clipped) = self.mean, symmetric_root(self)
        if C == 1:  # next to the logit 0 of class 0
            mean, root = pad(mean, (1, 0)), pad(root, (1, 0, 1, 0))
        eps = torch.randn(num_samples, root.shape[1], generator=generator, dtype=root.dtype, device=root.device)
        return _uncertainty(mean, root, eps, levels, max_clipped).labelled(**self._labels)

    def _summary(self) -> Summary:
        (n, C), shown = self.mean.shape, min(len(self), SHOWN_POINTS)
        moments = torch.stack([self.mean, self.std], dim=-1)[:shown, :_SHOWN_OUTPUTS].detach()
        rows = tuple(
            (f"output {c}", *(f"{number(mean)} ± {number(std)}" for mean, std in row))
            for c, row in enumerate(moments.transpose(0, 1).tolist())
        )
        outputs = "" if C <= _SHOWN_OUTPUTS else f"the first {_SHOWN_OUTPUTS} of {count(C, 'output')}"
        note = columns_note(shown, n, outputs=outputs)
        shapes = (
            Entry("shape of mean", str(tuple(self.mean.shape)), kind_of(self.mean)),
            Entry("shape of covariance", str(tuple(self.covariance.shape)), "of a point's outputs, without noise"),
        )
        title = f"Posterior of {count(C, 'logit')} at {count(n, 'point')}, mean ± standard deviation"
        table = Table(("", *(f"point {i}" for i in range(shown))), rows, note) if n else None
        return Summary(title, shapes, table)


def _validate_posterior(posterior: LogitPosterior) -> None:
    """Raise if a posterior does not have C outputs at n points.

    Raises:
        TypeError: Its tensors are not float32 or float64, or not of one dtype.
        ValueError: Mean and covariance have other shapes, or there are no outputs.
    """
    mean, covariance = posterior.mean, posterior.covariance
    validate_tensor(mean, "the posterior's mean", ndim=2, floating=True)
    validate_tensor(covariance, "the posterior's covariance", ndim=3, floating=True)
    n, C = mean.shape
    if covariance.shape != (n, C, C) or not C:
        raise ValueError(f"a posterior is (n, C) and (n, C, C): got {tuple(mean.shape)} and {tuple(covariance.shape)}.")
    validate_number(posterior.eigenvalue_tolerance, "the posterior's eigenvalue_tolerance")
    if not 0 <= posterior.eigenvalue_tolerance < float("inf"):
        raise ValueError(f"eigenvalue_tolerance must be finite and not negative: got {posterior.eigenvalue_tolerance}.")
    if covariance.dtype != mean.dtype:
        raise TypeError(f"a posterior must have one dtype: got {mean.dtype} and {covariance.dtype}.")


def isotropic_softmax_uncertainty(
    mean: Float[Tensor, "n C"],
    variance: Float[Tensor, " n"],
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
) -> SoftmaxUncertainty:
    """Push independent logits of equal variance through the softmax, without C x C covariances.

    Args:
        mean: Means of the logits.
        variance: Variance of each logit of a point.
        num_samples: Samples per point.
        generator: Source of the samples; torch's global one by default.

    Raises:
        TypeError, ValueError: As in `LogitPosterior.softmax_uncertainty`, or a variance is negative.
    """
    _validate_sampling(num_samples, generator)
    if not (torch.isfinite(mean).all() and torch.isfinite(variance).all() and (variance >= 0).all()):
        raise ValueError("means must be finite, and variances finite and not negative: some are not.")
    eps = torch.randn(num_samples, mean.shape[1], generator=generator, dtype=mean.dtype, device=mean.device)
    return _uncertainty(mean, variance.sqrt()[:, None, None], eps, mean.new_zeros(0), 0.0)


def _uncertainty(mean: Tensor, root: Tensor, eps: Tensor, levels: Tensor, max_clipped: float) -> SoftmaxUncertainty:
    """Estimate in chunks of points; roots are symmetric matrices (n, C, C) or standard deviations (n, 1, 1)."""
    size = max(1, CHUNK_BYTES // (ARRAYS_PER_POINT * eps.nbytes))
    chunks = [_moments(mu, A, eps, levels.to(mean)) for mu, A in zip(mean.split(size), root.split(size), strict=True)]
    p, std, entropy, aleatoric, error, quantiles = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    epistemic = entropy - aleatoric
    scores = (p, std, entropy, aleatoric, epistemic, error)
    return SoftmaxUncertainty(*scores, max_clipped, quantiles.movedim(1, 0), tuple(levels.tolist()))


def _validate_sampling(num_samples: int, generator: torch.Generator | None) -> None:
    validate_generator(generator)
    validate_count(num_samples, "num_samples, for a standard deviation,", minimum=2)


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


def _moments(mean: Tensor, root: Tensor, eps: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    """Average differences from the softmax of the mean over the samples; without variance they are exactly zero."""
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
        torch.special.entr(p_mean).sum(-1),
        entropy_of_centre + entropy_shift,
        shift.std(dim=1) / sqrt(len(eps)),
        torch.quantile(p, levels, dim=1).movedim(0, 1) if len(levels) else p.new_zeros(len(p), 0, p.shape[2]),
    )


def symmetric_root(posterior: LogitPosterior) -> tuple[Float[Tensor, "n C C"], float]:
    """Compute the symmetric square root of every covariance, which also exists for semi-definite ones.

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
    rounding = 8 * covariance.shape[-1] * torch.finfo(dtype).eps * size  # rounding of eigenvalues, with a margin of 8
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
