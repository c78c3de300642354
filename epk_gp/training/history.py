"""The recorded steps of a run: all learning rates and batches, and the results that must stay in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.update_rules import UpdateCoefficients
from epk_gp.storage.passes import pack_step
from epk_gp.training.tensor_arena import TensorArena


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step; that of step -1 stands for the initial weights.

    Attributes:
        end: The weights after the step.
        update: Its coefficients; None where no step led to the weights.
        digest: Digest of the run up to the step.
        statistics: The moving statistics after the step; None for a network without them.
    """

    end: Float[Tensor, " P"]
    update: UpdateCoefficients | None
    digest: str
    statistics: Float[Tensor, " Q"] | None = None


class RunHistory:
    """The steps recorded so far, and the results of those that are in memory.

    Attributes:
        steps: Learning rate, batch and forward passes of each step; the passes are packed, in memory or on disk.
    """

    def __init__(
        self,
        weights: Float[Tensor, " P"],
        digest: str,
        steps: Sequence[Step] = (),
        statistics: Float[Tensor, " Q"] | None = None,
    ) -> None:
        """Begin with the weights and statistics after `steps`, the initial ones if there are none."""
        self.steps = list(steps)
        self._results = {len(self.steps) - 1: StepResult(weights, None, digest, statistics)}
        self._arena = TensorArena()

    @property
    def last(self) -> StepResult:
        """The result of the last step."""
        return self._results[len(self.steps) - 1]

    def append(
        self,
        step: Step,
        end: Float[Tensor, " P"],
        update: UpdateCoefficients,
        digest: str,
        statistics: Float[Tensor, " Q"] | None = None,
    ) -> None:
        """Add a step with its passes packed, and copies of its results.

        Raises:
            TypeError: A tensor of a pass has a dtype that cannot be stored.
            ValueError: A pass is not as `ForwardPass` says, or holds NaN or infinity.
        """
        copy_in = self._arena.copy_in
        packed = pack_step(step, copy_in)
        after = None if statistics is None else copy_in(statistics)
        self._results[step.index] = StepResult(copy_in(end), update.map(copy_in), digest, after)
        # Last, for the number of steps counts them: an interrupt before this line leaves the history as it was.
        self.steps.append(packed if step.batch is None else replace(packed, batch=copy_in(step.batch)))

    def replace_steps(self, first: int, steps: Sequence[Step]) -> None:
        """Put steps that are on disk in the place of the same steps in memory, from number `first` on."""
        self.steps[first : first + len(steps)] = steps

    def results(self, first: int, end: int) -> list[StepResult]:
        """Return the results of the steps `first` to `end - 1`."""
        return [self._results[index] for index in range(first, end)]

    def drop_steps_from(self, count: int) -> None:
        """Drop all steps but the first `count`."""
        del self.steps[count:]

    def forget_results_before(self, index: int) -> None:
        """Free the results of the steps before `index`, which are on disk."""
        for earlier in [i for i in self._results if i < index]:
            del self._results[earlier]
