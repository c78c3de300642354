"""Where piecewise-smooth operations switch along a training step: event location (docs/engine.md, section 8).

`t -> f(w + t d)` has a kink where a ReLU's input crosses its threshold or a max-pool's largest input changes. These
events are scalar functions of t that a forward pass computes anyway: their zeros are found by bracketing, many at a
time, without a gradient.

All nodes share the passes: what a unit sees is a scalar function of t, whichever node's output depends on it. In the
first layers it is linear in t, and its zero follows from the ends.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.dense import group_rows
from epk_gp.autodiff.directional import WeightSegment, values
from epk_gp.autodiff.secants import EXTREMES, POOLS, THRESHOLDS
from epk_gp.core.losses import apply_head
from epk_gp.core.model import StopForwardError
from epk_gp.core.torch_overrides import disable_fused_attention

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


# Bound on the iterations of the Illinois method. Events that are linear in t end after one; the others converge
# superlinearly (order 1.44), and a position that is not exact only costs another split.
MAX_ITERATIONS = 40


@dataclass(frozen=True, eq=False)
class BracketedEvents:
    """Events that may hide a kink: the sign of `inputs[first] - inputs[second]` differs at an interval's ends.

    Attributes:
        interval: (B,) index of the interval.
        call: (B,) number of the operation's call in the forward pass.
        first: (B,) index of the unit.
        second: (B,) index of the other unit of a pool, or -1 for a threshold.
        at_a: (B,) value at the interval's start.
        at_b: (B,) value at its end.
    """

    interval: Int64[Tensor, " B"]
    call: Int64[Tensor, " B"]
    first: Int64[Tensor, " B"]
    second: Int64[Tensor, " B"]
    at_a: Float[Tensor, " B"]
    at_b: Float[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Kinks:
    """Where units switch along the step.

    Attributes:
        interval: (B,) index of the interval.
        position: (B,) position on the step.
        is_searched: (E,) whether each interval was searched: the network calls piecewise-smooth functions.
    """

    interval: Int64[Tensor, " B"]
    position: Float[Tensor, " B"]
    is_searched: Bool[Tensor, " E"]


def values_at_ends(
    segment: WeightSegment, X: Shaped[Tensor, "n ..."]
) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"], Bool[Tensor, " n"]]:
    """Evaluate f at both ends of the step, and tell for which rows a unit stands differently there.

    What fused functions hide is not seen.
    """
    starts, ends, switches = list[Tensor](), list[Tensor](), list[Tensor]()
    zeros = segment.w.new_zeros(len(X))
    for rows in torch.arange(len(X), device=X.device).split(min(segment.rows_per_kink_search, segment.rows_per_block)):
        calls = list[list[Preactivations]]()
        for t, outputs in ((zeros[rows], starts), (zeros[rows] + 1, ends)):
            with PreactivationRecorder(len(rows), keep_edges=False) as recorder:
                outputs.append(values(segment, X[rows], t))
            calls.append(recorder.calls)
        is_seen = segment.net.plan.supports_interpolation
        switches.append(_stand_differently(calls, len(rows)).to(X.device) & is_seen)
    return torch.cat(starts), torch.cat(ends), torch.cat(switches)


def may_switch(
    segment: WeightSegment, X: Shaped[Tensor, "E ..."], a: Float[Tensor, " E"], b: Float[Tensor, " E"]
) -> Bool[Tensor, " E"]:
    """Tell by forward passes alone whether a unit stands differently at a_e and b_e, whatever depends on it."""
    switches = torch.zeros_like(a, dtype=torch.bool)
    if not len(X) or not segment.net.plan.supports_interpolation:
        return switches
    for rows in torch.arange(len(X), device=X.device).split(segment.rows_per_kink_search):
        calls = list[list[Preactivations]]()
        for t in (a[rows], b[rows]):
            params, moved = segment.interpolated(t)
            recorder = PreactivationRecorder(len(rows), keep_edges=False)
            with torch.no_grad(), disable_fused_attention(), recorder, moved:
                segment.net.model(params, X[rows])
            calls.append(recorder.calls)
        switches[rows] = _stand_differently(calls, len(rows)).to(a.device)
    return switches


def _stand_differently(calls: list[list[Preactivations]], num_rows: int) -> Bool[Tensor, " E"]:
    """Compare the calls of two forward passes, row by row."""
    found = torch.zeros(num_rows, dtype=torch.bool)
    for at_a, at_b in zip(*calls, strict=True):
        if at_a.argmax is None or at_b.argmax is None:
            changes = at_a.inputs.sign() * at_b.inputs.sign() < 0
        else:
            changes = at_a.argmax != at_b.argmax
        found = found.to(changes.device) | changes.any(dim=1)
    return found


def locate_kinks(
    segment: WeightSegment, X: Shaped[Tensor, "E ..."], a: Float[Tensor, " E"], b: Float[Tensor, " E"]
) -> Kinks:
    """Find where in (a_e, b_e) a unit that affects f switches for row e.

    Args:
        segment: The step.
        X: E inputs.
        a: Starts of the E intervals.
        b: Their ends.

    Returns:
        The switches. A unit that switches an even number of times is not seen; a network that does not support
        interpolation has none.
    """
    is_searched = torch.zeros_like(a, dtype=torch.bool)
    intervals, positions = [torch.zeros(0, dtype=torch.int64, device=X.device)], [a[:0]]
    if not len(X) or not segment.net.plan.supports_interpolation:
        return Kinks(intervals[0], positions[0], is_searched)
    for rows in torch.arange(len(X), device=X.device).split(segment.rows_per_kink_search):
        start = _preactivations(segment, X[rows], a[rows])
        if not start:
            continue
        is_searched[rows] = True
        events = _bracket_events(start, _preactivations(segment, X[rows], b[rows]))
        intervals.append(rows[events.interval])
        positions.append(_solve(segment, X[rows], a[rows], b[rows], events))
    return Kinks(torch.cat(intervals), torch.cat(positions), is_searched)


def _bracket_events(
    start: list[tuple[Preactivations, Tensor]], end: list[tuple[Preactivations, Tensor]]
) -> BracketedEvents:
    """List the units that affect f and stand differently at both ends."""
    columns: list[tuple[Tensor, ...]] = []
    for number, ((at_a, affects_a), (at_b, affects_b)) in enumerate(zip(start, end, strict=True)):
        affects_output = affects_a | affects_b
        if at_a.argmax is None or at_b.argmax is None:
            changes = (at_a.inputs.sign() * at_b.inputs.sign() < 0) & affects_output
            interval, unit = changes.nonzero(as_tuple=True)
            values = at_a.inputs[interval, unit], at_b.inputs[interval, unit]
            call, no_second = torch.full_like(interval, number), torch.full_like(interval, -1)
            columns.append((interval, call, unit, no_second, *values))
            continue
        interval, output = ((at_a.argmax != at_b.argmax) & affects_output).nonzero(as_tuple=True)
        first, second = at_a.argmax[interval, output], at_b.argmax[interval, output]
        lead_a, lead_b = (units.inputs[interval, first] - units.inputs[interval, second] for units in (at_a, at_b))
        crosses = lead_a * lead_b < 0
        column = (interval, torch.full_like(interval, number), first, second, lead_a, lead_b)
        columns.append(tuple(value[crosses] for value in column))
    return BracketedEvents(*(torch.cat(parts) for parts in zip(*columns, strict=True)))


def _preactivations(segment: WeightSegment, X: Tensor, t: Tensor) -> list[tuple[Preactivations, Tensor]]:
    """List the units' inputs at t, and which of their outputs a random combination of f depends on."""
    model = segment.net.model
    params = {name: value.detach().requires_grad_() for name, value in model.unflatten(segment.w).items()}
    _, moved = segment.interpolated(t, params)
    with torch.enable_grad(), disable_fused_attention():
        recorder = PreactivationRecorder(len(X), keep_edges=True)
        with recorder, moved:  # what `moved` writes out is seen by the other
            z = model(params, X)
        f = apply_head(z, segment.head)
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(f.shape[1], generator=generator, dtype=torch.float64).to(f)
        edges = [units.edge for units in recorder.calls if units.edge is not None]
        grads = torch.autograd.grad(f @ v, edges, torch.ones_like(f[:, 0]), allow_unused=True) if edges else ()
    grad_of = dict(zip([id(edge) for edge in edges], grads, strict=True))
    listed = []
    for units in recorder.calls:
        grad = grad_of.get(id(units.edge))
        outputs = units.inputs if units.argmax is None else units.argmax
        affects = torch.zeros_like(outputs, dtype=torch.bool) if grad is None else grad.reshape(len(X), -1) != 0
        listed.append((units, affects))
    return listed


