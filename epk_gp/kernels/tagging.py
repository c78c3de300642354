"""The two copies of an input as rows of a matrix (Definition 3.4, Bell et al. 2023), which are checked and parsed."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Bool, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_tensor
from epk_gp.core.inputs import Inputs, Points, pack_inputs
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory

# The copy column's entries, for rows of floating-point numbers and of integers. No column of a table contains such
# numbers by chance, unlike a label or a task of 0 and 1. float16 and bfloat16 represent the fractions exactly, float32
# both; the copies of one point are 6e-6 apart.
_TEST_MARKS, _TRAIN_MARKS = ((m * 2.0**-20, -m * 2**20) for m in (151, 157))


def train_copy(X: Inputs) -> Shaped[Tensor, "n columns"]:
    """Mark inputs as training copies: x_I = 1, gradients frozen at the start of each step.

    Args:
        X: n inputs of any shape, a tensor or several (a tuple or dict); each is flattened to D numbers.

    Returns:
        (n, D + 1): the flattened inputs, and a last column with a number that marks x_I = 1 and that no table has by
        chance. The dtype is that of the inputs; integers of less than 32 bits become int64.

    Raises:
        TypeError: The inputs are not a tensor, or are complex or Boolean.
        ValueError: The inputs do not have the shape (n, ...), or a value is not finite.
    """
    return _with_copy_column(X, _TRAIN_MARKS)


def test_copy(X: Inputs) -> Shaped[Tensor, "n columns"]:
    """Mark inputs as test copies: x_I = 0, gradients move with t.

    Args:
        X: n inputs of any shape, a tensor or several (a tuple or dict); each is flattened to D numbers.

    Returns:
        (n, D + 1): the flattened inputs, and a last column with a number that marks x_I = 0, as in `train_copy`.

    Raises:
        TypeError: The inputs are not a tensor, or are complex or Boolean.
        ValueError: The inputs do not have the shape (n, ...), or a value is not finite.
    """
    return _with_copy_column(X, _TEST_MARKS)


test_copy.__test__ = False  # type: ignore[attr-defined]  # pytest: a function of this package, not a test


def _with_copy_column(inputs: Inputs, marks: tuple[float, int]) -> Tensor:
    X = inputs if isinstance(inputs, Tensor) else pack_inputs(inputs, "inputs")[0]
    if not isinstance(inputs, Tensor) and X.dtype == torch.bool:
        X = X.to(torch.uint8)
    _validate_entries(X)
    if X.ndim < 2:
        shape = f"shape {tuple(X.shape)}" if X.ndim else "a scalar"
        raise ValueError(f"inputs must have shape (n, ...): got {shape}. One point is X[None], n numbers X[:, None].")
    return _append(X.reshape(X.shape[0], X.shape[1:].numel()), marks)


def _append(rows: Tensor, marks: tuple[float, int]) -> Tensor:
    """Return rows with a copy column of one mark."""
    rows = rows if rows.is_floating_point() or rows.dtype in (torch.int32, torch.int64) else rows.long()
    column = rows.new_full((*rows.shape[:-1], 1), marks[not rows.is_floating_point()])
    return torch.cat([rows, column], dim=-1)


def has_mark(x: Shaped[Tensor, "*n columns"], marks: tuple[float, int] = _TRAIN_MARKS) -> Bool[Tensor, "*n"]:
    """Return a mask of the rows whose copy column has given marks, by default those of training copies."""
    column = x[..., -1].double()  # in a narrow dtype a comparison would round the mark
    return (column == marks[0]) | (column == marks[1])


def _validate_entries(X: Tensor) -> None:
    validate_tensor(X, "inputs")
    if X.is_complex() or X.dtype == torch.bool:
        raise TypeError(f"inputs must be real numbers: got {X.dtype}. Convert them first.")
    finite = torch.isfinite(X.detach())
    if not finite.all():
        entry = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(f"inputs must be finite: got {X[entry].item()} at index {entry}. Remove or repair that point.")


def tag_points(trajectory: Trajectory, x: Shaped[Tensor, "*n columns"]) -> Shaped[Tensor, "*n columns_and_1"]:
    """Return points with a copy column: rows without one become test copies. Gradients flow back to the points.

    Args:
        trajectory: The run.
        x: (..., n, D + 1), rows made with `train_copy` or `test_copy`; or (..., n, D), test copies without the column.

    Returns:
        (..., n, D + 1); the same object if it has a copy column.

    Raises:
        TypeError: `x` is not a tensor, or its entries are complex or Boolean, or not float32 or float64 although the
            network takes floating-point numbers, or it is inside a transformation of `torch.func`, or has a
            forward-mode tangent.
        ValueError: The rows have a wrong width, there are no rows, the last column is not a copy column, a value is not
            finite, or a gradient with respect to integers is requested.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"points must be a torch.Tensor: got {type(x).__name__}. Make them with train_copy or test_copy."
        )
    if is_transformed(x) or fwAD.unpack_dual(x).tangent is not None:
        raise TypeError(
            "points must be plain tensors: got one inside a transformation of torch.func, or with a forward-mode "
            "tangent. Differentiate with torch.autograd.grad, and pass batches of points as one tensor."
        )
    D, is_floating = torch.Size(trajectory.input_shape).numel(), trajectory.inputs.is_floating_point()
    if x.ndim < 2 or x.shape[-1] not in (D, D + 1):
        raise ValueError(
            f"points must have shape (..., n, {D + 1}), flattened inputs {trajectory.input_shape} and the copy column, "
            f"or (..., n, {D}), test copies without it: got {tuple(x.shape)}. Make them with train_copy or test_copy, "
            "or flatten the inputs."
        )
    if not x.shape[-2]:
        raise ValueError(f"there must be at least one point: got shape {tuple(x.shape)}.")
    validate_tensor(x, "inputs")
    if not is_floating and requires_graph(x):
        raise ValueError(
            f"points must not require gradients where the network takes integers ({trajectory.inputs.dtype}): got "
            "requires_grad=True. Pass x.detach(), or work under torch.no_grad()."
        )
    _validate_entries(x[..., :D])
    if is_floating and x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"points must be float32 or float64: got {x.dtype}. Convert them first.")
    if x.shape[-1] == D:
        return _append(x, _TEST_MARKS)
    if (unmarked := ~(has_mark(x) | has_mark(x, _TEST_MARKS))).any():
        row = tuple(unmarked.nonzero()[0].tolist())
        raise ValueError(
            f"points must have {D} columns, or {D + 1} as train_copy and test_copy make them: row "
            f"{row[0] if len(row) == 1 else row} ends in {x[(*row, -1)].item()}, which marks no copy. Leave out a "
            "column that is no input (a label, a task), or keep the last column of the copies as it is."
        )
    return x


