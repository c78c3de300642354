"""A fingerprint of a network's forward function: its outputs at a few inputs, near its initial weights."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel

NUM_FINGERPRINT_POINTS = 4  # inputs whose outputs are stored with a run (part of format version 2)


def perturbed_initial(initial: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return the initial weights moved by 0.1 sin(i), i the index of the weight.

    At the initial weights themselves a last layer of zeros would make the outputs of all networks equal.
    """
    wave = torch.arange(initial.numel(), device=initial.device, dtype=torch.float64).sin().to(initial.dtype)
    return initial + 0.1 * wave


def fingerprint_outputs(
    model: FunctionalModel,
    initial: Float[Tensor, " P"],
    inputs: Shaped[Tensor, "M ..."],
    statistics: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "n C"]:
    """Return the network's outputs at the first n = min(4, M) inputs, with the initial weights perturbed.

    Args:
        model: The network.
        initial: Its initial weights.
        inputs: The training inputs.
        statistics: Its initial moving statistics, if it has any; they are not perturbed, for a variance is positive.
    """
    state = perturbed_initial(initial)
    if statistics is not None:
        state = torch.cat([state, statistics.to(state)])
    with torch.no_grad():
        return model(model.unflatten(state), inputs[:NUM_FINGERPRINT_POINTS])
