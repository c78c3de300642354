"""Observe and redirect a network's use of its parameters, for any modules.

If one argument of an operation has a tangent and another has none, torch's forward mode creates the missing one from
symbolic zeros and asks its references in Python for the shape of every result: measured, 0.1 to 0.3 ms per operation, a
third of the time of a small convolutional network. The code here avoids such operations. A convolution with w and one
with d also become one call, which unfolds its input once: 0.7 to 0.9 of the time of two calls.

A bare parameter that is multiplied or added, the transpose of a tied weight, a slice or a multiple of a parameter:
every result that is linear in w equals, at w + t d, its value at w plus t times its value at d.

A forward pass under one of these modes calls the same functions as usual. A mode sees every call that takes a parameter
(through `torch.overrides.TorchFunctionMode`), so a parameter that is used twice, outside its module or inside a
function is never missed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.core.model import BATCH_MARK
from epk_gp.core.torch_overrides import normalise_by_statistics, split_dual


def add_multiple(value: Tensor, t: Tensor, along: Tensor) -> Tensor:
    """Return value + t along; any of the three may carry a tangent."""
    (v, dv), (u, du), (a, da) = (split_dual(x) for x in (value, t, along))
    result: Tensor = v + u * a
    tangent = dv if du is None else du * a if dv is None else dv + du * a
    if da is not None:
        tangent = u * da if tangent is None else tangent + u * da
    return result if tangent is None else fwAD.make_dual(result, tangent.expand_as(result))


def functions_named(*names: str) -> tuple[Callable[..., Any], ...]:
    """List the functions and methods of torch that have these names."""
    return tuple(
        getattr(where, name)
        for name in names
        for where in (torch, torch.Tensor)
        if callable(getattr(where, name, None))
    )


# Linear in all their tensors together: a tensor that is not a parameter is zero along the direction.
LINEAR_MAPS = {
    *functions_named(
        "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "view", "view_as",
        "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to",
        "repeat", "repeat_interleave", "tile", "ravel", "chunk", "split", "tensor_split", "unbind", "narrow", "select",
        "contiguous", "clone", "flip", "roll", "tril", "triu", "diag", "diagonal", "sum", "mean", "cumsum", "neg",
        "negative", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "index_select", "gather",
        "take_along_dim", "view_as_real", "view_as_complex", "conj", "real", "imag", "__getitem__", "__neg__",
    ),
    torch.Tensor.to, torch.Tensor.double, torch.Tensor.float, torch.Tensor.type_as,
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")),
}  # fmt: skip

# Also linear, and their numbers are terms: they are zero along the direction too.
SUMS = {*functions_named("add", "sub", "subtract", "rsub", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__")}

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
    """Mark the results of a call that has a marked argument."""
    results = list(filterfalse(has_rows, tensors_in((result,))))
    marked = next(filter(has_rows, tensors_in(arguments)), None) if results else None
    if marked is not None:
        for value in results:
            setattr(value, BATCH_MARK, getattr(marked, BATCH_MARK))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """List the tensors among values, including those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def substituted(values: Any, by_id: Mapping[int, Tensor]) -> Any:
    """Replace tensors, by their ids, among values and in lists, tuples and dictionaries."""
    if isinstance(values, list | tuple):
        return type(values)(substituted(value, by_id) for value in values)
    if isinstance(values, dict):
        return {name: substituted(value, by_id) for name, value in values.items()}
    return by_id.get(id(values), values) if isinstance(values, Tensor) else values


