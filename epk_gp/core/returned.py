"""What networks return: tensors, and tuples, dictionaries and data classes of them, such as Hugging Face's outputs."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtyping import Integer
from torch import Tensor


def tensors_of(returned: Any) -> Iterator[Tensor]:
    """Yield the tensors that a network returned, in order."""
    if isinstance(returned, Tensor):
        yield returned
    else:
        for part in _parts(returned).values():
            yield from tensors_of(part)


def select_rows(returned: Any, rows: slice | Integer[Tensor, " n"], num_rows: int) -> Any:
    """Return what a network returned for some rows of its inputs; what has no such rows stays as it is.

    Args:
        returned: What it returned for all of them.
        rows: The rows to keep.
        num_rows: Number of rows that there are.
    """
    return _map_tensors(lambda z: z[rows] if z.ndim and len(z) == num_rows else z, returned)


def _parts(returned: Any) -> dict[Any, Any]:
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list):
        return dict(enumerate(returned))
    if callable(returned):
        return {}
    attributes = dict(vars(returned)) if hasattr(returned, "__dict__") else {}
    if dataclasses.is_dataclass(returned):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)} | attributes
    return attributes


def _map_tensors(function: Callable[[Tensor], Tensor], returned: Any) -> Any:
    if isinstance(returned, Tensor):
        return function(returned)
    parts = {key: _map_tensors(function, part) for key, part in _parts(returned).items()}
    if not parts:
        return returned
    if isinstance(returned, tuple):
        values = list(parts.values())
        return type(returned)(*values) if hasattr(returned, "_fields") else tuple(values)
    if isinstance(returned, list):
        return list(parts.values())
    if isinstance(returned, Mapping):  # Hugging Face's outputs are data classes too, made of their fields
        make: Callable[..., Any] = type(returned) if dataclasses.is_dataclass(returned) else dict
        return make(**parts) if make is not dict else parts
    result = copy.copy(returned)
    for name, part in parts.items():
        object.__setattr__(result, name, part)  # a data class may be frozen
    return result
