"""Points of H x {0, 1}: inputs with the information whether they are training or test copies."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from epk_gp.core.inputs import InputLayout, Inputs, pack_inputs


@dataclass(frozen=True, eq=False, init=False)
class Points:
    """Points of H x {0, 1} (Definition 3.4, Bell et al. 2023).

    Attributes:
        X: n inputs, packed into one tensor if they are several.
        is_train: Whether they are training copies (gradient frozen at the step's start) or test copies; one for all,
            or (n,).
        layout: Of which tensors the inputs consist, if they are several.
    """

    X: Shaped[Tensor, "n ..."]
    is_train: bool | Bool[Tensor, " n"]
    layout: InputLayout | None

    def __init__(self, X: Inputs, is_train: bool | Bool[Tensor, " n"]) -> None:
        """Pack the inputs, and raise if the copy mask does not fit.

        Raises:
            TypeError: `X` is neither a tensor nor a tuple or dict of tensors, or `is_train` is neither a bool nor a
                bool tensor.
            ValueError: `is_train` has another length than X, or several inputs do not go together.
        """
        packed, layout = (X, None) if isinstance(X, Tensor) else pack_inputs(X)
        for name, value in (("X", packed), ("is_train", is_train), ("layout", layout)):
            object.__setattr__(self, name, value)
        if isinstance(self.is_train, bool):
            return
        if not isinstance(self.is_train, Tensor) or self.is_train.dtype != torch.bool:
            got = self.is_train.dtype if isinstance(self.is_train, Tensor) else type(self.is_train).__name__
            raise TypeError(f"is_train must be a bool or a bool tensor: got {got}. Convert it with .bool().")
        if self.is_train.shape != self.X.shape[:1]:
            raise ValueError(
                "is_train must have one entry per point: "
                f"got shape {tuple(self.is_train.shape)} for {len(self.X)} points."
            )

    def __len__(self) -> int:
        """Count the points."""
        return len(self.X)

    @property
    def mask(self) -> Bool[Tensor, " n"]:
        """Whether each point is a training copy."""
        if isinstance(self.is_train, bool):
            return torch.full((len(self),), self.is_train, device=self.X.device)
        return self.is_train

    def copies(self, is_train: bool) -> Tensor:
        """List the indices of the points of one copy."""
        if isinstance(self.is_train, bool):
            return torch.arange(len(self) if self.is_train == is_train else 0, device=self.X.device)
        return (self.is_train == is_train).nonzero().squeeze(1).to(self.X.device)


def validate_points(points: object, name: str) -> None:
    """Raise if an object does not tell which copies it holds.

    Raises:
        TypeError: The object is not `Points`.
    """
    if not isinstance(points, Points):
        raise TypeError(
            f"{name} must be epk_gp.Points(X, is_train=...), which says what copies they are: got "
            f"{type(points).__name__}."
        )
