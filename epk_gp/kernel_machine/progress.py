"""Where a pass over the run stands: its sums, its certificate, the adjoint it carries; on disk if that is asked for."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.quadrature.adaptive import Integral
from epk_gp.storage.partial_sums import PartialSums


class PassProgress:
    """The state of a pass, taken up again where a checkpoint has it.

    Attributes:
        done: Units of work that the sums hold.
        carried: The adjoint that the next unit needs.
        largest: Largest quadrature residual so far; NaN stays.
        evaluations: Gradient evaluations so far.
    """

    def __init__(
        self, checkpoint: PartialSums | None, sums: Sequence[Tensor], like: Float[Tensor, "..."], name: str = "sums"
    ) -> None:
        """Start, or go on.

        Args:
            checkpoint: Where the state is kept; nowhere if None.
            sums: What the pass adds to; filled with what the checkpoint holds.
            like: Gives dtype and device.
            name: What the sums are called on disk; it must tell ways of dividing the work apart.
        """
        self.checkpoint, self.sums, self.name = checkpoint, sums, name
        self.carried: Tensor | None = None
        self.largest, self.evaluations = like.new_zeros(()), 0.0
        stored, self.done = ({}, 0) if checkpoint is None else checkpoint.load(name)
        if not stored:
            return
        for number, total in enumerate(sums):
            total.copy_(stored[f"sum.{number}"])
        self.largest, self.evaluations = stored["largest"].to(like), float(stored["evaluations"])
        self.carried = stored["carried"].to(like) if "carried" in stored else None

    def advance(self, integral: Integral, carried: Tensor | None, *, last: bool) -> None:
        """Count one more unit, and save if it is time or the last one."""
        self.done += 1
        self.carried = carried
        self.largest = torch.maximum(self.largest, integral.residual.max())
        self.evaluations += float(integral.evaluations.sum())
        if self.checkpoint is None or not (last or self.checkpoint.should_save):
            return
        held = {f"sum.{number}": total for number, total in enumerate(self.sums)}
        held |= {"largest": self.largest, "evaluations": torch.tensor(self.evaluations, dtype=torch.float64)}
        self.checkpoint.save(self.name, held if carried is None else held | {"carried": carried}, self.done)
