"""The output head: whether f is the logits or their log-softmax."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.losses import CrossEntropy, Loss

Head = Literal["logits", "log_softmax"]


def resolve_head(head: Head | None, loss: Loss, num_outputs: int) -> Head:
    """Return the head that is asked for, where None asks for the one that follows the run's loss.

    The outputs of a network that was trained on cross entropy are logits, and the loss depends on their log-softmax.
    Under any other loss the outputs stand for themselves: values under squared error, log-probabilities under
    `NegativeLogLikelihood`. So does a single output, whose log-softmax is the constant 0.

    Args:
        head: "logits", "log_softmax", or None.
        loss: The run's loss.
        num_outputs: C.

    Returns:
        The head itself if one is given; else "log_softmax" for cross entropy with C >= 2, and "logits" otherwise.

    Raises:
        ValueError: As `validate_head`.
    """
    if head is None:
        return "log_softmax" if isinstance(loss, CrossEntropy) and num_outputs > 1 else "logits"
    validate_head(head, num_outputs)
    return head


def validate_head(head: str, num_outputs: int) -> None:
    """Raise if the head does not exist or carries no information.

    Raises:
        ValueError: The head is unknown, or it is the log-softmax of a single output, which is the constant 0.
    """
    if head not in get_args(Head):
        raise ValueError(f"head must be one of {list(get_args(Head))}: got {head!r}.")
    if head == "log_softmax" and num_outputs == 1:
        raise ValueError('head="log_softmax" needs at least 2 outputs: got a network with 1. Use head="logits".')


def apply_head(z: Float[Tensor, "*n C"], head: Head) -> Float[Tensor, "*n C"]:
    """Return the outputs f that belong to the logits z."""
    return z if head == "logits" else torch.log_softmax(z, dim=-1)
