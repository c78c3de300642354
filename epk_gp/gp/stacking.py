"""Weights of network and process, sets of classes, and scores for the uncertainty of the classes of points."""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.nn.functional import nll_loss

from epk_gp.core.checks import validate_number
from epk_gp.core.show import (
    SHOWN_POINTS,
    Displayed,
    Entry,
    Summary,
    Table,
    Tabular,
    columns_note,
    count,
    kind_of,
    number,
)

_LOG_RANGE = 10.0  # weights from 4.5e-5 to 2.2e4

# Prior of the logarithms of both weights: normal around 3/4 for the network and half of the process's weight alone. Its
# standard deviation is 0.3 for few labels, and n / 200 for many, so that 500 labels determine the weights; labels of
# out-of-fold logits, which come from other networks, count a quarter. Chosen on six tables with 37 to 100 held-out
# labels (benchmarks/small_tables.py).
_NETWORK_CENTRE, _PROCESS_CENTRE, _SPREAD, _SPREAD_PER_LABEL, _OTHER_NETWORKS = 0.75, 0.5, 0.3, 1 / 200, 1 / 4


class Judgement(NamedTuple):
    """Results of network and process at n points: logits and mean (n, C), and the process's variance (n,)."""

    logits: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, repr=False)
class Stacking(Displayed):
    """Class probabilities softmax(network * a_1 + process * a_2).

    The printed form reports whether the process gains anything: the increase of the loss for the network alone, with
    its own temperature, compared with twice the standard error of this difference.

    Attributes:
        network: a_1, the weight of the network's logits.
        process: a_2, the weight of the process's mean.
        loss: Mean negative log probability of the labels that determined both, in nats.
        network_loss: The same for the network alone (a_2 = 0), with the a_1 that these labels then determine.
        gain_error: Standard error of the mean difference of the two losses over these labels.
        alone: b, the weight of the process alone, for predictions of training labels from each other. Error bars are
            those of b m, or of a_2 m if that is larger: they do not vanish with a_2.
        num_labels: Number of labels that determined a_1 and a_2: held-out ones, and those of out-of-fold logits.
        num_training: Number of labels on which the process is conditioned.
        num_held_out: Number of held-out labels among those that determined a_1 and a_2.
    """

    network: float
    process: float
    loss: float
    network_loss: float = math.nan
    gain_error: float = math.nan
    alone: float = 0.0
    num_labels: int = 0
    num_training: int = 0
    num_held_out: int = 0

    @property
    def gain_words(self) -> str:
        """The gain by the process, and whether the labels show it."""
        gain, error = self.network_loss - self.loss, self.gain_error
        words = "" if gain > 2 * error else f"nothing that {count(self.num_labels, 'label')} would show: "
        return f"{words}{number(gain)} ± {number(error)} nats per label"

    def _summary(self) -> Summary:
        entries = (
            Entry("weights", f"network {number(self.network)}, process {number(self.process)}"),
            Entry(
                "loss",
                f"{number(self.loss)} nats per label",
                f"network with a temperature: {number(self.network_loss)}",
            ),
            Entry("the process gains", self.gain_words),
        )
        return Summary(f"Network and process, weighed by {count(self.num_labels, 'label')}", entries)

    def logits(self, network: Float[Tensor, "n C"], process: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
        """Return the weighted sum."""
        return self.network * network + self.process * process

    def mean(self, judged: Judgement) -> Float[Tensor, "n C"]:
        """Return the weighted sum, limited to the certainty that the labels support."""
        return self.without_certainty(self.logits(judged.logits, judged.mean), judged.variance)

    def probability(self, judged: Judgement) -> Float[Tensor, "n C"]:
        """Return the probabilities of the classes, whose logits are `mean`."""
        return torch.softmax(self.mean(judged), dim=1)

    def without_certainty(self, logits: Float[Tensor, "n C"], variance: Float[Tensor, " n"]) -> Float[Tensor, "n C"]:
        """Return logits whose largest probability is at most 1 - (1 - 1/C) v / (N + n + 1).

        In addition to N training and n held-out labels there is one label of unknown class, whose weight grows with a
        point's distance from the training data: the process's variance v is 0 at a training point and 1 far from all of
        them. Smaller probabilities do not change.
        """
        total, most = logits.logsumexp(1), 1 - 1 / logits.shape[1]
        error = 1 - (logits.amax(1) - total).exp()
        least = most * variance / (self.num_training + self.num_held_out + 1)
        share = (least - error).clamp_min(0) / (most - error).clamp_min(torch.finfo(error.dtype).tiny)  # share of 1/C
        unknown = total + (share / logits.shape[1]).log()
        return torch.logaddexp(logits + torch.log1p(-share)[:, None], unknown[:, None])


def stack_logits(
    network: Float[Tensor, "n C"],
    process: Float[Tensor, "n C"],
    labels: Int[Tensor, " n"],
    alone: float | None = None,
    num_training: int = 0,
    num_held_out: int | None = None,
) -> Stacking:
    """Choose both weights, positive, by the likelihood of labels that neither network nor process has seen.

    One label of unknown class is added, with the mean of all points and classes: otherwise the weights would grow
    without bound if all labels are predicted correctly, and all probabilities would be 0 or 1. For n labels it has the
    weight 1 / (n + 1), like the targets of Platt (1999).

    Args:
        network: Logits of the network.
        process: Mean of the process.
        labels: Classes of the n points.
        alone: The weight b of the process alone. It adds a prior that holds the weights near 3/4 and b/2, more weakly
            for more labels: few labels would often give one of the two a weight of nearly 0.
        num_training: Number of training labels, as in `Stacking`.
        num_held_out: Number of held-out labels among them; None for all. The others are of out-of-fold logits.
    """
    n = len(labels)
    centre = np.log([_NETWORK_CENTRE, _PROCESS_CENTRE * (alone or 1.0)])
    held_out = n if num_held_out is None else num_held_out
    spread = math.hypot(_SPREAD, _SPREAD_PER_LABEL * (held_out + _OTHER_NETWORKS * (n - held_out)))
    precision = 0.0 if alone is None else spread**-2

    def weighed(*terms: Tensor) -> list[float]:
        """Return the most likely weights of the network, or of network and process."""
        middle = centre[: len(terms)]

        def loss_and_gradient(log_weights: np.ndarray) -> tuple[float, np.ndarray]:
            a = torch.tensor(log_weights, dtype=network.dtype, device=network.device, requires_grad=True)
            log_p = sum(w * term for w, term in zip(a.exp(), terms, strict=True)).log_softmax(1)
            loss = (nll_loss(log_p, labels, reduction="sum") - log_p.mean()) / (n + 1)
            (gradient,) = torch.autograd.grad(loss, a)
            pull = precision * (log_weights - middle) / (n + 1)
            penalty = 0.5 * float(pull @ (log_weights - middle))
            return loss.item() + penalty, gradient.cpu().numpy().astype(np.float64) + pull

        bounds = [(-_LOG_RANGE, _LOG_RANGE)] * len(terms)
        with torch.enable_grad():
            found = minimize(loss_and_gradient, np.zeros(len(terms)), jac=True, method="L-BFGS-B", bounds=bounds)
        weights: list[float] = np.exp(found.x).tolist()
        return weights

    (a_1, a_2), (a_alone,) = weighed(network, process), weighed(network)
    candidates = a_1 * network + a_2 * process, a_alone * network
    of_both, of_network = (nll_loss(logits.log_softmax(1), labels, reduction="none") for logits in candidates)
    error = float((of_network - of_both).std()) / math.sqrt(n)
    means = float(of_both.mean()), float(of_network.mean())
    return Stacking(a_1, a_2, *means, error, alone or 0.0, n, num_training, held_out)


class Calibrated(NamedTuple):
    """The weights for probabilities, those for sets of classes, and the scores that calibrate sets, with their classes.

    Scores ascend. They are 1 - p of the true class, at points that did not determine the weights for sets.
    """

    stacking: Stacking
    set_stacking: Stacking
    scores: Float[Tensor, " m"]
    labels: Int[Tensor, " m"]


def calibrate(
    judged: Judgement,
    labels: Int[Tensor, " n"],
    left_out: Float[Tensor, "N C"],
    training_labels: Int[Tensor, " N"],
    out_of_fold: Float[Tensor, "N C"] | None,
    seed: int,
) -> Calibrated:
    """Weigh network and process by all labels that neither has seen, and for sets by those that do not calibrate.

    With out-of-fold logits, training labels determine the weights for sets, and all validation labels calibrate;
    otherwise half of the validation labels are used for each purpose.

    Args:
        judged: The n validation points.
        labels: Their classes.
        left_out: Mean of the process at the N training points, each predicted from the others.
        training_labels: Their classes.
        out_of_fold: Logits of the N training points by networks that have not seen them; NaN for points without any.
        seed: Seed of the division into halves.
    """
    N, (logits, mean, _) = len(training_labels), judged
    alone = most_likely_temperature(left_out, training_labels, unknown=1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    halves = order.tensor_split(2) if out_of_fold is None else (order[:0], order)
    f = logits.new_full((N, 1), math.nan) if out_of_fold is None else out_of_fold.to(logits)
    known = f.isfinite().all(1)

    def weights(rows: Tensor) -> Stacking:
        network = torch.cat([f[known].expand(-1, logits.shape[1]), logits[rows]])
        process, own = torch.cat([left_out[known], mean[rows]]), torch.cat([training_labels[known], labels[rows]])
        return stack_logits(network, process, own, alone, N, len(rows))

    weighing, calibrating = halves
    of_sets = weights(weighing)
    scores = 1 - of_sets.probability(judged).gather(1, labels[:, None])[:, 0]
    ascending = calibrating[scores[calibrating].argsort()]
    return Calibrated(weights(order), of_sets, scores[ascending], labels[ascending])


def most_likely_temperature(logits: Float[Tensor, "n C"], labels: Int[Tensor, " n"], unknown: int = 0) -> float:
    """Return the factor, an inverse temperature, at which labels are most likely under the softmax.

    Args:
        logits: Logits of n points.
        labels: Their classes.
        unknown: Number of additional labels of unknown class, as in `stack_logits`.
    """

    def loss(log_factor: float) -> float:
        log_p = (logits * math.exp(log_factor)).log_softmax(1)
        known = float(nll_loss(log_p, labels))
        return known - unknown * float(log_p.mean()) / len(labels)

    return math.exp(float(minimize_scalar(loss, bounds=(-_LOG_RANGE, _LOG_RANGE), method="bounded").x))


def conformal_sets(
    probability: Float[Tensor, "n C"],
    scores: Float[Tensor, " m"],
    alpha: float,
    labels: Int[Tensor, " m"] | None = None,
) -> Bool[Tensor, "n C"]:
    """Return the classes whose score is at most the ceil((m + 1)(1 - alpha))-th smallest of m held-out scores.

    If new points have the same distribution as the held-out ones, the set contains the true class with a probability of
    at least 1 - alpha: on average over points and over draws of the held-out ones, not for each class or region (Vovk
    et al. 2005; Angelopoulos & Bates 2021). With a threshold for each class this also holds within each class (Vovk
    2012).

    Args:
        probability: Class probabilities of n new points.
        scores: Ascending scores (`UncertainClassifier.conformity_scores_`).
        alpha: Allowed share of sets without the true class, in (0, 1). Below 1 / (m + 1) every set contains all
            classes.
        labels: Classes of the held-out points: each class has a threshold by its own scores, and is in every set if it
            has fewer than 1 / alpha - 1 of them. None for one threshold.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` does not lie between 0 and 1.
    """
    validate_number(alpha, "alpha")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1: got {alpha}. 0.1 asks for sets that are right in 90 %.")
    if labels is not None:
        columns = probability.split(1, dim=1)
        return torch.cat([conformal_sets(p, scores[labels == c], alpha) for c, p in enumerate(columns)], dim=1)
    rank = len(scores) + 1 - math.floor(round(alpha * (len(scores) + 1), 9))  # 0.18 of 150 are 27, not rounding below
    if rank > len(scores):
        return torch.ones_like(probability, dtype=torch.bool)
    return 1 - probability <= scores[rank - 1]


def classes_in_every_set(
    num_classes: int, scores: Float[Tensor, " m"], alpha: float, labels: Int[Tensor, " m"] | None = None
) -> list[int]:
    """Return the classes that are in every set, because too few held-out points calibrate them."""
    impossible = scores.new_zeros(1, num_classes)
    return conformal_sets(impossible, scores, alpha, labels)[0].nonzero()[:, 0].tolist()


@dataclass(frozen=True, eq=False, repr=False)
class ClassUncertainty(Tabular):
    """Uncertainty scores of the classes of n points; for every score, larger is less certain.

    Attributes:
        error: Probability that the class predicted by the network alone is wrong: use it to abstain, or to refer a
            point to a person. It is at least (1 - 1/C) v / (N + n + 1), with v the next score, N training and n
            validation labels, because the labels support nothing smaller. It is a probability only for points like the
            validation points. It does not detect points of another kind: these may look like a class.
        out_of_distribution: Posterior variance of the process, from 0 at a training point to 1 far from all of them:
            use it to detect points unlike the training data. It ignores the labels of neighbours, so it is not a score
            of errors between classes.
        entropy: Entropy of `predict_proba`, in nats: all uncertainty about the class, from any cause.
        mutual_information: The part of it that more training data would remove, in nats: use it to distinguish
            ignorance from classes that overlap. Draws through the softmax give its share of the entropy. It is small
            wherever the class is certain, even far from the data if network and process agree.
        std: Error bar of the predicted class's probability p, not of the class: the root of a sum of two variances. One
            is that of p under the process, with the weight of the process for predictions of training labels from each
            other, or its weight next to the network if that is larger. The other one is p (1 - p) / (n / 2 + 2), the
            variance that half of the n validation labels leave in any probability. On artificial tables two error bars
            cover the true probability at 86 to 99 % of the points (docs/deciding.md).
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
