"""The part of each step that its update rule does not explain from exact gradients."""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import replayed_steps
from epk_gp.core.plans import weight_rows
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.plans import rows_of_weights
from epk_gp.core.trajectory import Trajectory, flat_weights, leaves_unexplained
from epk_gp.kernel_machine.certification import StepMismatches, coarsest_dtype
from epk_gp.kernel_machine.terms import AttributionProblem


class StepResiduals:
    """rho_s = w_{s+1} - w_s - (the update that the training gradients give), for all steps of a run.

    The run is replayed once, and every step is compared with the recorded one. The residuals of a run in float64 that
    may leave nothing unexplained are rounding, and are not kept unless a preconditioner amplifies it: where one is
    more, the comparison says so. Of a run whose states are computed again, the steps that end at a kept state have
    residuals, the jumps; those between are steps of the update rule on the gradients of this very computation.

    Attributes:
        mismatches: The comparison.
    """

    def __init__(self, problem: AttributionProblem, outputs: Float[Tensor, "n C"], *, keeps: bool) -> None:
        trajectory, X, model = problem.trajectory, problem.X, problem.net.model
        dtype = coarsest_dtype(trajectory, outputs)
        self.mismatches = StepMismatches(dtype)
        recomputation, S = recomputation_of(trajectory), trajectory.num_steps
        ends = range(1, S + 1) if recomputation is None else recomputation.kept.numbers[1:]
        places = {state - 1: place for place, state in enumerate(ends)}
        max_rows = weight_rows(problem.options.memory_budget, outputs.element_size(), model.num_weights)
        self._rows: dict[int, Tensor] = {}
        rows: Tensor | None = None
        keeps_all = keeps and leaves_residuals(trajectory, outputs)
        for replayed in replayed_steps(trajectory, model, X):
            index = replayed.step.index
            is_amplified = self.mismatches.add(trajectory, model, replayed)
            if not keeps or not (is_amplified or (keeps_all and index in places)):
                continue
            residual = flat_weights(trajectory.trained, index + 1, X) - replayed.w - replayed.d
            if index not in places:
                self._rows[index] = residual.to(outputs)
                continue
            rows = rows_of_weights(len(places), model.num_weights, outputs, max_rows) if rows is None else rows
            rows[places[index]] = residual.to(rows)
            self._rows[index] = rows[places[index]]

    def __getitem__(self, s: int) -> Float[Tensor, " P"] | None:
        """Return rho_s; None where it is zero to rounding."""
        return self._rows.get(s)


def leaves_residuals(trajectory: Trajectory, outputs: Float[Tensor, "n C"]) -> bool:
    """Return whether steps may differ from the update rule's on exact gradients by more than float64's rounding.

    Args:
        trajectory: The run.
        outputs: Outputs in the dtype of the computation.
    """
    return coarsest_dtype(trajectory, outputs) != torch.float64 or leaves_unexplained(trajectory)
