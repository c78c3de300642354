"""How network and process are weighed, sets of classes, and scores of how unsure the classes of points are."""

from dataclasses import dataclass, fields
from math import ceil, exp, hypot
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from epk_gp.core.checks import validate_number
from epk_gp.core.show import SHOWN_POINTS, Entry, Summary, Table, Tabular, columns_note, count, kind_of, number

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


def conformal_sets(probability: Float[Tensor, "n C"], scores: Float[Tensor, " m"], alpha: float) -> Bool[Tensor, "n C"]:
    """Return the classes whose score is at most the ceil((m + 1)(1 - alpha))-th smallest of m held-out scores.

    If new points are drawn as the held-out ones were, the set holds the true class with a probability of at least
    1 - alpha: on average over points and over draws of the held-out ones, not for each class or region (Vovk et al.
    2005; Angelopoulos & Bates 2021).

    Args:
        probability: Of n new points.
        scores: Ascending (`UncertainClassifier.conformity_scores_`).
        alpha: Allowed share of sets without the true class, in (0, 1). Below 1 / (m + 1) every set holds all classes.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` does not lie between 0 and 1.
    """
    validate_number(alpha, "alpha")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1: got {alpha}. 0.1 asks for sets that are right in 90 %.")
    rank = ceil((len(scores) + 1) * (1 - alpha))
    if rank > len(scores):
        return torch.ones_like(probability, dtype=torch.bool)
    return 1 - probability <= scores[rank - 1]


@dataclass(frozen=True, eq=False, repr=False)
class ClassUncertainty(Tabular):
    """How unsure the classes of n points are; larger is less sure, for every score.

    Attributes:
        error: Probability that the class which the network alone predicts is wrong: to abstain, or to pass a point to a
            person. It is at least (1 - 1/C) v / (N + n + 1) with v the next score, N training labels and the n labels
            that weigh network and process: no label supports less. It is a probability for points like the validation
            points only. It is no detector of points of another kind: these may look like a class.
        out_of_distribution: Posterior variance of the process, from 0 at a training point to 1 far from all of them: to
            detect points unlike the training data. It does not see labels of its neighbours, so it is no score of
            errors between classes.
        entropy: Of `predict_proba`, in nats: all uncertainty about the class, whatever its cause.
        mutual_information: The part of it that more training data would remove, in nats: to tell ignorance from
            classes that overlap. It is small wherever the class is sure, also far from the data if network and process
            agree.
        std: Error bar of the predicted class's probability p, not of the class: the root of a sum of two variances. One
            is that of p under the process, with the weight that the process has where it predicts training labels from
            each other, or its weight beside the network if that is larger. The other one is p (1 - p) / (n + 2), which
            the n labels that weigh the two leave in any probability. On made tables two of them cover the true
            probability at 90 to 96 % of the points (docs/deciding.md).
    """

    error: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    out_of_distribution: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    entropy: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    mutual_information: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    std: Float[Tensor, " n"] | Float[np.ndarray, " n"]

    def _frame(self) -> tuple[Any, ...]:
        return {"point": range(len(self.error))}, {f.name: getattr(self, f.name) for f in fields(self)}, ()

    def _summary(self) -> Summary:
        scores = {f.name.replace("_", " "): torch.as_tensor(getattr(self, f.name)) for f in fields(self)}
        n = len(self.error)
        shown = min(n, SHOWN_POINTS)
        rows = tuple(
            (name, *map(number, [*score[:shown].tolist(), float(score.mean()), float(score.max())]))
            for name, score in (scores.items() if n else ())
        )
        columns = ("", *(f"point {i}" for i in range(shown)), "mean of all", "largest")
        return Summary(
            f"Uncertainty of the classes of {count(n, 'point')}; larger is less sure",
            (Entry("shape of each score", f"({n},)", kind_of(scores["error"])),),
            Table(columns, rows, columns_note(shown, n)) if n else None,
        )
