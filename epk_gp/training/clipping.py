"""Gradient clipping, recorded with each step as a factor of the gradient."""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import largest_entry
from epk_gp.optimizers.update_rules import CLIP_ROUNDING, EPSILON, Clip, ClipNorm, ClipValue, rounded_bound

__all__ = ["Clip", "ClipNorm", "ClipValue", "inferred_clip", "looks_clipped", "validate_clip"]


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
    for clip in (ClipNorm(rounded_bound(norm)), ClipValue(rounded_bound(float(used.abs().max())))):
        predicted = gradient * clip.factor(gradient)
        rounding = CLIP_ROUNDING[used.dtype == torch.float64] * float(used.abs().max())
        if not torch.equal(predicted, gradient) and bool(((predicted - used).abs() <= rounding).all()):
            return clip
    return None


def looks_clipped(used: Float[Tensor, " P"]) -> bool:
    """Return whether a gradient's norm or largest entry is a round number, as clipping leaves it."""
    rounding = 8 * torch.finfo(used.dtype).eps
    norm, largest = torch.stack([torch.linalg.vector_norm(used), largest_entry(used)]).tolist()
    # torch divides by a norm to which it adds 1e-6, so that the norm of what it clips is short of the bound by that
    sizes = ((norm, EPSILON + rounding * norm), (largest, rounding * largest))
    return any(
        0 < size < float("inf") and -short < size - rounded_bound(size) < rounding * size for size, short in sizes
    )


def validate_clip(clip: object) -> None:
    """Raise if an object is neither a clipping with a usable bound nor None.

    Raises:
        TypeError: The object is another kind of object.
        ValueError: The bound is not positive and finite.
    """
    if clip is None:
        return
    if not isinstance(clip, Clip):
        raise TypeError(f"clip must be ClipNorm or ClipValue of epk_gp.recording.setup, or None: got {clip!r}.")
    if not 0 < clip.bound < float("inf"):
        raise ValueError(f"the bound of gradient clipping must be positive and finite: got {clip.bound}.")