def validate_batches(batch_shape: torch.Size, *points: Shaped[Tensor, "..."]) -> None:
    """Raise if batches of points do not fit each other or the kernel's batch.

    Args:
        batch_shape: The kernel's batch shape: [C] if it has one matrix per class.
        points: Sets of points.

    Raises:
        ValueError: The batch shapes do not broadcast.
    """
    try:
        torch.broadcast_shapes(*(x.shape[:-2] for x in points), batch_shape)
    except RuntimeError as error:
        shapes = " and ".join(dict.fromkeys(str(tuple(x.shape)) for x in points))
        others = f"the kernel's batch {tuple(batch_shape)}, one matrix per class" if len(batch_shape) else "each other"
        raise ValueError(
            f"batches of points must broadcast with {others}: got points of shape {shapes}. Put a dimension of size 1 "
            "before the points, as x.unsqueeze(-3) does."
        ) from error


def requires_graph(x: Shaped[Tensor, "*n"]) -> bool:
    """Return whether autograd will ask for derivatives with respect to x."""
    return x.requires_grad and torch.is_grad_enabled()


def is_transformed(x: Shaped[Tensor, "*n"]) -> bool:
    """Return whether x is inside `torch.func.grad`, `vmap` or another transformation, where a tensor has no data."""
    of_torch = torch._C._functorch  # torch has no public names for this
    return of_torch.is_functorch_wrapped_tensor(x) or of_torch.is_legacy_batchedtensor(x)


