"""The part of each step that its update rule does not explain from exact gradients."""

import tempfile

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import replayed_steps
from epk_gp.core.memory_plan import weight_rows
from epk_gp.core.trajectory import Trajectory, flat_weights, leaves_unexplained
from epk_gp.kernel_machine.certification import StepMismatches, coarsest_dtype
from epk_gp.kernel_machine.problem import AttributionProblem


class StepResiduals:
    """rho_s = w_{s+1} - w_s - (the update that the training gradients give), for all steps of a run.

    The run is replayed once, and every step is compared with the recorded one. The residuals of a run in float64 that
    may leave nothing unexplained are rounding, and are not kept unless a preconditioner amplifies it: where one is
    more, the comparison says so.

    Attributes:
        mismatches: The comparison.
    """

    def __init__(self, problem: AttributionProblem, outputs: Float[Tensor, "n C"], *, keeps: bool) -> None:
        trajectory, X, model = problem.trajectory, problem.X, problem.net.model
        dtype = coarsest_dtype(trajectory, outputs)
        self.mismatches = StepMismatches(dtype)
        self._rows: Tensor | None = None
        budget = problem.options.memory_budget
        if keeps and leaves_residuals(trajectory, outputs):
            self._rows = rows_of_weights(trajectory.num_steps, model.num_weights, outputs, budget)
        for replayed in replayed_steps(trajectory, model, X):
            is_amplified = self.mismatches.add(trajectory, model, replayed)
            if keeps and is_amplified and self._rows is None:
                self._rows = rows_of_weights(trajectory.num_steps, model.num_weights, outputs, budget).zero_()
            if self._rows is not None:
                step = flat_weights(trajectory.trained, replayed.step.index + 1, X) - replayed.w
                self._rows[replayed.step.index] = (step - replayed.d).to(self._rows)

    def __getitem__(self, s: int) -> Float[Tensor, " P"] | None:
        """Return rho_s; None where all are zero to rounding."""
        return None if self._rows is None else self._rows[s]


def leaves_residuals(trajectory: Trajectory, outputs: Float[Tensor, "n C"]) -> bool:
    """Return whether steps may differ from the update rule's on exact gradients by more than float64's rounding.

    Args:
        trajectory: The run.
        outputs: Outputs in the dtype of the computation.
    """
    return coarsest_dtype(trajectory, outputs) != torch.float64 or leaves_unexplained(trajectory)


def rows_of_weights(num_steps: int, num_weights: int, reference: Tensor, budget: int) -> Tensor:
    """Return uninitialised rows: in memory if they fit into its share, else in a temporary file that goes with them."""
    if num_steps <= weight_rows(budget, reference.element_size(), num_weights):
        return reference.new_empty(num_steps, num_weights)
    kind = np.dtype(str(reference.dtype).removeprefix("torch."))
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="w+", shape=(num_steps, num_weights)))
