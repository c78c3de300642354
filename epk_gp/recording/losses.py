"""Losses: value per sample, derivative with respect to the outputs, and the weight of a sample in its batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of softmax(outputs), as `torch.nn.CrossEntropyLoss` without options.

    Targets are class indices (M,) int64, or probabilities (M, C) that sum to one.

    Attributes:
        reduction: How a batch's losses are joined: "mean" (c = 1/|B|) or "sum" (c = 1).
    """

    reduction: Reduction = "mean"


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, as `torch.nn.MSELoss`: "mean" averages over samples and outputs, "sum" adds both.

    Targets have the outputs' shape (M, C).
    """

    reduction: Reduction = "mean"


@dataclass(frozen=True)
class PerSampleLoss:
    """A loss of the user's own.

    Attributes:
        function: Maps outputs (n, C) and targets (n, ...) to n losses; sample i's must depend on row i alone.
        reduction: How a batch's losses are joined.
        name: What the run's header calls it. A stored run with such a loss is loaded with `loss=` given again.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    reduction: Reduction = "mean"
    name: str = "custom"


Loss = CrossEntropy | MeanSquaredError | PerSampleLoss


def as_loss(loss: object) -> Loss:
    """Accept this package's losses and torch's two plain ones.

    Raises:
        TypeError: Anything else.
        ValueError: A torch loss with options that this package's own does not have; an unknown reduction.
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.weight is not None or loss.label_smoothing != 0 or loss.ignore_index != -100:
            raise ValueError(
                "CrossEntropyLoss must have no class weights, label smoothing or ignore_index: wrap it in "
                "epk_gp.PerSampleLoss with reduction='none'."
            )
        loss = CrossEntropy(loss.reduction)  # type: ignore[arg-type]  # checked below
    elif isinstance(loss, nn.MSELoss):
        loss = MeanSquaredError(loss.reduction)  # type: ignore[arg-type]  # checked below
    if not isinstance(loss, CrossEntropy | MeanSquaredError | PerSampleLoss):
        raise TypeError(
            f"loss must be epk_gp.CrossEntropy, epk_gp.MeanSquaredError or epk_gp.PerSampleLoss(f): got {loss!r}."
        )
    if loss.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum': got {loss.reduction!r}.")
    return loss


def per_sample_losses(
    loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]
) -> Float[Tensor, " n"]:
    """Evaluate the losses of n samples, not yet joined.

    Raises:
        ValueError: A user's loss does not return one value per sample.
    """
    if isinstance(loss, CrossEntropy):
        return F.cross_entropy(outputs, _matched(targets, outputs), reduction="none")
    if isinstance(loss, MeanSquaredError):
        squares = (outputs - _matched(targets, outputs)).square()
        return squares.mean(dim=1) if loss.reduction == "mean" else squares.sum(dim=1)
    values = loss.function(outputs, _matched(targets, outputs))
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the loss function must return one value per sample, shape ({outputs.shape[0]},): got {got}. "
            "Leave the reduction to PerSampleLoss(reduction=...)."
        )
    return values


def refuse_coupled_losses(loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]) -> None:
    """Refuse a user's loss that mixes the rows of a batch.

    Raises:
        ValueError: Losses of n samples together differ from those of each alone.
    """
    together = per_sample_losses(loss, outputs, targets)
    pairs = zip(outputs.split(1), targets.split(1), strict=True)
    alone = torch.cat([per_sample_losses(loss, z, target) for z, target in pairs])
    if (alone - together).abs().max() > torch.finfo(outputs.dtype).eps ** 0.5 * together.abs().max():
        raise ValueError(
            "a sample's loss must depend on its own row alone: the loss function gives other values for several "
            "samples together than for each alone. Leave sums, means and normalisation over the batch out of it."
        )


def sample_weight(loss: Loss, batch_size: int) -> float:
    """Give the weight c of a sample in the loss of its batch (theory, section 1)."""
    return 1.0 / batch_size if loss.reduction == "mean" else 1.0


def loss_derivatives(
    loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]
) -> Float[Tensor, "n C"]:
    """Differentiate each sample's loss with respect to its own outputs."""
    with torch.enable_grad():
        z = outputs.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(per_sample_losses(loss, z, targets).sum(), z)
    return derivative


def soft_targets(targets: Shaped[Tensor, "n ..."], num_outputs: int, dtype: torch.dtype) -> Float[Tensor, "n C"]:
    """Write class targets as the distributions q of theory, section 2."""
    if targets.is_floating_point():
        return targets.to(dtype)
    return F.one_hot(targets, num_outputs).to(dtype)


def check_targets(loss: Loss, targets: Tensor, num_points: int, num_outputs: int) -> None:
    """Refuse targets that do not fit the data, the network or the loss.

    Raises:
        TypeError: Wrong dtype.
        ValueError: Wrong shape, labels out of range, non-finite values, or rows that are no distributions.
    """
    if targets.ndim == 0 or targets.shape[0] != num_points:
        got = targets.shape[0] if targets.ndim else "a scalar"
        raise ValueError(f"targets must have one entry per point: got {got} for {num_points} points.")
    if targets.is_floating_point() and not torch.isfinite(targets).all():
        row = int((~torch.isfinite(targets.reshape(num_points, -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"targets must be finite: row {row} holds NaN or infinity.")
    if isinstance(loss, MeanSquaredError) and targets.shape != (num_points, num_outputs):
        raise ValueError(
            f"MeanSquaredError needs targets of the outputs' shape {(num_points, num_outputs)}: "
            f"got {tuple(targets.shape)}."
        )
    if isinstance(loss, MeanSquaredError) and not targets.is_floating_point():
        raise TypeError(f"MeanSquaredError needs floating-point targets: got {targets.dtype}.")
    if not isinstance(loss, CrossEntropy):
        return
    if targets.is_floating_point():
        if targets.shape != (num_points, num_outputs):
            raise ValueError(
                f"class probabilities must have shape {(num_points, num_outputs)}: got {tuple(targets.shape)}. "
                "Class labels must be int64."
            )
        if (targets < 0).any() or (targets.sum(dim=1) - 1).abs().max() > 1e-4:
            raise ValueError("class probabilities must be non-negative and sum to 1 in every row.")
        return
    if targets.dtype != torch.int64:
        raise TypeError(f"class labels must be int64: got {targets.dtype}. Convert them with .long().")
    if targets.ndim != 1:
        raise ValueError(f"class labels must have shape ({num_points},): got {tuple(targets.shape)}.")
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_outputs:
        raise ValueError(
            f"class labels must lie in 0..{num_outputs - 1} (the network has {num_outputs} outputs): got {low}..{high}."
        )


def _matched(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets.to(outputs.dtype) if targets.is_floating_point() else targets