@dataclass(frozen=True, eq=False)
class PointSets:
    """Sets of n points each, parsed and copied: later edits of the originals by another thread do not change them.

    Attributes:
        rows: The given points, with the copy column, (*b, n, D + 1). Gradients flow back to them.
        X: Inputs, (*c, n, ...). A batch dimension along which one set repeats, as in SVGP and BoTorch, has size 1.
        is_train: Whether each point is a training copy, (*c, n).
    """

    rows: Shaped[Tensor, "*b n columns"]
    X: Shaped[Tensor, "..."]
    is_train: Bool[Tensor, "*c n"]

    @property
    def batch(self) -> torch.Size:
        """The shape b of the batch."""
        return self.rows.shape[:-2]

    @property
    def count(self) -> int:
        """Number of points in each set."""
        return self.rows.shape[-2]

    @property
    def repeated_dims(self) -> list[int]:
        """The batch dimensions along which one set repeats."""
        return [dim for dim, size in enumerate(self.batch) if size != self.is_train.shape[dim]]

    @cached_property
    def key(self) -> str:
        """A hash of the points, and of the dtype of their kernel's values."""
        return content_key(self.rows.new_empty(0), self.X, self.is_train)

    def flat(self) -> Points:
        """Return the points of all sets, one set after the other."""
        return Points(self.X.flatten(0, self.is_train.ndim - 1), self.is_train.flatten())

    def singles(self) -> "PointSets":
        """Return sets of one point each, one for each point of these sets."""
        inner = self.is_train.ndim
        return PointSets(self.rows.unsqueeze(-2), self.X.unsqueeze(inner), self.is_train.unsqueeze(inner))

    def split(self, size: int) -> "list[PointSets]":
        """Split one set into sets with at most this many points."""
        return [
            PointSets(*own) for own in zip(*(z.split(size) for z in (self.rows, self.X, self.is_train)), strict=True)
        ]

    def equals(self, other: "PointSets") -> bool:
        """Return whether both have the same points, after broadcasting their batches, and values of the same dtype."""
        if self is other:
            return True
        if self.count != other.count or self.rows.dtype != other.rows.dtype:
            return False
        pairs = ((self.is_train, other.is_train), (self.X, other.X))
        return all(torch.equal(*torch.broadcast_tensors(*pair)) for pair in pairs)


def parse_points(
    trajectory: Trajectory, x: Shaped[Tensor, "*n columns"], dtype: torch.dtype | None = None
) -> PointSets:
    """Check and parse points for a kernel.

    Args:
        trajectory: The run, which determines the shape and the kind of the inputs.
        x: Points, as in `tag_points`.
        dtype: Dtype of the parsed rows; by default their own.

    Raises:
        TypeError, ValueError: As in `tag_points`; or an entry is not an integer of the kind that the network takes.
    """
    rows, kind = tag_points(trajectory, x).to(dtype), trajectory.inputs.dtype
    distinct = _without_repeated_sets(rows.detach())
    X = distinct[..., :-1].clone().unflatten(-1, trajectory.input_shape or (1,))
    if not kind.is_floating_point and X.dtype != kind:
        integers = X.to(kind)
        if not torch.equal(integers.to(X.dtype), X):
            raise ValueError(f"inputs must be whole numbers of {kind}, as those of the run: got others. Round them.")
        X = integers
    return PointSets(rows, X if trajectory.input_shape else X.squeeze(-1), has_mark(distinct))


def as_test_points(X: Shaped[Tensor, "n ..."], dtype: torch.dtype) -> PointSets:
    """Return parsed inputs as test copies, with kernel values of a dtype."""
    rows = _append(X.flatten(1) if X.ndim > 1 else X[:, None], _TEST_MARKS).to(dtype)
    return PointSets(rows, X, torch.zeros(len(X), dtype=torch.bool, device=X.device))


def _without_repeated_sets(x: Shaped[Tensor, "*b n columns"]) -> Shaped[Tensor, "*c n columns"]:
    """Reduce batch dimensions whose slices are all equal to their first slice."""
    for dim in range(x.ndim - 2):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and (x.stride(dim) == 0 or torch.equal(x, first.expand_as(x))):
            x = first
    return x
