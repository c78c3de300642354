"""How far a kernel is from being a function of the displacement x − x′ alone."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Kernel: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (n, D), (m, D) -> (n, m)
Diagonal: TypeAlias = Callable[[Tensor], Tensor]  # (n, D) -> (n,)


def location_share(kernel: Kernel, X: Float[Tensor, "n D"], displacements: Float[Tensor, "k D"]) -> float:
    """Measure the share of a kernel's variance that comes from where a pair lies, not from how it is displaced.

        share = E_delta Var_x k(x, x + delta) / Var_{x, delta} k(x, x + delta)

    It is 0 for a stationary kernel, and 1 for one whose mean over locations is the same for every displacement.

    Args:
        kernel: Maps (n, D) and (m, D) points to their (n, m) values.
        X: n >= 2 locations.
        displacements: k >= 2 displacements.

    Raises:
        ValueError: Too few locations or displacements, or a kernel that has one value everywhere.
    """
    n, k = len(X), len(displacements)
    if n < 2 or k < 2:
        raise ValueError(f"shares of a variance need at least 2 locations and 2 displacements: got {n} and {k}.")
    rows = torch.arange(n, device=X.device)
    values = torch.stack([kernel(X, X + delta)[rows, rows] for delta in displacements])  # (k, n)
    total = values.var(correction=0)
    if not total > 0:
        raise ValueError("a share needs a kernel that varies: got one value everywhere.")
    return float(values.var(dim=1, correction=0).mean() / total)


def ray_growth(
    diagonal: Diagonal, centre: Float[Tensor, " D"], directions: Float[Tensor, "k D"], radii: Float[Tensor, " r"]
) -> Float[Tensor, " k"]:
    """Fit the power p of k(x, x) ~ radius^p along each of k rays.

    Stationary kernels have p = 0, a linear kernel without bias 2.

    Args:
        diagonal: Maps (n, D) points to k(x, x), positive.
        centre: Where the rays start.
        directions: Of any positive length; radii are in units of it.
        radii: r >= 2 increasing positive radii.

    Raises:
        ValueError: Radii that do not increase from above 0, or a kernel that is not positive.
    """
    if len(radii) < 2 or not radii[0] > 0 or not (radii.diff() > 0).all():
        raise ValueError(f"radii must be positive and increase, at least 2 of them: got {radii.tolist()}.")
    X = centre + radii[None, :, None] * directions[:, None, :]
    values = diagonal(X.reshape(-1, X.shape[-1])).reshape(len(directions), len(radii))
    if not (values > 0).all():
        raise ValueError(f"k(x, x) must be positive along the rays: got {float(values.min()):.3g}.")
    x = radii.log() - radii.log().mean()
    return values.log() @ x / x.square().sum()
