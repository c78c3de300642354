"""Gradient clipping, recorded with each step as a factor of the gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.gradients import largest_entry

_EPSILON = 1e-6  # as in torch, which divides by it where the norm is 0
_CLIP_ROUNDING = (1e-4, 1e-7)  # relative rounding of a clipped gradient, in float32 and in float64


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
        return min(1.0, self.max_norm / (norm + _EPSILON))

    def may_have_clipped(self, used: Float[Tensor, " P"]) -> bool:
        """Return whether a gradient is as large as this clipping leaves it: up to rounding, not below the bound."""
        norm = float(torch.linalg.vector_norm(used, self.norm_type))
        return not norm * (1 + _CLIP_ROUNDING[False]) + _EPSILON < self.max_norm

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

    def may_have_clipped(self, used: Float[Tensor, " P"]) -> bool:
        """Return whether a gradient has an entry as large as this clipping leaves it."""
        return not float(largest_entry(used)) * (1 + _CLIP_ROUNDING[False]) < self.max_value

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_value_(net.parameters(), self.max_value)


Clip = ClipNorm | ClipValue


def inferred_clip(used: Float[Tensor, " P"], gradient: Float[Tensor, " P"]) -> Clip | None:
    """Return the clipping that makes of a gradient the one that was used, if its bound is a round number.

    Clipping leaves a gradient whose norm, or whose largest entry, is the bound. Bounds are chosen by people: three
    digits are enough for them, and by chance a norm is as close to such a number once in some thousand steps.

    Args:
        used: The gradient that the optimizer used.
        gradient: The gradient of the loss.
    """
    if not torch.isfinite(used).all() or not used.any():
        return None
    norm = float(torch.linalg.vector_norm(used))
    for clip in (ClipNorm(_round(norm)), ClipValue(_round(float(used.abs().max())))):
        predicted = gradient * clip.factor(gradient)
        rounding = _CLIP_ROUNDING[used.dtype == torch.float64] * float(used.abs().max())
        if not torch.equal(predicted, gradient) and bool(((predicted - used).abs() <= rounding).all()):
            return clip
    return None


def looks_clipped(used: Float[Tensor, " P"]) -> bool:
    """Return whether a gradient's norm or largest entry is a round number, as clipping leaves it."""
    rounding = 8 * torch.finfo(used.dtype).eps
    norm, largest = torch.stack([torch.linalg.vector_norm(used), largest_entry(used)]).tolist()
    # torch divides by a norm to which it adds 1e-6, so that the norm of what it clips is short of the bound by that
    sizes = ((norm, _EPSILON + rounding * norm), (largest, rounding * largest))
    return any(0 < size < float("inf") and -short < size - _round(size) < rounding * size for size, short in sizes)


def _round(value: float) -> float:
    """Return a number in three digits."""
    return float(f"{value:.3g}")


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
