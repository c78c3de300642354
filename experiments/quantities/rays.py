"""Rays from the mean of projected points, and along how many of them a process is surer of its class farther out."""

from math import pi

import torch
from jaxtyping import Float
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.maps import UncertaintyMap, lift


def rays(uv: Float[Tensor, "n 2"], directions: int, far: float) -> tuple[Float[Tensor, "k 2"], Float[Tensor, "k 2"]]:
    """Return two points on each of k rays from the mean of projected points, in evenly spaced directions.

    Args:
        uv: Projected points.
        directions: Number k of directions.
        far: Distance of the second point, as a multiple of the radius of the data.

    Returns:
        The points at the radius of the data, which is the largest distance of a projected point from the mean, and
        those at `far` times this radius.
    """
    mean = uv.mean(0)
    radius = (uv - mean).norm(dim=1).max()
    angle = torch.arange(directions, dtype=uv.dtype) * (2 * pi / directions)
    unit = torch.stack([angle.cos(), angle.sin()], dim=1)
    return mean + radius * unit, mean + far * radius * unit


def share_decreasing(gp: epk.LogitGP, m: UncertaintyMap, num_samples: int, generator: torch.Generator) -> float:
    """Return the share of 72 rays along which the predicted class's probability varies less at 3 radii than at one."""
    ends = rays(m.training, 72, 3.0)
    X = lift(m.plane, torch.cat(ends))
    chosen = epk.network_outputs(gp.trajectory, X).argmax(1, keepdim=True)
    std = gp.logit_posterior(X).softmax_uncertainty(num_samples, generator).std.gather(1, chosen)[:, 0]
    near, far = std.tensor_split(2)
    return float((far < near).double().mean())
