"""The latent posterior at test points: factorise once, then blocks of test points; never a matrix over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_number, validate_tensor
from epk_gp.core.plans import posterior_points
from epk_gp.core.show import (
    SHOWN_POINTS,
    Displayed,
    Entry,
    Summary,
    Table,
    columns_note,
    count,
    kind_of,
    number,
    progress_bar,
)
from epk_gp.gp.output_coupling import OutputCoupling
from epk_gp.kernels.blocks import BlockCache, KernelConfig
from epk_gp.kernels.values import normalized_block, point_blocks

_SHOWN_OUTPUTS = 10  # rows of a table


@dataclass(frozen=True, eq=False, repr=False)
class LogitPosterior(Displayed):
    """Gaussian posterior of the C latent outputs at n points; the noise of observations is not in it.

    Attributes:
        mean: (n, C).
        covariance: Of the C outputs at one point, (n, C, C). Nothing is kept between points.
        eigenvalue_tolerance: Eigenvalues of a covariance between minus this number and 0 are rounding errors of a
            semi-definite matrix. The covariance is a difference of larger numbers, so the tolerance is relative to the
            prior variance; 0 if it is not known.
    """

    mean: Float[Tensor, "n C"]
    covariance: Float[Tensor, "n C C"]
    eigenvalue_tolerance: float = 0.0

    def __len__(self) -> int:
        return self.mean.shape[0]

    def _summary(self) -> Summary:
        n, C = self.mean.shape
        columns = [
            [f"{number(mean)} ± {number(std)}" for mean, std in zip(*point, strict=True)]
            for point in zip(self.mean[:SHOWN_POINTS, :_SHOWN_OUTPUTS].tolist(), self._shown_std(), strict=True)
        ]
        rows = tuple((f"output {c}", *row) for c, row in enumerate(zip(*columns, strict=True)))
        outputs = "" if C <= _SHOWN_OUTPUTS else f"the first {_SHOWN_OUTPUTS} of {count(C, 'output')}"
        note = columns_note(len(columns), n, outputs=outputs)
        shapes = (
            Entry("shape of mean", str(tuple(self.mean.shape)), kind_of(self.mean)),
            Entry("shape of covariance", str(tuple(self.covariance.shape)), "of a point's outputs, without noise"),
        )
        title = f"Posterior of {count(C, 'logit')} at {count(n, 'point')}, mean ± standard deviation"
        table = Table(("", *(f"point {i}" for i in range(len(columns)))), rows, note) if rows else None
        return Summary(title, shapes, table)

    def _shown_std(self) -> list[list[float]]:
        """Return the standard deviations that are shown; NaN where a variance is negative by more than rounding."""
        variance = self.covariance[:SHOWN_POINTS].diagonal(dim1=1, dim2=2)[:, :_SHOWN_OUTPUTS].detach()
        is_rounding = (variance < 0) & (variance >= -self.eigenvalue_tolerance)
        stds: list[list[float]] = variance.masked_fill(is_rounding, 0).sqrt().tolist()
        return stds


def validate_posterior(posterior: object) -> None:
    """Raise if an object is not a posterior of C outputs at n points.

    Raises:
        TypeError: The object is not a `LogitPosterior`, or its tensors are not float32 or float64.
        ValueError: Mean and covariance have other shapes, or there are no outputs.
    """
    if not isinstance(posterior, LogitPosterior):
        raise TypeError(
            f"posterior must be a LogitPosterior: got {type(posterior).__name__}. LogitGP.logit_posterior gives one."
        )
    mean, covariance = posterior.mean, posterior.covariance
    validate_tensor(mean, "the posterior's mean", ndim=2, floating=True)
    validate_tensor(covariance, "the posterior's covariance", ndim=3, floating=True)
    n, C = mean.shape
    if covariance.shape != (n, C, C) or not C:
        raise ValueError(
            "a posterior must have a mean (n, C) and covariances (n, C, C) with C >= 1: got shapes "
            f"{tuple(mean.shape)} and {tuple(covariance.shape)}."
        )
    validate_number(posterior.eigenvalue_tolerance, "the posterior's eigenvalue_tolerance")
    if not 0 <= posterior.eigenvalue_tolerance < float("inf"):
        raise ValueError(
            "the posterior's eigenvalue_tolerance must be finite and not negative: got "
            f"{posterior.eigenvalue_tolerance}."
        )
    if covariance.dtype != mean.dtype:
        raise TypeError(f"a posterior must have one dtype: got {mean.dtype} and {covariance.dtype}.")


@dataclass(frozen=True, eq=False)
class Factorization:
    """The factorised covariance of the observations, and the weights that follow from it.

    GPyTorch calls this a prediction strategy. There are K matrices, one per output or one for all of them, with R rows
    per point; see `OutputCoupling` for the B vectors of rows.

    Attributes:
        config: The kernel, with a cache that keeps nothing: blocks with test points are not asked for again.
        coupling: How the process over C outputs is put together.
        scale: What kernel values are multiplied by, one per matrix.
        points: The N training points.
        factor: Lower Cholesky factor of scale * K(points, points) + noise.
        weights: (scale * K(points, points) + noise)^-1 (targets - mean).
        inverse_norms: Of the N points, where the kernel is one of cosines.
    """

    config: KernelConfig
    coupling: OutputCoupling
    scale: Float[Tensor, " K"]
    points: Shaped[Tensor, "N columns"]
    factor: Float[Tensor, "K rows rows"]
    weights: Float[Tensor, "B rows"]
    inverse_norms: Float[Tensor, "K rows"] | None = None


def factorize(
    config: KernelConfig,
    coupling: OutputCoupling,
    scale: Float[Tensor, " K"],
    points: Shaped[Tensor, "N columns"],
    covariance: Float[Tensor, "K rows rows"],
    residual: Float[Tensor, "B rows"],
) -> Factorization:
    """Factorise the covariance of the observations.

    Args:
        config: The kernel.
        coupling: How the process over C outputs is put together.
        scale: What kernel values are multiplied by, one per matrix.
        points: The N training points.
        covariance: Of the observations, noise included.
        residual: Observations minus prior mean.

    Raises:
        ValueError: The covariance is not positive definite; no jitter is added.
    """
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info.any():
        raise ValueError(
            f"the observations' covariance must be positive definite in {covariance.dtype}: Cholesky stopped at row "
            f"{int(info.max())} of {covariance.shape[-1]}. Raise the noise, or condition on fewer points."
        )
    weights = torch.cholesky_solve(_by_matrix(residual, len(factor)), factor).mT.reshape(residual.shape)
    norms = point_blocks(config, points)[1] if config.is_cosine else None
    return Factorization(replace(config, cache=BlockCache(0)), coupling, scale, points, factor, weights, norms)


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
        prior_mean: Returns (n, C) at n points.
        x: Points, usually test copies.
        block_size: Points at a time; from the kernel's memory budget by default.
        progress: Show a progress bar.

    Returns:
        Mean and C x C covariance per point.

    Raises:
        TypeError: `block_size` is not a whole number.
        ValueError: `block_size` is below 1.
    """
    if block_size is not None:
        validate_count(block_size, "block_size")
    coupling, factor = factorization.coupling, factorization.factor
    options, structure = factorization.config.options, coupling.structure
    rows_per_point = structure.num_matrices * structure.rows_per_point
    size = posterior_points(options.memory_budget, factor.element_size(), rows_per_point, factor.shape[-1])
    size = size if block_size is None else int(block_size)
    means, covariances = [], []
    largest_variance = 0.0
    with torch.no_grad(), progress_bar(len(x), "posterior", unit="point", shown=progress) as bar:
        for number, rows in enumerate(x.split(size)):
            blocks, norms = point_blocks(factorization.config, rows, first=number * size)
            prior = coupling.covariances(factorization.scale[:, None, None] * blocks)
            largest_variance = max(largest_variance, float(prior.diagonal(dim1=-2, dim2=-1).max()))
            mean_update, covariance_update = _updates(factorization, rows, norms)
            means.append(prior_mean(rows) + mean_update)
            covariances.append(prior - covariance_update)
            bar.update(len(rows))
    tolerance = factor.shape[-1] * torch.finfo(factor.dtype).eps * largest_variance
    return LogitPosterior(torch.cat(means), torch.cat(covariances), tolerance)


def _updates(factorization: Factorization, x: Tensor, norms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute what the observations add to the mean, (n, C), and take from the covariance, (n, C, C).

    The large arrays live in this function only: those of one block of test points are freed before the next.
    """
    own, coupling, weights = factorization, factorization.coupling, factorization.weights
    cross = normalized_block(own.config, x, own.points, (norms, own.inverse_norms)).mul_(own.scale[:, None, None])
    updates = (cross @ _by_matrix(weights, len(cross))).mT.reshape(len(weights), -1)  # (B, n R)
    V = torch.linalg.solve_triangular(own.factor, cross.mT, upper=False)  # (K, N R, n R)
    return coupling.from_rows(updates), coupling.point_blocks_of_gram(V, len(x))


def _by_matrix(rows: Tensor, num_matrices: int) -> Tensor:
    """Arrange B vectors of rows as the columns of right-hand sides, (K, rows, B / K)."""
    return rows.reshape(num_matrices, -1, rows.shape[-1]).mT
