"""Maps of predictive uncertainty over a plane, with summary numbers (Figure 5, Bell et al. 2023)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.analysis.planes import (
    Plane,
    grid_coordinates,
    lift,
    nearest_distances,
    project,
    rays,
    square_grid,
    validate_plane,
)
from epk_gp.analysis.ranks import rank_correlation
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.models import LogitGP, validate_gp
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.kernels.tagging import test_copy
from epk_gp.kernels.values import point_blocks


@dataclass(frozen=True, eq=False)
class UncertaintyMap:
    """Predictions of a GP on logits over a plane. Row i of a map lies at y[i], column j at x[j].

    Attributes:
        x: Coordinates of the columns.
        y: Coordinates of the rows.
        training: Projections of all training inputs, (M, 2).
        kernel: k(x, x), averaged over classes; 1 on average over the training copies.
        network_class: Class that the network predicts.
        boundary_classes: Class that the network predicts on five times as many nodes per side of the same square, for
            drawing decision boundaries.
        probability: Expected softmax probability of the predicted class.
        std: Standard deviation of this probability.
        entropy: Entropy of the expected softmax, in nats.
        mutual_information: The part of the entropy that the uncertainty of the latent function causes, in nats.
        standard_error: Largest Monte Carlo standard error of `probability`.
        distance_correlation: Spearman's rank correlation, over the grid, of `std` with the distance in the plane to the
            nearest training point; None if `std` is constant.
        share_std_decreasing: Share of 72 rays from the mean of the data along which `std` is smaller at 3 times the
            radius of the data than at the radius itself.
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
    share_std_decreasing: float
    plane: Plane


def uncertainty_on_plane(
    gp: LogitGP,
    plane: Plane,
    *,
    size: int = 40,
    margin: float = 0.4,
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> UncertaintyMap:
    """Evaluate a fitted GP and its network on a square grid over a plane.

    Args:
        gp: The GP.
        plane: The plane that the grid lies in.
        size: Nodes per side.
        margin: Width of the border around the training points, in units of their extent.
        num_samples: Monte Carlo draws.
        generator: Source of the draws.
        progress: Show a progress bar.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The grid has fewer than 2 nodes per side, or the network has one output only, or the GP cannot
            predict at these points.
    """
    validate_gp(gp)
    validate_plane(plane)
    trajectory = gp.kernel.trajectory
    if trajectory.num_outputs < 2:
        raise ValueError("a map of class probabilities needs a network of at least 2 outputs: got 1.")
    training = project(plane, trajectory.inputs).double()
    x, y = square_grid(training, size, margin)
    nodes = grid_coordinates(x, y)
    near, far = rays(training, 72, 3.0)
    X = lift(plane, torch.cat([nodes, near, far]))
    posterior = gp.logit_posterior(X, progress=progress)
    u = softmax_uncertainty(posterior, num_samples, generator)
    chosen = network_outputs(trajectory, X).argmax(1)
    probability, std, error = (v.gather(1, chosen[:, None])[:, 0] for v in (u.mean, u.std, u.standard_error))
    blocks, _ = point_blocks(gp.kernel.config, test_copy(X[: len(nodes)]))
    scale = blocks.new_full((blocks.shape[1],), 1 / gp.kernel.scale)
    kernel = gp.coupling.prior_covariances(blocks, scale).diagonal(dim1=-2, dim2=-1).mean(1)
    std_nodes, std_near, std_far = std.split([len(nodes), len(near), len(far)])

    def shaped(values: Tensor) -> Tensor:
        return values[: len(nodes)].reshape(len(y), len(x))

    return UncertaintyMap(
        x=x,
        y=y,
        training=training,
        kernel=shaped(kernel),
        network_class=shaped(chosen),
        boundary_classes=_predicted_classes(trajectory, plane, x, y, 5 * size),
        probability=shaped(probability),
        std=shaped(std),
        entropy=shaped(u.entropy),
        mutual_information=shaped(u.mutual_information),
        standard_error=float(error[: len(nodes)].max()),
        distance_correlation=rank_correlation(std_nodes, nearest_distances(nodes, training)),
        share_std_decreasing=float((std_far < std_near).double().mean()),
        plane=plane,
    )


def _predicted_classes(trajectory: Trajectory, plane: Plane, x: Tensor, y: Tensor, size: int) -> Tensor:
    """Evaluate the network's classes on size x size nodes over the square that x and y span."""
    columns, rows = (torch.linspace(float(axis[0]), float(axis[-1]), size, dtype=axis.dtype) for axis in (x, y))
    nodes = grid_coordinates(columns, rows)
    classes = [network_outputs(trajectory, lift(plane, part)).argmax(1) for part in nodes.split(4096)]
    return torch.cat(classes).reshape(size, size)
