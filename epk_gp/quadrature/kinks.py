"""Kinks: switches of piecewise-smooth operations along a training step, found by event location (docs/engine.md, 8).

`t -> f(w + t d)` has a kink where a ReLU's input crosses its threshold or a max-pool's largest input changes. These
events are scalar functions of t that a forward pass computes anyway: their zeros are found by bracketing, many at a
time, without a gradient.

All nodes of a graph share the passes: a unit's input is a scalar function of t, for all nodes that depend on it. In the
first layers it is linear in t, and its zero follows from the ends.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.dense import WeightSegment, group_rows, values_at_end
from epk_gp.autodiff.interception import EXTREMES, POOLS, THRESHOLDS
from epk_gp.core.model import StopForwardError
from epk_gp.core.torch_overrides import disable_fused_attention

WATCHED = {*THRESHOLDS, *POOLS, *EXTREMES}


@dataclass(frozen=True, eq=False)
class Preactivations:
    """The inputs of one call of a piecewise-smooth function.

    Attributes:
        inputs: (E, U); for a threshold the distance from it.
        argmax: (E, V) index into U of the input that each of the V outputs picks; None for thresholds.
        edge: Graph edge at which the gradient with respect to the function's output can be taken, if requested.
    """

    inputs: Float[Tensor, "E U"]
    argmax: Int64[Tensor, "E V"] | None
    edge: GradientEdge | None

    def differ(self, other: "Preactivations") -> Bool[Tensor, "E V"]:
        """Return the units that are across their thresholds, or pick another input, compared with another pass."""
        if self.argmax is None or other.argmax is None:
            return self.inputs.sign() * other.inputs.sign() < 0
        return self.argmax != other.argmax


class UnitWatcher(TorchFunctionMode):
    """Observes the inputs of every call of a piecewise-smooth function on all rows, before the call.

    Args:
        num_rows: E; None treats the input of every call with thresholds as one row.
        keep_edges: Also keep the gradient edges of the calls' outputs.
    """

    def __init__(self, num_rows: int | None, *, keep_edges: bool = False) -> None:
        super().__init__()
        self.calls: list[Preactivations] = []
        self.num_rows, self.keep_edges = num_rows, keep_edges

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Note the inputs of the call, and make it."""
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        watched = THRESHOLDS if self.num_rows is None else WATCHED
        if func not in watched or not isinstance(x, Tensor) or not self._sees_all_rows(x):
            return func(*args, **kwargs)
        rest, first = {name: value for name, value in kwargs.items() if name != "input"}, len(self.calls)
        rows = x.detach().flatten(1) if self.num_rows is not None else x.detach().reshape(1, -1)
        for level in THRESHOLDS[func](x, *args[1:], **rest) if func in THRESHOLDS else ():
            self.note(rows, level, None)  # before the call, which may be in place
        result = func(*args, **kwargs)
        output = result if isinstance(result, Tensor) else result[0]
        if func in POOLS and result is output:
            self.note(rows, 0.0, lambda: _pool_argmax(func, (x, *args[1:]), rest))
        elif func in EXTREMES:
            picked = _picked(EXTREMES[func] * x.detach(), EXTREMES[func], args[1:], rest, output)
            if picked is not None:
                self.note(picked[0], 0.0, lambda: picked[1])
        if self.keep_edges and output.requires_grad:
            edge = get_gradient_edge(output)
            self.calls[first:] = [replace(units, edge=edge) for units in self.calls[first:]]
        return result

    def _sees_all_rows(self, x: Tensor) -> bool:
        if self.num_rows is None:
            return x.is_floating_point()
        return x.ndim > 1 and len(x) == self.num_rows and not x.is_complex()

    def note(self, x: Tensor, level: float, argmax: Callable[[], Tensor] | None) -> None:
        """Keep the units of a call.

        Args:
            x: Inputs of the units, (E, U), which may be overwritten.
            level: Threshold of the units.
            argmax: Returns the index that each output picks; None for thresholds.
        """
        self.calls.append(Preactivations(x - level, None if argmax is None else argmax(), None))


