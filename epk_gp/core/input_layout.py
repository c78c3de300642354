"""Inputs that consist of several tensors, as one: the tensors lie side by side in the columns of a matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.inputs import Graph
from epk_gp.core.checks import validate_finite, validate_has_values

# Inputs of n points: one tensor, or several with one first dimension, as the network takes them: net(*X), net(**X).
# The nodes of a graph are points too: the graph stands for all of them.
Inputs = Shaped[Tensor, "n ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class InputTensor:
    """One of the tensors of which inputs consist.

    Attributes:
        key: Its position in the call of the network, or its keyword.
        shape: Shape of one point.
        dtype: Its dtype at recording.
    """

    key: int | str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of entries of one point."""
        return torch.Size(self.shape).numel()

    @property
    def kind(self) -> str:
        """What its entries are."""
        if self.dtype == torch.bool:
            return "bool"
        return "floating-point" if self.dtype.is_floating_point else "integer"


@dataclass(frozen=True)
class InputLayout:
    """Where the tensors of which inputs consist lie in the packed inputs (n, D), side by side.

    Attributes:
        tensors: The tensors; those of a dictionary in the order of their sorted keys.
    """

    tensors: tuple[InputTensor, ...]

    @property
    def is_mapping(self) -> bool:
        """Whether the network is called with keywords."""
        return isinstance(self.tensors[0].key, str)

    @property
    def width(self) -> int:
        """Number D of entries of one point."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the packed inputs.

        The dtype of the tensors if they share one; else that of the floating-point ones; else int64.
        """
        dtypes = {tensor.dtype for tensor in self.tensors}
        if len(dtypes) == 1:
            return next(iter(dtypes))
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        return reduce(torch.promote_types, floating) if floating else torch.int64

    def columns(self) -> list[tuple[InputTensor, int]]:
        """Return each tensor with the first of its columns."""
        first, result = 0, []
        for tensor in self.tensors:
            result.append((tensor, first))
            first += tensor.size
        return result


def pack_inputs(X: Sequence[Tensor] | Mapping[str, Tensor] | Graph, name: str = "X") -> tuple[Tensor, InputLayout]:
    """Return several tensors as one, (n, D), and where they lie in it.

    Args:
        X: Tensors with one first dimension; those of a dictionary lie in the order of the sorted keys, so that any
            order gives the same.
        name: Name of the inputs in an error message.

    Raises:
        TypeError: X is neither a sequence nor a dictionary, or a part is no dense tensor of real numbers.
        ValueError: X is empty, or parts differ in their first dimension or device, or hold NaN or infinity, or integers
            that the dtype of the other parts cannot represent.
    """
    if isinstance(X, Graph):
        raise TypeError(f"{name} must be numbers of the graph's nodes, an int64 tensor (n,): got the graph itself.")
    items = _items(X, name)
    for label, value in items:
        _validate_part(value, label)
    (first_label, first), values = items[0], [value for _, value in items]
    for label, value in items[1:]:
        if len(value) != len(first):
            raise ValueError(
                f"all tensors of {name} must have one row per point: {first_label} has {len(first)} rows, {label} has "
                f"{len(value)}."
            )
        if value.device != first.device:
            raise ValueError(
                f"all tensors of {name} must be on one device: {first_label} is on {first.device}, {label} on "
                f"{value.device}."
            )
    keys: list[Any] = sorted(X) if isinstance(X, Mapping) else list(range(len(X)))
    layout = InputLayout(
        tuple(InputTensor(key, tuple(value.shape[1:]), value.dtype) for key, value in zip(keys, values, strict=True))
    )
    if layout.width == 0:
        raise ValueError(f"{name} must hold at least one number per point: got none.")
    if layout.dtype.is_floating_point:
        limit = 2.0 / torch.finfo(layout.dtype).eps
        for label, value in items:
            if not value.is_floating_point() and value.numel() and float(value.to(torch.float64).abs().max()) > limit:
                raise ValueError(
                    f"{label} must hold integers up to {limit:.0f} beside tensors of {layout.dtype}, which cannot "
                    "represent larger ones: got a larger one. Use float64."
                )
    return side_by_side(values, layout.dtype), layout


