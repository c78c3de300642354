"""The Gaussian posterior of the latent outputs at some points."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.checks import validate_number, validate_tensor
from epk_gp.core.losses import ClassLoss
from epk_gp.core.show import SHOWN_POINTS, Entry, Summary, Table, Tabular, columns_note, count, kind_of, number
from epk_gp.core.trajectory import Trajectory

_SHOWN_OUTPUTS = 10  # rows of a table

_LOGISTIC = nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss


def link_of(run: Trajectory) -> str | None:
    """Return the function from a run's outputs to probabilities, "softmax" or "sigmoid", if its loss determines it."""
    function = getattr(run.loss, "function", None)
    is_logistic = isinstance(function, _LOGISTIC) or function is nn.functional.binary_cross_entropy_with_logits
    return "softmax" if isinstance(run.loss, ClassLoss) else "sigmoid" if is_logistic else None


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


def validate_posterior(posterior: object) -> None:
    """Raise if an object is not a posterior of C outputs at n points.

    Raises:
        TypeError: The object is not a `LogitPosterior`, or its tensors are not float32 or float64.
        ValueError: Mean and covariance have other shapes, or there are no outputs.
    """
    if not isinstance(posterior, LogitPosterior):
        raise TypeError(f"posterior must be a LogitPosterior, as of a LogitGP: got {type(posterior).__name__}.")
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
