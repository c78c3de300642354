"""Weights of a network's logits and of a process's mean in the logits of both: stacking, with a temperature in it."""

from dataclasses import dataclass
from math import exp

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

_LOG_RANGE = 10.0  # weights from 4.5e-5 to 2.2e4


@dataclass(frozen=True)
class Stacking:
    """Class probabilities softmax(network * a_1 + process * a_2).

    Attributes:
        network: a_1, of the network's logits.
        process: a_2, of the process's mean.
        loss: Mean negative log probability of the held-out labels and of the one beside them (`stack_logits`), in nats.
    """

    network: float
    process: float
    loss: float

    def logits(self, network: Float[Tensor, "n C"], process: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        """Return the weighted sum."""
        return self.network * network + self.process * process


def stack_logits(network: Float[Tensor, "n C"], process: Float[Tensor, "n C"], labels: Int[Tensor, " n"]) -> Stacking:
    """Choose both weights, positive, by the likelihood of labels that neither network nor process has seen.

    One label of unknown class is added, of the mean of all points and classes: without it the weights would grow
    without end where all labels are predicted rightly, and all probabilities would be 0 or 1. Of n labels it weighs
    1 / (n + 1), as the targets of Platt (1999) do.

    Args:
        network: Logits of the network.
        process: Mean of the process.
        labels: Classes of the n points.
    """

    def loss_and_gradient(log_weights: np.ndarray) -> tuple[float, np.ndarray]:
        a = torch.tensor(log_weights, dtype=network.dtype, device=network.device, requires_grad=True)
        logits = a[0].exp() * network + a[1].exp() * process
        log_p = logits.log_softmax(1)
        known = torch.nn.functional.nll_loss(log_p, labels, reduction="sum")
        loss = (known - log_p.mean()) / (len(labels) + 1)
        (gradient,) = torch.autograd.grad(loss, a)
        return loss.item(), gradient.cpu().numpy().astype(np.float64)

    bounds = [(-_LOG_RANGE, _LOG_RANGE)] * 2
    with torch.enable_grad():
        found = minimize(loss_and_gradient, np.zeros(2), jac=True, method="L-BFGS-B", bounds=bounds)
    network_weight, process_weight = np.exp(found.x).tolist()
    return Stacking(network_weight, process_weight, float(found.fun))


def most_likely_temperature(logits: Float[Tensor, "n C"], labels: Int[Tensor, " n"]) -> float:
    """Return the factor, an inverse temperature, at which labels are most likely under the softmax."""

    def loss(log_factor: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits * exp(log_factor), labels))

    return exp(float(minimize_scalar(loss, bounds=(-_LOG_RANGE, _LOG_RANGE), method="bounded").x))
