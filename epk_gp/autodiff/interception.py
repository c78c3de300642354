"""Observe and redirect a network's use of its parameters, whatever modules it is written with.

Where one argument of an operation has a tangent and another has none, torch's forward mode makes the missing one of
symbolic zeros and asks its references in Python for the shape of every result: measured, 0.1 to 0.3 ms an operation, a
third of the time of a small convolutional network. By hand there are no such operations. A convolution with w and one
with d are one call besides, which unfolds its input once: 0.7 to 0.9 of the time of two.

A bare parameter that is multiplied or added, the transpose of a tied weight, a slice or a multiple of a parameter:
whatever is linear in w is, at w + t d, its value at w plus t times its value at d.

A forward pass under one of these modes calls the same functions as ever. A mode sees every call that takes a parameter
(through `torch.overrides.TorchFunctionMode`), so a parameter that is used twice, outside its module or inside a
function is never missed.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.forward_mode import split_dual
from epk_gp.autodiff.written_out import WRITTEN_OUT, write_out
from epk_gp.core.model import BATCH_MARK
from epk_gp.core.torch_overrides import normalise_by_statistics

Slots = Mapping[str, Tensor | None]


def add_multiple(value: Tensor, t: Tensor, along: Tensor) -> Tensor:
    """Return value + t along; any of the three may carry a tangent."""
    (v, dv), (u, du), (a, da) = (split_dual(x) for x in (value, t, along))
    result: Tensor = v + u * a
    tangent = dv if du is None else du * a if dv is None else dv + du * a
    if da is not None:
        tangent = u * da if tangent is None else tangent + u * da
    return result if tangent is None else fwAD.make_dual(result, tangent.expand_as(result))


def call_with_both(call: Callable[..., Any], x: Tensor, held: Slots, along: Slots, *, joins: bool) -> list[Tensor]:
    """Call a function that is linear in its input, with the weights w and with the direction d.

    Args:
        call: Makes the call with given weights and biases, and with a given input.
        x: The input; it may carry a tangent.
        held: Weight and bias by name; None where there is none.
        along: Their direction.
        joins: Channels of the output belong to entries of the weights: both calls can be one.
    """
    primal, tangent = split_dual(x)
    without_bias = {name: None if name == "bias" else value for name, value in held.items()}
    along_without_bias = {**along, **{name: None for name in along if name == "bias"}}
    results = _both(call, primal, held, along, joins=joins)
    if tangent is None:
        return results
    tangents = _both(call, tangent, without_bias, along_without_bias, joins=joins)
    return [fwAD.make_dual(*pair) for pair in zip(results, tangents, strict=True)]


def _both(call: Callable[..., Any], x: Tensor, held: Slots, along: Slots, *, joins: bool) -> list[Tensor]:
    if not joins:
        return [call(held, x), call(along, x)]
    pairs = {name: (value, along.get(name)) for name, value in held.items()}
    joined = {name: None if a is None or b is None else torch.cat([a, b]) for name, (a, b) in pairs.items()}
    return list(call(joined, x).chunk(2, dim=1))


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


# Functions that are linear in (weight, bias) taken together: positions and names of these arguments.
JOINTLY_LINEAR: dict[Callable[..., Any], dict[int | str, str]] = {
    F.linear: {1: "weight", 2: "bias"},
    F.bilinear: {2: "weight", 3: "bias"},
    F.embedding: {1: "weight"},
    F.layer_norm: {2: "weight", 3: "bias"},
    F.group_norm: {2: "weight", 3: "bias"},
    F.batch_norm: {3: "weight", 4: "bias"},
    F.instance_norm: {3: "weight", 4: "bias"},
    F.rms_norm: {2: "weight"},
    normalise_by_statistics: {3: "weight", 4: "bias"},
    **{
        function: {1: "weight", 2: "bias"}
        for function in (
            F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        )
    },
}  # fmt: skip
LINEAR = F.linear
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
LINEAR_IN_INPUT = (LINEAR, *CONVOLUTIONS)
NORMALISATIONS = (F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, normalise_by_statistics)
LAYERS = (*LINEAR_IN_INPUT, *NORMALISATIONS)
CHANNELS_LAST = (LINEAR, F.layer_norm, F.rms_norm)


class UnsupportedParameterUseError(ValueError):
    """The network uses its parameters otherwise than on the rows on which its plan was made."""


@dataclass(frozen=True)
class ParameterUsage:
    """One call of a function that takes parameters.

    Attributes:
        function: What was called.
        names: All parameters among its arguments.
        weight: The one in the place of a jointly linear function's weight, if any.
        bias: The one in the place of its bias, if any.
        num_statistics: How many are in the places of the statistics of `normalise_by_statistics`.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    weight: str | None
    bias: str | None
    num_statistics: int = 0

    @property
    def is_jointly_linear(self) -> bool:
        """Whether the function is linear in all the parameters that it takes, statistics that it knows left out."""
        return len(self.names) == (self.weight is not None) + (self.bias is not None) + self.num_statistics