def _solve(segment: WeightSegment, X: Tensor, a: Tensor, b: Tensor, events: BracketedEvents) -> Tensor:
    """Solve all events by the Illinois method (Dowell & Jarratt 1971), which keeps them bracketed."""
    low, high = a[events.interval].clone(), b[events.interval].clone()
    at_low, at_high = events.at_a.clone(), events.at_b.clone()
    scale = at_low.abs() + at_high.abs()
    root = low.clone()
    active = torch.arange(len(root), device=X.device)
    side = torch.zeros_like(active)
    for _ in range(MAX_ITERATIONS):
        if not len(active):
            break
        lo, hi, f_lo, f_hi = low[active], high[active], at_low[active], at_high[active]
        guess = (lo * f_hi - hi * f_lo) / (f_hi - f_lo)
        value = _event_values(segment, X, guess, events, active)
        root[active] = guess
        left = value * f_lo > 0  # the guess replaces the lower end
        low[active] = torch.where(left, guess, lo)
        high[active] = torch.where(left, hi, guess)
        again_low, again_high = left & (side[active] == 1), ~left & (side[active] == -1)
        at_low[active] = torch.where(left, value, torch.where(again_high, f_lo / 2, f_lo))
        at_high[active] = torch.where(left, torch.where(again_low, f_hi / 2, f_hi), value)
        side[active] = torch.where(left, 1, -1)
        eps = torch.finfo(X.dtype).eps if X.is_floating_point() else torch.finfo(a.dtype).eps
        done = (value.abs() <= 4 * eps * scale[active]) | ((high[active] - low[active]) <= 4 * eps)
        active = active[~done]
    return root


