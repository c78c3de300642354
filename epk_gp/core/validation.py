"""Input validation that many functions share: each function raises if its value is not what its name says."""

from numbers import Integral, Real

import torch
from jaxtyping import Shaped
from torch import Tensor

MIN_MEMORY_BUDGET = 1 << 20  # bytes; the smallest budget that the tests of the memory plan cover


def validate_integer(value: object, name: str) -> None:
    """Raise if a value is not an integer. NumPy's integers are integers, booleans are not.

    Raises:
        TypeError: The value is not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number: got {value!r}.")


def validate_positive(value: object, name: str) -> None:
    """Raise if a value is not a positive, finite number.

    Raises:
        TypeError: The value is not a real number.
        ValueError: The value is zero, negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a positive number: got {value!r}.")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be positive and finite: got {value}.")


def validate_count(value: object, name: str, *, minimum: int = 1) -> None:
    """Raise if a value is not an integer of at least `minimum`. NumPy's integers are integers, booleans are not.

    Args:
        value: The value.
        name: Name of the value in the error message.
        minimum: The smallest value that is accepted.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, at least {minimum}: got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}: got {value}.")


def validate_memory_budget(value: object) -> None:
    """Raise if a value is not a memory budget of at least 1 MiB.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is below 1 MiB.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"memory_budget must be a whole number of bytes: got {value!r}.")
    if value < MIN_MEMORY_BUDGET:
        raise ValueError(f"memory_budget must be at least 1 MiB ({MIN_MEMORY_BUDGET} bytes): got {value}.")


def validate_generator(value: object) -> None:
    """Raise if a value is neither a `torch.Generator` nor None.

    Raises:
        TypeError: The value is another kind of object.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator: got {value!r}. Make one with torch.Generator().manual_seed(0)."
        )


def validate_finite(X: Shaped[Tensor, "n ..."], name: str, advice: str = "Remove or repair that point.") -> None:
    """Raise if a tensor holds NaN or infinity, and name the first row that does. Integers are always finite.

    Args:
        X: Rows of numbers.
        name: Name of the tensor in the error message.
        advice: Last sentence of the error message.

    Raises:
        ValueError: A row holds NaN or infinity.
    """
    if X.is_floating_point() and not torch.isfinite(X).all():
        row = int((~torch.isfinite(X.reshape(X.shape[0], -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"{name} must be finite: row {row} holds NaN or infinity. {advice}")
