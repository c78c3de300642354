"""Random samples: standard normals by Monte Carlo or quasi-Monte Carlo, and whole functions of a posterior."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.quasirandom import SobolEngine

from epk_gp.core.checks import validate_count, validate_generator, validate_integer
from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import parse_inputs
from epk_gp.gp.models import LogitGP, validate_gp
from epk_gp.gp.posterior import joint_posterior_at
from epk_gp.kernels.tagging import test_copy

# Rows of a joint covariance, which takes 3.2 GB in float64; its eigendecomposition needs several times that.
MAX_ROWS = 20_000

# A negative eigenvalue of a joint covariance is rounding if it is smaller than this multiple of rows * eps * variance.
# Measured on three networks with points that repeat and noise from 1e-6 to 1e-2: at most 0.13, so the margin is wide.
ROUNDING_MULTIPLE = 100

_SOBOL_CELL = 2.0**-30  # width of the grid that torch's Sobol points lie on


class SamplingMethod(ABC):
    """How standard normal vectors are sampled, and what the error of their mean is."""

    @abstractmethod
    def standard_normals(
        self, num_samples: int, dimension: int, generator: torch.Generator | None, reference: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "samples dimension"]:
        """Sample standard normal vectors.

        Args:
            num_samples: Number of vectors.
            dimension: Of a vector.
            generator: Source of the samples; torch's global one by default.
            reference: A tensor of the dtype and on the device of the result.
        """

    @abstractmethod
    def standard_error(self, samples: Float[Tensor, "*n samples C"]) -> Float[Tensor, "*n C"]:
        """Estimate the standard error of the mean of samples, in the order of `standard_normals`."""


@final
@dataclass(frozen=True)
class MonteCarlo(SamplingMethod):
    """Independent samples: the error falls as 1 / sqrt(number)."""

    def standard_normals(
        self, num_samples: int, dimension: int, generator: torch.Generator | None, reference: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "samples dimension"]:
        """Sample independent vectors; the generator is on the device of `reference`."""
        return torch.randn(num_samples, dimension, generator=generator, dtype=reference.dtype, device=reference.device)

    def standard_error(self, samples: Float[Tensor, "*n samples C"]) -> Float[Tensor, "*n C"]:
        """Divide the samples' standard deviation by the square root of their number."""
        return samples.std(dim=-2).div(sqrt(samples.shape[-2]))


@final
@dataclass(frozen=True)
class QuasiMonteCarlo(SamplingMethod):
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


def validate_method(method: object) -> None:
    """Raise if standard normals cannot be sampled by this.

    Raises:
        TypeError: `method` is neither `MonteCarlo()` nor `QuasiMonteCarlo(groups)`.
    """
    if not isinstance(method, SamplingMethod):
        raise TypeError(f"method must be MonteCarlo() or QuasiMonteCarlo(groups): got {method!r}.")


def sample_functions(
    gp: LogitGP,
    X: Inputs,
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n C"]:
    """Sample functions from the posterior, jointly at n test copies.

    Unlike `LogitGP.logit_posterior`, this uses the covariance between points, a dense matrix of n * C rows
    ("independent": C matrices of n rows, "trace": one for all outputs): the values of a sample at neighbouring points
    belong to one function.

    Args:
        gp: The process.
        X: n inputs, with at most 20000 rows in a matrix.
        num_samples: Number of functions.
        generator: Source of the samples, on the GP's device; torch's global one by default.

    Returns:
        Latent outputs, float64; no noise of observations in them.

    Raises:
        TypeError: `gp`, `num_samples` or `generator` is of the wrong kind, or the inputs are of a kind that the network
            cannot take.
        ValueError: The inputs have a shape or values that the network cannot take, or are too many; `num_samples` is
            below 1; or a posterior covariance is not positive semi-definite up to rounding.
    """
    validate_gp(gp)
    X = parse_inputs(gp.kernel.trajectory, X)
    validate_count(num_samples, "num_samples")
    validate_generator(generator)
    rows_per_point = gp.coupling.structure.rows_per_point
    if len(X) * rows_per_point > MAX_ROWS:
        raise ValueError(
            f"a joint sample needs a dense matrix of at most {MAX_ROWS} rows: got {len(X)} points with "
            f"{rows_per_point} outputs each. Take fewer points, or logit_posterior, point by point."
        )
    with torch.no_grad():
        mean, covariance = joint_posterior_at(
            gp.factorization(), gp.prior_mean, test_copy(X.reshape(len(X), -1).to(gp.train_inputs[0]))
        )
        values, vectors = torch.linalg.eigh(covariance)  # semi-definite where points repeat, so no Cholesky
        rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
        scale = covariance.diagonal(dim1=-2, dim2=-1).amax(-1) + gp.covar_module.outputscale.max()
        if (values.amin(-1) < -ROUNDING_MULTIPLE * rounding * scale).any():
            raise ValueError(
                f"the posterior covariance must be positive semi-definite: its smallest eigenvalue is "
                f"{float(values.min()):.3g}. Raise the noise, or condition on fewer points."
            )
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        K, rows = len(root), mean.shape[-1]
        eps = torch.randn(num_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        by_matrix = eps.reshape(num_samples, K, -1, rows).permute(1, 3, 0, 2)  # (K, rows, samples, B / K)
        samples = (root @ by_matrix.flatten(2)).reshape(by_matrix.shape).permute(2, 0, 3, 1)
        return gp.coupling.from_rows(mean + samples.reshape(eps.shape))
