"""Derivatives averaged operation by operation: every operation's inputs move along a separate straight segment.

The network is called once, with the weights at the start of a stretch. Every tensor that moves carries its value for
the weights at the end. Each function's multipliers m, `y_end - y_start = <m, x_end - x_start>`, replace its derivative
(docs/theory.md, section 11).

Between two states of the weights a network's output changes by exactly `<m, change of the weights>` if every operation
in it propagates multipliers m with that property: no integral along a path of the weights is needed.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from epk_gp.autodiff import averages
from epk_gp.autodiff.averages import Ends, Outputs, Pull, end_of, identity, middle_of, moves, moves_to, pulled
from epk_gp.autodiff.interception import (
    ADDED_PRODUCTS,
    CASTS,
    CHANNELS_LAST,
    CONSTANT,
    IN_PLACE,
    JOINTLY_LINEAR,
    KINKED,
    LINEAR,
    POOLS,
    PRELU,
    PRODUCTS,
    QUOTIENTS,
    SCALED,
    SMOOTH,
    WRITTEN_OUT,
    FunctionCall,
    ParameterInterception,
    Watch,
    functions_named,
    has_rows,
    is_in_place,
    spread_mark,
    substituted,
    tensors_in,
)
from epk_gp.core.model import BATCH_MARK
from epk_gp.core.torch_overrides import normalise_by_statistics


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` by products."""
    if dropout_p:
        raise _unsupported(F.scaled_dot_product_attention, "drops some of its numbers")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    return scores.softmax(dim=-1) @ value


def _cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
    """Compute `F.cross_entropy` of classes by functions that are linear in logarithms of probabilities."""
    smoothing = options.pop("label_smoothing", 0.0)
    if target.is_floating_point() or smoothing or not options.keys() <= {"ignore_index", "reduction"}:
        return NotImplemented
    return F.nll_loss(F.log_softmax(x, dim=x.ndim > 1), target, weight, **options)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive + slope.view(-1, *[1] * (x.ndim - 2)) * (x - positive)


def _quotient(x: Any, y: Any = None, **options: Any) -> Any:
    """Compute a quotient whose divisor moves by a product."""
    return NotImplemented if options or not moves(y) else torch.mul(y.reciprocal(), x)


def _overwrite(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(function(x, *args, **kwargs))


# Functions that are made of others. Each returns NotImplemented for a call that it does not cover.
_WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    **WRITTEN_OUT,
    **dict.fromkeys(PRELU, _prelu),
    **dict.fromkeys(QUOTIENTS, _quotient),
    **{func: partial(_overwrite, IN_PLACE[name]) for name in IN_PLACE for func in functions_named(name)},
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    Tensor.register_hook: lambda *_: RemovableHandle(OrderedDict()),  # hooks of gradients, which averages do not use
    Tensor.retain_grad: lambda *_: None,
}
_OF_TWO_FACTORS = {*PRODUCTS, *QUOTIENTS, *JOINTLY_LINEAR, *ADDED_PRODUCTS}
_SOFTMAX = {*functions_named("softmax", "log_softmax", "logsumexp"), F.softmax, F.log_softmax}
_SCALES = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: ("input", "mean", "variance", "weight", "bias", "use_input_stats", "momentum", "eps"),
    F.batch_norm: ("input", "mean", "variance", "weight", "bias", "training", "momentum", "eps"),
    normalise_by_statistics: ("input", "mean", "variance", "weight", "bias", "eps"),
}


