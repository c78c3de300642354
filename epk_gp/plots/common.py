"""Number formatting and validation that all drawing functions share."""

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from epk_gp.plots.style import COLORMAP, GREY, LOWERED, PALETTE, RAISED, REST

__all__ = [
    "COLORMAP",
    "GREY",
    "LOWERED",
    "Numbers",
    "PALETTE",
    "RAISED",
    "REST",
    "as_numpy",
    "class_name",
    "plain",
    "require_shape",
    "short",
]

Numbers: TypeAlias = Tensor | np.ndarray


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
    mantissa, exponent, power = text.partition("e")
    return (mantissa + (f"e{int(power)}" if exponent else "")).replace("-", "−")


def plain(text: str) -> str:
    """Return a text as matplotlib shows it as it stands: dollars begin no formula. Twice is as once."""
    return re.sub(r"(?<!\\)\$", r"\\$", str(text).encode(errors="replace").decode())


def class_name(number: int, names: Sequence[str] | None) -> str:
    """Return the name of a class for a picture: the given one, or "class 3"."""
    return f"class {number}" if names is None else plain(names[number])
