"""The gradients of the outputs, averaged over a stretch of the path: one step, or a chord over several."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.trajectory import flat_state
from epk_gp.gram.accumulator import averaged_jacobian
from epk_gp.kernel_machine.terms import (
    AttributionProblem,
    IntegratedLine,
    averaged_statistics_jacobian,
    integrate_stretch,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.paths import LayerwisePath, num_segments
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.quadrature.status import OPEN, QuadratureStatus, fixed_status, residual_status, rounding_of

# A change of the outputs that is a sum over the weights may miss them by so many eps of the sum of its terms' sizes.
_SUM_ROUNDING = 16


@dataclass(frozen=True, eq=False)
class StretchAverage:
    """The adjoint of every step of a stretch: what a change of the state during any of them does to N points.

    Attributes:
        steps: The steps that the stretch stands for.
        of_weights: Phi, the averaged gradients in the weights.
        of_statistics: Phi^b, those in the moving statistics, if they were asked for.
        integrals: Of each straight line of the stretch.
    """

    steps: range
    of_weights: Float[Tensor, "K N P"]
    of_statistics: Float[Tensor, "K N Q"] | None
    integrals: tuple[Integral, ...]

    @property
    def is_one_line_of_a_step(self) -> bool:
        """Whether the integral of the one line is the change of the outputs in one step."""
        return len(self.steps) == len(self.integrals) == 1


def average_over(
    problem: AttributionProblem, steps: range, rows: Int64[Tensor, " N"], max_nodes: int, *, splits_statistics: bool
) -> StretchAverage:
    """Average the gradients of some points over a stretch.

    On a Manhattan path each weight has the average over the line on which it moves.

    Args:
        problem: The predictions.
        steps: The steps that the stretch stands for.
        rows: Which N of the points.
        max_nodes: Nodes evaluated at a time.
        splits_statistics: The averages in the moving statistics are wanted even where their sum is known without.
    """
    P, K = problem.net.model.num_weights, problem.num_outputs
    Phi, of_statistics, integrals = None, None, list[Integral]()
    for line in integrate_stretch(problem, steps, rows, max_nodes):
        integrals.append(line.integral)
        if _wants_statistics(problem, steps, line, splits_statistics=splits_statistics):
            of_statistics = averaged_statistics_jacobian(problem, line, rows)
        if not line.moves_weights:
            continue
        average = averaged_jacobian(line.node_batches(), problem.columns)
        if line.part.stop - line.part.start >= P:
            Phi = average
            continue
        Phi = average.new_zeros(K, len(rows), P) if Phi is None else Phi
        Phi[:, :, line.part] = average[:, :, line.part]
    if Phi is None:
        raise RuntimeError("a stretch of the path must move weights: this is a bug in epk_gp.")
    if isinstance(problem.kernel.path, LayerwisePath):
        integrals = [_measured(problem, rows, line, Phi, of_statistics)]
    return StretchAverage(steps, Phi, of_statistics, tuple(integrals))


def _measured(
    problem: AttributionProblem,
    rows: Int64[Tensor, " N"],
    line: IntegratedLine,
    Phi: Float[Tensor, "K N P"],
    of_statistics: Float[Tensor, "K N Q"] | None,
) -> Integral:
    """Return the integral of a layerwise stretch, with what its averages say of the change of the outputs."""
    P, integral = problem.net.model.num_weights, line.integral
    d, eps = line.segment.d, torch.finfo(Phi.dtype).eps
    change, size = (Phi @ d[:P]).T, (Phi.abs() @ d[:P].abs()).T
    if of_statistics is not None:
        change = change + (of_statistics @ d[P:]).T
        size = size + (of_statistics.abs() @ d[P:].abs()).T
    rounding = _SUM_ROUNDING * eps * size.amax(dim=1)
    true = problem.select_outputs(integral.end - integral.start, rows)
    error = (true - change).abs().amax(dim=1)
    total = change if problem.classes is None else integral.total.scatter(1, problem.classes[rows][:, None], change)
    rule = problem.kernel.rule
    if isinstance(rule, AdaptiveRule):
        share = num_segments(problem.kernel.path, problem.net.model, problem.trajectory.num_steps)
        of_outputs = rounding_of(integral.start, integral.end)
        status = residual_status(error, torch.maximum(of_outputs, rounding), rule.tol / share)
        status = torch.where(status == OPEN, QuadratureStatus.INCONSISTENT_DERIVATIVE, status)
        status = torch.where(error.isfinite(), status, QuadratureStatus.NOT_FINITE)
    else:
        status = fixed_status(error)
    return replace(integral, total=total, residual=error, status=status, rounding=rounding)


def statistics_change(
    problem: AttributionProblem,
    average: StretchAverage,
    step: int,
    rows: Int64[Tensor, " N"],
    of_weights: Float[Tensor, "N K"],
) -> Float[Tensor, "N K"]:
    """Return what the change of the moving statistics in a step adds to some outputs.

    Args:
        problem: The predictions.
        average: The stretch that the step belongs to.
        step: The step.
        rows: Which N of the points.
        of_weights: What its weights add.
    """
    if average.is_one_line_of_a_step:
        return problem.select_outputs(average.integrals[0].total, rows) - of_weights
    before, after = (flat_state(problem.trajectory, s, problem.X) for s in (step, step + 1))
    change = (after - before)[problem.net.model.num_weights :]
    return torch.einsum("knq,q->nk", average.of_statistics, change)


def _wants_statistics(
    problem: AttributionProblem, steps: range, line: IntegratedLine, *, splits_statistics: bool
) -> bool:
    model = problem.net.model
    if problem.trajectory.statistics is None or line.part.stop <= model.num_weights:
        return False
    if isinstance(problem.kernel.path, LayerwisePath):  # the integral is not known without
        return True
    return splits_statistics or len(steps) > 1 or line.part.start > 0
