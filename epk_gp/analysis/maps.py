"""Maps of predictive uncertainty over planes through the input space (Figure 5, Bell et al. 2023)."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.analysis.measures import rank_correlation
from epk_gp.core.checks import validate_count, validate_finite, validate_number, validate_tensor
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.models import LogitGP, validate_gp
from epk_gp.gp.softmax import softmax_uncertainty

_ROUNDING = 100 * torch.finfo(torch.float64).eps  # of coordinates on which points of a line differ


@dataclass(frozen=True, eq=False)
class Plane:
    """The inputs origin + u axes[0] + v axes[1], for all real u and v.

    Attributes:
        origin: A flattened input, (D,).
        axes: Two orthonormal directions, (2, D).
        input_shape: Shape of one input, of D entries.
    """

    origin: Float[Tensor, " D"]
    axes: Float[Tensor, "2 D"]
    input_shape: tuple[int, ...]


def coordinate_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Return the plane of the first two input coordinates, with all others at their mean over the points.

    Raises:
        TypeError: The inputs are not floating-point numbers.
        ValueError: There are no points, a value is not finite, or an input has fewer than 2 entries.
    """
    rows = _rows(X)
    axes = torch.eye(2, rows.shape[1], dtype=rows.dtype)
    return Plane(rows.mean(0) * (1 - axes.sum(0)), axes, tuple(X.shape[1:]))


