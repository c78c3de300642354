"""Checks at the door that many functions share."""

from numbers import Integral, Real

import torch
from jaxtyping import Shaped
from torch import Tensor

MIN_MEMORY_BUDGET = 1 << 20


def validate_integer(value: object, name: str) -> None:
    """Refuse what is no integer; NumPy's are, True is not.

    Raises:
        TypeError: No whole number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number: got {value!r}.")


def validate_positive(value: object, name: str) -> None:
    """Refuse what is no positive, finite number.

    Raises:
        TypeError: No number.
        ValueError: Zero, negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a positive number: got {value!r}.")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be positive and finite: got {value}.")


def validate_count(value: object, name: str, *, minimum: int = 1) -> None:
    """Refuse what does not count anything.

    Args:
        value: What was given; NumPy's integers are integers, True is none.
        name: What to call it.
        minimum: Smallest count allowed.

    Raises:
        TypeError: No whole number.
        ValueError: Below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, at least {minimum}: got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}: got {value}.")


def validate_memory_budget(value: object) -> None:
    """Refuse a memory budget that no work fits into.

    Raises:
        TypeError: No whole number of bytes.
        ValueError: Less than 1 MiB.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"memory_budget must be a whole number of bytes: got {value!r}.")
    if value < MIN_MEMORY_BUDGET:
        raise ValueError(f"memory_budget must be at least 1 MiB ({MIN_MEMORY_BUDGET} bytes): got {value}.")


def validate_generator(value: object) -> None:
    """Refuse what draws no random numbers.

    Raises:
        TypeError: Neither a `torch.Generator` nor None.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator: got {value!r}. Make one with torch.Generator().manual_seed(0)."
        )


def validate_finite(X: Shaped[Tensor, "n ..."], name: str, advice: str = "Remove or repair that point.") -> None:
    """Refuse NaN and infinity, naming the first row that holds one.

    Args:
        X: Rows of numbers; those of integers are finite.
        name: What to call them.
        advice: What to do.

    Raises:
        ValueError: A row holds NaN or infinity.
    """
    if X.is_floating_point() and not torch.isfinite(X).all():
        row = int((~torch.isfinite(X.reshape(X.shape[0], -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"{name} must be finite: row {row} holds NaN or infinity. {advice}")
