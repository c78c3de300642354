"""A probe of the network along recorded steps: is autograd's derivative the derivative of the outputs?

A path integral of gradients is the change of the outputs only where it is. It is not for straight-through estimators,
stop-gradients and gradient reversal, for outputs that jump (hard routing, rounding), and for outputs that are computed
in less precision than the weights have.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.core.plans import TensorSpec
from epk_gp.core.show import warn_uncertified
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.update_rules import move_by_rounding
from epk_gp.recording.check import CheckSchedule, ObservedStep
from epk_gp.recording.setup import TrainingSetup
from epk_gp.recording.validation import evenly_spread

_NUM_ROWS = 16  # rows of the batch that are looked at
_NUM_COMBINATIONS = 3  # random combinations of rows and outputs whose derivatives are compared
_POSITIONS = (0.21, 0.48, 0.83)  # on the step, away from its ends, where a kink is likelier than elsewhere
_NUM_INTERVALS = 16  # of the step, in which jumps are looked for
_NUM_SUSPECTS = 4  # of the intervals, those that are farthest from linear

# Shares by which the outputs change between the two ends of a central difference. In float64 the fine one is exact to
# some 1e-8 of the derivative; wrong derivatives differ by 5 % to 200 % in the cases measured (docs/reliability.md). A
# network of float32 weights may compute in float32 whatever its inputs are: its rounding then spoils the fine
# difference and not the medium one, where a wrong derivative stays as wrong. Where all is float32, kinks may lie in the
# coarse one.
_FINE_CHANGE, _MEDIUM_CHANGE, _COARSE_CHANGE = 1e-7, 1e-4, 3e-3
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.1

# Halvings of an interval in which a jump is looked for: tanh units of a diverging run switch within 1e-10 of a step.
_HALVINGS = {torch.float64: 40, torch.float32: 8}

# Outputs in float32 that differ from those in float64 by more than this share of their size were computed in less than
# float32: bfloat16 loses 2e-3, float16 and TF32 5e-4; float32 itself loses 1e-6 to 1e-5 in deep networks.
_LOST_PRECISION = 2e-4


@dataclass(frozen=True, eq=False)
class _Segment:
    """The network along a step, at some of the batch's rows and with the moving statistics at its start."""

    model: FunctionalModel
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    X: Shaped[Tensor, "n ..."]
    statistics: Float[Tensor, " Q"]

    def outputs(self, t: float, rows: Shaped[Tensor, "m ..."] | None = None) -> Float[Tensor, "m C"]:
        return self.outputs_at(self.w + t * self.d, rows)

    def outputs_at(self, w: Float[Tensor, " P"], rows: Shaped[Tensor, "m ..."] | None = None) -> Float[Tensor, "m C"]:
        with torch.no_grad():
            return self.model(self.params(w), self.X if rows is None else rows)

    def params(self, w: Float[Tensor, " P"]) -> dict[str, Tensor]:
        return self.model.unflatten(torch.cat([w, self.statistics.to(w)]))


class DerivativeProbe:
    """Looks at the first step that moves the weights, and at ever fewer of the later ones; warns at most once."""

    def __init__(self) -> None:
        self._next = 0

    def look_at(self, setup: TrainingSetup, observed: ObservedStep, schedule: CheckSchedule) -> None:
        """Probe a step if its turn has come, and warn if the run's sums of gradients cannot be its outputs.

        Args:
            setup: The training.
            observed: The step.
            schedule: The account of the checks; the looks take at most half of their time.
        """
        index = observed.step.index
        if index < self._next or torch.equal(observed.start, observed.end):
            return
        with schedule.checking():
            cause = _look(setup, observed)
        wait = 2 * schedule.steps_that_pay() if index else 0  # layers that begin at zero hide others in step 0
        self._next = max(4 * (index + 1) - 1, index + 1 + wait)
        if cause is None:
            return
        self._next = 1 << 62
        warn_uncertified(
            f"step {index}: {cause}. The path integral of the gradients is then not the change of the outputs: "
            "contributions may not sum to the prediction, and results that do not will not be certified."
        )


def _look(setup: TrainingSetup, observed: ObservedStep) -> str | None:
    """Return why gradients along a step do not integrate to the change of the outputs, or None if they may."""
    batch = observed.step.batch
    rows = evenly_spread(setup.X if batch is None else batch, _NUM_ROWS)
    X = rows if batch is None else setup.X[rows]
    with random_state_kept(observed.start.device), disable_fused_attention():
        return _cause(setup.model, (observed.start, observed.end, observed.start_statistics), X)


