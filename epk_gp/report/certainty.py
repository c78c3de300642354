"""How sure predictions are: class probabilities, their band, and scores, of a process or of the network alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.losses import CrossEntropy, NegativeLogLikelihood
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.report.fixed_point import significant
from epk_gp.report.request import ReportRequest

BAND = (0.05, 0.95)  # quantiles of a class's probability
_NUM_SAMPLES = 1024

Scores = tuple[tuple[str, Float[Tensor, " n"], str], ...]

_OF_CLASSIFIER = (
    ("error score", "error", "probability that the network's class is wrong"),
    ("out-of-distribution score", "out_of_distribution", "from 0 at a training sample to 1 far from all of them"),
    ("entropy", "entropy", "of the class probabilities, in nats: all uncertainty about the class"),
    ("mutual information", "mutual_information", "the part of the entropy that more training data would remove"),
    ("standard deviation", "std", "of the predicted class's probability under the process"),
)


@dataclass(frozen=True, eq=False)
class Certainty:
    """How sure the predictions at n points are.

    Attributes:
        source: Whose probabilities they are: "network", "process" or "network and process"; empty without any.
        probabilities: (n, C); None where outputs stand for no probabilities.
        scores: Name, values and meaning of each score.
        out_of_distribution: The score that tells inputs unlike the training data; None without one.
    """

    source: str
    probabilities: Float[Tensor, "n C"] | None
    scores: Scores
    out_of_distribution: Float[Tensor, " n"] | None


def certainty(request: ReportRequest) -> Certainty:
    """Return how sure the predictions at all points of a report are."""
    process, X = request.settings.posterior, request.X
    if isinstance(process, UncertainClassifier):
        u = process.uncertainty(X, _NUM_SAMPLES)
        scores = tuple((name, _tensor(getattr(u, field)), text) for name, field, text in _OF_CLASSIFIER)
        scores = (*scores, _own_probability(request))
        p, far = _tensor(process.predict_proba(X)), _tensor(u.out_of_distribution)
        return Certainty("network and process", p, scores, far)
    if process is not None:
        return _of_posterior(request, _posterior(process, request))
    if request.is_classifier and isinstance(request.trajectory.loss, CrossEntropy | NegativeLogLikelihood):
        p = request.network.double().softmax(dim=1)
        entropy = ("entropy", torch.special.entr(p).sum(dim=1), "of the network's own class probabilities, in nats")
        return Certainty("network", p, (entropy,), None)
    return Certainty("", None, (), None)


def band(request: ReportRequest) -> Float[Tensor, "2 m C"] | None:
    """Return the quantiles of the probabilities of the explained points under a process; None without one."""
    process = request.settings.posterior
    if process is None or not request.is_classifier:
        return None
    if isinstance(process, UncertainClassifier):
        posterior = process.logit_posterior(request.X[request.points.to(request.X.device)])
    else:
        whole = _posterior(process, request)
        posterior = LogitPosterior(
            whole.mean[request.points], whole.covariance[request.points], whole.eigenvalue_tolerance
        )
    return softmax_uncertainty(posterior, _NUM_SAMPLES, _generator(posterior), quantiles=BAND).quantiles.cpu()


def scores_of(found: Certainty, point: int) -> list[list[Any]]:
    """Return the scores of one point."""
    return [[name, significant(float(values[point])), text] for name, values, text in found.scores]


def _posterior(process: LogitGP | LogitPosterior, request: ReportRequest) -> LogitPosterior:
    return process if isinstance(process, LogitPosterior) else process.logit_posterior(request.X)


def _of_posterior(request: ReportRequest, posterior: LogitPosterior) -> Certainty:
    if not request.is_classifier:
        std = posterior.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().cpu()
        names: Sequence[str] = request.class_names
        scores = tuple((f"standard deviation of {name}", std[:, c], "of the process") for c, name in enumerate(names))
        return Certainty("process", None, scores, None)
    u = softmax_uncertainty(posterior, _NUM_SAMPLES, _generator(posterior))
    std = u.std.gather(1, u.mean.argmax(dim=1, keepdim=True))[:, 0]
    scores = (
        ("entropy", u.entropy.cpu(), "of the class probabilities, in nats: all uncertainty about the class"),
        ("mutual information", u.mutual_information.cpu(), "the part that the process's uncertainty causes"),
        ("standard deviation", std.cpu(), "of the predicted class's probability under the process"),
    )
    return Certainty("process", u.mean.cpu(), (*scores, _own_probability(request)), None)


def _own_probability(request: ReportRequest) -> tuple[str, Float[Tensor, " n"], str]:
    """Return the probability that the network gives its class, which may be far from the process's."""
    p = request.network.double().softmax(dim=1).amax(dim=1)
    return "network's own probability", p, "of its class, by the softmax of its outputs, without the process"


def _generator(posterior: LogitPosterior) -> torch.Generator:
    return torch.Generator(posterior.mean.device).manual_seed(0)


def _tensor(values: object) -> Tensor:
    return torch.as_tensor(values).cpu()
