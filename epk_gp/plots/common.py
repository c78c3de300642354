"""What the pictures share: colours, and numbers made ready to be drawn."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

Numbers: TypeAlias = Tensor | np.ndarray

# Petroff (2021): ten colours that stay apart in each of the three kinds of colour blindness.
PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
GREY, REST = "#4d4d4d", "#e4e4e4"
RAISED, LOWERED = "#1b7837", "#b2182b"
# Shades of grey under the points, so that their colours mean the class and nothing else.
COLORMAP = "Greys"


def as_numpy(name: str, values: Numbers | Sequence[int | float]) -> np.ndarray:
    """Make an array of finite numbers, or refuse what is none."""
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
    """Refuse another shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}: got {array.shape}. Check the order of the arguments.")


def short(value: float, *, sign: bool = False) -> str:
    """Write a number in a few characters, with a real minus."""
    text = f"{value:+.3g}" if sign else f"{value:.2g}"
    return text.replace("-", "−")
