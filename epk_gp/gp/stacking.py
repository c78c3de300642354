"""Weights of a network's logits and of a process's mean in the logits of both: stacking, with a temperature in it."""

from dataclasses import dataclass
from math import exp, hypot

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

_LOG_RANGE = 10.0  # weights from 4.5e-5 to 2.2e4

# Prior of the logarithms of both weights, around half of what each would have alone: its standard deviation is 1/2 for
# few labels, and n / 50 for many, so that 500 labels choose by themselves (benchmarks/small_tables.py).
_SPREAD, _SPREAD_PER_LABEL = 0.5, 1 / 50


@dataclass(frozen=True)
class Stacking:
    """Class probabilities softmax(network * a_1 + process * a_2).

    Attributes:
        network: a_1, of the network's logits.
        process: a_2, of the process's mean.
        loss: Mean negative log probability of the held-out labels and of the one beside them (`stack_logits`), in nats.
        alone: b, the weight that the process has alone, in predictions of training labels from each other. Error bars
            are those of b m, or of a_2 m where that is larger: they do not vanish with a_2.
        num_labels: Held-out labels that chose a_1 and a_2.
        num_training: Labels that the process is conditioned on.
    """

    network: float
    process: float
    loss: float
    alone: float = 0.0
    num_labels: int = 0
    num_training: int = 0

    def logits(self, network: Float[Tensor, "n C"], process: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        """Return the weighted sum."""
        return self.network * network + self.process * process

    def without_certainty(self, logits: Float[Tensor, "n C"], variance: Float[Tensor, " n"]) -> Float[Tensor, "n C"]:
        """Return logits whose largest probability is at most 1 - (1 - 1/C) v / (N + n + 1).

        Of N + n labels and one of unknown class, the one counts as much as a point is far from the training data: the
        variance v of the process is 0 at a training point and 1 far from all. Smaller probabilities are as they were.
        """
        total, most = logits.logsumexp(1), 1 - 1 / logits.shape[1]
        error = 1 - (logits.amax(1) - total).exp()
        least = most * variance / (self.num_training + self.num_labels + 1)
        share = (least - error).clamp_min(0) / (most - error).clamp_min(torch.finfo(error.dtype).tiny)  # of 1/C
        unknown = total + (share / logits.shape[1]).log()
        return torch.logaddexp(logits + torch.log1p(-share)[:, None], unknown[:, None])

    def bar_factor(self) -> float:
        """Return what the process's standard deviation is multiplied by in the logits' error bars."""
        return max(self.process, self.alone)


def stack_logits(
    network: Float[Tensor, "n C"],
    process: Float[Tensor, "n C"],
    labels: Int[Tensor, " n"],
    alone: float | None = None,
    num_training: int = 0,
) -> Stacking:
    """Choose both weights, positive, by the likelihood of labels that neither network nor process has seen.

    One label of unknown class is added, of the mean of all points and classes: without it the weights would grow
    without end where all labels are predicted rightly, and all probabilities would be 0 or 1. Of n labels it weighs
    1 / (n + 1), as the targets of Platt (1999) do.

    Args:
        network: Logits of the network.
        process: Mean of the process.
        labels: Classes of the n points.
        alone: The weight b that the process has alone. With it a prior holds the weights near 1/2 and b/2, the less
            the more labels there are: few labels would as often as not give one of the two a weight of nearly 0.
        num_training: Labels that the process is conditioned on.
    """
    n = len(labels)
    centre = np.log([0.5, 0.5 * (alone or 2.0)])
    precision = 0.0 if alone is None else hypot(_SPREAD, _SPREAD_PER_LABEL * n) ** -2

    def loss_and_gradient(log_weights: np.ndarray) -> tuple[float, np.ndarray]:
        a = torch.tensor(log_weights, dtype=network.dtype, device=network.device, requires_grad=True)
        logits = a[0].exp() * network + a[1].exp() * process
        log_p = logits.log_softmax(1)
        known = torch.nn.functional.nll_loss(log_p, labels, reduction="sum")
        loss = (known - log_p.mean()) / (n + 1)
        (gradient,) = torch.autograd.grad(loss, a)
        pull = precision * (log_weights - centre) / (n + 1)
        penalty = 0.5 * float(pull @ (log_weights - centre))
        return loss.item() + penalty, gradient.cpu().numpy().astype(np.float64) + pull

    bounds = [(-_LOG_RANGE, _LOG_RANGE)] * 2
    with torch.enable_grad():
        found = minimize(loss_and_gradient, np.zeros(2), jac=True, method="L-BFGS-B", bounds=bounds)
    network_weight, process_weight = np.exp(found.x).tolist()
    deviation = found.x - centre
    loss = float(found.fun) - 0.5 * precision * float(deviation @ deviation) / (n + 1)
    return Stacking(network_weight, process_weight, loss, alone or 0.0, n, num_training)


def most_likely_temperature(logits: Float[Tensor, "n C"], labels: Int[Tensor, " n"], unknown: int = 0) -> float:
    """Return the factor, an inverse temperature, at which labels are most likely under the softmax.

    Args:
        logits: Of n points.
        labels: Their classes.
        unknown: Labels of unknown class beside them, as in `stack_logits`.
    """

    def loss(log_factor: float) -> float:
        log_p = (logits * exp(log_factor)).log_softmax(1)
        known = float(torch.nn.functional.nll_loss(log_p, labels))
        return known - unknown * float(log_p.mean()) / len(labels)

    return exp(float(minimize_scalar(loss, bounds=(-_LOG_RANGE, _LOG_RANGE), method="bounded").x))
