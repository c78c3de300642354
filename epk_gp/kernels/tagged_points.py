"""Rows of tagged points, as GPyTorch hands them over, checked against a run and translated to `Points`."""

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.pairs import PointSets, SetPairs
from epk_gp.kernels.tagging import split_copy, validate_entries

# of torch itself, which has no public names for them; without them a transformed tensor gets an error of torch's
_TRANSFORMED: list[Callable[[Tensor], bool]] = [
    getattr(torch._C._functorch, name)
    for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
    if hasattr(getattr(torch._C, "_functorch", None), name)
]


def tag_points(trajectory: Trajectory, x: Shaped[Tensor, "*n columns"]) -> Shaped[Tensor, "*n columns_and_1"]:
    """Return points with a copy column: rows that have none are test copies. Gradients flow back to them.

    Args:
        trajectory: The run.
        x: (..., n, D) or (..., n, D + 1).

    Returns:
        (..., n, D + 1); the same object if it has a copy column.

    Raises:
        TypeError, ValueError: As `validate_tagged_points`.
    """
    validate_tagged_points(trajectory, x)
    if x.shape[-1] != _num_inputs(trajectory):
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], dim=-1)


def validate_tagged_points(trajectory: Trajectory, x: Shaped[Tensor, "*n columns"]) -> None:
    """Raise if the network of a run cannot take these points.

    Args:
        trajectory: The run.
        x: (..., n, D + 1), rows made with `train_copy` or `test_copy`; or (..., n, D), test copies without the column.

    Raises:
        TypeError: `x` is not a tensor, or its entries are complex or Boolean, or not float32 or float64 where the
            network takes floating-point numbers, or it is inside a transformation of `torch.func`, or has a
            forward-mode tangent.
        ValueError: The rows have another width than the run's inputs with or without the copy column, there are none,
            the copy column is not 0 or 1, a value is not finite, or a gradient with respect to integers is asked for.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"points must be a torch.Tensor: got {type(x).__name__}. Make them with train_copy or test_copy."
        )
    if is_transformed(x):
        raise TypeError(
            "points must be plain tensors: got one inside a transformation of torch.func, as grad, vmap and jvp make "
            "it. Differentiate with torch.autograd.grad, and pass batches of points as one tensor."
        )
    if fwAD.unpack_dual(x).tangent is not None:
        raise TypeError(
            "points must have no forward-mode tangent: got a dual tensor. Differentiate with torch.autograd.grad."
        )
    D = _num_inputs(trajectory)
    if x.ndim < 2 or x.shape[-1] not in (D, D + 1):
        raise ValueError(
            f"points must have shape (..., n, {D + 1}), flattened inputs {trajectory.input_shape} and the copy column, "
            f"or (..., n, {D}), test copies without it: got {tuple(x.shape)}. Make them with train_copy or test_copy, "
            "or flatten the inputs."
        )
    if not x.shape[-2]:
        raise ValueError(f"there must be at least one point: got shape {tuple(x.shape)}.")
    if not trajectory.inputs.is_floating_point() and requires_graph(x):
        raise ValueError(
            f"points must not require gradients where the network takes integers ({trajectory.inputs.dtype}): got "
            "requires_grad=True. Pass x.detach(), or work under torch.no_grad()."
        )
    if x.shape[-1] == D:
        validate_entries(x)
    else:
        split_copy(x)
    if trajectory.inputs.is_floating_point() and x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"points must be float32 or float64: got {x.dtype}. Convert them first.")


def validate_batches(batch_shape: torch.Size, *points: Shaped[Tensor, "..."]) -> None:
    """Raise if batches of points do not go together with each other and with a kernel's batch.

    Args:
        batch_shape: The kernel's batch shape: [C] if it has one matrix per class.
        points: Sets of points, (*b, n, D + 1).

    Raises:
        ValueError: The batch shapes do not broadcast.
    """
    shapes = [x.shape[:-2] for x in points]
    try:
        torch.broadcast_shapes(*shapes, batch_shape)
    except RuntimeError as error:
        got = " and ".join(str(tuple(x.shape)) for x in points)
        if len(batch_shape):
            raise ValueError(
                f"batches of points must broadcast with the kernel's batch {tuple(batch_shape)}, one matrix per class: "
                f"got points of shape {got}. Put a dimension of size 1 before the points, as x.unsqueeze(-3) does."
            ) from error
        raise ValueError(f"batches of points must broadcast with each other: got points of shape {got}.") from error


def as_points(trajectory: Trajectory, x: Shaped[Tensor, "n columns"]) -> Points:
    """Translate rows of tagged points to `Points`.

    Args:
        trajectory: The run, which knows the shape and the kind of its inputs.
        x: (n, D + 1).

    Raises:
        ValueError: An entry has a fractional part where the network takes integers.
    """
    X, is_train = split_copy(x)
    X = X.reshape(-1, *trajectory.input_shape)
    if not trajectory.inputs.is_floating_point() and X.is_floating_point():
        integers = X.to(trajectory.inputs.dtype)
        if not torch.equal(integers.to(X.dtype), X):
            raise ValueError(
                f"inputs must be whole numbers, as the run was trained on {trajectory.inputs.dtype}: got a fraction. "
                "Round them."
            )
        X = integers
    one_kind = bool((is_train == is_train[:1]).all())
    return Points(X, bool(is_train[0]) if one_kind and len(is_train) else is_train)


def as_set_pairs(
    trajectory: Trajectory, x: Shaped[Tensor, "*b n columns"], y: Shaped[Tensor, "*c m columns"], batch: torch.Size
) -> SetPairs:
    """Translate a batch of pairs of sets of tagged points to `SetPairs`, all outputs of each pair.

    Args:
        trajectory: The run.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1); the sets are one object if they are the same.
        batch: b and c broadcast to it.
    """
    left = _as_sets(trajectory, x)
    right = left if same_points(x, y) else _as_sets(trajectory, y)
    return SetPairs(left, right, _set_of_element(x, batch), _set_of_element(y, batch))


def requires_graph(x: Shaped[Tensor, "*n"]) -> bool:
    """Return whether autograd will ask for derivatives with respect to x."""
    return x.requires_grad and torch.is_grad_enabled()


def is_transformed(x: Shaped[Tensor, "*n"]) -> bool:
    """Return whether x is inside `torch.func.grad`, `vmap` or another transformation, where a tensor has no data."""
    return any(has_kind(x) for has_kind in _TRANSFORMED)


def own_points(
    x: Shaped[Tensor, "*b n columns"], y: Shaped[Tensor, "*c m columns"]
) -> tuple[Shaped[Tensor, "*d n columns"], Shaped[Tensor, "*e m columns"]]:
    """Copy points: should another thread edit them meanwhile, a block and its key still are of the same points.

    A batch dimension that is expanded, and so repeats one slice, has size 1 in the copy.

    Args:
        x: (*b, n, D + 1).
        y: (*c, m, D + 1); the copies are one object if x and y are.
    """
    own = _copy_once(x)
    return own, own if x is y else _copy_once(y)


def _copy_once(x: Tensor) -> Tensor:
    for dim in range(x.ndim - 2):
        if x.shape[dim] > 1 and x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x.detach().clone()


def same_points(x: Shaped[Tensor, "*n"], y: Shaped[Tensor, "*m"]) -> bool:
    """Return whether two sets of points have the same dtype, shape and values."""
    return x is y or (x.dtype == y.dtype and torch.equal(x, y))


def squeeze_repeated(x: Shaped[Tensor, "*b n columns"]) -> Shaped[Tensor, "*c n columns"]:
    """Reduce each batch dimension whose slices are all equal to size 1: SVGP and BoTorch repeat points there."""
    for dim in repeated_dims(x):
        x = x.narrow(dim, 0, 1)
    return x


def repeated_dims(x: Shaped[Tensor, "*b n columns"]) -> list[int]:
    """List the batch dimensions whose slices are all equal, and more than one."""
    dims = list[int]()
    for dim in range(x.ndim - 2):
        first = x.narrow(dim, 0, 1)
        if x.shape[dim] > 1 and (x.stride(dim) == 0 or torch.equal(x, first.expand_as(x))):
            dims.append(dim)
            x = first
    return dims


def _num_inputs(trajectory: Trajectory) -> int:
    """Count the numbers of an input, D."""
    return torch.Size(trajectory.input_shape).numel()


def _as_sets(trajectory: Trajectory, x: Tensor) -> PointSets:
    points, num_sets, n = as_points(trajectory, x.reshape(-1, x.shape[-1])), x.shape[:-2].numel(), x.shape[-2]
    is_train = torch.as_tensor(points.is_train, device=x.device).expand(num_sets * n)
    return PointSets(torch.unflatten(points.X, 0, (num_sets, n)), is_train.view(num_sets, n))


def _set_of_element(x: Tensor, batch: torch.Size) -> Tensor:
    """Return which of the sets of x each element of a batch has."""
    own = x.shape[:-2]
    return torch.arange(own.numel(), device=x.device).view(own).expand(batch).flatten()