class EventReader(UnitWatcher):
    """Reads the inputs of given units in a forward pass, and stops it (`StopForwardError`) after the last of them.

    Args:
        num_rows: E.
        requested: Rows and units, each (B,), by number of the call in `UnitWatcher.calls`.
    """

    def __init__(self, num_rows: int, requested: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__(num_rows)
        self.requested = requested
        self.values: dict[int, Tensor] = {}
        self._number, self._last = 0, max(requested)

    def note(self, x: Tensor, level: float, argmax: Callable[[], Tensor] | None) -> None:
        """Read the requested units."""
        if self._number in self.requested:
            rows, units = self.requested[self._number]
            self.values[self._number] = x[rows, units] - level
        if self._number == self._last:
            raise StopForwardError
        self._number += 1


def _pool_argmax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the index of the input that each output of a max-pool picks, (E, V)."""
    x = args[0].detach()
    options = {key: value for key, value in kwargs.items() if key != "return_indices"}
    indices: Tensor = POOLS[func](x, *args[1:6], **options)[1]
    offset: Tensor = x[0, 0].numel() * torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    return (indices.flatten(2) + offset).flatten(1)


def _picked(
    x: Tensor, sign: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the inputs (E, U) of a choice and the chosen indices (E, V); None if it mixes the rows."""
    second = args[0] if args else kwargs.get("other", kwargs.get("dim"))
    dims: tuple[int, ...] = (1,)
    if isinstance(second, Tensor):
        if len(output) != len(x) or output.ndim < 2:
            return None
        x = torch.stack([x.expand_as(output), (sign * second.detach()).expand_as(output)], dim=1)
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
# superlinearly (order 1.44), and an inexact position only costs another split.
MAX_ITERATIONS = 40


# B events that may hide a kink: the interval, or its pair of a step and an input, the number of the operation's call in
# the forward pass, the unit, and the other unit of a pool, or -1 for a threshold. At the event, the sign of the unit's
# input minus the other's changes.
_Events = tuple[Int64[Tensor, " B"], Int64[Tensor, " B"], Int64[Tensor, " B"], Int64[Tensor, " B"]]

# Switches of units along the step: (B,) the interval, (B,) the position on the step, and (E,) whether an interval was
# searched, because the network calls piecewise-smooth functions.
Kinks = tuple[Int64[Tensor, " B"], Float[Tensor, " B"], Bool[Tensor, " E"]]


def values_at_ends(
    segment: WeightSegment, X: Shaped[Tensor, "N ..."]
) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"], Bool[Tensor, " n"]]:
    """Evaluate f at both ends of each step, and return the pairs for which a unit differs between them.

    Units inside fused functions are not seen.
    """

    def evaluate(part: WeightSegment, x: Tensor, t: Tensor) -> Tensor:
        return values_at_end(part, x, is_start=not bool(t[0]))

    pair = torch.arange(segment.num_lines * len(X), device=X.device)
    zeros, is_seen = segment.w.new_zeros(len(pair)), segment.net.plan.supports_interpolation
    switches, (start, end) = _stand_differently(evaluate, segment, X, pair, (zeros, zeros + 1))
    return start, end, switches & is_seen


def may_switch(
    segment: WeightSegment,
    X: Shaped[Tensor, "N ..."],
    pair: Int64[Tensor, " E"],
    a: Float[Tensor, " E"],
    b: Float[Tensor, " E"],
) -> Bool[Tensor, " E"]:
    """Return whether any unit differs between a_e and b_e, even one without effect, using forward passes only."""

    def evaluate(part: WeightSegment, x: Tensor, t: Tensor) -> Tensor:
        params, moved = part.interpolated(t)
        with torch.no_grad(), disable_fused_attention(), moved:
            return segment.net.model(params, x)

    if not len(pair) or not segment.net.plan.supports_interpolation:
        return torch.zeros_like(a, dtype=torch.bool)
    return _stand_differently(evaluate, segment, X, pair, (a, b))[0]


def _stand_differently(
    evaluate: Callable[[WeightSegment, Tensor, Tensor], Tensor],
    segment: WeightSegment,
    X: Tensor,
    pair: Tensor,
    ends: tuple[Tensor, Tensor],
) -> tuple[Bool[Tensor, " E"], list[Tensor]]:
    """Compare the units of forward passes at two ends, some rows at a time; return the passes' outputs too."""
    switches, outputs = torch.zeros(len(pair), dtype=torch.bool, device=X.device), list[tuple[Tensor, ...]]()
    for part, rows, own in segment.passes(pair // len(X), segment.memory.kink_search_rows()):
        calls, found = list[list[Preactivations]](), [rows[own]]
        for t in ends:
            with UnitWatcher(len(rows)) as recorder:
                found.append(evaluate(part, X[pair[rows] % len(X)], t[rows])[own])
            calls.append(recorder.calls)
        outputs.append(tuple(found))
        if len(calls[0]) != len(calls[1]):
            raise ValueError(
                "the network must call the same functions at both ends of a step: it takes another branch there (an "
                "`if` on a weight or an activation). Compute both branches, and choose by torch.where."
            )
        for at_a, at_b in zip(*calls, strict=True):
            switches[rows[own]] |= at_a.differ(at_b).any(dim=1).to(X.device)[own]
    rows, *of_ends = (torch.cat(values) for values in zip(*outputs, strict=True))
    return switches, [torch.empty_like(f).index_copy_(0, rows, f) for f in of_ends]


def locate_kinks(
    segment: WeightSegment,
    X: Shaped[Tensor, "N ..."],
    pair: Int64[Tensor, " E"],
    a: Float[Tensor, " E"],
    b: Float[Tensor, " E"],
) -> Kinks:
    """Return the positions in (a_e, b_e) at which a unit that affects f switches, for pair e of a step and an input.

    Args:
        segment: The steps.
        X: N inputs.
        pair: The pair of each of the E intervals.
        a: Starts of the E intervals.
        b: Their ends.

    Returns:
        The switches. A unit that switches an even number of times is not seen; a network that does not support
        interpolation has none.
    """
    is_searched = torch.zeros_like(a, dtype=torch.bool)
    intervals, positions = [torch.zeros(0, dtype=torch.int64, device=X.device)], [a[:0]]
    for part, rows, own in _searched_together(segment, pair // len(X), a, b):
        x = X[pair[rows] % len(X)]
        start = _preactivations(part, x, a[rows])
        if not start:
            continue
        is_searched[rows] = True
        events, at_ends = _bracket_events(start, _preactivations(part, x, b[rows]), own)
        intervals.append(rows[events[0]])
        ends = a[intervals[-1]], b[intervals[-1]]
        if segment.net.plan.shares_pass:
            positions.append(_shared_positions(segment, x, events, ends, at_ends))
            continue
        eps = torch.finfo(X.dtype if X.is_floating_point() else a.dtype).eps
        events = (pair[intervals[-1]], *events[1:])
        positions.append(_solve(partial(_event_values, segment, X, events), ends, at_ends, eps))
    return torch.cat(intervals), torch.cat(positions), is_searched


def _searched_together(
    segment: WeightSegment, line: Tensor, a: Tensor, b: Tensor
) -> Iterator[tuple[WeightSegment, Tensor, Tensor]]:
    """Divide intervals into passes (`WeightSegment.passes`); for a graph, a pass has intervals with equal ends."""
    if segment.net.plan.shares_pass:
        for of_start in group_rows(a)[1]:
            for of_end in group_rows(b[of_start])[1]:
                yield segment, of_start[of_end], torch.arange(len(of_end), device=a.device)
    elif segment.net.plan.supports_interpolation and len(a):
        yield from segment.passes(line, segment.memory.kink_search_rows())


def _bracket_events(
    start: list[tuple[Preactivations, Tensor]], end: list[tuple[Preactivations, Tensor]], own: Tensor
) -> tuple[_Events, tuple[Tensor, Tensor]]:
    """List the units of some rows that affect f and differ between both ends, and their values there."""
    columns: list[tuple[Tensor, ...]] = []
    for number, ((at_a, affects_a), (at_b, affects_b)) in enumerate(zip(start, end, strict=True)):
        interval, first = (at_a.differ(at_b) & (affects_a | affects_b))[own].nonzero(as_tuple=True)
        interval = own[interval]
        second = torch.full_like(first, -1)
        if at_a.argmax is None or at_b.argmax is None:
            lead_a, lead_b = (units.inputs.expand(len(affects_a), -1)[interval, first] for units in (at_a, at_b))
        else:
            first, second = at_a.argmax[interval, first], at_b.argmax[interval, first]
            lead_a, lead_b = (units.inputs[interval, first] - units.inputs[interval, second] for units in (at_a, at_b))
        crosses = lead_a.sign() * lead_b.sign() < 0
        column = (interval, torch.full_like(interval, number), first, second, lead_a, lead_b)
        columns.append(tuple(value[crosses] for value in column))
    interval, call, first, second, lead_a, lead_b = (torch.cat(parts) for parts in zip(*columns, strict=True))
    return (interval, call, first, second), (lead_a, lead_b)


def _preactivations(segment: WeightSegment, X: Tensor, t: Tensor) -> list[tuple[Preactivations, Tensor]]:
    """List the units' inputs at t, and the outputs of units on which a random combination of f depends."""
    plan = segment.net.plan
    with torch.enable_grad(), disable_fused_attention():
        w = segment.w if segment.num_lines == 1 else segment.w[0]
        params = segment.net.leaves(w + t[0] * segment.d if plan.shares_pass else w)
        moved = nullcontext() if plan.shares_pass else segment.interpolated(t, params)[1]
        recorder = UnitWatcher(None if plan.shares_pass else len(X), keep_edges=True)
        with recorder, moved:  # `recorder` sees the functions that `moved` replaces
            f = segment.outputs(params, X)
        edges = [units.edge for units in recorder.calls if units.edge is not None]
        grads: Iterable[Tensor | None] = ()
        if edges and plan.shares_pass:  # each node depends on different units of the shared pass
            grads = _dependences(_combined(f), edges, plan.vmap_chunk_size if plan.supports_vmap else 1)
        elif edges:
            grads = torch.autograd.grad(_combined(f), edges, torch.ones_like(f[:, 0]), allow_unused=True)
    grad_of = dict(zip([id(edge) for edge in edges], grads, strict=True))
    listed = []
    for units in recorder.calls:
        grad = grad_of.get(id(units.edge))
        outputs = units.inputs if units.argmax is None else units.argmax
        none = outputs.new_zeros(len(X), outputs.shape[1], dtype=torch.bool)
        affects = none if grad is None else grad.reshape(len(X), -1) != 0
        listed.append((units, affects))
    return listed


def _solve(
    value_of: Callable[[Tensor, Tensor], Tensor], ends: tuple[Tensor, Tensor], f_ends: tuple[Tensor, Tensor], eps: float
) -> Float[Tensor, " B"]:
    """Solve all events by the Illinois method (Dowell & Jarratt 1971), which keeps them bracketed.

    Args:
        value_of: Evaluates some of the events at given positions.
        ends: Bracketing positions of each of the B events.
        f_ends: Values of the events there.
        eps: Rounding of the inputs' dtype.
    """
    (low, high), (at_low, at_high) = (x.clone() for x in ends), (x.clone() for x in f_ends)
    scale = at_low.abs() + at_high.abs()
    root = low.clone()
    active = torch.arange(len(root), device=root.device)
    side = torch.zeros_like(active)
    for _ in range(MAX_ITERATIONS):
        if not len(active):
            break
        lo, hi, f_lo, f_hi = low[active], high[active], at_low[active], at_high[active]
        guess = (lo * f_hi - hi * f_lo) / (f_hi - f_lo)
        value = value_of(guess, active)
        root[active] = guess
        left = value * f_lo > 0  # the guess replaces the lower end
        low[active] = torch.where(left, guess, lo)
        high[active] = torch.where(left, hi, guess)
        again_low, again_high = left & (side[active] == 1), ~left & (side[active] == -1)
        at_low[active] = torch.where(left, value, torch.where(again_high, f_lo / 2, f_lo))
        at_high[active] = torch.where(left, torch.where(again_low, f_hi / 2, f_hi), value)
        side[active] = torch.where(left, 1, -1)
        done = (value.abs() <= 4 * eps * scale[active]) | ((high[active] - low[active]) <= 4 * eps)
        active = active[~done]
    return root


def _event_values(segment: WeightSegment, X: Tensor, events: _Events, t: Tensor, active: Tensor) -> Tensor:
    """Evaluate events, those of early layers first: a forward pass stops at the last requested unit."""
    pair, call, first, second = (column[active] for column in events)
    value, size = torch.zeros_like(t), segment.memory.directional_rows()
    for some in call.argsort().split(size):
        for lines, places, own in segment.passes(pair[some] // len(X), size):
            part = some[places]
            requested: dict[int, tuple[Tensor, Tensor]] = {}
            for number in call[part].unique().tolist():
                rows = own[call[part[own]] == number]
                requested[number] = rows.repeat(2), torch.cat([first[part[rows]], second[part[rows]].clamp(min=0)])
            reader = EventReader(len(part), requested)
            params, moved = lines.interpolated(t[part])
            with suppress(StopForwardError), torch.no_grad(), disable_fused_attention(), reader, moved:
                segment.net.model(params, X[pair[part] % len(X)])
            for number, (rows, _) in requested.items():
                mine = part[rows[: len(rows) // 2]]
                level, other = reader.values[number].chunk(2)
                value[mine] = torch.where(second[mine] >= 0, level - other, level)
    return value


def _dependences(f: Tensor, edges: list[GradientEdge], size: int) -> Iterator[Bool[Tensor, "E U"] | None]:
    """Yield, for each call, the units on which each of some numbers depends, `size` numbers at a time."""
    parts = list[list[Tensor | None]]()
    for rows in torch.eye(len(f), dtype=f.dtype, device=f.device).split(size):
        grads = torch.autograd.grad(f, edges, rows, is_grads_batched=True, retain_graph=True, allow_unused=True)
        parts.append([None if grad is None else grad.reshape(len(rows), -1) != 0 for grad in grads])
    return (None if of_call[0] is None else torch.cat(of_call) for of_call in zip(*parts, strict=True))


def _combined(f: Tensor) -> Float[Tensor, " E"]:
    """Return a random combination of each row's outputs."""
    v = torch.randn(f.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return f @ v.to(f)


# Relative difference, between a unit's value in the middle of an interval and the mean of its ends, that counts as
# rounding. An inexact position only costs another split.
_LINEAR = 16.0


def _shared_positions(
    segment: WeightSegment, X: Tensor, events: _Events, ends: tuple[Tensor, Tensor], at_ends: tuple[Tensor, Tensor]
) -> Float[Tensor, " B"]:
    """Solve the events of nodes that share the passes: each unit once, and by a formula if it is linear in t."""
    if not len(ends[0]):
        return ends[0]
    (call, unit), of_event = torch.stack(events[1:3]).unique(dim=1, return_inverse=True)
    event = torch.zeros_like(call).index_copy_(0, of_event, torch.arange(len(of_event), device=call.device))
    (a, b), (low, high) = (tuple(x[event] for x in pair) for pair in (ends, at_ends))
    position = a + (b - a) * low / (low - high)
    calls = _calls_at(segment, X, (a[0] + b[0]) / 2)
    middle = torch.stack([calls[c].inputs[0, u] for c, u in zip(call.tolist(), unit.tolist(), strict=True)])
    eps = torch.finfo(low.dtype).eps
    bent = ((middle - (low + high) / 2).abs() > _LINEAR * eps * (low.abs() + high.abs())).nonzero().squeeze(1)

    def value_of(t: Tensor, active: Tensor) -> Tensor:
        units = zip(t, call[bent[active]].tolist(), unit[bent[active]].tolist(), strict=True)
        return torch.stack([_calls_at(segment, X, place)[c].inputs[0, u] for place, c, u in units])

    position[bent] = _solve(value_of, (a[bent], b[bent]), (low[bent], high[bent]), eps)
    return position[of_event]


def _calls_at(segment: WeightSegment, X: Tensor, t: Tensor) -> list[Preactivations]:
    """List the calls with thresholds at one position of the step, for all units."""
    model = segment.net.model
    with torch.no_grad(), disable_fused_attention(), UnitWatcher(None) as watcher:
        model(model.unflatten(segment.w + t * segment.d), X)
    calls: list[Preactivations] = watcher.calls
    return calls