def _cause(model: FunctionalModel, path: tuple[Tensor, Tensor, Tensor], X: Tensor) -> str | None:
    """Return why gradients along a step do not integrate to the change of the outputs, or None if they may.

    Args:
        model: The recorded network.
        path: The weights before and after the step, and the moving statistics before it.
        X: Some rows of the batch.
    """
    start, end, statistics = path
    segment = _in_float64(model, path, X) or _Segment(model, start, end - start, X, statistics)
    size = _size(segment)
    if not 0 < size < float("inf"):  # dead outputs have a derivative of 0; NaN and infinity are found elsewhere
        return None
    wrong = _derivative_error(segment, size, model.spec.dtype)
    if wrong is not None:
        return (
            f"the network's derivative is not the derivative of its outputs: along the step they differ by {wrong:.1%} "
            "(a straight-through estimator, a stop-gradient such as detach(), gradient reversal, rounding, or reduced "
            "precision in forward)"
        )
    lost = _lost_precision(model, segment, size, X)
    if lost is not None:
        return (
            f"the network computes in less precision than its weights have: its outputs are off by {lost:.1e} of their "
            "size (autocast, or a cast in forward)"
        )
    jump = _largest_jump(segment, 64 * torch.finfo(model.spec.dtype).eps * size)
    if jump is not None:
        return (
            f"the network's outputs jump by {jump:.1e} along the step (hard routing such as top-1 experts, argmax, "
            "rounding, or a training that diverges)"
        )
    return None


def _in_float64(model: FunctionalModel, path: tuple[Tensor, Tensor, Tensor], X: Tensor) -> _Segment | None:
    """Return the step in float64, or None where the network, or its derivative, needs its own dtype."""
    start, end, statistics = (value.double() for value in path)
    spec = TensorSpec(torch.float64, start.device)
    try:
        wide = model if model.spec == spec else model.converted(spec)
        segment = _Segment(wide, start, end - start, spec.cast(X), statistics)
        f = segment.outputs(0.0)
        _slopes(segment, torch.ones_like(f)[None], 0.0)
    except (RuntimeError, TypeError, ValueError):
        return None
    return segment if f.dtype == torch.float64 else None


def _size(segment: _Segment) -> float:
    """Return the size of the outputs, and of what they are the difference of where terms cancel.

    A network less its initial self has outputs near 0, whose rounding is that of its terms. It is measured: by how much
    outputs change where weights are moved by one eps, in units of eps.
    """
    eps, f = torch.finfo(segment.w.dtype).eps, segment.outputs(0.0)
    moved = segment.outputs_at(move_by_rounding(segment.w, eps))
    return float(f.abs().max() + (moved - f).abs().max() / eps)


def _derivative_error(segment: _Segment, size: float, own_dtype: torch.dtype) -> float | None:
    """Return the relative difference of autograd's derivative from central differences, if it is no rounding."""
    generator = torch.Generator().manual_seed(0)
    f = segment.outputs(0.0)
    V = torch.randn(_NUM_COMBINATIONS, *f.shape, generator=generator, dtype=torch.float64).to(f)
    slopes = [_slopes(segment, V, t) for t in _POSITIONS]

    def median_error(change: float) -> float:  # one of the positions may lie at a kink
        errors = [
            _relative_error(segment, V, t, slope, change * size) for t, slope in zip(_POSITIONS, slopes, strict=True)
        ]
        return float(torch.tensor(errors).median())

    if f.dtype != torch.float64:
        error = median_error(_COARSE_CHANGE)
        return error if error > _COARSE_TOLERANCE else None
    error = median_error(_FINE_CHANGE)
    if error <= _TOLERANCE or own_dtype == torch.float64:
        return error if error > _TOLERANCE else None
    wider = median_error(_MEDIUM_CHANGE)
    return wider if wider > min(error / 10, 10 * _TOLERANCE) else None