def principal_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Return the plane through the mean of the points that their first two principal directions span.

    Args:
        X: n >= 3 inputs of at least 2 entries each.

    Returns:
        The plane. Each axis has the sign that makes its largest entry positive.

    Raises:
        TypeError: The inputs are not floating-point numbers.
        ValueError: There are fewer than 3 points, a value is not finite, or an input has fewer than 2 entries.
    """
    rows = _rows(X)
    if len(rows) < 3:
        raise ValueError(f"a principal plane needs at least 3 points: got {len(rows)}.")
    mean = rows.mean(0)
    axes = torch.linalg.svd(rows - mean, full_matrices=False).Vh[:2]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return Plane(mean, axes * largest.sign(), tuple(X.shape[1:]))


def project(plane: Plane, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n 2"]:
    """Return the coordinates (u, v) of the projections of points onto the plane."""
    return (X.reshape(len(X), -1) - plane.origin.to(X)) @ plane.axes.T.to(X)


def lift(plane: Plane, uv: Float[Tensor, "n 2"]) -> Float[Tensor, "n ..."]:
    """Return the inputs at coordinates (u, v) of the plane."""
    return (plane.origin.to(uv) + uv @ plane.axes.to(uv)).reshape(len(uv), *plane.input_shape)


def grid_over(
    uv: Float[Tensor, "n 2"], size: int, margin: float, *, square: bool = False
) -> tuple[Float[Tensor, " size"], Float[Tensor, " size"]]:
    """Return an evenly spaced grid that covers projected points.

    Args:
        uv: Projected points.
        size: Nodes per side, at least 2.
        margin: Width of the border on every side, in units of the points' extent along the axis.
        square: Whether both axes have one unit, and thus the larger extent.

    Returns:
        Coordinates of the columns and of the rows, of the same number.

    Raises:
        TypeError: `size` is not a whole number, or `margin` is not a number.
        ValueError: There are fewer than 2 nodes per side, or the margin is negative, or the points have no extent.
    """
    validate_count(size, "size", minimum=2)
    validate_number(margin, "margin")
    if not 0 <= margin < float("inf"):
        raise ValueError(f"the margin must be finite and not negative: got {margin}.")
    low, high = uv.min(0).values.double(), uv.max(0).values.double()
    extent = (high - low).max().expand(2) if square else high - low
    if not (extent > _ROUNDING * uv.abs().max()).all():
        advice = "Where both axes have one unit, pass square=True."
        raise ValueError(f"a grid needs points at different places along both axes: all coincide. {advice}")
    centre, half = (low + high) / 2, extent * (0.5 + margin)
    ends = torch.stack([centre - half, centre + half], dim=1).tolist()
    x, y = (torch.linspace(first, last, int(size), dtype=torch.float64) for first, last in ends)
    return x, y


def grid_coordinates(x: Float[Tensor, " nx"], y: Float[Tensor, " ny"]) -> Float[Tensor, "nodes 2"]:
    """Return the nodes (u, v) of a grid, row by row; v is constant along a row."""
    v, u = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([u.reshape(-1), v.reshape(-1)], dim=1)


def _rows(X: Tensor) -> Tensor:
    validate_tensor(X, "inputs", floating=True)
    if X.ndim < 2 or not len(X):
        raise ValueError(f"a plane needs inputs of shape (n, ...), at least one: got shape {tuple(X.shape)}.")
    validate_finite(X, "inputs")
    rows = X.flatten(1).cpu()
    if rows.shape[1] < 2:
        raise ValueError(f"a plane needs inputs of at least 2 entries: got {rows.shape[1]}.")
    return rows


@dataclass(frozen=True, eq=False)
class UncertaintyMap:
    """Predictions of a GP on logits over a plane. Row i of a map lies at y[i], column j at x[j].

    Attributes:
        x: Coordinates of the columns.
        y: Coordinates of the rows.
        training: Projections of all training inputs, (M, 2).
        kernel: k(x, x), averaged over classes; 1 on average over the training copies.
        network_class: Class that the network predicts.
        boundary_classes: Class that the network predicts on five times as many nodes per side over the same extent,
            for drawing decision boundaries.
        probability: Expected softmax probability of the predicted class.
        std: Standard deviation of this probability.
        entropy: Entropy of the expected softmax, in nats.
        mutual_information: The part of the entropy that the uncertainty of the latent function causes, in nats.
        standard_error: Largest Monte Carlo standard error of `probability`.
        distance_correlation: Spearman's rank correlation, over the grid, of `std` with the distance in the plane to the
            nearest training point, in units of the grid's extent along each axis; None if `std` is constant.
        plane: The plane.
    """

    x: Float[Tensor, " nx"]
    y: Float[Tensor, " ny"]
    training: Float[Tensor, "M 2"]
    kernel: Float[Tensor, "ny nx"]
    network_class: Int64[Tensor, "ny nx"]
    boundary_classes: Int64[Tensor, "fine_y fine_x"]
    probability: Float[Tensor, "ny nx"]
    std: Float[Tensor, "ny nx"]
    entropy: Float[Tensor, "ny nx"]
    mutual_information: Float[Tensor, "ny nx"]
    standard_error: float
    distance_correlation: float | None
    plane: Plane


def uncertainty_on_plane(
    gp: LogitGP,
    plane: Plane,
    *,
    size: int = 40,
    margin: float = 0.4,
    square: bool = False,
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> UncertaintyMap:
    """Evaluate a fitted GP and its network on a grid over a plane, with an extent for each axis.

    Args:
        gp: The GP.
        plane: The plane that the grid lies in.
        size: Nodes per side.
        margin: Width of the border around the training points, in units of their extent along the axis.
        square: Whether both axes have one unit, as pixels and principal directions of them: both get the larger extent.
        num_samples: Monte Carlo draws.
        generator: Source of the draws.
        progress: Show a progress bar.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The grid has fewer than 2 nodes per side, or the network has one output only, or the GP cannot
            predict at these points.
    """
    validate_gp(gp)
    if not isinstance(plane, Plane):
        raise TypeError(f"plane must be a Plane: got {type(plane).__name__}. Make one with principal_plane(X).")
    trajectory = gp.kernel.trajectory
    if trajectory.num_outputs < 2:
        raise ValueError("a map of class probabilities needs a network of at least 2 outputs: got 1.")
    training = project(plane, trajectory.inputs).double()
    x, y = grid_over(training, size, margin, square=square)
    nodes, unit = grid_coordinates(x, y), torch.stack([x[-1] - x[0], y[-1] - y[0]])
    X = lift(plane, nodes)
    posterior = gp.logit_posterior(X, progress=progress)
    u = softmax_uncertainty(posterior, num_samples, generator)
    chosen = network_outputs(trajectory, X).argmax(1)
    probability, std, error = (v.gather(1, chosen[:, None])[:, 0] for v in (u.mean, u.std, u.standard_error))
    prior_variance = cast(Tensor, posterior.prior_variance)
    kernel = (prior_variance / gp.covar_module.outputscale.detach().reshape(-1)).mean(1)
    on_grid = {"kernel": kernel, "network_class": chosen, "probability": probability, "std": std}
    on_grid |= {"entropy": u.entropy, "mutual_information": u.mutual_information}
    return UncertaintyMap(
        x=x, y=y, plane=plane, training=training, standard_error=float(error.max()),
        **{name: values.reshape(len(y), len(x)) for name, values in on_grid.items()},
        boundary_classes=_predicted_classes(trajectory, plane, x, y, 5 * size),
        distance_correlation=rank_correlation(std, torch.cdist(nodes / unit, training / unit).amin(1)),
    )  # fmt: skip


def _predicted_classes(trajectory: Trajectory, plane: Plane, x: Tensor, y: Tensor, size: int) -> Tensor:
    """Evaluate the network's classes on size x size nodes over the extent of x and y."""
    columns, rows = (torch.linspace(float(axis[0]), float(axis[-1]), size, dtype=axis.dtype) for axis in (x, y))
    nodes = grid_coordinates(columns, rows)
    classes = [network_outputs(trajectory, lift(plane, part)).argmax(1) for part in nodes.split(4096)]
    return torch.cat(classes).reshape(size, size)
