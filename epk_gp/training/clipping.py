"""Gradient clipping that the recorder is told of: a factor of the gradient, recorded with the step."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class ClipNorm:
    """Clipping of the whole gradient's norm, as `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: The largest norm that passes.
        norm_type: The norm's p.
    """

    max_norm: float
    norm_type: float = 2.0


@dataclass(frozen=True)
class ClipValue:
    """Clipping of every entry, as `torch.nn.utils.clip_grad_value_`.

    Attributes:
        max_value: The largest absolute value that passes.
    """

    max_value: float


Clip = ClipNorm | ClipValue


def validate_clip(clip: object) -> None:
    """Refuse what is no clipping.

    Raises:
        TypeError: Another kind of object.
        ValueError: A bound that is not positive.
    """
    if not isinstance(clip, ClipNorm | ClipValue | None):
        raise TypeError(f"clip must be ClipNorm, ClipValue or None: got {clip!r}.")
    bound = clip.max_norm if isinstance(clip, ClipNorm) else clip.max_value if clip is not None else 1.0
    if not 0 < bound < float("inf"):
        raise ValueError(f"the bound of gradient clipping must be positive and finite: got {bound}.")


def clip_factor(clip: Clip | None, g: Float[Tensor, " P"]) -> float | Float[Tensor, " P"]:
    """Give the factor that clipping puts in front of a gradient: one number, or one per weight."""
    if clip is None:
        return 1.0
    if isinstance(clip, ClipValue):
        return torch.where(g.abs() > clip.max_value, clip.max_value / g.abs(), 1.0)
    norm = float(torch.linalg.vector_norm(g, clip.norm_type))
    return min(1.0, clip.max_norm / (norm + 1e-6))  # torch's own guard against 0


def clip_gradients(clip: Clip | None, net: nn.Module) -> None:
    """Clip a network's gradients in place."""
    if isinstance(clip, ClipNorm):
        nn.utils.clip_grad_norm_(net.parameters(), clip.max_norm, clip.norm_type)
    elif isinstance(clip, ClipValue):
        nn.utils.clip_grad_value_(net.parameters(), clip.max_value)
