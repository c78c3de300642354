"""The probe of a step: it tests whether autograd's derivative is the derivative of the outputs.

Only then a path integral of gradients is the change of the outputs. It fails for straight-through estimators,
stop-gradients and gradient reversal, for outputs that jump (hard routing, rounding), and for outputs that are computed
in lower precision than the weights.

Everything is computed in float64 if the network allows it. A first look at the derivative takes a few rows, one
position on the step and one combination of the outputs. Only suspicious results are examined in full.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.core.plans import TensorSpec
from epk_gp.core.show import warn_uncertified
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.update_rules import largest_entry, move_by_rounding
from epk_gp.recording.check import CheckSchedule
from epk_gp.recording.mismatches import ObservedStep
from epk_gp.recording.setup import TrainingSetup, evenly_spread

_FIRST_WAIT, _LEAST_WAIT = 2, 12  # steps; the first if a layer that begins at zero may hide others
# number of examined rows of the batch; rows searched for jumps; rows of the first looks at derivatives
_NUM_ROWS, _GRID_ROWS, _FEW_ROWS = 16, 8, 4
_NUM_COMBINATIONS = 3  # random combinations of rows and outputs whose derivatives are compared
_POSITIONS = (0.0, -0.29, 0.33)  # relative to the middle of the step; kinks are most likely at its ends
_NUM_INTERVALS = 4  # intervals of the step that are searched for jumps
_GRID = [k / _NUM_INTERVALS - 0.5 for k in range(_NUM_INTERVALS + 1)]
_NUM_SUSPECTS = 4  # intervals and rows that are farthest from linear

# Relative changes of the outputs between the two ends of a central difference. In float64 the fine one is exact to
# about 1e-8 of the derivative; wrong derivatives differ by 5 % to 200 % in the measured cases (docs/reliability.md). A
# network of float32 weights may compute in float32 for any inputs: its rounding then spoils the fine difference but not
# the medium one, where a wrong derivative stays wrong. If everything is float32, the coarse one may contain kinks.
_FINE, _MEDIUM, _COARSE = (1e-7, 1e-3), (1e-4, 1e-2), (3e-3, 0.1)  # with the largest error of a correct derivative
_FIRST_TOLERANCE, _STRICTER = 1e-6, 8.0  # for the first looks: results that pass are not examined again

# Halvings of an interval in the search for a jump: tanh units of a diverging run switch within 1e-10 of a step.
_HALVINGS = {torch.float64: 40, torch.float32: 8}

_FALL = 0.15  # after three halvings: a continuous change falls to an eighth, a jump does not

# Outputs in float32 that differ from the float64 ones by more than this share of their size were computed in less than
# float32: bfloat16 loses 2e-3, float16 and TF32 5e-4; float32 itself loses 1e-6 to 1e-5 in deep networks.
_LOST_PRECISION = 2e-4

_SINGLE = (
    "the network computes in float32 inside, though its weights are float64 (as normalisations of transformers' Llama "
    "do). Recorded in float32, net.float(), it costs less and is as exact."
    " Results are certified if the contributions sum to the prediction up to float32's rounding."
)
_MAY_NOT_SUM = ". Contributions may then not sum to the prediction, and results that do not will not be certified."


@dataclass(frozen=True, eq=False)
class _Segment:
    """The network along a step, t from -0.5 to 0.5, at some rows and with the moving statistics at the step's start."""

    model: FunctionalModel
    middle: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    X: Shaped[Tensor, "n ..."]
    statistics: Float[Tensor, " Q"]

    def outputs(self, t: float) -> Float[Tensor, "n C"]:
        with torch.no_grad():
            return self.at(self.weights(t))

    def on_grid(self) -> Float[Tensor, "k m C"]:
        few = replace(self, X=self.X[:_GRID_ROWS])
        return torch.stack([few.outputs(t) for t in _GRID])

    def weights(self, t: float) -> Float[Tensor, " P"]:
        return torch.add(self.middle, self.d, alpha=t) if t else self.middle

    def at(self, w: Float[Tensor, " P"]) -> Float[Tensor, "n C"]:
        state = torch.cat([w, self.statistics.to(w)]) if len(self.statistics) else w
        return self.model(self.model.unflatten(state), self.X)


class DerivativeProbe:
    """Examines the first step that moves the weights, and then steps at growing distances; warns at most once.

    Attributes:
        next: The step of the next look.
    """

    next = 0

    def look_at(self, setup: TrainingSetup, observed: ObservedStep, schedule: CheckSchedule) -> None:
        """Probe a step if it is due, and warn if the run's sums of gradients cannot equal its outputs.

        Args:
            setup: The training.
            observed: The step.
            schedule: The schedule of the checks; the probe takes at most half of their time.
        """
        index = observed.step.index
        if torch.equal(observed.start, observed.end):
            return
        batch = observed.step.batch
        rows = evenly_spread(setup.X if batch is None else batch, _NUM_ROWS)
        path = (observed.start, observed.end, observed.start_statistics)
        with schedule.checking(), random_state_kept(observed.start.device), disable_fused_attention():
            cause = _find_fault(setup.model, path, rows if batch is None else setup.X[rows])
        gradients = setup.model.unflatten(observed.made.gradient).values()
        hides = not index and not all(bool(g.any()) for g in gradients)  # layers that start at zero hide others
        wait = _FIRST_WAIT if hides else max(_LEAST_WAIT, 3 * index, 2 * schedule.steps_that_pay())
        self.next = index + 1 + wait
        if cause is None:
            return
        self.next = 1 << 62
        warn_uncertified(f"step {index}: {cause}{'' if cause is _SINGLE else _MAY_NOT_SUM}")


