"""What a trajectory reads of a run: its weight states and its coefficients, wherever they are."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from epk_gp.optimizers.update_rules import UpdateCoefficients


@runtime_checkable
class States(Protocol):
    """Weight states w_0 .. w_S, each flat, (P,)."""

    def __len__(self) -> int:
        """Count the states, S + 1."""

    def __getitem__(self, state: int, /) -> Float[Tensor, " P"]:
        """Read one state."""


@runtime_checkable
class Updates(Protocol):
    """The update rule's coefficients of each step."""

    def __len__(self) -> int:
        """Count the steps, S."""

    def __getitem__(self, step: int, /) -> UpdateCoefficients:
        """Read one step's coefficients."""
