"""The latent posterior at test points: factorise once, then blocks of test points; never a matrix over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.kernels.blocks import block, diagonal_matrices
from epk_gp.kernels.cache import BlockCache
from epk_gp.kernels.config import KernelConfig


@dataclass(frozen=True, eq=False)
class LogitPosterior:
    """Gaussian posterior of the C latent outputs at n points; the noise of observations is not in it.

    Attributes:
        mean: (n, C).
        covariance: Of the C outputs at one point, (n, C, C). Nothing is kept between points.
        rounding: Size below which an eigenvalue of a covariance is rounding: the covariance is a difference of larger
            numbers, so this is relative to the prior variance. 0 if unknown.
    """

    mean: Float[Tensor, "n C"]
    covariance: Float[Tensor, "n C C"]
    rounding: float = 0.0

    def __len__(self) -> int:
        return self.mean.shape[0]


@dataclass(frozen=True, eq=False)
class Factorization:
    """A prior and its observations, factorised. K matrices (1 coupled GP, or one per class) with R rows per point.

    Attributes:
        source: Where kernel values come from.
        scale: What kernel values are multiplied by, one per matrix.
        points: The N training points.
        factor: Lower Cholesky factor of scale * K(points, points) + noise.
        weights: (scale * K(points, points) + noise)^-1 (targets - mean).
    """

    source: KernelConfig
    scale: Float[Tensor, " K"]
    points: Shaped[Tensor, "N columns"]
    factor: Float[Tensor, "K rows rows"]
    weights: Float[Tensor, "K rows"]


def factorize(
    source: KernelConfig,
    scale: Float[Tensor, " K"],
    points: Shaped[Tensor, "N columns"],
    covariance: Float[Tensor, "K rows rows"],
    residual: Float[Tensor, "K rows"],
) -> Factorization:
    """Factorise the covariance of the observations.

    Args:
        source: Where kernel values come from.
        scale: What they are multiplied by, one per matrix.
        points: The N training points.
        covariance: Of the observations, noise included.
        residual: Observations minus prior mean.

    Raises:
        ValueError: The covariance is not positive definite. No jitter is added.
    """
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info.any():
        raise ValueError(
            f"the observations' covariance must be positive definite in {covariance.dtype}: Cholesky stopped at row "
            f"{int(info.max())} of {covariance.shape[-1]}. Raise the noise, or condition on fewer points."
        )
    weights = torch.cholesky_solve(residual[..., None], factor)[..., 0]
    return Factorization(replace(source, cache=BlockCache(0)), scale, points, factor, weights)


def posterior_at(
    factorization: Factorization,
    prior_mean: Callable[[Tensor], Tensor],
    x: Shaped[Tensor, "n columns"],
    *,
    block_size: int | None = None,
    progress: bool = False,
) -> LogitPosterior:
    """Evaluate the posterior block by block.

    Section 4.2, Bell et al. (2023), with equations (2.25) and (2.26) of Rasmussen & Williams (2006):

        mean(x) = m(x) + k(x)^T (K + noise)^-1 (y - m),   cov(x) = K(x, x) - k(x)^T (K + noise)^-1 k(x)

    Args:
        factorization: The factorised prior.
        prior_mean: Gives (n, C) at n points.
        x: Points, usually test copies.
        block_size: Points at a time; from the source's memory budget by default.
        progress: Show a progress bar.

    Returns:
        Mean and C x C covariance per point.

    Raises:
        ValueError: `block_size` is not positive.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be at least 1: got {block_size}.")
    size = block_size or _block_size(factorization)
    means, covariances = [], []
    largest = 0.0
    with torch.no_grad(), tqdm(total=len(x), desc="posterior", unit="point", disable=not progress) as bar:
        for rows in x.split(size):
            prior = _prior_covariance(factorization, rows)
            largest = max(largest, float(prior.diagonal(dim1=-2, dim2=-1).max()))
            shift, reduction = _update(factorization, rows)
            means.append(prior_mean(rows) + shift)
            covariances.append(prior - reduction)
            bar.update(len(rows))
    rounding = factorization.factor.shape[-1] * torch.finfo(factorization.factor.dtype).eps * largest
    return LogitPosterior(torch.cat(means), torch.cat(covariances), rounding)


def joint_posterior_at(
    factorization: Factorization, prior_mean: Callable[[Tensor], Tensor], x: Shaped[Tensor, "n columns"]
) -> tuple[Float[Tensor, "K rows"], Float[Tensor, "K rows rows"]]:
    """Evaluate the posterior of all outputs at all points together: dense, for small n.

    Args:
        factorization: The factorised prior.
        prior_mean: Gives (n, C) at n points.
        x: Points, usually test copies.

    Returns:
        Mean and covariance, per matrix of the prior: one with n * C rows, or C with n rows.
    """
    source, scale = factorization.source, factorization.scale[:, None, None]
    with torch.no_grad():
        cross = scale * block(source, x, factorization.points)
        V = torch.linalg.solve_triangular(factorization.factor, cross.mT, upper=False)
        prior = prior_mean(x)
        prior = prior.reshape(1, -1) if source.reduction == "full" else prior.mT
        mean = prior + (cross @ factorization.weights[..., None])[..., 0]
        return mean, scale * block(source, x, x) - V.mT @ V


def _block_size(factorization: Factorization) -> int:
    """Points for which the cross block, its solve and one copy of it fit into the budget."""
    source, factor = factorization.source, factorization.factor
    per_point = 3 * factor.element_size() * source.num_matrices * source.num_rows * factor.shape[-1]
    return max(1, source.memory_budget // per_point)


def _prior_covariance(factorization: Factorization, x: Tensor) -> Tensor:
    blocks = diagonal_matrices(factorization.source, x)
    if factorization.source.reduction == "full":
        return factorization.scale * blocks
    return torch.diag_embed(factorization.scale * blocks.diagonal(dim1=-2, dim2=-1))


def _update(factorization: Factorization, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the observations add to the mean, (n, C), and take from the covariance, (n, C, C)."""
    cross = factorization.scale[:, None, None] * block(factorization.source, x, factorization.points)  # (K, n R, N R)
    shift = (cross @ factorization.weights[..., None])[..., 0]
    V = torch.linalg.solve_triangular(factorization.factor, cross.mT, upper=False)  # (K, N R, n R)
    if factorization.source.reduction == "full":
        V = V.reshape(V.shape[1], len(x), -1).permute(1, 2, 0).contiguous()  # (n, C, N C)
        return shift.reshape(len(x), -1), V @ V.mT
    return shift.mT, torch.diag_embed(V.square().sum(1).mT)
