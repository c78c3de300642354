"""Where piecewise-smooth operations switch along a training step: event location (docs/engine.md, section 8).

`t -> f(w + t d)` has a kink where a ReLU's input crosses its threshold or a max-pool's largest input changes. These
events are scalar functions of t that a forward pass computes anyway: their zeros are found by bracketing, many at a
time, without a gradient.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import WeightSegment, values
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.losses import apply_head
from epk_gp.core.model import StopForwardError
from epk_gp.quadrature.kinks import EventReader, PreactivationRecorder, Preactivations

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
