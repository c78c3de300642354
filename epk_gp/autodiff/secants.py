"""Derivatives averaged operation by operation: every operation's inputs move along a straight segment of their own.

Rows come in pairs, 2i and 2i + 1: the same input at the start and at the end of a stretch of the weights. Each function
has multipliers m with `y_end - y_start = <m, x_end - x_start>`, whatever it computes; see docs/theory.md, section 11.

Between two states of the weights a network's output changes by `<m, change of the weights>` exactly if every operation
in it propagates multipliers m with that property, in place of its derivative at one point: no integral along a path of
the weights is needed (docs/theory.md, section 11).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.interception import (
    JOINTLY_LINEAR,
    LINEAR_MAPS,
    NORMALISATIONS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    WRITTEN_OUT,
    InterpolatedWeights,
    functions_named,
    has_rows,
    spread_mark,
    substituted,
    tensors_in,
)
from epk_gp.core.model import BATCH_MARK
from epk_gp.core.torch_overrides import normalise_by_statistics


def _at(*thresholds: float) -> Callable[..., tuple[float, ...]]:
    return lambda *args, **kwargs: thresholds


def _given(**defaults: float | None) -> Callable[..., tuple[float, ...]]:
    """Return what gives the thresholds among a call's arguments behind the first, which have names and defaults."""

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


Outputs = tuple[Tensor, ...]

# Gauss-Legendre nodes on [-1, 1], of the derivative of what is no elementwise function.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)

# A remainder below so many eps of the outputs' size is rounding, and is not distributed.
_ROUNDING = 64


def start_and_end(x: Shaped[Tensor, "E ..."]) -> tuple[Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]]:
    """Return the first and the second row of every pair."""
    start, end = x.unflatten(0, (-1, 2)).unbind(1)
    return start, end


def both_rows(value: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "E ..."]:
    """Return what belongs to a pair for each of its rows."""
    return value.repeat_interleave(2, dim=0)


def mean_of_rows(grad: Shaped[Tensor, "E ..."]) -> Shaped[Tensor, "E ..."]:
    """Return the mean over each pair, for each of its rows: the hook of a function that is linear in each argument."""
    return both_rows(grad.unflatten(0, (-1, 2)).mean(1))


class ElementwiseSecant(torch.autograd.Function):
    """A function of single numbers, with the slope between the two rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], has_kinks: bool) -> Tensor:
        """Compute the function and its slopes.

        Args:
            ctx: What the backward pass needs.
            x: (E, ...).
            function: Works entry by entry.
            has_kinks: Its slope between near numbers may be that of none of them.
        """
        y = function(x.clone())
        (start, end), (y_start, y_end) = start_and_end(x), start_and_end(y)
        change = end - start
        # a difference of near numbers is rounding; the derivative in the middle is off by the square of the difference
        limit = 0.0 if has_kinks else torch.finfo(x.dtype).eps ** (1 / 3)
        is_near = change.abs() <= limit * torch.maximum(start.abs(), end.abs())
        slope = (y_end - y_start) / change
        if bool(is_near.any()):
            with torch.enable_grad():
                middle = ((start + end) / 2).requires_grad_()
                (derivative,) = torch.autograd.grad(function(middle.clone()).sum(), middle)
            slope = torch.where(is_near, derivative, slope)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Multiply by the slopes."""
        (slope,) = ctx.saved_tensors
        return both_rows(slope) * mean_of_rows(grads[0]), None, None


class PoolSecant(torch.autograd.Function):
    """The largest of several inputs: the first row's until the second row's catches up with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the pool, and for how long the largest inputs of either row are the largest.

        Args:
            ctx: What the backward pass needs.
            x: (E, channels, ...).
            pool: Returns the largest inputs, and their places among those of the channel.
        """
        y, indices = pool(x)
        first, second = start_and_end(indices.flatten(2))
        leads = [row.gather(2, first) - row.gather(2, second) for row in start_and_end(x.flatten(2))]
        lead = leads[0] - leads[1]
        share = torch.where(lead > 0, leads[0] / lead, 0.5)
        ctx.save_for_backward(first, second, share)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """Give each of the two its share."""
        first, second, share = ctx.saved_tensors
        grad = grads[0].flatten(2).unflatten(0, (-1, 2)).mean(1)
        result = grad.new_zeros(len(first), ctx.shape[1], ctx.shape[2:].numel())
        result.scatter_add_(2, first, share * grad).scatter_add_(2, second, (1 - share) * grad)
        return both_rows(result.unflatten(2, ctx.shape[2:])), None


