"""One recorded training step."""

from dataclasses import dataclass

from jaxtyping import Float64, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """Learning rate and batch of the step from the weights w_s to the weights w_{s+1}.

    Attributes:
        index: The number s of the step, counted from 0.
        lr: The learning rate eps_s, that of the optimizer's first parameter group.
        batch: Indices into the training data, or None for all points in order.
        sample_weights: The weights c of the batch's samples in the loss. None stands for the weights that the loss
            gives to a single batch; other weights come from accumulated gradients.
    """

    index: int
    lr: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None
