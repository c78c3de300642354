"""Piecewise-smooth operations: on which side of a threshold, or which of several inputs, each of their units is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.core.model import StopForwardError


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


WATCHED = {*THRESHOLDS, *POOLS, *EXTREMES}


@dataclass(frozen=True, eq=False)
class Preactivations:
    """The inputs of one call of a piecewise-smooth function.

    Attributes:
        inputs: (E, U); for a threshold the distance from it.
        argmax: (E, V) index into U of the input that each of the V outputs picks; None for thresholds.
        edge: Where the gradient with respect to the function's output can be taken, if it was asked for.
    """

    inputs: Float[Tensor, "E U"]
    argmax: Int64[Tensor, "E V"] | None
    edge: GradientEdge | None


class PreactivationRecorder(TorchFunctionMode):
    """Keep the inputs of every call of a piecewise-smooth function that sees all rows."""

    def __init__(self, num_rows: int, *, keep_edges: bool) -> None:
        """Start without a call.

        Args:
            num_rows: E.
            keep_edges: Keep the gradient edges of the calls' outputs too.
        """
        super().__init__()
        self.calls: list[Preactivations] = []
        self.num_rows, self.keep_edges = num_rows, keep_edges

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Record the call's inputs, then make it."""
        kwargs = kwargs or {}
        if func not in WATCHED:
            return func(*args, **kwargs)
        x, rest = _first(args, kwargs)
        sees_all_rows = _has_rows(x, self.num_rows)
        thresholds = THRESHOLDS[func](x, *args[1:], **rest) if sees_all_rows and func in THRESHOLDS else ()
        kept = x.detach().flatten(1).clone() if thresholds else None
        result = func(*args, **kwargs)
        output = result if isinstance(result, Tensor) else result[0]
        edge = get_gradient_edge(output) if self.keep_edges and output.requires_grad else None
        if kept is not None:
            self.calls += [
                Preactivations(kept - threshold if threshold else kept, None, edge) for threshold in thresholds
            ]
        elif sees_all_rows and func in POOLS and result is output:
            self.calls.append(_pool_units(func, (x, *args[1:]), rest, edge))
        elif sees_all_rows and func in EXTREMES:
            picked = _picked(EXTREMES[func] * x.detach(), EXTREMES[func], args[1:], rest, output)
            self.calls += [] if picked is None else [Preactivations(*picked, edge)]
        return result


class EventReader(TorchFunctionMode):
    """Read the inputs of given units in a forward pass, and stop it (`StopForwardError`) after the last of them."""

    def __init__(self, num_rows: int, requested: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Start without a value.

        Args:
            num_rows: E.
            requested: Rows and units, each (B,), by number of the call in `PreactivationRecorder.calls`.
        """
        super().__init__()
        self.num_rows, self.requested = num_rows, requested
        self.values: dict[int, Tensor] = {}
        self._number, self._last = 0, max(requested)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Read the call's inputs, then make it."""
        kwargs = kwargs or {}
        if func not in WATCHED:
            return func(*args, **kwargs)
        x, rest = _first(args, kwargs)
        sees_all_rows = _has_rows(x, self.num_rows)
        if sees_all_rows and func in THRESHOLDS:
            for threshold in THRESHOLDS[func](x, *args[1:], **rest):
                self._read(x, threshold)
            return func(*args, **kwargs)
        if sees_all_rows and func in POOLS:
            # the last unit's inputs are read before the call, whose result is not needed then
            returns_tensor = len(args) <= 2 and not rest.get("return_indices")
            result = None if returns_tensor and self._number == self._last else func(*args, **kwargs)
            if result is None or isinstance(result, Tensor):
                self._read(x, 0.0)
            return result
        result = func(*args, **kwargs)
        if sees_all_rows:
            output = result if isinstance(result, Tensor) else result[0]
            picked = _picked(EXTREMES[func] * x.detach(), EXTREMES[func], args[1:], rest, output)
            if picked is not None:
                self._read(picked[0], 0.0)
        return result

    def _read(self, x: Tensor, threshold: float) -> None:
        if self._number in self.requested:
            rows, units = self.requested[self._number]
            self.values[self._number] = x.detach().flatten(1)[rows, units] - threshold
        if self._number == self._last:
            raise StopForwardError
        self._number += 1


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    return (args[0] if args else kwargs.get("input")), rest


def _has_rows(x: Any, num_rows: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1 and len(x) == num_rows


def _pool_units(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], edge: GradientEdge | None
) -> Preactivations:
    x = args[0].detach()
    options = {key: value for key, value in kwargs.items() if key != "return_indices"}
    _, indices = POOLS[func](x, *args[1:6], **options)
    channels, places = x.shape[1], x[0, 0].numel()
    offset = places * torch.arange(channels, device=x.device).view(1, -1, 1)
    return Preactivations(x.flatten(1), (indices.flatten(2) + offset).flatten(1), edge)


def _picked(
    x: Tensor, sign: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the inputs (E, U) of a choice and the indices (E, V) of those chosen; None if it mixes the rows."""
    second = args[0] if args else kwargs.get("other", kwargs.get("dim"))
    dims: tuple[int, ...] = (1,)
    if isinstance(second, Tensor):
        if len(output) != len(x) or output.ndim < 2:
            return None
        both = torch.stack([x.expand_as(output), (sign * second.detach()).expand_as(output)], dim=1)
        x = both
    else:
        dims = tuple(d % x.ndim for d in ((second,) if isinstance(second, int) else second or ()))
    if not dims or 0 in dims:
        return None
    last = tuple(range(-len(dims), 0))
    lines = x.movedim(dims, last).flatten(-len(dims))
    number = torch.arange(x[0].numel(), device=x.device).view(1, *x.shape[1:]).movedim(dims, last).flatten(-len(dims))
    argmax = number.expand_as(lines).gather(-1, lines.argmax(dim=-1, keepdim=True))
    return x.flatten(1), argmax.flatten(1)
