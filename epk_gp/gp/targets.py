"""What the GP regresses on: the trained network's outputs, the labels, or transformed labels."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_labels, validate_positive, validate_tensor
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory, network_outputs

TargetKind = Literal["network", "dirichlet", "labels"]


def make_targets(
    trajectory: Trajectory,
    train_indices: Int[Tensor, " N"],
    targets: TargetKind,
    head: Head,
    *,
    prior_is_zero: bool = True,
) -> tuple[Float[Tensor, "N C"], Float[Tensor, "N C"] | None, Float[Tensor, " C"]]:
    """Return what the GP regresses on.

    Args:
        trajectory: The run.
        train_indices: Indices of N training points.
        targets: "network" - the trained network's outputs (section 4.2, Bell et al. 2023); "dirichlet" - transformed
            labels; "labels" - the run's own targets, centred (`label_values`).
        head: The network's head.
        prior_is_zero: The prior mean is zero: of real targets their mean is subtracted then. Another prior mean says
            where they lie.

    Returns:
        Targets; for "dirichlet" the variances of their noise; and what was subtracted from "labels". Float64.

    Raises:
        ValueError: `targets` is none of these, "dirichlet" is asked for and the run has no class labels, or "labels"
            and the run's targets are neither class labels nor a number for every output.
    """
    zero = torch.zeros(trajectory.num_outputs, dtype=torch.float64, device=trajectory.device)
    if targets == "network":
        X = trajectory.inputs[train_indices]
        X = X.to(torch.float64) if X.is_floating_point() else X
        return network_outputs(trajectory, X, state=-1, head=head).to(torch.float64), None, zero
    if targets == "labels":
        values, mean = label_values(trajectory, train_indices)
        mean = mean if prior_is_zero or not trajectory.targets.is_floating_point() else zero
        return values - mean, None, mean
    if targets != "dirichlet":
        raise ValueError(f"targets must be 'network', 'dirichlet' or 'labels': got {targets!r}.")
    labels = trajectory.targets
    if labels.is_floating_point() or labels.ndim != 1:
        raise ValueError(
            f"targets='dirichlet' needs class labels, one integer per point: the run has {labels.dtype} targets of "
            f"shape {tuple(labels.shape)}. Use targets='network'."
        )
    return *dirichlet_targets(labels[train_indices], trajectory.num_outputs), zero


def label_values(
    trajectory: Trajectory, train_indices: Int[Tensor, " N"]
) -> tuple[Float[Tensor, "N C"], Float[Tensor, " C"]]:
    """Return the run's own targets as a number for every output, and the mean that a process is centred at.

    Args:
        trajectory: The run.
        train_indices: Indices of N training points.

    Returns:
        Of class labels, one-hot vectors and 1 / C; of real targets, as of `MeanSquaredError`, themselves and their mean
        over the N points. Float64.

    Raises:
        ValueError: The targets are neither class labels nor a number for every output, or a label is out of range.
    """
    targets, C = trajectory.targets[train_indices], trajectory.num_outputs
    if targets.ndim == 1 and C > 1 and not targets.is_floating_point():
        validate_labels(targets, len(targets), C)
        values = torch.nn.functional.one_hot(targets.long(), C).to(torch.float64)
        return values, values.new_full((C,), 1 / C)
    if targets[0].numel() != C or (C > 1 and not targets.is_floating_point()):
        raise ValueError(
            f"targets='labels' needs one class label per point, or a real number for each of the {C} outputs: the run "
            f"has {targets.dtype} targets of shape {tuple(trajectory.targets.shape)}. Use targets='network'."
        )
    values = targets.reshape(len(targets), C).to(torch.float64)
    return values, values.mean(0)


def dirichlet_targets(
    labels: Int[Tensor, " n"], num_classes: int, *, alpha_epsilon: float = 0.01, dtype: torch.dtype = torch.float64
) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
    """Transform class labels to regression targets with known noise.

    Milios et al. (2018), as in GPyTorch's `DirichletClassificationLikelihood`: the label's Dirichlet concentration
    alpha = alpha_epsilon + [class is the label] gives Gamma variables that log-normals match in mean and variance:

        sigma^2 = log(1 / alpha + 1),   y = log(alpha) - sigma^2 / 2

    Args:
        labels: Class of each of n points.
        num_classes: C. GPyTorch infers it from the largest label, and misses classes without a point.
        alpha_epsilon: Concentration of the classes that are not the label.
        dtype: Of the result.

    Returns:
        Targets y and variances sigma^2.

    Raises:
        TypeError: The labels are not integers, or a number is of the wrong kind.
        ValueError: A label is out of range, or the concentration is not positive.
    """
    validate_positive(alpha_epsilon, "alpha_epsilon")
    validate_count(num_classes, "num_classes")
    validate_tensor(labels, "labels", ndim=1)
    validate_labels(labels, len(labels), num_classes)
    alpha = torch.nn.functional.one_hot(labels.long(), int(num_classes)).to(dtype) + alpha_epsilon
    variances = (1 / alpha).log1p()
    return alpha.log() - variances / 2, variances