def is_in_place(func: Any) -> bool:
    """Return whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in {"__setitem__", "__iadd__", "__isub__"} or (name.endswith("_") and not name.endswith("__"))


# Functions that are linear in (weight, bias) together: positions of these arguments.
JOINTLY_LINEAR: dict[Callable[..., Any], dict[str, int]] = {
    F.linear: {"weight": 1, "bias": 2},
    F.bilinear: {"weight": 2, "bias": 3},
    F.embedding: {"weight": 1},
    F.layer_norm: {"weight": 2, "bias": 3},
    F.group_norm: {"weight": 2, "bias": 3},
    F.batch_norm: {"weight": 3, "bias": 4},
    F.instance_norm: {"weight": 3, "bias": 4},
    F.rms_norm: {"weight": 2},
    normalise_by_statistics: {"weight": 3, "bias": 4},
    **{
        function: {"weight": 1, "bias": 2}
        for function in (
            F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        )
    },
}  # fmt: skip
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
NORMALISATIONS = (F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, normalise_by_statistics)
LAYERS = (F.linear, *CONVOLUTIONS, *NORMALISATIONS)
CHANNELS_LAST = (F.linear, F.layer_norm, F.rms_norm)


def _at(*thresholds: float) -> Callable[..., tuple[float, ...]]:
    return lambda *args, **kwargs: thresholds


def _given(**defaults: float | None) -> Callable[..., tuple[float, ...]]:
    """Return a function that reads the thresholds from a call's further arguments, with names and defaults."""

    def thresholds(x: Any, *args: Any, **kwargs: Any) -> tuple[float, ...]:
        named = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        return tuple(float(named[name]) for name in defaults if isinstance(named[name], int | float))

    return thresholds


# Functions that are smooth between thresholds of their first argument.
THRESHOLDS: dict[Callable[..., Any], Callable[..., tuple[float, ...]]] = {
    **dict.fromkeys(
        (
            *functions_named("relu", "relu_", "abs", "abs_"), F.relu, F.relu_, F.leaky_relu, F.leaky_relu_, F.rrelu,
            F.elu, F.elu_, F.selu, F.selu_, F.celu, F.celu_, F.prelu,
        ),
        _at(0.0),
    ),
    F.relu6: _at(0.0, 6.0),
    **dict.fromkeys((F.hardswish, F.hardsigmoid), _at(-3.0, 3.0)),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _given(min_val=-1.0, max_val=1.0)),
    **dict.fromkeys(
        (getattr(F, name) for name in ("threshold", "threshold_", "_threshold") if hasattr(F, name)),  # untyped names
        _given(threshold=None),
    ),
    **dict.fromkeys(functions_named("clamp", "clamp_", "clip", "clip_"), _given(min=None, max=None)),
    **dict.fromkeys(functions_named("clamp_min", "clamp_min_"), _given(min=None)),
    **dict.fromkeys(functions_named("clamp_max", "clamp_max_"), _given(max=None)),
    F.softshrink: lambda x, lambd=0.5: (-lambd, lambd),
}  # fmt: skip
POOLS: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(F, name): getattr(F, f"{name}_with_indices")
    for name in (f"{kind}max_pool{dims}d" for kind in ("", "adaptive_") for dims in (1, 2, 3))
}
# Functions that pick the largest (1) or smallest (-1) entry along dimensions, or of two tensors.
EXTREMES: dict[Callable[..., Any], int] = {
    **dict.fromkeys(functions_named("amax", "max", "maximum"), 1),
    **dict.fromkeys(functions_named("amin", "min", "minimum"), -1),
}

PRELU = {F.prelu, torch.prelu, torch.Tensor.prelu}

# Smooth functions of single numbers, possibly with options; and functions whose slopes depend on the number's size.
SMOOTH = {
    *functions_named(
        "tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal",
        "square", "pow", "__pow__", "__rpow__", "sin", "cos", "tan", "sinh", "cosh", "asinh", "atan", "arctan", "erf",
        "tanh_", "sigmoid_", "exp_", "sqrt_", "rsqrt_", "square_",
    ),
    F.tanh, F.sigmoid, F.softplus, F.silu, F.gelu, F.mish, F.softsign, F.tanhshrink, F.logsigmoid,
}  # fmt: skip
KINKED = {*THRESHOLDS} - PRELU
SCALED = {"pow", "log2", "log10", "log1p"}