def _event_values(segment: WeightSegment, X: Tensor, t: Tensor, events: BracketedEvents, active: Tensor) -> Tensor:
    """Evaluate events, early layers' first: a forward pass stops at the last unit that is asked for."""
    model = segment.net.model
    value = torch.zeros_like(t)
    for part in events.call[active].argsort().split(segment.rows_per_block):
        chosen = active[part]
        calls = events.call[chosen]
        requested: dict[int, tuple[Tensor, Tensor]] = {}
        for number in calls.unique().tolist():
            rows = (calls == number).nonzero().squeeze(1)
            first, second = events.first[chosen[rows]], events.second[chosen[rows]]
            requested[number] = rows.repeat(2), torch.cat([first, second.clamp(min=0)])
        reader = EventReader(len(chosen), requested)
        params, moved = segment.interpolated(t[part])
        with suppress(StopForwardError), torch.no_grad(), disable_fused_attention(), reader, moved:
            model(params, X[events.interval[chosen]])
        for number, (rows, _) in requested.items():
            mine = part[rows[: len(rows) // 2]]
            level, other = reader.values[number].chunk(2)
            value[mine] = torch.where(events.second[active[mine]] >= 0, level - other, level)
    return value


# Difference of a unit's value in the middle of an interval from the mean of its ends that is rounding, relative to
# these. A position that is not exact only costs another split.
_LINEAR = 16.0


class _ThresholdRecorder(TorchFunctionMode):
    """Keep the inputs of every call of a function with thresholds, and where its output's gradient can be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.edges: list[GradientEdge | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Record the call's inputs, then make it."""
        kwargs = kwargs or {}
        if func not in THRESHOLDS:
            return func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        x = args[0] if args else kwargs.get("input")
        is_seen = isinstance(x, Tensor) and x.is_floating_point()
        kept = [x.detach().reshape(-1) - level for level in THRESHOLDS[func](x, *args[1:], **rest)] if is_seen else []
        result = func(*args, **kwargs)
        edge = get_gradient_edge(result) if isinstance(result, Tensor) and result.requires_grad else None
        self.inputs += kept
        self.edges += [edge] * len(kept)
        return result


@dataclass(frozen=True, eq=False)
class _Units:
    """The units of one pass.

    Attributes:
        inputs: Their distances from the thresholds, (U,).
        affects: Which of the rows' outputs depend on each, (E, U).
    """

    inputs: Float[Tensor, " U"]
    affects: Bool[Tensor, "E U"]


def locate_graph_kinks(
    segment: WeightSegment, X: Shaped[Tensor, "E ..."], a: Float[Tensor, " E"], b: Float[Tensor, " E"]
) -> Kinks:
    """Find where in (a_e, b_e) a unit that affects f of node X_e crosses a threshold.

    Arguments, result: as `locate_kinks`, of a network that takes a graph.
    """
    is_searched = torch.zeros_like(a, dtype=torch.bool)
    intervals, positions = [torch.zeros(0, dtype=torch.int64, device=X.device)], [a[:0]]
    for start, of_start in zip(*group_rows(a), strict=True):
        for end, of_end in zip(*group_rows(b[of_start]), strict=True):
            rows = of_start[of_end]
            at_a = _units(segment, X[rows], start)
            if not len(at_a.inputs):
                continue
            is_searched[rows] = True
            row, position = _crossings(segment, (start, end), at_a, _units(segment, X[rows], end))
            intervals.append(rows[row])
            positions.append(position)
    return Kinks(torch.cat(intervals), torch.cat(positions), is_searched)


def _units(segment: WeightSegment, X: Tensor, t: Tensor) -> _Units:
    """Return what the units see at t, and on which of them a random combination of each row's f depends."""
    model, plan = segment.net.model, segment.net.plan
    params = {name: value.requires_grad_() for name, value in model.unflatten(segment.w + t * segment.d).items()}
    with torch.enable_grad(), disable_fused_attention():
        with _ThresholdRecorder() as recorder:
            f = apply_head(model(params, X), segment.head)
        if not recorder.inputs:
            return _Units(segment.w[:0], torch.zeros(len(X), 0, dtype=torch.bool, device=X.device))
        generator = torch.Generator().manual_seed(0)
        combined = f @ torch.randn(f.shape[1], generator=generator, dtype=torch.float64).to(f)
        edges = [edge for edge in recorder.edges if edge is not None]
        parts = []
        one_hot = torch.eye(len(X), dtype=f.dtype, device=f.device)
        for rows in one_hot.split(plan.vmap_chunk_size if plan.supports_vmap else 1):
            grads = torch.autograd.grad(
                combined, edges, rows, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
            found = iter(grads)
            columns = [
                torch.zeros(len(rows), len(values), dtype=torch.bool, device=X.device)
                if edge is None or (grad := next(found)) is None
                else grad.reshape(len(rows), -1) != 0
                for edge, values in zip(recorder.edges, recorder.inputs, strict=True)
            ]
            parts.append(torch.cat(columns, dim=1))
    return _Units(torch.cat(recorder.inputs), torch.cat(parts))


def _crossings(
    segment: WeightSegment, ends: tuple[Tensor, Tensor], at_a: _Units, at_b: _Units
) -> tuple[Int64[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the rows that have a kink between two ends, and where."""
    (a, b), affects = ends, at_a.affects | at_b.affects
    units = ((at_a.inputs.sign() * at_b.inputs.sign() < 0) & affects.any(dim=0)).nonzero().squeeze(1)
    low, high = at_a.inputs[units], at_b.inputs[units]
    position = a + (b - a) * low / (low - high)
    if len(units):
        middle = _inputs_at(segment, (a + b) / 2)[units]
        rounding = _LINEAR * torch.finfo(low.dtype).eps * (low.abs() + high.abs())
        for k in ((middle - (low + high) / 2).abs() > rounding).nonzero().squeeze(1).tolist():
            position[k] = _solve_crossings(segment, int(units[k]), ends, (low[k], high[k]))
    row, unit = affects[:, units].nonzero(as_tuple=True)
    return row, position[unit]


def _solve_crossings(
    segment: WeightSegment, unit: int, ends: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]
) -> Tensor:
    """Find the zero of what a unit sees by the Illinois method, which keeps it bracketed."""
    (low, high), (at_low, at_high) = ends, values
    eps, scale, side = torch.finfo(low.dtype).eps, at_low.abs() + at_high.abs(), 0
    guess = low
    for _ in range(MAX_ITERATIONS):
        guess = (low * at_high - high * at_low) / (at_high - at_low)
        value = _inputs_at(segment, guess)[unit]
        if value.abs() <= 4 * eps * scale or high - low <= 4 * eps:
            break
        if value * at_low > 0:
            low, at_low, at_high = guess, value, at_high / 2 if side == 1 else at_high
            side = 1
        else:
            high, at_high, at_low = guess, value, at_low / 2 if side == -1 else at_low
            side = -1
    return guess


def _inputs_at(segment: WeightSegment, t: Tensor) -> Float[Tensor, " U"]:
    model = segment.net.model
    node = torch.zeros(1, 1, dtype=torch.int64, device=segment.w.device)
    with torch.no_grad(), disable_fused_attention(), _ThresholdRecorder() as recorder:
        model(model.unflatten(segment.w + t * segment.d), node)
    return torch.cat(recorder.inputs)
