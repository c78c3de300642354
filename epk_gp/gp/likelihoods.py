"""Gaussian noise per point and class: known, or one variance to learn."""

from typing import Any, final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    _GaussianLikelihoodBase,
)
from jaxtyping import Float
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor, distributions

NOISE_FLOOR = 1e-6  # lowest variance that can be learned; the kernel's mean diagonal is 1


@final
class MultitaskFixedNoiseGaussianLikelihood(_GaussianLikelihoodBase):  # type: ignore[misc]  # gpytorch ships no types
    """Gaussian noise of known variance for every point and class.

    GPyTorch's `FixedNoiseGaussianLikelihood` adds no noise to a `MultitaskMultivariateNormal` (a warning only); this
    one adds it, or refuses.

    Args:
        noise: Variances of the n training points and C classes, (n, C), positive.

    Raises:
        ValueError: A variance that is not positive and finite.
    """

    def __init__(self, noise: Float[Tensor, "n C"]) -> None:
        super(_GaussianLikelihoodBase, self).__init__()  # the base class would want a noise module
        _check_variances(noise)
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
            function_dist: Latent values of n points and C classes.
            params: Ignored: GPyTorch passes the inputs here.
            noise: Variances to use instead of those of the training points.
            kwargs: Ignored.

        Raises:
            ValueError: Other points than the training points, and no `noise` for them.
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
        """Give the distribution of observations around samples of latent values."""
        variances = self._variances(function_samples.shape[-2:], noise)
        return distributions.Independent(distributions.Normal(function_samples, variances.sqrt()), 1)

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, **kwargs: Any) -> LinearOperator:
        """Serve the base class's expected log probability: (n, C) to a diagonal of n * C."""
        return DiagLinearOperator(self._variances(base_shape[-2:], kwargs.get("noise")).flatten(-2))

    def _variances(self, event_shape: torch.Size, noise: Tensor | None) -> Tensor:
        if noise is not None:
            _check_variances(noise)
        variances: Tensor = self.noise if noise is None else noise
        if variances.shape[-2:] != event_shape:
            raise ValueError(
                f"the noise must have one variance per point and class {tuple(event_shape)}: got shape "
                f"{tuple(variances.shape)}. Pass noise= for points that are not the training points, or use the latent "
                "distribution."
            )
        return variances


def make_likelihood(
    batch_shape: torch.Size, num_outputs: int, noise: Float[Tensor, "n C"] | None
) -> _GaussianLikelihoodBase:
    """Build a Gaussian likelihood, with noise that is known or learned.

    Args:
        batch_shape: [] for one multi-output GP, [C] for one GP per class.
        num_outputs: C.
        noise: Known variances; None to learn one variance per GP, above 1e-6.
    """
    full = len(batch_shape) == 0
    if noise is not None:
        if full:
            return MultitaskFixedNoiseGaussianLikelihood(noise)
        return FixedNoiseGaussianLikelihood(noise.mT.contiguous(), batch_shape=batch_shape)
    floor = GreaterThan(NOISE_FLOOR)
    if full:
        return MultitaskGaussianLikelihood(num_tasks=num_outputs, has_task_noise=False, noise_constraint=floor)
    return GaussianLikelihood(batch_shape=batch_shape, noise_constraint=floor)


def _check_variances(noise: Tensor) -> None:
    wrong = noise[~((noise > 0) & torch.isfinite(noise))]
    if len(wrong):
        raise ValueError(f"noise variances must be positive and finite: got {wrong[0].item()}.")
