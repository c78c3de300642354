"""The vectors that output gradients are contracted with: one cotangent for each gradient that is wanted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.losses import Head
from epk_gp.core.losses import Loss, loss_derivatives


@dataclass(frozen=True, eq=False)
class Cotangents:
    """K cotangents of the logits of every sample.

    Attributes:
        of_logits: Maps logits (E, C) to the cotangents (K, E, C).
        are_constant: The cotangents do not depend on the logits.
        head: The cotangents are those of all C outputs of this head; None for any others.
    """

    of_logits: Callable[[Float[Tensor, "E C"]], Float[Tensor, "K E C"]]
    are_constant: bool = False
    head: Head | None = None


def all_outputs(head: Head) -> Cotangents:
    """Return the C cotangents of the outputs: rows of I, or of I - 1 p^T (docs/theory.md, section 5)."""

    def rows(z: Tensor) -> Tensor:
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None, :].expand(-1, z.shape[0], -1)
        return eye if head == "logits" else eye - z.softmax(dim=1)

    return Cotangents(rows, are_constant=head == "logits", head=head)


def chosen_outputs(head: Head, classes: Int64[Tensor, " E"]) -> Cotangents:
    """Return the one cotangent of each sample's own output."""
    every = all_outputs(head).of_logits

    def rows(z: Tensor) -> Tensor:
        return every(z)[classes, torch.arange(len(z), device=z.device)][None]

    return Cotangents(rows, are_constant=head == "logits")


def summed_outputs(head: Head) -> Cotangents:
    """Return the one cotangent of the sum of all outputs."""
    every = all_outputs(head).of_logits
    return Cotangents(lambda z: every(z).sum(0, keepdim=True), are_constant=head == "logits")


def combined_outputs(head: Head, coefficients: Float[Tensor, "K C"]) -> Cotangents:
    """Return the K cotangents of sums over the outputs of a head, each with coefficients of its own."""

    def rows(z: Tensor) -> Tensor:
        V = coefficients.to(z)
        every = V[:, None].expand(-1, len(z), -1)
        return every if head == "logits" else every - V.sum(1)[:, None, None] * z.softmax(dim=1)

    return Cotangents(rows, are_constant=head == "logits")


def weighted_loss(loss: Loss, y: Shaped[Tensor, "B ..."], c: Float[Tensor, " B"]) -> Cotangents:
    """Return the one cotangent of each sample's weighted loss: c_i times its derivative in the logits."""
    return Cotangents(lambda z: (c[:, None] * loss_derivatives(loss, z, y))[None])
