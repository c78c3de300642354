"""The functions of torch that are smooth only piece by piece: where their pieces meet, and which input they pick."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def _at(*thresholds: float) -> Callable[..., tuple[float, ...]]:
    return lambda *args, **kwargs: thresholds


def _range(
    x: Any,
    min: Any = None,  # noqa: A002  # torch's argument names
    max: Any = None,  # noqa: A002
    *args: Any,
    **kwargs: Any,
) -> tuple[float, ...]:
    return tuple(float(bound) for bound in (min, max) if isinstance(bound, int | float))


def _minimum(x: Any, min: Any = None, *args: Any, **kwargs: Any) -> tuple[float, ...]:  # noqa: A002
    return _range(x, min)


def _maximum(x: Any, max: Any = None, *args: Any, **kwargs: Any) -> tuple[float, ...]:  # noqa: A002
    return _range(x, max)


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, *args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (min_val, max_val)


def _threshold(x: Any, threshold: float, *args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (threshold,)


def _softshrink(x: Any, lambd: float = 0.5, *args: Any, **kwargs: Any) -> tuple[float, ...]:
    return (-lambd, lambd)


# Functions that are smooth between thresholds of their first argument.
THRESHOLDS: dict[Callable[..., Any], Callable[..., tuple[float, ...]]] = {
    **{
        function: _at(0.0)
        for function in (
            F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, F.leaky_relu,
            F.leaky_relu_, F.rrelu, F.elu, F.elu_, F.selu, F.selu_, F.celu, F.celu_, F.prelu, torch.abs,
            torch.Tensor.abs, torch.Tensor.abs_,
        )
    },
    F.relu6: _at(0.0, 6.0),
    F.hardswish: _at(-3.0, 3.0),
    F.hardsigmoid: _at(-3.0, 3.0),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    **{
        getattr(F, name): _threshold  # untyped names of torch's
        for name in ("threshold", "threshold_", "_threshold")
        if hasattr(F, name)
    },
    **dict.fromkeys((torch.clamp, torch.Tensor.clamp, torch.Tensor.clamp_), _range),
    **dict.fromkeys((torch.clip, torch.Tensor.clip, torch.Tensor.clip_), _range),
    **dict.fromkeys((torch.clamp_min, torch.Tensor.clamp_min, torch.Tensor.clamp_min_), _minimum),
    **dict.fromkeys((torch.clamp_max, torch.Tensor.clamp_max, torch.Tensor.clamp_max_), _maximum),
    F.softshrink: _softshrink,
}  # fmt: skip
POOLS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.max_pool1d: F.max_pool1d_with_indices,
    F.max_pool2d: F.max_pool2d_with_indices,
    F.max_pool3d: F.max_pool3d_with_indices,
    F.adaptive_max_pool1d: F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d: F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d: F.adaptive_max_pool3d_with_indices,
}
# Functions that pick the largest (1) or smallest (-1) entry along dimensions, or of two tensors.
EXTREMES: dict[Callable[..., Any], int] = {
    **dict.fromkeys((torch.amax, torch.Tensor.amax, torch.max, torch.Tensor.max), 1),
    **dict.fromkeys((torch.amin, torch.Tensor.amin, torch.min, torch.Tensor.min), -1),
    **dict.fromkeys((torch.maximum, torch.Tensor.maximum), 1),
    **dict.fromkeys((torch.minimum, torch.Tensor.minimum), -1),
}