@dataclass(eq=False, slots=True)
class FunctionCall:
    """A call that takes observed parameters.

    Attributes:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        params: Names of the observed parameters among them, each as often as it occurs.
        slots: Places of weight and bias if the function is jointly linear in them, else empty.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: tuple[str, ...]
    slots: Mapping[int | str, str]

    def run(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, slot: int | str, name: str) -> Any:
        """Return an argument, given by position or by name."""
        if isinstance(slot, int) and slot < len(self.args):
            return self.args[slot]
        return self.kwargs.get(name)

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.argument(0, "input")

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The mean and the variance of `normalise_by_statistics`; nothing of another function."""
        return self.args[1:3] if self.function is normalise_by_statistics else ()

    def in_slots(self) -> dict[str, Any]:
        """Return the arguments in the places of weight and bias, by these names; None where there is none."""
        return {name: self.argument(slot, name) for slot, name in self.slots.items()}

    def with_slots(self, values: Mapping[str, Any], x: Any = None) -> Any:
        """Make the call with other weights and biases, and with another input if one is given."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if x is not None and args:
            args[0] = x
        elif x is not None:
            kwargs["input"] = x
        for slot, name in self.slots.items():
            if name not in values:
                continue
            if isinstance(slot, int) and slot < len(args):
                args[slot] = values[name]
            else:
                kwargs[name] = values[name]
        return self.function(*args, **kwargs)

    def require_all_in_slots(self, count: int) -> None:
        """Raise if a parameter is used outside the places of weight and bias.

        Args:
            count: Number of observed parameters in these places.

        Raises:
            UnsupportedParameterUseError: The function takes more of them.
        """
        if count != len(self.params):
            raise UnsupportedParameterUseError(
                f"the weights {sorted(self.params)} must be used by functions that are linear in them."
            )


class ParameterInterception(TorchFunctionMode):
    """Intercept the calls that take given parameters; recognised by identity.

    Args:
        params: The parameters by name, the very tensors that the network will be called with.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name_of = {id(value): name for name, value in params.items()}
        self.calls_fused_functions = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, through `intercept` if it takes a parameter."""
        kwargs = kwargs or {}
        params: list[str] = []
        _find(self.name_of, args, params)
        _find(self.name_of, kwargs.values(), params)
        if not params:
            return self.pass_through(func(*args, **kwargs))
        if func in WRITTEN_OUT and (result := write_out(self, func, args, kwargs)) is not NotImplemented:
            self.calls_fused_functions = True
            return result
        return self.intercept(FunctionCall(func, args, kwargs, tuple(params), JOINTLY_LINEAR.get(func, {})))

    def pass_through(self, result: Any) -> Any:
        """Observe the result of a call without parameters."""
        return result

    @abstractmethod
    def intercept(self, call: FunctionCall) -> Any:
        """Make a call that takes parameters."""


@final
class ParameterUsageRecorder(ParameterInterception):
    """List which function takes which parameters, and count the numbers that a forward pass computes."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """Observe the given parameters."""
        super().__init__(params)
        self.usages: list[ParameterUsage] = []
        self.num_activations = 0

    def pass_through(self, result: Any) -> Any:
        """Count the numbers of a result."""
        self.num_activations += sum(value.numel() for value in tensors_in((result,)))
        return result

    def intercept(self, call: FunctionCall) -> Any:
        """Record the call; not that of a shape or a dtype, which does not depend on a parameter's value."""
        result = self.pass_through(call.run())
        if has_tensors(result):
            names = {name: self.name_of.get(id(value)) for name, value in call.in_slots().items()}
            found = sum(id(value) in self.name_of for value in call.statistics)
            self.usages.append(
                ParameterUsage(call.function, call.params, names.get("weight"), names.get("bias"), found)
            )
        return result