def _slopes(segment: _Segment, V: Float[Tensor, "r n C"], t: float) -> Float[Tensor, " r"]:
    """Return autograd's derivatives, along the step, of some combinations of the outputs."""
    params = segment.params(segment.w + t * segment.d)
    leaves = {name: params[name].detach().requires_grad_() for name in segment.model.names}
    with torch.enable_grad():
        f = segment.model({**params, **leaves}, segment.X)
        if not f.requires_grad:
            return torch.zeros_like(V[:, 0, 0])
        pulled = [
            torch.autograd.grad(f, [*leaves.values()], v, retain_graph=True, allow_unused=True, materialize_grads=True)
            for v in V
        ]
    return torch.stack([torch.cat([g.reshape(-1) for g in parts]) @ segment.d for parts in pulled])


def _relative_error(
    segment: _Segment, V: Float[Tensor, "r n C"], t: float, slope: Float[Tensor, " r"], change: float
) -> float:
    """Return the distance of slopes from a central difference over some change of the outputs, less its rounding."""
    scale = float(V.norm())  # of the combinations of outputs of size 1
    w = segment.w + t * segment.d
    reach = (1e-3 * w.abs().max() + 1e-6) / segment.d.abs().max()  # weights may move by a thousandth of their size
    h = min(change * scale / max(float(slope.norm()), 1e-300), float(reach))
    if h * float(segment.d.abs().max()) < 1e3 * torch.finfo(V.dtype).eps * float(w.abs().max()):
        return 0.0  # weights do not resolve the change: the training diverges
    difference = (V * (segment.outputs(t + h) - segment.outputs(t - h))).sum(dim=(1, 2)) / (2 * h)
    rounding = 64 * torch.finfo(V.dtype).eps * _size(segment) * scale / h
    error = float((difference - slope).norm()) - rounding
    return max(error, 0.0) / max(float(slope.norm()), float(difference.norm()), 1e-300)


def _lost_precision(model: FunctionalModel, segment: _Segment, size: float, X: Tensor) -> float | None:
    """Return by how much the outputs in the weights' own dtype are off, if that is more than float32 loses."""
    if segment.model.spec == model.spec:
        return None
    with torch.no_grad():
        params = {name: value.to(model.spec.dtype) for name, value in segment.params(segment.w).items()}
        own = model(params, X).double()
    lost = float((own - segment.outputs(0.0)).abs().max()) / size
    return lost if lost > _LOST_PRECISION else None


def _largest_jump(segment: _Segment, rounding: float) -> float | None:
    """Return the size of a jump of the outputs along the step, if there is one that is larger than their rounding.

    Intervals in which the outputs are farthest from linear are halved: at a kink the distance from the line falls with
    the interval's length, at a jump it does not.
    """
    grid = [k / _NUM_INTERVALS for k in range(_NUM_INTERVALS + 1)]
    F = torch.stack([segment.outputs(t) for t in grid])
    change = F.diff(dim=0)
    smooth = (change.roll(1, 0) + change.roll(-1, 0)) / 2
    smooth[0], smooth[-1] = change[1], change[-2]
    distance = (change - smooth).abs().amax(dim=2)
    largest = 0.0
    for index in distance.flatten().topk(min(_NUM_SUSPECTS, distance.numel())).indices.tolist():
        k, row = divmod(index, distance.shape[1])
        slope = smooth[k, row] * _NUM_INTERVALS
        largest = max(largest, _jump_inside(segment, row, (grid[k], grid[k + 1]), (F[k, row], F[k + 1, row]), slope))
    return largest if largest > rounding else None


def _jump_inside(
    segment: _Segment, row: int, ends: tuple[float, float], values: tuple[Tensor, Tensor], slope: Tensor
) -> float:
    """Return the size of a jump of one row's outputs between two ends; 0 if there is none."""
    (a, b), (f_a, f_b) = ends, values

    def distance(left: tuple[float, Tensor], right: tuple[float, Tensor]) -> float:
        return float((right[1] - left[1] - (right[0] - left[0]) * slope).abs().max())

    X, first = segment.X[row : row + 1], distance((a, f_a), (b, f_b))
    last = first
    for _ in range(_HALVINGS[f_a.dtype]):
        middle = (a + b) / 2
        f = segment.outputs(middle, X)[0]
        left, right = distance((a, f_a), (middle, f)), distance((middle, f), (b, f_b))
        last = max(left, right)
        if last < first / 4:
            return 0.0
        a, f_a, b, f_b = (a, f_a, middle, f) if left > right else (middle, f, b, f_b)
    return last
