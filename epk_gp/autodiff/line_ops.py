"""Along a line of weights: functions of parameters that are linear in them, but are not a layer's call.

A bare parameter that is multiplied or added, the transpose of a tied weight, a slice or a multiple of a parameter:
whatever is linear in w is, at w + t d, its value at w plus t times its value at d.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epk_gp.autodiff.interception import add_multiple
from epk_gp.core.model import BATCH_MARK


def functions_named(*names: str) -> tuple[Callable[..., Any], ...]:
    """List the functions and methods of torch that have these names."""
    return tuple(
        getattr(where, name) for name in names for where in (torch, torch.Tensor) if getattr(where, name, None)
    )


# Linear in all their tensors together: what is no parameter is zero along the direction.
LINEAR_MAPS = {
    *functions_named(
        "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "view", "view_as",
        "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to",
        "repeat", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "contiguous", "clone", "flip", "roll",
        "tril", "triu", "diag", "sum", "mean", "neg", "negative", "cat", "concat", "concatenate", "stack", "hstack",
        "vstack", "index_select", "__getitem__", "__neg__",
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
}  # fmt: skip

# Likewise, and their numbers are terms: zero along the direction too.
SUMS = {*functions_named("add", "sub", "subtract", "rsub", "__add__", "__radd__", "__sub__", "__rsub__")}

# Linear in each of their tensors.
PRODUCTS = {
    *functions_named(
        "mul", "multiply", "__mul__", "__rmul__", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "einsum",
        "tensordot", "inner", "outer", "dot",
    ),
}  # fmt: skip

# Linear in their first tensor.
QUOTIENTS = {*functions_named("div", "divide", "true_divide", "__truediv__")}


def has_rows(value: Tensor) -> bool:
    """Return whether a tensor is the batch of inputs, or was computed from it."""
    return hasattr(value, BATCH_MARK)


def spread_mark(result: Any, arguments: Any) -> None:
    """Mark the results of a call of which an argument is marked."""
    results = [value for value in tensors_in((result,)) if not has_rows(value)]
    if results and any(has_rows(value) for value in tensors_in(arguments)):
        for value in results:
            setattr(value, BATCH_MARK, True)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """List the tensors among values, lists, tuples and dictionaries of values included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def along_direction(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], direction: Mapping[int, Tensor]
) -> Any:
    """Return what a function that is linear in its parameters gives along a direction; NotImplemented if it is not.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        direction: The direction of each parameter, by the parameter's id.
    """
    tensors = list(tensors_in((args, kwargs)))
    moving = [value for value in tensors if id(value) in direction]
    if function in LINEAR_MAPS or function in SUMS:
        constant = [value for value in tensors if id(value) not in direction and value.is_floating_point()]
        replaced = {**direction, **{id(value): torch.zeros_like(value) for value in constant}}
        terms = tuple(0 if isinstance(value, int | float) else value for value in args) if function in SUMS else args
        return function(*substituted(terms, replaced), **substituted(kwargs, replaced))
    if len(moving) == 1 and (function in PRODUCTS or (function in QUOTIENTS and moving[0] is tensors[0])):
        return function(*substituted(args, direction), **substituted(kwargs, direction))
    if function is torch.prelu and len(moving) == 1 and len(args) == 2 and moving[0] is args[1]:
        x, slope = args[0], direction[id(args[1])]
        return x.where(x < 0, 0.0) * (slope.view(-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else slope)
    return NotImplemented


def substituted(values: Any, by_id: Mapping[int, Tensor]) -> Any:
    """Replace tensors, by their ids, in values, lists, tuples and dictionaries of values."""
    if isinstance(values, list | tuple):
        return type(values)(substituted(value, by_id) for value in values)
    if isinstance(values, dict):
        return {name: substituted(value, by_id) for name, value in values.items()}
    return by_id.get(id(values), values) if isinstance(values, Tensor) else values


@dataclass(eq=False)
class Line:
    """What moves along a line of weights: the parameters, and what is made of them alone.

    Attributes:
        t: Place of each row on the line, (E,).
        direction: The direction of what moves, by its id.
        name_of: The parameter that it is made of, by its id.
        followed: What was made of parameters; its ids are in use as long as it is here.
    """

    t: Tensor
    direction: dict[int, Tensor]
    name_of: dict[int, str]
    followed: list[Tensor] = field(default_factory=list)

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result of a function that is linear in its parameters, at the places of the rows.

        If no argument has rows, neither has the result: it moves as a parameter does, along a direction of its own.

        Args:
            function: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: What it gives at w, a tensor or several.

        Returns:
            The result, or NotImplemented if the function is not linear, or does not give one entry per row.
        """
        along = along_direction(function, args, kwargs, self.direction)
        if along is NotImplemented:
            return NotImplemented
        tensors = list(tensors_in((args, kwargs)))
        if not any(has_rows(value) for value in tensors):
            name = next(self.name_of[id(value)] for value in tensors if id(value) in self.name_of)
            for value, step in zip(tensors_in((result,)), tensors_in((along,)), strict=True):
                self.followed.append(value)
                self.direction[id(value)], self.name_of[id(value)] = step, name
            return result
        if any(not value.ndim or len(value) != len(self.t) for value in tensors_in((result,))):
            return NotImplemented
        if isinstance(result, Tensor):
            return self._moved(result, along)
        return type(result)(self._moved(*pair) for pair in zip(result, along, strict=True))

    def _moved(self, value: Tensor, along: Tensor) -> Tensor:
        return add_multiple(value, self.t.view(-1, *[1] * (value.ndim - 1)), along)