class MovedWeights(ParameterInterception):
    """Evaluate rows at weights and statistics of their own."""

    @abstractmethod
    def of_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Return a parameter at every row, (E, ...); a tensor that does not move as it is."""

    def normalise(self, call: FunctionCall) -> Any:
        """Make a call of `normalise_by_statistics`, which is not linear in its statistics, with those of every row."""
        x, *held = call.args[:5]
        own = (None if value is None else self.of_rows(value, len(x)) for value in held)
        return call.function(x, *own, *call.args[5:])


@final
class InterpolatedWeights(MovedWeights):
    """Evaluate row e at weights w + t_e d: each jointly linear function is called once with w and once with d.

    Args:
        params: w by name.
        direction: d by name.
        t: (E,) positions on the segment, one per row; may carry a tangent or require a gradient.
        statistics: Statistics of every row by name, (E, ...), which replace those at w + t_e d.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        t: Tensor,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__({name: params[name] for name in direction})
        self.direction = {id(params[name]): value for name, value in direction.items()}
        self.t = t
        self.line = Line(t, self.direction, self.name_of)
        self.statistics = {id(params[name]): value for name, value in (statistics or {}).items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, and carry on the mark of what has rows."""
        result = super().__torch_function__(func, types, args, kwargs)
        spread_mark(result, (args, kwargs or {}))
        return result

    def of_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Return w_e + t_e d for every row."""
        step = self.direction.get(id(value))
        if step is None or id(value) in self.statistics:
            return self.statistics.get(id(value), value)
        return add_multiple(value, self.t.view(-1, *[1] * value.ndim), step)

    def intercept(self, call: FunctionCall) -> Any:
        """Make the call, and add t times the call along the direction."""
        if call.function is normalise_by_statistics:
            require_rows(call.input, call.input, len(self.t), call.params[0])
            return self.normalise(call)
        held, along, moved = call.in_slots(), {}, 0
        for name, value in held.items():
            if value is None:
                continue
            step = self.direction.get(id(value))
            moved += step is not None
            along[name] = torch.zeros_like(value) if step is None else step
        if moved != len(call.params):
            result = call.run()
            if not has_tensors(result):
                return result
            followed = self.line.follow(call.function, call.args, call.kwargs, result)
            if followed is NotImplemented:
                call.require_all_in_slots(0)
            return followed
        if call.function in LINEAR_IN_INPUT:
            joins = call.function in CONVOLUTIONS and call.argument(6, "groups") in (None, 1)
            result, change = call_with_both(call.with_slots, call.input, held, along, joins=joins)
        else:
            result, change = call.run(), call.with_slots(along)
        require_rows(call.input, result, len(self.t), call.params[0])
        return add_multiple(result, self.t.view(-1, *[1] * (result.ndim - 1)), change)


@final
class StackedWeights(MovedWeights):
    """Evaluate each of G equal parts of the rows at weights of its own.

    Args:
        params: Parameters by name; their values are not used.
        stacked: By name, with a first dimension of G.
    """

    def __init__(self, params: Mapping[str, Tensor], stacked: Mapping[str, Tensor]) -> None:
        super().__init__({name: params[name] for name in stacked})
        self.stacked = {id(params[name]): value for name, value in stacked.items()}
        self.num_parts = len(next(iter(stacked.values())))

    def of_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Return a parameter at every row: that of the part of the rows that it lies in."""
        own = self.stacked.get(id(value))
        return value if own is None else own.repeat_interleave(num_rows // self.num_parts, dim=0)

    def intercept(self, call: FunctionCall) -> Any:
        """Make the call part by part; linear layers in one product."""
        if not call.slots:
            result = call.run()  # a shape or a dtype; everything else is not supported
            if not has_tensors(result):
                return result
        x = call.input
        rows = len(x) if isinstance(x, Tensor) and x.ndim else 0
        if not rows or rows % self.num_parts:  # whether these are all of the rows is known to the layer recorder
            raise UnsupportedParameterUseError(f"the layer of {call.params[0]} must see all rows: it saw {rows}.")
        if call.function is normalise_by_statistics:
            return self.normalise(call)
        held = call.in_slots()
        own = {name: self.stacked[id(value)] for name, value in held.items() if id(value) in self.stacked}
        call.require_all_in_slots(len(own))
        parts = x.unflatten(0, (self.num_parts, -1))
        if call.function is LINEAR and (held["bias"] is None or "bias" in own) and "weight" in own:
            return _batched_linear(parts, own["weight"], own.get("bias")).flatten(0, 1)
        return torch.cat(
            [call.with_slots({name: value[g] for name, value in own.items()}, part) for g, part in enumerate(parts)]
        )


def _batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply G linear layers, (G, n_out, n_in), to (G, n, ..., n_in)."""
    rows = x.flatten(1, -2)
    result = rows @ weight.mT if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return result.view(*x.shape[:-1], -1)


def has_tensors(result: Any) -> bool:
    """Return whether a call computed something that can depend on a parameter's value: not a shape, not a dtype."""
    return any(True for _ in tensors_in((result,)))


def require_rows(x: Any, result: Tensor, num_rows: int, name: str) -> None:
    """Raise if a call does not see, and return, all rows.

    Args:
        x: Its input.
        result: Its result.
        num_rows: E.
        name: A parameter that it takes.

    Raises:
        UnsupportedParameterUseError: Rows are missing.
    """
    rows = len(x) if isinstance(x, Tensor) and x.ndim else 0
    if rows != num_rows or len(result) != num_rows:
        raise UnsupportedParameterUseError(f"the layer of {name} must see all {num_rows} rows: it saw {rows}.")


def _find(name_of: Mapping[int, str], values: Iterable[Any], names: list[str]) -> None:
    """Append the names of the parameters among values, lists and dictionaries of values included."""
    for value in values:
        if id(value) in name_of:
            names.append(name_of[id(value)])
        elif isinstance(value, list | tuple):
            _find(name_of, value, names)
        elif isinstance(value, dict):
            _find(name_of, value.values(), names)