# Linear in all of their tensors that can move; dropout as in evaluation mode.
LINEAR = {
    *LINEAR_MAPS,
    *SUMS,
    *functions_named(
        "add_", "sub_", "__iadd__", "__isub__", "neg_", "positive", "unfold", "detach", "masked_fill", "masked_fill_",
        "where", "masked_select", "index_fill", "trapezoid", "squeeze_", "unsqueeze_", "t_", "transpose_",
    ),
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.unfold, F.fold, F.pad, F.pixel_shuffle, F.pixel_unshuffle, F.interpolate, F.nll_loss, F.embedding_bag,
    *functions_named(
        "index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_",
        "__setitem__", "copy_", "fill_", "zero_",
    ),
    *(getattr(torch.fft, kind + name) for name in ("fft", "fft2", "fftn") for kind in ("", "i", "r", "ir")),
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip

# Results that are a shape or a dtype only.
CONSTANT = {
    *functions_named(
        "size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_complex", "is_contiguous", "zeros_like",
        "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_tensor",
    ),
}  # fmt: skip

# Casts, except those to fewer digits.
CASTS = {*functions_named("to", "type", "float", "half", "bfloat16", "type_as")}
ADDED_PRODUCTS = {*functions_named("addmm", "addbmm", "baddbmm")}
IN_PLACE: dict[str, Callable[..., Any]] = {
    "__imul__": torch.mul, "mul_": torch.mul, "multiply_": torch.mul, "__itruediv__": torch.div, "div_": torch.div,
    "divide_": torch.div, "softmax_": torch.softmax, "pow_": torch.pow, "__ipow__": torch.pow,
}  # fmt: skip


# Functions of torch that take many parameters at once are replaced by functions that are linear in them: a recurrent
# layer or an attention module is one call with all of its weights. After the replacement, each weight belongs to a
# linear layer, with rows first.
State = tuple[Tensor, ...]
_ATTENTION = inspect.signature(F.multi_head_attention_forward)
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]