def _find_fault(model: FunctionalModel, path: tuple[Tensor, Tensor, Tensor], X: Tensor) -> str | None:
    """Return the reason that gradients along a step do not integrate to the change of the outputs; None if they may.

    Args:
        model: The recorded network.
        path: The weights before and after the step, and the moving statistics before it.
        X: Some rows of the batch.
    """
    start, end, statistics = path
    d, own_dtype = end - start, model.spec.dtype
    segment = own = _Segment(model, torch.add(start, d, alpha=0.5), d, X, statistics)
    try:
        spec = TensorSpec(torch.float64, d.device)
        wide = model if model.spec == spec else model.converted(spec)
        segment = _Segment(wide, own.middle.double(), d.double(), spec.cast(X), statistics)
        F = segment.on_grid()
        few = (F[-1] - F[0]).abs().amax(dim=1).topk(min(_FEW_ROWS, F.shape[1])).indices  # rows with large changes
        look = _Look.at(segment, 0.0, few, 1)
        is_wide = look.f.dtype == torch.float64
    except (RuntimeError, TypeError, ValueError):  # the network or its derivative needs its own dtype
        is_wide = False
    if not is_wide:
        segment, F, few = own, own.on_grid(), torch.arange(len(X), device=X.device)
        look = _Look.at(own, 0.0, few, _NUM_COMBINATIONS)
    if not 0 < look.size < math.inf:  # dead outputs have derivative 0; NaN and infinity are found elsewhere
        return None
    if (fault := _derivative_fault(look, segment, few, own_dtype)) not in (None, _SINGLE):
        return fault
    middle = replace(own, X=X[:_GRID_ROWS]).outputs(0.0).double()
    lost = float((middle - F[_NUM_INTERVALS // 2]).abs().max()) / look.size
    if lost > _LOST_PRECISION:
        return (
            f"the network computes in less precision than its weights have: its outputs are off by {lost:.1e} of "
            "their size (autocast, or a cast in forward)"
        )
    size, dtype = (look.size, own_dtype) if fault is None else (float(F.abs().max()), torch.float32)
    jump = _largest_jump(segment, F, 64 * torch.finfo(dtype).eps * size)
    if jump:
        return (
            f"the network's outputs jump by {jump:.1e} along the step (hard routing such as top-1 experts, argmax, "
            "rounding, or a training that diverges)"
        )
    return fault


@dataclass(frozen=True, eq=False)
class _Look:
    """Autograd's derivatives along a step, at one position, of some combinations of the outputs at some rows."""

    segment: _Segment
    t: float
    V: Float[Tensor, "r n C"]
    f: Float[Tensor, "n C"]
    slopes: Float[Tensor, " r"]

    @classmethod
    def at(cls, segment: _Segment, t: float, rows: Int64[Tensor, " n"], combinations: int) -> "_Look":
        segment, generator = replace(segment, X=segment.X[rows]), torch.Generator().manual_seed(0)
        s = torch.zeros_like(segment.d[:1], requires_grad=True)  # along the step
        with torch.enable_grad():
            f = segment.at(segment.weights(t) + s * segment.d)
        V = torch.randn(combinations, *f.shape, generator=generator, dtype=torch.float64).to(f)
        slopes = torch.zeros_like(V[:, 0, 0])
        for number in range(combinations if f.requires_grad else 0):
            (slopes[number],) = torch.autograd.grad(f, s, V[number], retain_graph=number + 1 < combinations)[0]
        return cls(segment, t, V, f.detach(), slopes)

    @cached_property
    def size(self) -> float:
        """The size of the outputs, or of their terms if these cancel.

        A network minus its initial version has outputs near 0, with the rounding of its terms. The size is measured:
        the change of the outputs when weights move by one eps, in units of eps.
        """
        eps = torch.finfo(self.V.dtype).eps
        w = move_by_rounding(self.segment.weights(self.t), eps)
        with torch.enable_grad():
            moved = self.segment.at(w.requires_grad_())  # by the same kernels
        return float(self.f.abs().max() + (moved.detach() - self.f).abs().max() / eps)

    def error(self, change: float, *, allowed: float = 64.0) -> float:
        """Return the distance of slopes from a central difference over a change of the outputs, minus its rounding.

        Args:
            change: The change, as a share of the outputs' size.
            allowed: The allowed rounding, in units of the outputs' rounding.
        """
        segment, t, scale = self.segment, self.t, float(self.V.norm())  # for combinations of outputs of size 1
        eps, slope = torch.finfo(self.V.dtype).eps, float(self.slopes.norm())
        reach, largest = float(largest_entry(segment.d)), float(largest_entry(segment.middle))
        h = min(change * self.size * scale / max(slope, 1e-300), (1e-3 * largest + 1e-6) / reach)
        if h * reach < 1e3 * eps * largest:
            return 0.0  # the weights cannot resolve the change: the training diverges
        difference = (self.V * (segment.outputs(t + h) - segment.outputs(t - h))).sum(dim=(1, 2)) / (2 * h)
        error = float((difference - self.slopes).norm()) - allowed * eps * self.size * scale / h
        return max(error, 0.0) / max(slope, float(difference.norm()), 1e-300)


def _derivative_fault(first: _Look, segment: _Segment, few: Int64[Tensor, " n"], own_dtype: torch.dtype) -> str | None:
    """Return the reason that autograd's derivative differs from central differences beyond the weights' rounding.

    Args:
        first: The first look; further looks are taken as long as the result is suspicious.
        segment: The step.
        few: The rows of the first look.
        own_dtype: The dtype of the run.
    """
    is_wide, every = first.f.dtype == torch.float64, torch.arange(len(segment.X), device=few.device)
    checks = [_FINE, _MEDIUM] if is_wide else [_COARSE]
    if not first.error(checks[0][0], allowed=0.0 if is_wide else 64.0) > (_FIRST_TOLERANCE if is_wide else _COARSE[1]):
        return None
    if is_wide and own_dtype != torch.float64:  # computed in float32 inside: look again at the same rows
        look, (change, tolerance) = _Look.at(segment, 0.0, few, _NUM_COMBINATIONS), _MEDIUM
        if not look.error(change, allowed=0.0) > tolerance / _STRICTER:
            return None
    looks = [_Look.at(segment, t, every, _NUM_COMBINATIONS) for t in _POSITIONS]
    before = math.inf
    for change, tolerance in checks:
        error = float(torch.tensor([look.error(change) for look in looks]).median())  # one of them may be at a kink
        if not error > tolerance and not error > before / 8:  # rounding falls by 1,000; NaN is found elsewhere
            return _SINGLE if (change, own_dtype) == (_MEDIUM[0], torch.float64) else None
        before = error
    return (
        f"the network's derivative is not the derivative of its outputs: along the step they differ by {error:.1%} "
        "(a straight-through estimator, a stop-gradient such as detach(), gradient reversal, rounding, a cast)"
    )


def _largest_jump(segment: _Segment, F: Float[Tensor, "k n C"], rounding: float) -> float:
    """Return the size of the largest jump of the outputs along the step; 0 if they are continuous up to rounding.

    Args:
        segment: The step.
        F: The outputs on the grid.
        rounding: The rounding of the outputs.
    """
    change, largest = F.diff(dim=0), 0.0
    smooth = (change.roll(1, 0) + change.roll(-1, 0)) / 2
    smooth[0], smooth[-1] = change[1], change[-2]
    distance = (change - smooth).abs().amax(dim=2)
    distance *= F.diff(n=len(F) - 1, dim=0).abs().amax(dim=2) > rounding / 2  # otherwise a polynomial fits as well
    for suspect in distance.flatten().topk(min(_NUM_SUSPECTS, distance.numel())).indices.tolist():
        k, row = divmod(suspect, distance.shape[1])
        if float(distance[k, row]) > rounding / 2:
            own = replace(segment, X=segment.X[row : row + 1])
            ends = F[k : k + 2, row : row + 1]
            largest = max(largest, _jump(own, _GRID[k], ends, smooth[k, row] * _NUM_INTERVALS, rounding))
    return largest


def _jump(
    segment: _Segment, a: float, ends: Float[Tensor, "2 1 C"], slope: Float[Tensor, " C"], rounding: float
) -> float:
    """Return the size of a jump of one row's outputs in the interval that starts at a; 0 if they are continuous there.

    The interval, with known outputs at its ends, is halved: at a kink the distance from the line falls with its length,
    at a jump it does not.
    """

    def from_line(t: float) -> Float[Tensor, "1 C"]:
        return segment.outputs(t) - t * slope

    b = a + 1 / _NUM_INTERVALS
    f_a, f_b = ends[0] - a * slope, ends[1] - b * slope
    jumps = [float((f_b - f_a).abs().max())]
    for _ in range(_HALVINGS[slope.dtype]):
        middle = (a + b) / 2
        f = from_line(middle)
        left, right = float((f - f_a).abs().max()), float((f_b - f).abs().max())
        a, f_a, b, f_b = (a, f_a, middle, f) if left > right else (middle, f, b, f_b)
        jumps.append(max(left, right))
        if jumps[-1] <= max(rounding, _FALL * jumps[-1 - min(3, len(jumps) - 1)]):
            return 0.0
    return jumps[-1]
