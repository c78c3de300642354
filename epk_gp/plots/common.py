"""Number formatting and validation that all drawing functions share."""

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from epk_gp.core.losses import Head

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


def require_names(names: Sequence[str] | None, *of_classes: np.ndarray | None) -> None:
    """Raise if a class has no name.

    Raises:
        ValueError: There are names, but not for all classes.
    """
    largest = max((int(classes.max()) for classes in of_classes if classes is not None and classes.size), default=-1)
    if names is not None and largest >= len(names):
        raise ValueError(
            f"names must name each class: got {len(names)} names for classes up to {largest}. Add the others."
        )


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


def as_images(X: Tensor) -> Tensor | None:
    """Return the points as grey (n, H, W) or colour (n, H, W, 3) images, or None if they are not images."""
    if X.ndim != 4 or X.shape[1] not in (1, 3) or min(X.shape[2:]) < 4:
        return None
    return X[:, 0] if X.shape[1] == 1 else X.permute(0, 2, 3, 1)


def class_labels(labels: Tensor) -> Tensor | None:
    """Return the targets if they are class labels, or None."""
    return labels if labels.ndim == 1 and labels.dtype == torch.int64 else None


OUTPUT_NAMES: dict[Head, str] = {"logits": "logit", "log_softmax": "log probability"}


def output_name(number: int, head: Head | None, names: Sequence[str] | None = None, *, is_class: bool = True) -> str:
    """Return what an output is called: "logit of class 2", or "output 2" where it stands for no class.

    Args:
        number: Index of the output.
        head: What the outputs are; None means that it is not known.
        names: Names of the classes, in order.
        is_class: Whether outputs stand for classes.
    """
    if not is_class:
        return f"output {number}"
    name = number if names is None else plain(names[number])
    return f"{'output' if head is None else OUTPUT_NAMES[head]} of class {name}"