@final
class SecantDerivatives(ParameterInterception):
    """Calls a network with the weights at the start of a stretch, and follows the value of everything at its end.

    Args:
        params: The weights at the start by name: the same tensor objects with which the network will be called.
        direction: The change to the weights at the end.
        num_rows: n, the number of inputs.
        watch: Receives the calls that take a parameter, or a tensor made only of parameters. Moving tensors with rows
            are replaced in these calls by the mean of both ends; for a normalisation, its scaled input is replaced.
        statistics: Moving statistics of every row at the start, (n, ...), which replace those in `params`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        num_rows: int,
        watch: Watch | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(params, watch)
        self.num_rows = num_rows
        for name, step in direction.items():
            moves_to(params[name], params[name].detach() + step)
        self.statistics = dict[int, Tensor]()
        for name, rows in (statistics or {}).items():
            self.statistics[id(params[name])] = moves_to(rows, rows.detach() + direction[name])
            setattr(rows, BATCH_MARK, num_rows)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call; if weights move any of its arguments, with secants instead of derivatives."""
        kwargs = kwargs or {}
        moving = [value for value in tensors_in((args, kwargs)) if moves(value)]
        if not moving or func in CONSTANT:
            result = func(*args, **kwargs)
            if not moving and any(value.requires_grad for value in tensors_in((result,))):
                raise _unsupported(func, "takes what was computed where torch's functions are not seen")
        else:
            result = self._call(func, args, kwargs, moving)
        spread_mark(result, (args, kwargs))
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moving: list[Tensor]) -> Any:
        name = getattr(func, "__name__", "")
        if func in _WRITTEN_OUT:
            with self:
                result = _WRITTEN_OUT[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _SCALES and not all(value is not _input(args, kwargs) for value in moving):
            return self._normalise(func, args, kwargs)
        if func in _SOFTMAX and (result := self._softmax(name, args, kwargs)) is not None:
            return result
        if func in CASTS and (x := args[0]).is_floating_point() and func(*args, **kwargs).itemsize < x.itemsize:
            return x
        if func is F.embedding:
            args, kwargs = (args[0], FunctionCall(func, args, kwargs, {}, []).held["weight"]), {}
        are_numbers = all(value.is_floating_point() or value.is_complex() for value in moving)
        if are_numbers and func in _OF_TWO_FACTORS:
            result = self._product(func, args, kwargs, moving)
        elif are_numbers and (func in LINEAR or name == "__get__"):
            result = self._linear(func, args, kwargs)
        else:
            result = self._secant(func, args, kwargs, moving)
        self._tell(func, args, kwargs, result)
        return result

    def _tell(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Report a call that takes parameters, or tensors made of them; results made only of these are followed."""
        tensors = list(tensors_in((args, kwargs)))
        names = [self.name_of[id(value)] for value in tensors if id(value) in self.name_of]
        if not names:
            return
        by_id = {id(value): middle_of(value) for value in tensors if moves(value) and has_rows(value)}
        call = FunctionCall(func, substituted(args, by_id), substituted(kwargs, by_id), self.name_of, names)
        is_layer = func is not F.embedding and call.in_slots and len(result) == self.num_rows
        if not is_layer and not any(map(has_rows, tensors)):
            for value in tensors_in((result,)):
                self.followed.append(value)
                self.name_of.setdefault(id(value), names[0])
        if self.watch is not None:
            self.watch(call, result)

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that is linear in all moving arguments: autograd's derivative is the average."""
        if is_in_place(func) and not moves(args[0]):
            moves_to(args[0], args[0].clone())
        result = func(*args, **kwargs)
        if func not in LINEAR and not any(True for _ in tensors_in((result,))):
            return result  # a shape or a dtype
        return self._carry(result, _at_end(func, args, kwargs))

    def _carry(self, result: Any, end: Any) -> Any:
        """Attach the results at the end to the results of a call."""
        for value, other in zip(tensors_in((result,)), tensors_in((end,)), strict=True):
            if value.requires_grad or not torch.equal(value, other):
                moves_to(value, other)
        return result

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moving: list[Tensor]) -> Any:
        """Make a call that is linear in each of two factors: each gradient uses the other factor's middle."""
        slots = FunctionCall(func, args, kwargs, {}, []).held
        terms = [slots.get("bias"), args[0] if func in ADDED_PRODUCTS else None]
        factors = [value for value in moving if not any(value is term for term in terms)]
        if len(factors) < 2:
            return self._linear(func, args, kwargs)
        if len(factors) > 2:
            raise _unsupported(func, f"has {len(factors)} factors that move, not two")
        if all(value.is_complex() for value in factors):
            raise _unsupported(func, "takes complex numbers that move")
        with torch.no_grad():
            value = func(*args, **kwargs)
        (a, b), (a_mid, b_mid) = factors, [middle_of(value).detach() for value in factors]
        added = [term for term in terms if term is not None and moves(term)]
        pulls = _product_pulls(func, kwargs, a_mid, b_mid)
        if pulls is None:
            carried = {id(x): pulled(middle_of(x).detach(), (x, identity)) for x in (*factors, *added)}
            graph = func(*substituted(args, carried), **substituted(kwargs, carried))
            result = pulled(value, (graph, identity))
        else:
            sums = [(term, partial(torch.Tensor.sum_to_size, size=term.shape)) for term in added]
            result = pulled(value, (a, pulls[0]), (b, pulls[1]), *sums)
        return moves_to(result, _at_end(func, args, kwargs))

    def _normalise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that normalises its input, then scales and shifts it by the middles of its weights."""
        given = {"use_input_stats": func is F.instance_norm, **dict(zip(_SCALES[func], args, strict=False)), **kwargs}
        given = {{"running_mean": "mean", "running_var": "variance"}.get(name, name): given[name] for name in given}
        x, W, b = given["input"], given.get("weight"), given.get("bias")
        eps: Any = given.get("eps", None if func is F.rms_norm else 1e-5)
        if func is F.group_norm or given.get("use_input_stats"):
            with self:
                flat = x.reshape(len(x), given.get("num_groups", x.shape[1]), -1)
                z = self._normalised(flat, (-1,), eps, centres=True).view_as(x)
        elif given.get("training"):
            raise _unsupported(func, "takes the statistics of a batch")
        elif "variance" in given:
            z = self._by_statistics(x, given, eps)
        else:
            dims = tuple(range(-len(given["normalized_shape"]), 0))
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            z = self._normalised(x, dims, eps, centres=func is not F.rms_norm)
        if has_rows(x):
            setattr(z, BATCH_MARK, self.num_rows)
        if W is None and b is None:
            return z
        shape = (-1,) if func in CHANNELS_LAST else (-1, *[1] * (x.ndim - 2))
        if len(given.get("normalized_shape", ())) > 1:
            shape = tuple(given["normalized_shape"])

        def both(value: Any) -> list[Any]:
            return [None, None] if value is None else [own.detach().view(shape) for own in (value, end_of(value))]

        scales, shifts = both(W), both(b)
        ends = [_scaled(*each) for each in zip((z.detach(), end_of(z)), scales, shifts, strict=True)]
        middle, arms = middle_of(z).detach(), list[tuple[Tensor, Pull]]([(z, identity)])
        if W is not None:
            arms = [(z, partial(torch.mul, torch.lerp(scales[0], scales[1], 0.5)))]
            arms.append((W, lambda grad: (grad * middle).sum_to_size(scales[0].shape).view_as(W)))
        if b is not None:
            arms.append((b, lambda grad: grad.sum_to_size(shifts[0].shape).view_as(b)))
        result = moves_to(pulled(ends[0], *arms), ends[1])
        places = JOINTLY_LINEAR[func]
        rest = [None] * (max(places.values()))
        for name, place in places.items():
            rest[place - 1] = given.get(name)
        if "variance" in given:
            rest[:2] = given["mean"], given["variance"]
        self._tell(func, (z, *rest), {}, result)
        return result

    def _normalised(self, x: Tensor, dims: tuple[int, ...], eps: float, *, centres: bool) -> Tensor:
        (start, end), pull = averages.normalised((x.detach(), end_of(x)), dims, eps, centres=centres)
        return moves_to(pulled(start, (x, pull)), end)

    def _by_statistics(self, x: Tensor, given: Mapping[str, Any], eps: float) -> Tensor:
        """Normalise by statistics, which may move: a difference, a product and a power."""
        rows = [self.statistics.get(id(value), value) for value in (given["mean"], given["variance"])]
        shapes = [(*value.shape, *[1] * (x.ndim - 2)) for value in rows]
        with self:
            mean, variance = (value.reshape(shape) for value, shape in zip(rows, shapes, strict=True))
            result: Tensor = (x - mean) * (variance + eps).rsqrt()
            return result

    def _softmax(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Make a call of a softmax, of its logarithm, or of the logarithm of its sum."""
        x, dim = _input(args, kwargs), args[1] if len(args) > 1 else kwargs.get("dim")
        dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), x.dtype)
        if not isinstance(dim, int) or dtype.itemsize > x.itemsize:
            return None
        ends = x.detach(), end_of(x)
        if name == "logsumexp":
            (start, end), weights = averages.Exponentials(ends, dim).log_sum()
            result = moves_to(pulled(start, (x, partial(torch.mul, weights))), end)
            keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            with self:
                return result if keeps else result.squeeze(dim)
        is_log = name != "softmax"
        (start, end), pull = averages.log_softmax(ends, dim) if is_log else averages.Exponentials(ends, dim).softmax()
        return moves_to(pulled(start, (x, pull)), end)

    def _secant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moving: list[Tensor]) -> Any:
        """Make a call that is not linear in its moving arguments."""
        inputs = list({id(value): value for value in moving if value.is_floating_point()}.values())
        places = [value for value in moving if not value.is_floating_point()]
        may_write = is_in_place(func) or kwargs.get("inplace", False) or any(value is True for value in args)
        copies = [value.detach().clone() for value in inputs] if may_write else inputs
        with torch.no_grad():
            result = _call_with(func, args, kwargs, inputs, *copies)
            others = [end_of(value).clone() if copies is not inputs else end_of(value) for value in inputs]
            end = _call_with(func, args, kwargs, (*inputs, *places), *others, *map(end_of, places))
        results, ends = list(tensors_in((result,))), list(tensors_in((end,)))
        if not any(value.is_floating_point() or value.is_complex() for value in results):
            if not results and result != end:
                raise _unsupported(func, "makes a Python number of what moves")
            return self._carry(result, end)
        if any(value.is_complex() for value in (*moving, *results)):
            raise _unsupported(func, "takes complex numbers that move")
        if not inputs and all(torch.equal(*both) for both in zip(results, ends, strict=True)):
            return self._carry(result, end)
        if not inputs:
            raise _unsupported(func, "makes numbers of comparisons that come out otherwise at both ends")
        if places and func in _ROUTING:
            raise _unsupported(func, "takes places that both states choose otherwise, as a mixture of experts does")
        found = self._averaged(func, args, kwargs, (inputs, places), list(zip(results, ends, strict=True)))
        if copies is not inputs and any(value is copies[0] for value in results):  # an in-place call
            end_of(inputs[0]).copy_(ends[0])
            return moves_to(inputs[0].copy_(found[0]), end_of(inputs[0]))
        return found[0] if isinstance(result, Tensor) else type(result)(found)

    def _averaged(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moving: Any, results: list[Ends]
    ) -> list[Tensor]:
        """Return the results of a call, with graphs and attached ends."""
        inputs, places = moving
        x = inputs[0]
        call = partial(_call_with, func, args, kwargs, inputs)
        ends = [(value.detach(), end_of(value)) for value in inputs]
        if func in POOLS and not places and len(inputs) == 1 and len(results) == 1:
            return [self._pool(func, args, kwargs, x)]
        if (func in SMOOTH or func in KINKED) and not places and len(inputs) == 1 and results[0][0].shape == x.shape:
            slope = _slope(func, args, kwargs, x, call, results[0])
            return [moves_to(pulled(results[0][0], (x, partial(torch.mul, slope))), results[0][1])]
        rows = [has_rows(value) for value in inputs]
        lengths = {value.shape[:1] for value in (*inputs, *(value for both in results for value in both))}
        if any(rows) and not (all(rows) and lengths == {(self.num_rows,)}):
            raise _unsupported(
                func, "does not return one entry for each input" if all(rows) else "mixes weights and inputs"
            )
        floats = [value.is_floating_point() for value, _ in results]

        def function(node: float, *values: Tensor) -> Outputs:
            by_id = {id(value): end_of(value) if node > 0.5 else value for value in places}
            again = _call_with(func, substituted(args, by_id), substituted(kwargs, by_id), inputs, *values)
            return tuple(value for value, is_float in zip(tensors_in((again,)), floats, strict=True) if is_float)

        kept = [both for both, is_float in zip(results, floats, strict=True) if is_float]
        apply_segment: Any = averages.SegmentSecant.apply
        found = iter(apply_segment(function, ends, (kept, any(rows)), *inputs))
        values = [next(found) if is_float else value for (value, _), is_float in zip(results, floats, strict=True)]
        self._carry(values, [end for _, end in results])
        return values

    def _pool(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
        """Pool: the largest input at the start has a share of the gradient, in proportion to its lead."""
        options = {name: value for name, value in kwargs.items() if name != "return_indices"}
        ends = x.detach(), end_of(x)
        (y0, first), (y1, second) = (_call_with(POOLS[func], args, options, [x], value) for value in ends)
        first, second = first.flatten(2), second.flatten(2)
        leads = [value.flatten(2).gather(2, first) - value.flatten(2).gather(2, second) for value in ends]
        lead = leads[0] - leads[1]
        share = torch.where(lead > 0, leads[0] / lead, 0.5)

        def pull(grad: Tensor) -> Tensor:
            result = grad.new_zeros(*x.shape[:2], x.shape[2:].numel())
            grad = grad.flatten(2)
            result.scatter_add_(2, first, share * grad).scatter_add_(2, second, (1 - share) * grad)
            return result.view(x.shape)

        return moves_to(pulled(y0, (x, pull)), y1)


_ROUTING = {
    *functions_named(
        "__getitem__", "__setitem__", "gather", "index_select", "take_along_dim", "masked_select", "index_add",
        "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    ),
    F.embedding,
}  # fmt: skip


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _at_end(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call with its arguments' values at the end."""
    by_id = {id(value): end_of(value) for value in tensors_in((args, kwargs)) if moves(value)}
    with torch.no_grad():
        return func(*substituted(args, by_id), **substituted(kwargs, by_id))


def _scaled(z: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None:
        return z if shift is None else z + shift
    return z * scale if shift is None else torch.addcmul(shift, z, scale)


def _product_pulls(func: Any, kwargs: Mapping[str, Any], a: Tensor, b: Tensor) -> Any:
    """Return the functions that pull back to two factors, from their middles; None to ask torch."""
    name = func.__name__
    if name in {"mul", "multiply", "__mul__", "__rmul__"}:
        return averages.product_pulls(a, b)
    if func is F.linear:
        to_x, to_W = averages.matmul_pulls(a, b.mT)
        return to_x, lambda grad: to_W(grad).mT
    is_addmm = name == "addmm" and not kwargs
    if (name in {"matmul", "__matmul__", "mm", "bmm"} or is_addmm) and min(a.ndim, b.ndim) > 1:
        return averages.matmul_pulls(a, b)
    return None


def _slope(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, call: Any, y: Ends) -> Tensor:
    """Return the slope of an elementwise function between both ends."""
    name, ends = func.__name__, (x.detach(), end_of(x))
    if name in averages.SLOPES:
        return averages.SLOPES[name](ends, y)
    exponent = args[1] if name == "pow" and args[0] is x and len(args) > 1 else None
    if (slope := averages.power_slope(ends, exponent)) is not None:
        return slope
    limit: Tensor | float = 0.0 if func in KINKED else torch.finfo(x.dtype).eps ** (1 / 3)
    if name in SCALED:
        limit = limit * ends[0].abs()
    fits = len(list(tensors_in((args, kwargs)))) == 1
    return averages.quotient_slope(call, ends, y, limit, fits=fits)


def _call_with(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    moving: Sequence[Tensor],
    *values: Tensor,
) -> Any:
    """Call a function with other values for the moving arguments."""
    by_id = {id(old): value for old, value in zip(moving, values, strict=True)}
    return func(*substituted(args, by_id), **substituted(dict(kwargs), by_id))


class UnsupportedAverageError(ValueError):
    """The derivative of an operation cannot be averaged between two states."""


def _unsupported(func: Any, why: str) -> UnsupportedAverageError:
    return UnsupportedAverageError(
        f"layerwise() cannot average {getattr(func, '__name__', repr(func))}: it {why}. Take chords(every=k)."
    )
