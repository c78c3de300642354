"""The output head: whether f is the logits or their log-softmax."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Head = Literal["logits", "log_softmax"]


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
