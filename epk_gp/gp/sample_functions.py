"""Samples of whole functions: joint draws of the latent outputs over a small set of points."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.trajectory import validate_inputs
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import joint_posterior_at
from epk_gp.kernels.tagging import test_copy

MAX_ROWS = 20_000


def sample_functions(
    gp: LogitGP,
    X: Shaped[Tensor, "n *shape"],
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n C"]:
    """Draw functions from the posterior, at n test copies together.

    Unlike `logit_posterior`, this takes the covariance between points, a dense matrix of n * C rows ("independent": C
    matrices of n rows); draws at neighbouring points belong to one function.

    Args:
        gp: The process.
        X: n inputs, together at most 20000 rows.
        num_samples: How many functions.
        generator: Source of the draws, on the GP's device; torch's global one by default.

    Returns:
        Latent outputs, float64; no noise of observations in them.

    Raises:
        TypeError, ValueError: Inputs that the network cannot take, or too many of them.
    """
    validate_inputs(gp.kernel.trajectory, X)
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1: got {num_samples}.")
    source = gp.kernel.source
    if len(X) * source.num_rows > MAX_ROWS:
        raise ValueError(
            f"a joint draw needs a dense matrix of at most {MAX_ROWS} rows: got {len(X)} points with "
            f"{source.num_rows} outputs each. Take fewer points, or logit_posterior, point by point."
        )
    with torch.no_grad():
        mean, covariance = joint_posterior_at(gp.factorization(), gp.prior_mean, test_copy(X.to(gp.train_inputs[0])))
        values, vectors = torch.linalg.eigh(covariance)  # (K, rows); semi-definite where points repeat
        rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
        scale = covariance.diagonal(dim1=-2, dim2=-1).amax(-1) + gp.covar_module.outputscale.max()
        if (values.amin(-1) < -100 * rounding * scale).any():
            raise ValueError(
                f"the posterior covariance must be positive semi-definite: its smallest eigenvalue is "
                f"{float(values.min()):.3g}. Raise the noise, or condition on fewer points."
            )
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        K, rows = mean.shape
        eps = torch.randn(num_samples, K, rows, 1, generator=generator, dtype=mean.dtype, device=mean.device)
        draws: Tensor = mean + (root @ eps)[..., 0]
        if source.reduction == "full":
            return draws.reshape(num_samples, len(X), -1)
        return draws.mT
