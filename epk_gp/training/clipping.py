"""Gradient clipping, recorded with each step as a factor of the gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class ClipNorm:
    """Clipping of the norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: The largest norm that is not clipped.
        norm_type: The p of the p-norm.
    """

    max_norm: float
    norm_type: float = 2.0

    @property
    def bound(self) -> float:
        """The number that must be positive and finite."""
        return self.max_norm

    def factor(self, g: Float[Tensor, " P"]) -> float:
        """Return the factor by which this clipping multiplies a gradient."""
        norm = float(torch.linalg.vector_norm(g, self.norm_type))
        return min(1.0, self.max_norm / (norm + 1e-6))  # 1e-6 as in torch, which divides by it where the norm is 0

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_norm_(net.parameters(), self.max_norm, self.norm_type)


@dataclass(frozen=True)
class ClipValue:
    """Clipping of every entry of the gradient, as `torch.nn.utils.clip_grad_value_`.

    Attributes:
        max_value: The largest absolute value that is not clipped.
    """

    max_value: float

    @property
    def bound(self) -> float:
        """The number that must be positive and finite."""
        return self.max_value

    def factor(self, g: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Return the factor by which this clipping multiplies each entry of a gradient."""
        return torch.where(g.abs() > self.max_value, self.max_value / g.abs(), 1.0)

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_value_(net.parameters(), self.max_value)


Clip = ClipNorm | ClipValue


def validate_clip(clip: object) -> None:
    """Raise if an object is neither a clipping with a usable bound nor None.

    Raises:
        TypeError: The object is another kind of object.
        ValueError: The bound is not positive and finite.
    """
    if clip is None:
        return
    if not isinstance(clip, Clip):
        raise TypeError(f"clip must be ClipNorm or ClipValue of epk_gp.training.clipping, or None: got {clip!r}.")
    if not 0 < clip.bound < float("inf"):
        raise ValueError(f"the bound of gradient clipping must be positive and finite: got {clip.bound}.")
