"""Where piecewise-smooth units switch along a training step.

`t -> f(w + t d)` has a kink where a ReLU's input crosses its threshold or a max-pool's winner changes. These events
are scalar functions of t that a forward pass computes anyway: their zeros are found by bracketing, many at a time,
without a gradient.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import Line, block_rows
from epk_gp.autodiff.interception import InterpolatedWeights, disable_fused_attention
from epk_gp.core.head import apply_head
from epk_gp.quadrature.piecewise_ops import EventReader, PreactivationRecorder, Preactivations, StopForwardError

_ITERATIONS = 40


@dataclass(frozen=True, eq=False)
class BracketedEvents:
    """Events that may hide a kink: the sign of `inputs[first] - inputs[second]` differs at a segment's ends.

    Attributes:
        segment: (B,) index of the segment.
        call: (B,) which call.
        first: (B,) unit.
        second: (B,) the other unit of a pool, or -1 for a threshold unit.
        at_a: (B,) value at the segment's start.
        at_b: (B,) value at its end.
    """

    segment: Int64[Tensor, " B"]
    call: Int64[Tensor, " B"]
    first: Int64[Tensor, " B"]
    second: Int64[Tensor, " B"]
    at_a: Float[Tensor, " B"]
    at_b: Float[Tensor, " B"]


def locate_kinks(
    line: Line, X: Shaped[Tensor, "E ..."], a: Float[Tensor, " E"], b: Float[Tensor, " E"]
) -> tuple[Int64[Tensor, " B"], Float[Tensor, " B"]]:
    """Find the places in (a_e, b_e) where a unit that matters to f switches for row e.

    Args:
        line: The step.
        X: E inputs.
        a: Starts of the E segments.
        b: Their ends.

    Returns:
        Segment and place of B switches; a unit that switches an even number of times is not seen.
    """
    if not line.plan.supports_interpolation:
        return torch.zeros(0, dtype=torch.int64, device=X.device), a[:0]
    rows = max(1, block_rows(line) // 4)
    found, places = [], []
    for part in torch.arange(len(X), device=X.device).split(rows):
        candidates = _candidates(line, X[part], a[part], b[part])
        found.append(part[candidates.segment])
        places.append(_roots(line, X[part], a[part], b[part], candidates))
    return torch.cat(found), torch.cat(places)


def _candidates(line: Line, X: Tensor, a: Tensor, b: Tensor) -> BracketedEvents:
    start, end = _watched(line, X, a), _watched(line, X, b)
    columns: list[tuple[Tensor, ...]] = []
    for number, ((at_a, matters_a), (at_b, matters_b)) in enumerate(zip(start, end, strict=True)):
        matters = matters_a | matters_b
        if at_a.winners is None or at_b.winners is None:
            segment, unit = ((at_a.inputs.sign() * at_b.inputs.sign() < 0) & matters).nonzero(as_tuple=True)
            values = at_a.inputs[segment, unit], at_b.inputs[segment, unit]
            columns.append((segment, torch.full_like(segment, number), unit, torch.full_like(segment, -1), *values))
            continue
        segment, output = ((at_a.winners != at_b.winners) & matters).nonzero(as_tuple=True)
        first, second = at_a.winners[segment, output], at_b.winners[segment, output]
        lead_a, lead_b = (units.inputs[segment, first] - units.inputs[segment, second] for units in (at_a, at_b))
        crossing = lead_a * lead_b < 0
        column = (segment, torch.full_like(segment, number), first, second, lead_a, lead_b)
        columns.append(tuple(value[crossing] for value in column))
    if not columns:
        none = torch.zeros(0, dtype=torch.int64, device=X.device)
        return BracketedEvents(none, none, none, none, a[:0], a[:0])
    return BracketedEvents(*(torch.cat(parts) for parts in zip(*columns, strict=True)))


def _watched(line: Line, X: Tensor, t: Tensor) -> list[tuple[Preactivations, Tensor]]:
    """List the units at t, and which of their outputs a random combination of f depends on."""
    weights = {name: value.detach().requires_grad_() for name, value in line.model.unflatten(line.w).items()}
    with torch.enable_grad(), disable_fused_attention():
        watch = PreactivationRecorder(len(X), edges=True)
        with InterpolatedWeights(weights, line.model.unflatten(line.d), t), watch:
            z = line.model(weights, X)
        f = apply_head(z, line.head)
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(f.shape[1], generator=generator, dtype=torch.float64).to(f)
        edges = [units.edge for units in watch.units if units.edge is not None]
        found = torch.autograd.grad(f @ v, edges, torch.ones_like(f[:, 0]), allow_unused=True) if edges else ()
    gradients = dict(zip([id(edge) for edge in edges], found, strict=True))
    listed = []
    for units in watch.units:
        gradient = gradients.get(id(units.edge))
        shape = units.inputs if units.winners is None else units.winners
        matters = torch.zeros_like(shape, dtype=torch.bool) if gradient is None else gradient.reshape(len(X), -1) != 0
        listed.append((units, matters))
    return listed


def _roots(line: Line, X: Tensor, a: Tensor, b: Tensor, candidates: BracketedEvents) -> Tensor:
    """Solve all events by the Illinois method: bracketed, and exact after one step where the event is linear in t."""
    low, high = a[candidates.segment].clone(), b[candidates.segment].clone()
    at_low, at_high = candidates.at_a.clone(), candidates.at_b.clone()
    scale = at_low.abs() + at_high.abs()
    root = low.clone()
    active = torch.arange(len(root), device=X.device)
    side = torch.zeros_like(active)
    for _ in range(_ITERATIONS):
        if not len(active):
            break
        lo, hi, f_lo, f_hi = low[active], high[active], at_low[active], at_high[active]
        guess = (lo * f_hi - hi * f_lo) / (f_hi - f_lo)
        value = _event_values(line, X, guess, candidates, active)
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


def _event_values(line: Line, X: Tensor, t: Tensor, candidates: BracketedEvents, active: Tensor) -> Tensor:
    """Evaluate events at places of their own, early layers' first: a forward pass ends at the last unit asked for."""
    weights, direction = line.model.unflatten(line.w), line.model.unflatten(line.d)
    value = torch.zeros_like(t)
    for part in candidates.call[active].argsort().split(block_rows(line)):
        chosen = active[part]
        calls = candidates.call[chosen]
        wanted: dict[int, tuple[Tensor, Tensor]] = {}
        for number in calls.unique().tolist():
            rows = (calls == number).nonzero().squeeze(1)
            first, second = candidates.first[chosen[rows]], candidates.second[chosen[rows]]
            wanted[number] = rows.repeat(2), torch.cat([first, second.clamp(min=0)])
        read = EventReader(len(chosen), wanted)
        with (
            suppress(StopForwardError),
            torch.no_grad(),
            disable_fused_attention(),
            InterpolatedWeights(weights, direction, t[part]),
            read,
        ):
            line.model(weights, X[candidates.segment[chosen]])
        for number, (rows, _) in wanted.items():
            mine = part[rows[: len(rows) // 2]]
            level, other = read.found[number].chunk(2)
            value[mine] = torch.where(candidates.second[active[mine]] >= 0, level - other, level)
    return value
