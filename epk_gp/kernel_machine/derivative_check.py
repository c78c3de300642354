"""A check of second derivatives: are those that torch gives the differences of the gradients?

They are not where the gradient is that of no function (straight-through estimators, stop-gradients, gradients scaled by
counts), and where torch's own second derivative of an operation is wrong.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.plans import TensorSpec
from epk_gp.core.gradients import RunReplay
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.replay import PassData, TrainingReplay
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.kernel_machine.curvature import LossCurvature

# Pairs of differences, relative to the weights, that are compared with each other; and by how much torch may differ
# from them. At the fine ones even networks of many ReLUs seldom meet a kink; where a network computes in float32
# inside, these are rounding, and the coarse ones may hold kinks.
_PAIRS = (((1e-8, 1e-7), 1e-3), ((1e-4, 1e-3), 0.15))
_SETTLED = 4  # differences tell something where torch misses them by so many times what they miss each other


class _WideReplay(TrainingReplay):
    """Replays all passes in float64, with other random numbers than the run drew, but the same ones in each call."""

    def dtype_of(self, data: PassData, *, exact: bool = True) -> torch.dtype:
        """Return float64."""
        return torch.float64


def curvature_error(trajectory: Trajectory, net: PlannedModel, memory: MemoryPlan, device: torch.device) -> float:
    """Return by what share the second derivatives along some direction differ from differences of gradients.

    The middle, the last and the first step are looked at; 0 where the difference is rounding or a kink, and where the
    network cannot compute in float64.

    Args:
        trajectory: The run.
        net: The network with its plan.
        memory: Chooses how many rows are taken together.
        device: Of the computation.
    """
    run, recomputation = _wide_run(trajectory.trained, net, device), recomputation_of(trajectory)
    curvature = LossCurvature(PlannedModel(run.model, net.plan), run, memory)
    states = range(trajectory.num_steps) if recomputation is None else recomputation.kept.numbers[:-1]
    steps = [run.trajectory.steps[states[place]] for place in dict.fromkeys((len(states) // 2, -1, 0)) if states]
    for pair, tolerance in _PAIRS:
        try:
            errors = [_step_error(run, curvature, step, pair) for step in steps]
        except (RuntimeError, TypeError, ValueError):  # the network cannot compute in float64
            return 0.0
        if settled := [error for error in errors if error is not None]:
            return max(settled) if max(settled) > tolerance else 0.0
    return 0.0


def _wide_run(trajectory: Trajectory, net: PlannedModel, device: torch.device) -> RunReplay:
    spec = TensorSpec(torch.float64, device)
    run = RunReplay(trajectory, net.model.variant(spec), torch.zeros((), dtype=spec.dtype, device=device))
    own = trajectory.model.variant(TensorSpec(trajectory.dtype, device))
    run.__dict__["passes"] = _WideReplay(own, trajectory.loss, spec)
    return run


def _step_error(run: RunReplay, curvature: LossCurvature, step: Step, pair: tuple[float, float]) -> float | None:
    """Return the relative error of a product with a step's Hessian; None where the differences do not settle."""
    state = flat_state(run.trajectory, step.index, run.reference)
    P = run.model.num_weights
    direction = torch.zeros_like(state)
    d = direction[:P].copy_(_direction(state[:P], run.model.sizes))
    product = curvature(step, d[None], None).of_weights[0]
    # a Hessian is symmetric: <H d, H d> = <d, H (H d)>
    square, again = product @ product, d @ curvature(step, product[None], None).of_weights[0]
    asymmetry = float((square - again).abs() / torch.maximum(square, again.abs()).clamp(min=1e-300))

    def difference(h: float) -> Float[Tensor, " P"]:
        ends = [run.gradient_at(step, state + sign * h * direction)[0] for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * h)

    fine, coarse = map(difference, pair)
    scale = float(torch.stack([product, fine]).norm(dim=1).max())
    error, unsettled = float((fine - product).norm()), float((fine - coarse).norm())
    if not scale > 0 or not unsettled * _SETTLED <= max(error, 1e-3 * scale):
        return None
    return max(error / scale, asymmetry)


def _direction(w: Float[Tensor, " P"], sizes: tuple[int, ...]) -> Float[Tensor, " P"]:
    """Return random numbers of the size of each parameter's weights."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(w), generator=generator, dtype=w.dtype).to(w.device)
    typical = w.norm() / max(1, len(w)) ** 0.5
    parts = w.split(sizes)
    scales = [part.norm() / max(1, len(part)) ** 0.5 for part in parts]
    own = [torch.where(scale > 0, scale, typical).expand(len(part)) for scale, part in zip(scales, parts, strict=True)]
    return noise * torch.cat(own)
