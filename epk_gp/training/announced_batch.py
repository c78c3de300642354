"""The batches that a training loop announces to its recorder, and the step that they make together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.core.losses import Loss, sample_weights
from epk_gp.core.step import ForwardPass, Step
from epk_gp.recording.observer import CapturedForward


@dataclass(eq=False)
class AnnouncedBatch:
    """A batch whose gradient the next step of the optimizer uses.

    Attributes:
        indices: Rows of the training data, or None for all of them in order.
        weight: Factor that the loop puts in front of the batch's loss, or of each row's.
        position: Number of forward passes before the announcement.
        forwards: The forward passes that computed the batch, in the order of its rows; empty if none was seen.
    """

    indices: Int64[Tensor, " B"] | None
    weight: float | Tensor
    position: int = 0
    forwards: list[CapturedForward] = field(default_factory=list)

    def samples(self, num_points: int) -> Int64[Tensor, " B"]:
        """Return the sample of each row."""
        return torch.arange(num_points) if self.indices is None else self.indices.cpu()

    @property
    def is_plain(self) -> bool:
        """Whether the loss of the batch stands for itself, not multiplied by anything."""
        return not isinstance(self.weight, Tensor) and self.weight == 1


def assign_forwards(
    announced: Sequence[AnnouncedBatch], waiting: list[CapturedForward], num_points: int, *, whole_graph: bool = False
) -> None:
    """Find the forward passes of each announced batch.

    A batch is announced after its backward pass, so its pass is the last one before the announcement that saw as many
    rows; or the last ones that saw as many rows together. Several batches that are announced together take the last
    passes in their order. A batch that is announced before its forward pass takes the first one that fits.

    Args:
        announced: The batches since the last step.
        waiting: The forward passes since then; those that are taken are removed, with all before them.
        num_points: M.
        whole_graph: Every pass has a row for each node of a graph, whatever nodes a batch holds.
    """
    for number in range(len(announced) - 1, -1, -1):
        batch = announced[number]
        if batch.forwards:
            continue
        earlier = [forward for forward in waiting if forward.position <= batch.position]
        rows = num_points if whole_graph else len(batch.samples(num_points))
        found = _last_with_rows(earlier, rows) or _last_with_rows(list(reversed(waiting)), rows)[::-1]
        for forward in found:
            waiting.remove(forward)
        batch.forwards = found


def _last_with_rows(forwards: list[CapturedForward], num_rows: int) -> list[CapturedForward]:
    """Return the last pass of some rows, or the last passes that have as many rows together; empty if none do."""
    for forward in reversed(forwards):
        if len(forward.inputs) == num_rows and forward.output_gradient is not None:
            return [forward]
    for forward in reversed(forwards):
        if len(forward.inputs) == num_rows:
            return [forward]
    taken: list[CapturedForward] = []
    rows = 0
    for forward in reversed(forwards):
        taken.insert(0, forward)
        rows += len(forward.inputs)
        if rows >= num_rows:
            break
    return taken if rows == num_rows else []


def stated_weights(batch: AnnouncedBatch, loss: Loss, y: Shaped[Tensor, "M ..."]) -> Tensor:
    """Return the weights of a batch's rows in the loss of the step, as the loss and the loop state them.

    Raises:
        ValueError: All samples of the batch are ignored by the loss.
    """
    return batch.weight * sample_weights(loss, y[batch.samples(len(y)).to(y.device)]).cpu()


def join_batches(
    index: int,
    lr: float,
    announced: Sequence[AnnouncedBatch],
    weights: Sequence[Tensor] | None,
    passes: Sequence[ForwardPass],
    num_points: int,
) -> Step:
    """Return the step that the announced batches make together: their samples, each with its weight in the loss.

    Args:
        index: Number of the step.
        lr: Its learning rate.
        announced: The batches; several where gradients are accumulated.
        weights: The weights of each batch's rows in the loss; None for one batch with the weights that the loss gives.
        passes: The forward passes; empty if the network in evaluation mode on the recorded data computes the same.
        num_points: M.
    """
    if len(announced) == 1 and weights is None:
        return Step(index, lr, announced[0].indices, None, tuple(passes))
    batches = [batch.samples(num_points) for batch in announced]
    return Step(index, lr, torch.cat(batches), torch.cat(list(weights or ())).cpu().double(), tuple(passes))
