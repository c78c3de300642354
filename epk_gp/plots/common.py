"""Colours, number formatting and validation that all drawing functions share."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

Numbers: TypeAlias = Tensor | np.ndarray

# Petroff (2021): ten colours that can be distinguished in each of the three kinds of colour blindness.
PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
GREY, REST = "#4d4d4d", "#e4e4e4"
RAISED, LOWERED = "#1b7837", "#b2182b"
# Maps are grey, so that the colour of a point stands for its class only.
COLORMAP = "Greys"


def as_numpy(name: str, values: Numbers | Sequence[int | float]) -> np.ndarray:
    """Return the values as an array, in float64 if they are floating-point numbers.

    Raises:
        ValueError: A value is not finite.
    """
    if isinstance(values, Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    array = np.asarray(values)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise ValueError(f"{name} must be finite: got {count} entries that are not. Find them before drawing.")
    return array


def require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise if an array does not have the expected shape.

    Raises:
        ValueError: The shapes differ.
    """
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}: got {array.shape}. Check the order of the arguments.")


def short(value: float, *, sign: bool = False) -> str:
    """Format a number in a few characters, with a typographic minus."""
    text = f"{value:+.3g}" if sign else f"{value:.2g}"
    return text.replace("-", "−")
