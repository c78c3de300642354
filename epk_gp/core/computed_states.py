"""States and coefficients of a run that are computed when they are read, in the dtype of whoever reads."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.plans import TensorSpec
from epk_gp.optimizers.update_rules import UpdateCoefficients


@runtime_checkable
class ComputedStates(Protocol):
    """Weight states that depend on the dtype of the computation."""

    def at(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Compute one state in this dtype and on this device."""


@runtime_checkable
class ComputedUpdates(Protocol):
    """The update rule's coefficients of each step, which depend on the dtype of the computation."""

    @property
    def is_scaled(self) -> bool:
        """Whether a preconditioner scales any of them."""

    def at(self, step: int, spec: TensorSpec) -> UpdateCoefficients:
        """Compute one step's coefficients in this dtype and on this device."""

    def held(self, step: int) -> UpdateCoefficients:
        """Return what is held of one step's coefficients, without computing any."""
