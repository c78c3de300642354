"""Where thresholds of a graph's forward pass are crossed along a training step.

All nodes share the passes: what a unit sees is a scalar function of t, whichever node's output depends on it. In the
first layers it is linear in t, and its zero follows from the ends.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.dense import group_rows
from epk_gp.autodiff.directional import WeightSegment
from epk_gp.autodiff.secants import THRESHOLDS
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.losses import apply_head
from epk_gp.quadrature.kinks import MAX_ITERATIONS, Kinks

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
            position[k] = _solve(segment, int(units[k]), ends, (low[k], high[k]))
    row, unit = affects[:, units].nonzero(as_tuple=True)
    return row, position[unit]


def _solve(segment: WeightSegment, unit: int, ends: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
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
