"""Gradient clipping: as it is stated, or as a recorded run shows it by the factors of its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.optimizers.update_rules import UpdateCoefficients

EPSILON = 1e-6  # torch adds it to the norm of a gradient that it clips
CLIP_ROUNDING = (1e-4, 1e-7)  # relative rounding of a clipped gradient, in float32 and in float64


@dataclass(frozen=True)
class ClipNorm:
    """Clipping of the norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: The largest norm that is not clipped.
        norm_type: The p of the p-norm.
    """

    max_norm: float
    norm_type: float = 2.0

    @property
    def bound(self) -> float:
        """The number that must be positive and finite."""
        return self.max_norm

    def factor(self, g: Float[Tensor, " P"]) -> float:
        """Return the factor by which this clipping multiplies a gradient."""
        norm = float(torch.linalg.vector_norm(g, self.norm_type))
        return min(1.0, self.max_norm / (norm + EPSILON))

    def factors(self, g: Float[Tensor, "*m P"]) -> Float[Tensor, "*m 1"]:
        """Return the factor of each of several gradients."""
        norms: Tensor = torch.linalg.vector_norm(g, self.norm_type, dim=-1, keepdim=True)
        return (self.max_norm / (norms + EPSILON)).clamp(max=1.0)

    def may_have_clipped(self, used: Float[Tensor, " P"]) -> bool:
        """Return whether a gradient is as large as this clipping leaves it: up to rounding, not below the bound."""
        norm = float(torch.linalg.vector_norm(used, self.norm_type))
        return not norm * (1 + CLIP_ROUNDING[False]) + EPSILON < self.max_norm

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_norm_(net.parameters(), self.max_norm, self.norm_type)


@dataclass(frozen=True)
class ClipValue:
    """Clipping of every entry of the gradient, as `torch.nn.utils.clip_grad_value_`.

    Attributes:
        max_value: The largest absolute value that is not clipped.
    """

    max_value: float

    @property
    def bound(self) -> float:
        """The number that must be positive and finite."""
        return self.max_value

    def factor(self, g: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Return the factor by which this clipping multiplies each entry of a gradient."""
        return self.factors(g)

    def factors(self, g: Float[Tensor, "*m P"]) -> Float[Tensor, "*m P"]:
        """Return the factor of each entry of several gradients."""
        return torch.where(g.abs() > self.max_value, self.max_value / g.abs(), 1.0)

    def may_have_clipped(self, used: Float[Tensor, " P"]) -> bool:
        """Return whether a gradient has an entry as large as this clipping leaves it."""
        return not float(torch.linalg.vector_norm(used, float("inf"))) * (1 + CLIP_ROUNDING[False]) < self.max_value

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_value_(net.parameters(), self.max_value)


Clip = ClipNorm | ClipValue


def clip_from_json(stated: Sequence[float] | None) -> Clip | None:
    """Return the clipping of a run's header: the bound of the entries, or the bound of the norm and its p."""
    if stated is None:
        return None
    return ClipValue(*stated) if len(stated) == 1 else ClipNorm(*stated)


def is_clipped(update: UpdateCoefficients) -> bool:
    """Return whether a step clipped its gradient, or an entry of it."""
    factors = update.grad_scale.abs()
    return bool(((factors > 0) & (factors < 1)).any())


def step_clip(stated: Clip | None, update: UpdateCoefficients, scale: Tensor, g: Float[Tensor, " P"]) -> Clip | None:
    """Return the clipping of a step: as stated, else as its factors show it, of the 2-norm or entry by entry.

    A bound that is not stated has three digits, for the recorder sees no other. The factors of another norm do not
    follow from such a bound.

    Args:
        stated: The clipping that the loop stated.
        update: The recorded coefficients of the step.
        scale: Its `grad_scale` as one number per weight, (P,); 0 where there was no gradient.
        g: The gradient of the batch's loss.
    """
    if stated is not None or not is_clipped(update):
        return stated
    factors = scale.abs()
    if len(update.grad_scale) == len(g):
        return ClipValue(rounded_bound(float((factors * g.abs())[(factors > 0) & (factors < 1)].max())))
    norm = float(torch.linalg.vector_norm(torch.where(factors > 0, g, 0.0))) + EPSILON
    return ClipNorm(rounded_bound(float(factors[factors > 0].min()) * norm))


def rounded_bound(value: float) -> float:
    """Return a number in three digits."""
    return float(f"{value:.3g}")
