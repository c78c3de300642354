"""The two copies of an input, as rows of a matrix: Definition 3.4, Bell et al. (2023), in GPyTorch's format."""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_has_values
from epk_gp.core.inputs import Inputs, pack_inputs


def train_copy(X: Inputs) -> Shaped[Tensor, "n columns"]:
    """Mark inputs as training copies: x_I = 1, gradients frozen at the start of each step.

    Args:
        X: n inputs of any shape, a tensor or several (a tuple or dict); each is flattened to D numbers.

    Returns:
        (n, D + 1): the flattened inputs, and a last column of ones.

    Raises:
        TypeError: The inputs are not a tensor, or complex or Boolean.
        ValueError: The inputs have no dimension of points and one of values, or a value is not finite.
    """
    return _with_copy_column(X, 1)


def test_copy(X: Inputs) -> Shaped[Tensor, "n columns"]:
    """Mark inputs as test copies: x_I = 0, gradients move with t.

    Args:
        X: n inputs of any shape, a tensor or several (a tuple or dict); each is flattened to D numbers.

    Returns:
        (n, D + 1): the flattened inputs, and a last column of zeros.

    Raises:
        TypeError: The inputs are not a tensor, or complex or Boolean.
        ValueError: The inputs have no dimension of points and one of values, or a value is not finite.
    """
    return _with_copy_column(X, 0)


test_copy.__test__ = False  # type: ignore[attr-defined]  # pytest: a function of this package, not a test


def split_copy(x: Shaped[Tensor, "*n columns"]) -> tuple[Shaped[Tensor, "*n D"], Bool[Tensor, "*n"]]:
    """Undo `train_copy` and `test_copy`.

    Args:
        x: (..., D + 1), the last column 1 for a training copy and 0 for a test copy.

    Returns:
        The inputs (..., D), and (...) True for training copies.

    Raises:
        TypeError: `x` is not a tensor, or its entries are complex or Boolean.
        ValueError: There is no input column, a value is not finite, or the copy column holds anything but 0 and 1.
    """
    _validate_kind(x)
    if x.ndim < 2 or x.shape[-1] < 2:
        raise ValueError(
            f"points must have shape (..., n, D + 1) with D >= 1: got {tuple(x.shape)}. Make them with train_copy or "
            "test_copy."
        )
    X, column = x[..., :-1], x[..., -1]
    _validate_finite(X)
    is_train = column == 1
    invalid = ~(is_train | (column == 0))  # includes NaN
    if invalid.any():
        row = tuple(invalid.nonzero()[0].tolist())
        where = row[0] if len(row) == 1 else row
        raise ValueError(
            f"the last column must be exactly 0 (test copy) or 1 (training copy): got {column[row].item()} in row "
            f"{where}. Make points with train_copy or test_copy, and leave their last column as it is."
        )
    return X, is_train


def validate_entries(X: Shaped[Tensor, "..."]) -> None:
    """Raise if the entries of inputs are not finite real numbers.

    Raises:
        TypeError: `X` is not a tensor, or its entries are complex or Boolean.
        ValueError: The tensor holds no values, is sparse, or a value is not finite.
    """
    _validate_kind(X)
    _validate_finite(X)


def _with_copy_column(inputs: Inputs, value: int) -> Tensor:
    X = inputs if isinstance(inputs, Tensor) else pack_inputs(inputs, "inputs")[0]
    if not isinstance(inputs, Tensor) and X.dtype == torch.bool:
        X = X.to(torch.uint8)
    _validate_kind(X)
    if X.ndim == 0:
        raise ValueError("inputs must have shape (n, ...), one row per point: got a scalar. A single point is X[None].")
    if X.ndim == 1:
        raise ValueError(
            f"inputs must have shape (n, ...), one row per point: got shape {tuple(X.shape)}. "
            "A single point is X[None], n points of one number each are X[:, None]."
        )
    _validate_finite(X)
    return torch.cat([X.reshape(X.shape[0], X.shape[1:].numel()), X.new_full((X.shape[0], 1), value)], dim=1)


def _validate_kind(X: Tensor) -> None:
    if not isinstance(X, Tensor):
        raise TypeError(f"inputs must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.as_tensor.")
    if X.is_complex() or X.dtype == torch.bool:
        raise TypeError(f"inputs must be real numbers: got {X.dtype}. Convert them first.")
    validate_has_values(X, "inputs")


def _validate_finite(X: Tensor) -> None:
    finite = torch.isfinite(X.detach())
    if not finite.all():
        entry = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(f"inputs must be finite: got {X[entry].item()} at index {entry}. Remove or repair that point.")