class SegmentSecant(torch.autograd.Function):
    """Any function of rows: its derivative's mean over the segment between both rows, and what that leaves.

    The mean is taken at four Gauss-Legendre nodes. What it leaves of the change of the outputs is distributed in
    proportion to the changes of the inputs: the smallest correction that leaves nothing.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """Compute the function.

        Args:
            ctx: What the backward pass needs.
            function: Maps the inputs to its floating-point outputs, row by row.
            inputs: (E, ...) each.
        """
        outputs = function(*(x.clone() for x in inputs))
        ctx.function, ctx.num_inputs = function, len(inputs)
        ends = [start_and_end(y) for y in outputs]  # the outputs may be overwritten
        ctx.save_for_backward(
            *inputs, *(end - start for start, end in ends), *(start.abs() + end.abs() for start, end in ends)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Average the derivative, and distribute what is left."""
        inputs, rest = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        cotangents = [mean_of_rows(grad) for grad in grads]
        means = _mean_gradients(ctx.function, inputs, cotangents)
        changes = [end - start for start, end in map(start_and_end, inputs)]
        of_pairs = [cotangent[::2] for cotangent in cotangents]
        left = _inner(rest[: len(grads)], of_pairs) - _inner(means, changes)
        size = _inner(rest[len(grads) :], [cotangent.abs() for cotangent in of_pairs])
        length = _inner(changes, changes)
        is_left = (left.abs() > _ROUNDING * torch.finfo(left.dtype).eps * size) & (length > 0)
        factor = torch.where(is_left, left / length, 0.0)
        corrected = [
            mean + factor.view(-1, *[1] * (change.ndim - 1)) * change
            for mean, change in zip(means, changes, strict=True)
        ]
        return None, *(both_rows(value) for value in corrected)


