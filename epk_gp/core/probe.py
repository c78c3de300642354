"""Evaluate a network near its initial weights: a fingerprint of its forward function."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel

NUM_FINGERPRINT_POINTS = 4


def perturbed_initial(initial: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Move the initial weights by a fixed wave, so that a zero last layer hides nothing."""
    wave = torch.arange(initial.numel(), device=initial.device, dtype=torch.float64).sin().to(initial.dtype)
    return initial + 0.1 * wave


def fingerprint_outputs(
    model: FunctionalModel, initial: Float[Tensor, " P"], inputs: Shaped[Tensor, "M ..."]
) -> Float[Tensor, "n C"]:
    """Evaluate the first inputs near the initial weights: a fingerprint of the forward function."""
    with torch.no_grad():
        return model(model.unflatten(perturbed_initial(initial)), inputs[:NUM_FINGERPRINT_POINTS])
