"""Non-stationarity of a kernel: how far it is from a function of the displacement x − x′ alone."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import validate_tensor

Kernel: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (n, D), (m, D) -> (n, m)
Diagonal: TypeAlias = Callable[[Tensor], Tensor]  # (n, D) -> (n,)


def location_variance_share(kernel: Kernel, X: Float[Tensor, "n D"], displacements: Float[Tensor, "k D"]) -> float:
    """Measure the share of a kernel's variance that the location of a pair explains, at fixed displacement.

        share = E_delta Var_x k(x, x + delta) / Var_{x, delta} k(x, x + delta)

    This non-stationarity index is 0 for a stationary kernel, and 1 for a kernel whose mean over locations is the same
    for every displacement.

    Args:
        kernel: Maps (n, D) and (m, D) points to their (n, m) values.
        X: n >= 2 locations.
        displacements: k >= 2 displacements.

    Raises:
        TypeError: The kernel is not a function, or the points are not tensors of float32 or float64.
        ValueError: The kernel's values have another shape or are not finite, there are fewer than 2 locations or
            displacements, or the kernel has the same value everywhere.
    """
    for name, values in (("X", X), ("displacements", displacements)):
        validate_tensor(values, name, ndim=2, floating=True)
    if not callable(kernel):
        raise TypeError(f"kernel must be a function of two sets of points: got {kernel!r}.")
    n, k = len(X), len(displacements)
    if n < 2 or k < 2:
        raise ValueError(f"shares of a variance need at least 2 locations and 2 displacements: got {n} and {k}.")
    block = kernel(X, (X + displacements[:, None]).flatten(0, 1))  # all at once: locations are evaluated once
    if not isinstance(block, Tensor) or block.shape != (n, k * n):
        raise ValueError(f"kernel must return one value per pair, of shape {(n, k * n)}: it does not.")
    values = block.unflatten(1, (k, n)).diagonal(dim1=0, dim2=2)  # (k, n)
    if not torch.isfinite(values).all():
        raise ValueError("kernel must return finite values: it returned NaN or infinity.")
    total = values.var(correction=0)
    if not total > 0:
        raise ValueError("a share needs a kernel that varies: got one value everywhere.")
    return float(values.var(dim=1, correction=0).mean() / total)


def diagonal_growth_exponent(
    diagonal: Diagonal, centre: Float[Tensor, " D"], directions: Float[Tensor, "k D"], radii: Float[Tensor, " r"]
) -> Float[Tensor, " k"]:
    """Fit the exponent p of k(x, x) ~ radius^p along each of k rays.

    A stationary kernel has p = 0, and a linear kernel without bias has p = 2.

    Args:
        diagonal: Maps (n, D) points to k(x, x), positive.
        centre: Start of the rays.
        directions: Directions of the rays, of any positive length; a radius is a multiple of this length.
        radii: r >= 2 increasing positive radii.

    Raises:
        TypeError: `diagonal` is not a function, or a tensor is not float32 or float64.
        ValueError: The radii are not positive, finite and increasing, or k(x, x) is not positive along the rays.
    """
    for name, tensor, ndim in (("centre", centre, 1), ("directions", directions, 2), ("radii", radii, 1)):
        validate_tensor(tensor, name, ndim=ndim, floating=True)
    if not callable(diagonal):
        raise TypeError(f"diagonal must be a function of points: got {diagonal!r}.")
    if len(radii) < 2 or not radii[0] > 0 or not (radii.diff() > 0).all() or not torch.isfinite(radii).all():
        raise ValueError(f"radii must be positive, finite and increase, at least 2 of them: got {radii.tolist()}.")
    X = centre + radii[None, :, None] * directions[:, None, :]
    values = diagonal(X.reshape(-1, X.shape[-1])).reshape(len(directions), len(radii))
    if not (values > 0).all():
        raise ValueError(f"k(x, x) must be positive along the rays: got {float(values.min()):.3g}.")
    x = radii.log() - radii.log().mean()
    return values.log() @ x / x.square().sum()
