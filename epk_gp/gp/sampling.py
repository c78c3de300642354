"""Standard normal draws: plain Monte Carlo, or Sobol points, in independent groups that tell their own error."""

from dataclasses import dataclass
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor
from torch.quasirandom import SobolEngine

_SOBOL_CELL = 2.0**-30  # torch's Sobol points lie on this grid


@dataclass(frozen=True)
class MonteCarlo:
    """Independent draws; the error falls as 1 / sqrt(number)."""


@dataclass(frozen=True)
class QuasiMonteCarlo:
    """Sobol points, scrambled anew in every group: unbiased, and the groups' spread is the error.

    Owen (1997): for smooth integrands the error falls almost as 1 / number^(3/2) within a group.

    Attributes:
        groups: Independent scramblings, at least 2. Each has num_samples / groups points, best a power of 2.
    """

    groups: int = 16

    def __post_init__(self) -> None:
        """Refuse a number of groups that gives no error estimate.

        Raises:
            ValueError: Fewer than 2 groups.
        """
        if self.groups < 2:
            raise ValueError(f"a standard error needs at least 2 scramblings: got groups={self.groups}.")


Method = MonteCarlo | QuasiMonteCarlo


def standard_normals(
    method: Method, num_samples: int, dimension: int, generator: torch.Generator | None, like: Tensor
) -> Float[Tensor, "samples dimension"]:
    """Draw standard normal vectors, group after group.

    Args:
        method: How.
        num_samples: How many; for Sobol points a multiple of the groups.
        dimension: Of a vector.
        generator: Source of the draws or scramblings, on the device of `like` (Sobol: on the CPU); torch's global one
            by default.
        like: Gives dtype and device.

    Raises:
        TypeError: `method` is of another kind.
        ValueError: A number of samples that the groups do not divide.
    """
    if isinstance(method, MonteCarlo):
        return torch.randn(num_samples, dimension, generator=generator, dtype=like.dtype, device=like.device)
    if not isinstance(method, QuasiMonteCarlo):
        raise TypeError(f"method must be MonteCarlo() or QuasiMonteCarlo(groups): got {method!r}.")
    if num_samples % method.groups:
        raise ValueError(
            f"the number of samples must be a multiple of the scramblings: got num_samples={num_samples} for "
            f"groups={method.groups}."
        )
    seeds = torch.randint(2**31, (method.groups,), generator=generator).tolist()
    size = num_samples // method.groups
    points = torch.cat(
        [SobolEngine(dimension, scramble=True, seed=seed).draw(size, dtype=torch.float64) for seed in seeds]
    )
    centred = points + _SOBOL_CELL / 2  # the middle of the cell: 0 would be minus infinity
    normals: Tensor = torch.special.ndtri(centred).to(like)
    return normals


def standard_error(method: Method, samples: Float[Tensor, "*n samples C"]) -> Float[Tensor, "*n C"]:
    """Estimate the standard error of the samples' mean.

    Args:
        method: How they were drawn.
        samples: In the order of `standard_normals`.
    """
    count = samples.shape[-2]
    if isinstance(method, MonteCarlo):
        return samples.std(dim=-2).div(sqrt(count))
    means: Tensor = samples.unflatten(-2, (method.groups, -1)).mean(-2)
    return means.std(dim=-2).div(sqrt(method.groups))
