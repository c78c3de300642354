"""One recorded training step."""

from dataclasses import dataclass

from jaxtyping import Float64, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """How state s became state s + 1.

    Attributes:
        index: s, from 0.
        lr: The learning rate eps_s (of the first parameter group).
        batch: Indices into the training data, or None for all of them in order.
        sample_weights: The weights c of the batch's samples in the loss, where they are not those that the loss gives
            to one batch (gradient accumulation).
    """

    index: int
    lr: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None
