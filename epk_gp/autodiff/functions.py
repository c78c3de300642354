"""Properties of torch's functions: their kinks, and whether they are smooth or linear."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epk_gp.autodiff.interception import LINEAR_MAPS, SUMS, functions_named


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