def _lstm_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    i, f, g, o = (x + _affine(state[0], weights, 1)).chunk(4, dim=1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (F.linear(h, weights[-1]) if len(weights) % 2 else h), c  # if odd, the last one is a projection


def _gru_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    own_r, own_z, own_n = x.chunk(3, dim=1)
    r, z, n = _affine(state[0], weights, 1).chunk(3, dim=1)
    new = (own_n + (own_r + r).sigmoid() * n).tanh()
    return (new + (own_z + z).sigmoid() * (state[0] - new),)


def _plain_gates(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, state, weights: (activation(x + _affine(state[0], weights, 1)),)


def _affine(x: Tensor, weights: Sequence[Tensor], k: int) -> Tensor:
    """Multiply the inputs (k = 0) or the hidden state (k = 1) by its weight, and add its bias if there is one."""
    return F.linear(x, weights[k], weights[2 + k] if len(weights) > 3 else None)


def _cell(gates: Cell) -> Callable[..., Any]:
    def run(x: Tensor, hidden: Any, *weights: Tensor | None) -> Any:
        held = [value for value in weights if value is not None]
        state = gates(_affine(x, held, 0), (hidden,) if isinstance(hidden, Tensor) else tuple(hidden), held)
        return state[0] if isinstance(hidden, Tensor) else state

    return run


def _recurrent_layers(gates: Cell) -> Callable[..., Any]:
    def run(x: Tensor, hidden: Any, flat: Any, *options: Any) -> Any:
        if isinstance(flat, Tensor) or len(options) != 6 or not isinstance(options[0], bool):  # packed sequences
            return NotImplemented
        _, num_layers, dropout, training, bidirectional, batch_first = options
        if training and dropout:
            return NotImplemented
        directions = 2 if bidirectional else 1
        size = len(flat) // (num_layers * directions)
        groups = [flat[k : k + size] for k in range(0, len(flat), size)]
        initial = [hidden] if isinstance(hidden, Tensor) else list(hidden)
        rows = x if batch_first else x.transpose(0, 1)
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                weights, state = groups[number], tuple(value[number] for value in initial)
                steps = _affine(rows, weights, 0).unbind(1)
                hs = []
                for step in reversed(steps) if direction else steps:
                    state = gates(step, state, weights)
                    hs.append(state[0])
                outputs.append(torch.stack(hs[::-1] if direction else hs, dim=1))
                last.append(state)
            rows = torch.cat(outputs, dim=2) if bidirectional else outputs[0]
        final = (torch.stack(values) for values in zip(*last, strict=True))
        return (rows if batch_first else rows.transpose(0, 1)), *final

    return run


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Compute `F.multi_head_attention_forward` with rows first: (E, L, D) inside, (L, E, D) outside."""
    bound = _ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    W, b, mask, padding = (given[name] for name in ("in_proj_weight", "in_proj_bias", "attn_mask", "key_padding_mask"))
    others = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if query.ndim != 3 or others or given["add_zero_attn"] or (given["is_causal"] and mask is None):
        return NotImplemented
    rows = query.transpose(0, 1)
    if W is not None and query is key and key is value:
        q, k, v = F.linear(rows, W, b).chunk(3, dim=2)
    else:
        separate = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        weights = separate if W is None else W.chunk(3)
        biases = (None, None, None) if b is None else b.chunk(3)
        inputs = (rows, key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (F.linear(*layer) for layer in zip(inputs, weights, biases, strict=True))
    heads = given["num_heads"]
    q, k, v = (tensor.unflatten(2, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))  # E H L d
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if mask is not None and mask.ndim == 3:  # a mask for each head
        mask = mask.view(len(rows), heads, *mask.shape[1:])
    for one in (mask, None if padding is None else padding[:, None, None]):
        if one is not None:
            scores = scores.masked_fill(one, -torch.inf) if one.dtype == torch.bool else scores + one
    drops = bool(given["training"] and given["dropout_p"])
    share = F.dropout(scores.softmax(dim=3), given["dropout_p"]) if drops else scores.softmax(dim=3)
    mixed = (share @ v).transpose(1, 2).flatten(2)
    output = F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if given["training"]:
        output = output.contiguous()  # in torch's memory order, which later dropout uses
    if not given["need_weights"]:
        return output, None
    return output, (share.mean(dim=1) if given["average_attn_weights"] else share)


def _addmm(bias: Tensor, x: Tensor, W: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Compute x W + bias for rows that were joined with their positions, (E L, n), as (E, L, n)."""
    num_rows = getattr(x, BATCH_MARK, 0)
    if not num_rows or len(x) % num_rows or (beta, alpha) != (1, 1):
        return NotImplemented
    return (x.unflatten(0, (num_rows, -1)) @ W + bias).flatten(0, 1)


# Each function returns NotImplemented for a call that it does not cover.
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _recurrent_layers(_lstm_gates),
    torch.gru: _recurrent_layers(_gru_gates),
    torch.rnn_tanh: _recurrent_layers(_plain_gates(torch.tanh)),
    torch.rnn_relu: _recurrent_layers(_plain_gates(torch.relu)),
    torch.lstm_cell: _cell(_lstm_gates),
    torch.gru_cell: _cell(_gru_gates),
    torch.rnn_tanh_cell: _cell(_plain_gates(torch.tanh)),
    torch.rnn_relu_cell: _cell(_plain_gates(torch.relu)),
    F.multi_head_attention_forward: _attention,
    torch.addmm: _addmm,
}


class UnsupportedParameterUseError(ValueError):
    """The network uses its parameters in another way than on the rows from which its plan was made."""


class FunctionCall:
    """A call that takes observed parameters.

    Attributes:
        function: The called function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        params: Names of the observed parameters among them, repeated as they occur.
        input: The first argument.
        slots: Positions of weight and bias if the function is jointly linear in them, otherwise empty.
        held: The arguments at these positions, by "weight" and "bias"; None for missing ones.
        names: The parameters among them, by the same keys; None for other tensors.
        statistics: The mean and the variance of `normalise_by_statistics`; empty for another function.
        in_slots: Whether all observed parameters are at these positions, or are these statistics.
    """

    __slots__ = ("args", "function", "held", "in_slots", "input", "kwargs", "names", "params", "slots", "statistics")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: dict[int, str], params: list[str]
    ) -> None:
        self.function, self.args, self.kwargs, self.params = function, args, kwargs, params
        self.input: Any = args[0] if args else kwargs.get("input")
        self.slots = JOINTLY_LINEAR.get(function, {})
        self.held = {name: args[k] if k < len(args) else kwargs.get(name) for name, k in self.slots.items()}
        self.names = dict(zip(self.held, map(name_of.get, map(id, self.held.values())), strict=True))
        self.statistics = args[1:3] if function is normalise_by_statistics else ()
        num_found = sum(name is not None for name in self.names.values())
        self.in_slots = len(params) == num_found + sum(id(value) in name_of for value in self.statistics)

    def run(self, values: Mapping[str, Any] | None = None) -> Any:
        """Make the call, with other values of "input", "weight" and "bias" if given."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in (values or {}).items():
            position = 0 if name == "input" else self.slots[name]
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return self.function(*args, **kwargs)


def called_with_both(call: FunctionCall, along: Mapping[str, Tensor], *, joins: bool) -> list[Tensor]:
    """Make a call that is linear in its input, which may carry a tangent, with the weights w and with the direction d.

    Args:
        call: The call.
        along: The direction of weight and bias, by these names.
        joins: Whether channels of the output belong to entries of the weights, so that both calls can be one.
    """

    def both(x: Tensor, held: Mapping[str, Any], along: Mapping[str, Any]) -> list[Tensor]:
        if not joins:
            return [call.run({**held, "input": x}), call.run({**along, "input": x})]
        pairs = {name: (value, along.get(name)) for name, value in held.items()}
        joined = {name: None if a is None or b is None else torch.cat([a, b]) for name, (a, b) in pairs.items()}
        return list(call.run({**joined, "input": x}).chunk(2, dim=1))

    primal, tangent = split_dual(call.input)
    results = both(primal, call.held, along)
    if tangent is None:
        return results
    tangents = both(tangent, {**call.held, "bias": None}, {**along, "bias": None})
    return [fwAD.make_dual(*pair) for pair in zip(results, tangents, strict=True)]


def along_direction(call: FunctionCall, direction: Mapping[int, Tensor]) -> Any:
    """Return the value along a direction of a call that is linear in its parameters; NotImplemented for other calls.

    Args:
        call: The call.
        direction: The direction of each parameter, by the parameter's id.
    """
    function, args, kwargs = call.function, call.args, call.kwargs
    tensors = list(tensors_in((args, kwargs)))
    moving = [value for value in tensors if id(value) in direction]
    if function is F.embedding:
        return FunctionCall(function, args, kwargs, {}, []).run({"weight": direction[id(moving[0])]})
    if function in LINEAR_MAPS or function in SUMS:
        constant = [value for value in tensors if id(value) not in direction and value.is_floating_point()]
        direction = {**direction, **{id(value): torch.zeros_like(value) for value in constant}}
        if function in SUMS:
            args = tuple(0 if isinstance(value, int | float) else value for value in args)
    elif function is torch.prelu and len(moving) == 1 and len(args) == 2 and moving[0] is args[1]:
        x, slope = args[0], direction[id(args[1])]
        return x.where(x < 0, 0.0) * (slope.view(-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else slope)
    elif len(moving) > 1 or not (function in PRODUCTS or (function in QUOTIENTS and moving[0] is tensors[0])):
        return NotImplemented
    return function(*substituted(args, direction), **substituted(kwargs, direction))


Watch = Callable[[FunctionCall | None, Any], None]


class ParameterInterception(TorchFunctionMode):
    """Observes the calls that take given parameters, or tensors made only of them; these are recognised by identity.

    Args:
        params: The parameters by name: the same tensor objects with which the network will be called.
        watch: Receives every call's result, and the call itself if it takes a parameter.
    """

    def __init__(self, params: Mapping[str, Tensor], watch: Watch | None) -> None:
        super().__init__()
        self.name_of = {id(value): name for name, value in params.items()}
        self.watch = watch
        self.calls_fused_functions = False
        self.followed: list[Tensor] = []  # tensors made of parameters: their ids stay in use while they are here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, through `intercept` if it takes a parameter."""
        kwargs, call = kwargs or {}, None
        params = list[str]()
        for value in tensors_in((*args, *kwargs.values())):
            if id(value) in self.name_of:
                params.append(self.name_of[id(value)])
        if params and func in WRITTEN_OUT:
            with self:
                result = WRITTEN_OUT[func](*args, **kwargs)
            if result is not NotImplemented:
                self.calls_fused_functions = True
                return result
        if params:
            call = FunctionCall(func, args, kwargs, self.name_of, params)
            result = self.intercept(call)
        else:
            result = func(*args, **kwargs)
        if self.watch is not None:
            self.watch(call, result)
        spread_mark(result, (*args, *kwargs.values()))
        return result

    def intercept(self, call: FunctionCall) -> Any:
        """Make a call that takes parameters; tensors made only of these are observed like parameters."""
        result = call.run()
        is_layer = call.in_slots and call.function in LAYERS  # its input may be an initial state of every row
        if not is_layer and not any(map(has_rows, tensors_in((call.args, call.kwargs)))):
            self.followed += tensors_in((result,))
            self.name_of |= {id(value): call.params[0] for value in tensors_in((result,))}
        return result

    def of_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Return a parameter at every row, (E, ...); a tensor that does not move is returned unchanged."""
        return value

    def normalise(self, call: FunctionCall) -> Any:
        """Call `normalise_by_statistics`, which is not linear in its statistics, with the statistics of every row."""
        x, *held = call.args[:5]
        of_rows = (None if value is None else self.of_rows(value, len(x)) for value in held)
        return call.function(x, *of_rows, *call.args[5:])


def has_tensors(result: Any) -> bool:
    """Return whether a call's result can depend on a parameter's value, unlike a shape or a dtype."""
    return next(tensors_in((result,)), None) is not None


def require_rows(x: Any, result: Tensor, num_rows: int, name: str) -> None:
    """Raise if a call does not take and return all rows.

    Args:
        x: Its input.
        result: Its result.
        num_rows: E.
        name: A parameter of the call.

    Raises:
        UnsupportedParameterUseError: Rows are missing.
    """
    rows = len(x) if isinstance(x, Tensor) and x.ndim else 0
    if rows != num_rows or len(result) != num_rows:
        raise UnsupportedParameterUseError(f"the layer of {name} must see all {num_rows} rows: it saw {rows}.")


def windows_of(x: Tensor, options: Mapping[str, Any], kernel: torch.Size) -> Tensor:
    """Return the inputs of a convolution at each position: (E, channels, *kernel, *positions)."""
    stride, dilation = (_per_dimension(options.get(key, 1), len(kernel)) for key in ("stride", "dilation"))
    x = F.pad(x, _padding(options.get("padding", 0), kernel, dilation))
    for dim, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, spread * (size - 1) + 1, step)[..., ::spread]
    dims = len(kernel)
    return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[int]:
    """Return the zeros before and after each dimension, last dimension first."""
    if padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(width, width) for width in _per_dimension(0 if padding == "valid" else padding, len(kernel))]
    return [width for side in reversed(sides) for width in side]
