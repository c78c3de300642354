"""Planes through the data: where a map over two coordinates lies among inputs of many."""

from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plane:
    """Inputs origin + u axes[0] + v axes[1].

    Attributes:
        origin: A flattened input, (D,).
        axes: Two orthonormal directions, (2, D).
        input_shape: Shape of one input, of D entries.
    """

    origin: Float[Tensor, " D"]
    axes: Float[Tensor, "2 D"]
    input_shape: tuple[int, ...]


def coordinate_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Span the first two input coordinates; all others are 0.

    Raises:
        TypeError, ValueError: Inputs without a plane; see `principal_plane`.
    """
    rows = _rows(X)
    return Plane(torch.zeros_like(rows[0]), torch.eye(2, rows.shape[1], dtype=rows.dtype), tuple(X.shape[1:]))


def principal_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Span the two principal directions of the points, through their mean.

    Args:
        X: n >= 3 inputs of at least 2 entries each.

    Returns:
        The plane; each axis points to where its largest entry is positive.

    Raises:
        TypeError: Inputs that are not floating-point numbers.
        ValueError: Too few points or entries.
    """
    rows = _rows(X)
    if len(rows) < 3:
        raise ValueError(f"a principal plane needs at least 3 points: got {len(rows)}.")
    mean = rows.mean(0)
    axes = torch.linalg.svd(rows - mean, full_matrices=False).Vh[:2]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return Plane(mean, axes * largest.sign(), tuple(X.shape[1:]))


def project(plane: Plane, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n 2"]:
    """Give the coordinates (u, v) of the points' projections."""
    return (X.reshape(len(X), -1) - plane.origin.to(X)) @ plane.axes.T.to(X)


def lift(plane: Plane, uv: Float[Tensor, "n 2"]) -> Float[Tensor, "n ..."]:
    """Give the inputs at coordinates (u, v)."""
    return (plane.origin.to(uv) + uv @ plane.axes.to(uv)).reshape(len(uv), *plane.input_shape)


def square_grid(
    uv: Float[Tensor, "n 2"], size: int, margin: float
) -> tuple[Float[Tensor, " size"], Float[Tensor, " size"]]:
    """Lay an even grid over projected points.

    Args:
        uv: Projected points.
        size: Nodes per side, at least 2.
        margin: Room on every side, in units of the points' larger extent.

    Returns:
        Coordinates of the columns and of the rows, both of the same length and spacing.

    Raises:
        ValueError: Fewer than 2 nodes per side, a negative margin, or points that all coincide.
    """
    if size < 2:
        raise ValueError(f"a grid must have at least 2 nodes per side: got {size}.")
    if margin < 0:
        raise ValueError(f"the margin must not be negative: got {margin}.")
    low, high = uv.min(0).values.double(), uv.max(0).values.double()
    half = float((high - low).max()) * (0.5 + margin)
    if half == 0:
        raise ValueError("a grid needs points at different places: all coincide in this plane.")
    centre = ((low + high) / 2).tolist()
    x, y = (torch.linspace(c - half, c + half, size, dtype=torch.float64) for c in centre)
    return x, y


def grid_coordinates(x: Float[Tensor, " nx"], y: Float[Tensor, " ny"]) -> Float[Tensor, "nodes 2"]:
    """List the nodes (u, v) row by row: v is constant along a row."""
    v, u = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([u.reshape(-1), v.reshape(-1)], dim=1)


def rays(uv: Float[Tensor, "n 2"], directions: int, far: float) -> tuple[Float[Tensor, "k 2"], Float[Tensor, "k 2"]]:
    """Go from the mean of projected points in evenly spaced directions.

    Args:
        uv: Projected points.
        directions: Number k of directions.
        far: Where a ray ends, as a multiple of the largest distance of a point from the mean.

    Returns:
        Where the rays leave the data, at that distance, and where they end.
    """
    mean = uv.mean(0)
    radius = (uv - mean).norm(dim=1).max()
    angle = torch.arange(directions, dtype=uv.dtype) * (2 * pi / directions)
    unit = torch.stack([angle.cos(), angle.sin()], dim=1)
    return mean + radius * unit, mean + far * radius * unit


def nearest_distances(a: Float[Tensor, "n D"], b: Float[Tensor, "m D"]) -> Float[Tensor, " n"]:
    """Measure how far each point of a is from the nearest point of b."""
    return torch.cdist(a.double(), b.double()).amin(1)


def _rows(X: Tensor) -> Tensor:
    if not X.is_floating_point():
        raise TypeError(f"a plane needs floating-point inputs: got {X.dtype}.")
    rows = X.reshape(len(X), -1).cpu()
    if rows.shape[1] < 2:
        raise ValueError(f"a plane needs inputs of at least 2 entries: got {rows.shape[1]}.")
    return rows
