"""The batches that a training loop announces to its recorder, and the step that they make together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.core.losses import Loss, sample_weights
from epk_gp.core.step import Step


@dataclass(frozen=True, eq=False)
class AnnouncedBatch:
    """A batch whose gradient the next step of the optimizer uses.

    Attributes:
        indices: Rows of the training data, or None for all of them in order.
        weight: Factor that the loop puts in front of the batch's loss.
    """

    indices: Int64[Tensor, " B"] | None
    weight: float


def join_batches(
    index: int, lr: float, announced: Sequence[AnnouncedBatch], loss: Loss, y: Shaped[Tensor, "M ..."]
) -> Step:
    """Return the step that the announced batches make together: their samples, each with its weight in the loss.

    Args:
        index: Number of the step.
        lr: Its learning rate.
        announced: The batches; several where gradients are accumulated.
        loss: The loss of each batch.
        y: All training targets.

    Raises:
        ValueError: All samples of a batch are ignored by the loss.
    """
    if len(announced) == 1 and announced[0].weight == 1:
        return Step(index, lr, announced[0].indices)
    all_points = torch.arange(len(y))
    batches = [all_points if batch.indices is None else batch.indices for batch in announced]
    weights = [
        batch.weight * sample_weights(loss, y[indices.to(y.device)]).cpu()
        for indices, batch in zip(batches, announced, strict=True)
    ]
    return Step(index, lr, torch.cat([indices.cpu() for indices in batches]), torch.cat(weights))