def _mean_gradients(
    function: Callable[..., Outputs], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Average the contracted derivative over the segments between the rows, two nodes at a time."""
    means = [torch.zeros_like(start_and_end(x)[0]) for x in inputs]
    for first in range(0, len(_NODES), 2):
        places = inputs[0].new_tensor((1 + _NODES[first : first + 2]) / 2)
        weights = inputs[0].new_tensor(_WEIGHTS[first : first + 2] / 2)
        here = []
        for x in inputs:
            start, end = start_and_end(x)
            along = places.repeat(len(start)).view(-1, *[1] * (x.ndim - 1))
            here.append(torch.lerp(both_rows(start), both_rows(end), along).requires_grad_())
        with torch.enable_grad():
            outputs = function(*(x.clone() for x in here))
            found = torch.autograd.grad(outputs, here, cotangents, allow_unused=True, materialize_grads=True)
        for mean, grad in zip(means, found, strict=True):
            mean += torch.einsum("nk...,k->n...", grad.unflatten(0, (-1, 2)), weights)
    return means


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Sum the products of all entries, row by row."""
    return torch.stack([(a * b).reshape(len(a), -1).sum(1) for a, b in zip(left, right, strict=True)]).sum(0)


PRELU = {F.prelu, torch.prelu, torch.Tensor.prelu}

# Smooth functions of single numbers, which may have options.
SMOOTH = {
    *functions_named(
        "tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal",
        "square", "pow", "__pow__", "__rpow__", "sin", "cos", "tan", "sinh", "cosh", "asinh", "atan", "arctan", "erf",
        "tanh_", "sigmoid_", "exp_", "sqrt_", "rsqrt_", "square_",
    ),
    F.tanh, F.sigmoid, F.softplus, F.silu, F.gelu, F.mish, F.softsign, F.tanhshrink, F.logsigmoid,
}  # fmt: skip
KINKED = {*THRESHOLDS} - PRELU

# Linear in all of their tensors that can move (dropout as in evaluation), or of no number that moves: of a shape.
LINEAR = {
    *LINEAR_MAPS,
    *SUMS,
    *functions_named("add_", "sub_", "__iadd__", "__isub__", "positive", "unfold", "type_as"),
    torch.Tensor.to, torch.Tensor.double, torch.Tensor.float,
    *functions_named("size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_contiguous", "detach"),
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.unfold, F.fold, F.pad, F.pixel_shuffle, F.pixel_unshuffle, F.interpolate,
    *functions_named(
        "index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_",
        "__setitem__", "copy_", "fill_", "zero_",
    ),
    *(getattr(torch.fft, kind + name) for name in ("fft", "fft2", "fftn") for kind in ("", "i", "r", "ir")),
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    *functions_named(
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty", "new_tensor",
    ),
}  # fmt: skip


@final
class SecantDerivatives(TorchFunctionMode):
    """Give every operation of a forward pass the mean derivative between the two rows of each pair.

    Rows 2i and 2i + 1 must be the same input, at t = 0 and at t = 1. The mode must see a call before the modes that
    record layers and move weights.
    """

    def __init__(self, params: Mapping[str, Tensor], moved: InterpolatedWeights) -> None:
        """Take the parameters, and what moves them; before that is entered."""
        super().__init__()
        self.moved = moved
        held = ((value, moved.direction.get(id(value))) for value in params.values())
        self.middle = {id(value): value.detach() + 0.5 * step for value, step in held if step is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call; where weights move any of its arguments, with secants in place of derivatives."""
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        params = [value for value in tensors if id(value) in self.moved.direction]
        rows = [value for value in tensors if value.requires_grad and id(value) not in self.moved.direction]
        if not (params or rows) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        result = self._call(func, args, kwargs, (params, rows))
        spread_mark(result, (args, kwargs))
        return result

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moving: tuple[list[Tensor], list[Tensor]]
    ) -> Any:
        params, rows = moving
        if func in LINEAR or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is normalise_by_statistics:
            return self._normalise(*args, **kwargs)
        if func in WRITTEN_OUT:
            with self:
                result = WRITTEN_OUT[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in QUOTIENTS and any(value is args[1] for value in (*params, *rows)):
            with self:
                return torch.mul(args[1].reciprocal(), args[0])
        if params:
            return self._with_params(func, args, kwargs, len(rows))
        if func in PRODUCTS or func in QUOTIENTS or (func in JOINTLY_LINEAR and func not in NORMALISATIONS):
            if len(rows) > 2:
                raise _unsupported(func, f"has {len(rows)} factors that move, not two")
            return self._averaged(func(*args, **kwargs))
        if not all(has_rows(value) for value in rows):
            raise _unsupported(func, "sees weights and no rows")
        return _secant(func, args, kwargs, rows)

    def _averaged(self, result: Any) -> Any:
        """Average the gradient over the two rows of each pair: the operation is linear in each of two factors."""
        if isinstance(result, Tensor) and result.requires_grad:
            if len(result) != len(self.moved.t):
                raise _unsupported(None, "moves the rows of a batch out of the first dimension")
            result.register_hook(mean_of_rows)
        return result

    def _with_params(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_others: int) -> Any:
        """Make a call that takes parameters: linear in these, and in one other argument at most."""
        if func in PRELU:
            x, slope = args
            with self:
                positive = torch.relu(x)
                return positive + slope.view(-1, *[1] * (x.ndim - 2)) * (x - positive)
        if func in NORMALISATIONS and num_others:
            return self._affine(func, args, kwargs)
        if not num_others and not any(has_rows(value) for value in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # of weights alone: those that follow the line are linear in them
        if num_others > 1:
            raise _unsupported(func, f"has {num_others + 1} factors that move, not two")
        return self._averaged(func(*args, **kwargs))

    def _affine(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that normalises its input, then scales and shifts it: by weights in the middle of their way."""
        x = args[0] if args else kwargs["input"]
        leaf = x.detach().requires_grad_()  # its gradient is that of the term below
        setattr(leaf, BATCH_MARK, len(leaf))
        at_weights: Tensor = func(*substituted(args, {id(x): leaf}), **substituted(kwargs, {id(x): leaf}))
        in_middle = _secant(func, substituted(args, self.middle), substituted(kwargs, self.middle), [x])
        return self._averaged(at_weights + (in_middle - in_middle.detach()))

    def _normalise(
        self, x: Tensor, mean: Tensor, variance: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Any:
        """Normalise by moving statistics: a sum, a product and a power, each with its secants."""
        with torch._C.DisableTorchFunction():  # the other modes would move them once more
            own = [self.moved.of_rows(value, len(x)) for value in (mean, variance)]
        shape = (len(x), -1, *[1] * (x.ndim - 2))
        own = [value if value.ndim > 1 else value.expand(len(x), -1) for value in own]
        for value in own:
            setattr(value, BATCH_MARK, len(value))
        with self:
            normalised: Tensor = (x - own[0].view(shape)) * (own[1] + eps).rsqrt().view(shape)
        if weight is None and bias is None:
            return normalised
        zeros = own[0].new_zeros(own[0].shape[1])
        return self._averaged(normalise_by_statistics(normalised, zeros, zeros + (1 - eps), weight, bias, eps))


def _secant(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], moving: list[Tensor]) -> Any:
    """Make a call that is not linear in its rows."""
    (x, *others) = moving
    if any(value.is_complex() for value in moving):
        raise _unsupported(func, "takes complex numbers that move")
    if func in POOLS and not others and not (kwargs.get("return_indices") or len(args) > 6):
        options = {name: value for name, value in kwargs.items() if name != "return_indices"}
        pool = partial(_call_with, POOLS[func], args, options, [x])
        return _apply(PoolSecant, x, pool)
    call = partial(_call_with, func, args, kwargs, moving)
    with torch.no_grad():
        copies = [value.clone() for value in moving]
        result = call(*copies)
    if any(value is result for value in tensors_in((args, kwargs))):
        raise _unsupported(func, "writes what moves into a tensor that does not")
    results = list(tensors_in((result,)))
    if not any(value.is_floating_point() for value in results):
        return func(*args, **kwargs)
    if any(not value.ndim or len(value) != len(x) for value in results):
        raise _unsupported(func, "does not return one entry per row")
    if (func in SMOOTH or func in KINKED) and not others and results[0].shape == x.shape:
        found = _apply(ElementwiseSecant, x, call, func in KINKED)
        return found if results[0] is not copies[0] else x.copy_(found)
    floats = [value.is_floating_point() for value in results]

    def differentiable(*values: Tensor) -> tuple[Tensor, ...]:
        again = list(tensors_in((call(*values),)))
        return tuple(value for value, is_float in zip(again, floats, strict=True) if is_float)

    if result is copies[0]:  # in place
        (found,) = _apply(SegmentSecant, differentiable, *(value.clone() for value in moving))
        return x.copy_(found)
    found = iter(_apply(SegmentSecant, differentiable, *moving))
    if isinstance(result, Tensor):
        return next(found)
    return type(result)([next(found) if is_float else value for value, is_float in zip(results, floats, strict=True)])


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def _call_with(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], moving: list[Tensor], *values: Tensor
) -> Any:
    """Call a function with other values in the place of what moves."""
    by_id = {id(old): value for old, value in zip(moving, values, strict=True)}
    return func(*substituted(args, by_id), **substituted(dict(kwargs), by_id))


def _unsupported(func: Any, why: str) -> ValueError:
    name = "what this network calls" if func is None else getattr(func, "__name__", repr(func))
    return ValueError(f"layerwise() cannot average {name}: it {why}. Take chords(every=k).")