def validate_same_layout(recorded: InputLayout, given: InputLayout, name: str = "X") -> None:
    """Raise if inputs do not consist of the tensors that a run was recorded with.

    Raises:
        TypeError: A tensor holds numbers of another kind.
        ValueError: A tensor is missing, or there is one too many, or one has another shape.
    """
    keys, got = ([tensor.key for tensor in layout.tensors] for layout in (recorded, given))
    if keys != got:
        raise ValueError(f"{name} must consist of the tensors of the training inputs, {keys}: got {got}.")
    for before, now in zip(recorded.tensors, given.tensors, strict=True):
        label = f"{name}[{before.key!r}]"
        if before.shape != now.shape:
            expected = ", ".join(map(str, ("n", *before.shape)))
            shown = ", ".join(map(str, ("n", *now.shape)))
            raise ValueError(f"{label} must have shape ({expected}) like the training inputs: got ({shown}).")
        if before.kind != now.kind:
            raise TypeError(f"{label} must be of the training inputs' kind ({before.dtype}): got {now.dtype}.")


def validate_packed(layout: InputLayout, X: Shaped[Tensor, "n D"], name: str = "X") -> None:
    """Raise if packed inputs hold a number that the tensor in its place cannot have.

    Raises:
        ValueError: An integer has a fractional part or is out of range, or a Boolean is neither 0 nor 1.
    """
    for tensor, first in layout.columns():
        part = X.detach()[:, first : first + tensor.size]
        if tensor.dtype.is_floating_point or part.dtype == tensor.dtype:
            continue
        if not torch.equal(part.to(tensor.dtype).to(part.dtype), part):
            raise ValueError(
                f"{name}[{tensor.key!r}] must hold whole numbers ({tensor.dtype}), as the training inputs do: got "
                "another number. Round them."
            )


def _items(X: Any, name: str) -> list[tuple[str, Any]]:
    """Return the parts of inputs with what an error calls them."""
    is_several = isinstance(X, Sequence | Mapping) and not isinstance(X, str)
    if not is_several or (isinstance(X, Sequence) and len(X) and not any(isinstance(part, Tensor) for part in X)):
        raise TypeError(
            f"{name} must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.as_tensor, or pass several "
            "tensors as a tuple or dict."
        )
    if len(X) == 0:
        raise ValueError(f"{name} must hold at least one tensor: got an empty {type(X).__name__}.")
    if not isinstance(X, Mapping):
        return [(f"{name}[{number}]", value) for number, value in enumerate(X)]
    for key in X:
        if not isinstance(key, str):
            raise TypeError(f"the keys of {name} must be keywords of the network's forward(): got {key!r}.")
    return [(f"{name}[{key!r}]", X[key]) for key in sorted(X)]


def _validate_part(value: object, label: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{label} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor, or leave it "
            "out and set it inside the network."
        )
    if value.layout != torch.strided:
        raise TypeError(f"{label} must be a dense tensor: got {value.layout}. Convert it with to_dense().")
    if str(value.dtype) not in DTYPES:
        raise TypeError(f"{label} must hold real numbers: got {value.dtype}. Convert it first.")
    validate_has_values(value, label)
    if value.ndim == 0:
        raise ValueError(f"{label} must have one row per point: got a scalar.")
    validate_finite(value, label)


def side_by_side(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return tensors of n rows as one, (n, D), without checks."""
    return torch.cat([value.reshape(len(value), value.shape[1:].numel()).to(dtype) for value in values], dim=1)


def layout_from_json(entries: object) -> InputLayout:
    """Return the layout that a run's header describes.

    Raises:
        ValueError: The description is damaged.
    """
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"the header's 'signature' must describe the network's input tensors: got {entries!r}.")
    tensors = []
    for entry in entries:
        described: dict[str, Any] = entry if isinstance(entry, dict) else {}
        key, shape, dtype = (described.get(name) for name in ("key", "shape", "dtype"))
        if not _is_input_tensor(key, shape, dtype):
            raise ValueError(f"the header's 'signature' must describe an input tensor: got {entry!r}.")
        tensors.append(InputTensor(described["key"], tuple(described["shape"]), DTYPES[described["dtype"]]))
    keys = [tensor.key for tensor in tensors]
    is_sorted = all(isinstance(key, str) for key in keys) and keys == sorted(set(map(str, keys)))
    if not is_sorted and keys != list(range(len(keys))):
        raise ValueError(f"the header's 'signature' must have positions or sorted keywords as keys: got {keys}.")
    return InputLayout(tuple(tensors))


def _is_input_tensor(key: Any, shape: Any, dtype: Any) -> bool:
    is_key = isinstance(key, str) or type(key) is int
    is_shape = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    return is_key and is_shape and isinstance(dtype, str) and dtype in DTYPES
