"""Derivatives averaged operation by operation: every operation's inputs move along a straight segment of their own.

Between two states of the weights a network's output changes by `<m, change of the weights>` exactly if every operation
in it propagates multipliers m with that property, in place of its derivative at one point: no integral along a path of
the weights is needed (docs/theory.md, section 11).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.interception import (
    JOINTLY_LINEAR,
    NORMALISATIONS,
    InterpolatedWeights,
)
from epk_gp.autodiff.interception import (
    LINEAR_MAPS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    functions_named,
    has_rows,
    spread_mark,
    substituted,
    tensors_in,
)
from epk_gp.autodiff.secants import POOLS, THRESHOLDS
from epk_gp.autodiff.secants import ElementwiseSecant, PoolSecant, SegmentSecant, mean_of_rows
from epk_gp.autodiff.written_out import WRITTEN_OUT, write_out
from epk_gp.core.model import BATCH_MARK
from epk_gp.core.torch_overrides import normalise_by_statistics

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

# Linear in all of their tensors that can move (dropout as in evaluation), or of no number that moves (a shape).
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
}  # fmt: skip

# They take shape and dtype of a tensor, and none of its numbers.
LIKE = {
    *functions_named("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *functions_named("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
}


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
        if func in LINEAR or func in LIKE or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is normalise_by_statistics:
            return self._normalise(*args, **kwargs)
        if func in WRITTEN_OUT and (result := write_out(self, func, args, kwargs)) is not NotImplemented:
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
        """Let the gradient of what is linear in each of two factors be the mean over both rows of a pair."""
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
        setattr(leaf, BATCH_MARK, True)
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
            setattr(value, BATCH_MARK, True)
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
