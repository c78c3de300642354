"""Piecewise-smooth operations: on which side of a threshold, or which of several inputs, each of their units is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.secants import EXTREMES, POOLS, THRESHOLDS
from epk_gp.core.model import StopForwardError

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
    return isinstance(x, Tensor) and x.ndim > 1 and len(x) == num_rows and not x.is_complex()


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
