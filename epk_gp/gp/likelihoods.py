"""Gaussian likelihoods: known noise per point and output, and the bound of noise that is learned."""

from typing import Any, final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import _GaussianLikelihoodBase
from jaxtyping import Float
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor, distributions

# Lowest variance that is learned, where the kernel's mean diagonal is 1. It lies well above the rounding of a Gram
# matrix, so that no jitter is needed: for 3000 rows, 3000 eps = 7e-13 of the largest eigenvalue, which is at most the
# trace 3000, are 2e-9.
NOISE_FLOOR = 1e-6


@final
class MultitaskFixedNoiseGaussianLikelihood(_GaussianLikelihoodBase):  # type: ignore[misc]  # gpytorch ships no types
    """Gaussian noise of known variance for every point and output.

    GPyTorch's `FixedNoiseGaussianLikelihood` adds no noise to a `MultitaskMultivariateNormal` and only warns. This one
    adds it, or raises an error.

    Args:
        noise: Variances of the n training points and C outputs, (n, C), positive.

    Raises:
        ValueError: A variance is not positive and finite.
    """

    def __init__(self, noise: Float[Tensor, "n C"]) -> None:
        super(_GaussianLikelihoodBase, self).__init__()  # the base class itself needs a noise module
        _validate_variances(noise)
        self.register_buffer("noise", noise, persistent=False)

    def marginal(
        self,
        function_dist: MultitaskMultivariateNormal,
        *params: Any,
        noise: Float[Tensor, "*b n C"] | None = None,
        **kwargs: Any,
    ) -> MultitaskMultivariateNormal:
        """Add the noise to the covariance.

        Args:
            function_dist: Latent values of n points and C outputs.
            params: Ignored: GPyTorch passes the inputs here.
            noise: Variances to use instead of those of the training points.
            kwargs: Ignored.

        Raises:
            ValueError: The points are not as many as the training points, and no `noise` is given for them.
        """
        variances = self._variances(function_dist.event_shape, noise)
        if not function_dist._interleaved:
            variances = variances.mT
        mean, covariance = function_dist.mean, function_dist.lazy_covariance_matrix.evaluate_kernel()
        noisy = covariance + DiagLinearOperator(variances.flatten(-2))
        return MultitaskMultivariateNormal(mean, noisy, interleaved=function_dist._interleaved)

    def forward(
        self,
        function_samples: Float[Tensor, "*b n C"],
        *params: Any,
        noise: Float[Tensor, "*b n C"] | None = None,
        **kwargs: Any,
    ) -> distributions.Distribution:
        """Return the distribution of observations around samples of latent values."""
        variances = self._variances(function_samples.shape[-2:], noise)
        return distributions.Independent(distributions.Normal(function_samples, variances.sqrt()), 1)

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, **kwargs: Any) -> LinearOperator:
        """Return the noise as a diagonal of n * C, for the base class's expected log probability."""
        return DiagLinearOperator(self._variances(base_shape[-2:], kwargs.get("noise")).flatten(-2))

    def _variances(self, event_shape: torch.Size, noise: Tensor | None) -> Tensor:
        if noise is not None:
            _validate_variances(noise)
        variances: Tensor = self.noise if noise is None else noise
        if variances.shape[-2:] != event_shape:
            raise ValueError(
                f"the noise must have one variance per point and class {tuple(event_shape)}: got shape "
                f"{tuple(variances.shape)}. Pass noise= for points that are not the training points, or use the latent "
                "distribution."
            )
        return variances


def noise_constraint() -> GreaterThan:
    """Return the constraint of a noise variance that is learned."""
    return GreaterThan(NOISE_FLOOR)


def _validate_variances(noise: Tensor) -> None:
    invalid = noise[~((noise > 0) & torch.isfinite(noise))]
    if len(invalid):
        raise ValueError(f"noise variances must be positive and finite: got {invalid[0].item()}.")
