"""How far a pass over the run is: its sums, its certificate and its adjoint; on disk if that is asked for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epk_gp.core.show import ProgressBar
from epk_gp.kernel_machine.certification import IntegrationRecord
from epk_gp.quadrature.adaptive import Integral
from epk_gp.storage.partial_sums import PartialSums


class PassProgress:
    """The state of a pass, resumed from where partial sums have it.

    Args:
        checkpoint: Where the state is kept; nowhere if None.
        sums: What the pass adds to; filled with what the checkpoint holds.
        record: What the integrals left; continued from the checkpoint.
        name: Name of the sums on disk; it must tell ways of dividing the work apart.
        bar: A progress bar of steps.

    Attributes:
        done: Number of work items that the sums hold.
        adjoint_state: The adjoint that the next work item needs.
        evaluations: Gradient evaluations so far.
        advice: How a call is made faster, for one that finds out that it will be long; None where it says nothing.
    """

    def __init__(
        self,
        checkpoint: PartialSums | None,
        sums: Sequence[Tensor],
        record: IntegrationRecord,
        name: str = "sums",
        bar: ProgressBar | None = None,
    ) -> None:
        self.checkpoint, self.sums, self.name, self.bar = checkpoint, sums, name, bar
        self.adjoint_state: Tensor | None = None
        self.advice: str | None = None
        self.record, self.evaluations = record, 0.0
        stored, self.done = ({}, 0) if checkpoint is None else checkpoint.load(name)
        if not stored:
            return
        for number, total in enumerate(sums):
            total.copy_(stored[f"sum.{number}"])
        self.record.load(stored)
        self.evaluations = float(stored["evaluations"])
        self.adjoint_state = stored["carried"].to(sums[0]) if "carried" in stored else None

    def advance(
        self, integrals: Sequence[Integral], adjoint_state: Tensor | None, *, is_last: bool, num_steps: int = 1
    ) -> None:
        """Count one more work item, and save if it is time or the last one.

        Args:
            integrals: Those that were taken for it, and have not been counted.
            adjoint_state: The adjoint that the next work item needs.
            is_last: There is no work item after it.
            num_steps: Steps of the run that it stands for.
        """
        self.done += 1
        self.adjoint_state = adjoint_state
        for integral in integrals:
            self.record.add(integral)
            self.evaluations += float(integral.evaluations.sum())
        if self.bar is not None:
            self.bar.update(num_steps)
        if self.checkpoint is None or not (is_last or self.checkpoint.should_save):
            return
        state = self.state()
        if adjoint_state is not None:
            state["carried"] = adjoint_state
        self.checkpoint.save(self.name, state, self.done)

    def state(self) -> dict[str, Tensor]:
        """Return sums and certificate as tensors."""
        state = {f"sum.{number}": total for number, total in enumerate(self.sums)}
        return state | self.record.state() | {"evaluations": torch.tensor(self.evaluations, dtype=torch.float64)}

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add what other steps add to the same sums, and its certificate (`state`)."""
        for number, total in enumerate(self.sums):
            total += state[f"sum.{number}"].to(total)
        self.merge(state)

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the certificate and the evaluations of points that another pass went through (`state`)."""
        other = replace(self.record, statuses=Counter())
        other.load(state)
        self.record.merge(other)
        self.evaluations += float(state["evaluations"])
