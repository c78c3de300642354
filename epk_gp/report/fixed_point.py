"""Numbers as whole multiples of a quantum, so that every sum that a page shows is exact."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

LARGEST = 2**53  # below it every whole number is a double, as JavaScript has them

# Absolute contributions to one output may sum to so many times those to the first output that is explained.
_MARGIN = 1000
_FINEST = -15  # power of ten


def choose_quantum(size: float) -> float:
    """Return the smallest power of ten in which sums of terms are exact in JavaScript.

    Args:
        size: Sum of the absolute terms of one output; those of another one may sum to a thousand times as much.

    Raises:
        ValueError: The size is not finite, or so large that its sums are not exact in whole numbers.
    """
    largest = LARGEST / _MARGIN
    if not size <= largest:
        raise ValueError(
            f"the absolute terms of an output must sum to at most {largest:.0e} to be shown: got {size}. Look for "
            "outputs that are not finite, or train on targets of another unit."
        )
    return float(f"1e{max(_FINEST, math.ceil(math.log10(max(size, 1e-300) / largest)))}")


def to_units(values: Float[Tensor, "*shape"], quantum: float) -> Int64[Tensor, "*shape"]:
    """Round to multiples of a quantum.

    Raises:
        ValueError: The absolute values sum to more than is exact in JavaScript.
    """
    units = values.detach().cpu().double() / quantum
    if not float(units.abs().sum()) < LARGEST:
        raise ValueError(
            f"the terms of one output must sum to less than {LARGEST * quantum:.2g}, which its size lets one expect: "
            f"their absolute values sum to {float(units.abs().sum()) * quantum:.2g}. Explain this point by itself."
        )
    return units.round().to(torch.int64)


def unit(value: float, quantum: float) -> int:
    """Round one number to multiples of a quantum."""
    return round(value / quantum)


def significant(value: float, digits: int = 5) -> float:
    """Round a number that is no part of a sum to a few significant digits, which keeps the file small."""
    return float(f"{value:.{digits}g}")
