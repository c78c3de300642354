"""Methods that rank training labels by how suspicious they are; for label_noise.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor
from torch.func import functional_call, grad, vmap

import epk_gp as epk
from epk_gp.analysis.labels import LabelErrors, area_under_margin
from epk_gp.gp.stacking import most_likely_temperature
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from peers import hidden, logits, pixels, training_data
from rbf_process import fit_rbf_process, median_distance
from uncertainty_problems import Judged, network_of, train_unrecorded

FOLDS = 5
CHECKPOINTS = 10  # of the recorded run, evenly spaced, for TracIn
NUM_NEIGHBOURS = (5, 10, 20, 50)

Suspicion = Callable[[Judged], Tensor]  # (M,), larger is more suspicious


def loss(judged: Judged) -> Tensor:
    """Rank by the loss of the trained network."""
    train = training_data(judged)
    return F.cross_entropy(logits(judged, train.inputs), train.labels, reduction="none")


def aum(judged: Judged) -> Tensor:
    """Rank by the area under the margin along the recorded run (Pleiss et al. 2020)."""
    train = training_data(judged)
    return -area_under_margin(judged.trajectory, train.inputs, train.labels)


def tracin(judged: Judged) -> Tensor:
    """Rank by self-influence: squared gradients at checkpoints, times learning rates (Pruthi et al. 2020)."""
    train, run, net = training_data(judged), judged.trajectory, network_of(judged)

    def loss_at(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    gradients = vmap(grad(loss_at), in_dims=(None, 0, 0))
    total = torch.zeros(len(train), dtype=torch.float64)
    for state in torch.linspace(run.num_steps / CHECKPOINTS, run.num_steps, CHECKPOINTS).long().tolist():
        weights, lr = run.weights(state), run.steps[state - 1].lr
        sizes = [
            sum(g.flatten(1).square().sum(1) for g in gradients(weights, x, y).values())
            for x, y in zip(train.inputs.split(250), train.labels.split(250), strict=True)
        ]
        total += lr * torch.cat(sizes).double()
    return total


def out_of_fold(judged: Judged) -> Tensor:
    """Return class probabilities of each point by a network that was trained on the other four fifths."""
    train, problem = training_data(judged), judged.problem
    fold = torch.randperm(len(train), generator=judged.generator()) % FOLDS
    p = torch.empty(len(train), train.num_classes, dtype=torch.float64)
    for k in range(FOLDS):
        net = train_unrecorded(replace(problem, seed=1000 * problem.seed + 2000 + k), train[fold != k])
        with torch.no_grad():
            p[fold == k] = net(train.inputs[fold == k]).double().softmax(1)
    return p


def cleanlab(judged: Judged) -> Tensor:
    """Rank by cleanlab's label quality, from probabilities out of five folds."""
    from cleanlab.rank import get_label_quality_scores  # noqa: PLC0415  an optional peer

    quality = get_label_quality_scores(training_data(judged).labels.numpy(), out_of_fold(judged).numpy())
    return -torch.from_numpy(quality).double()


def neighbours(judged: Judged, features: Callable[[Judged], Callable[[Tensor], Tensor]]) -> Tensor:
    """Rank by the share of the nearest other points with another label, their number by agreement on all points."""
    train = training_data(judged)
    A = F.normalize(features(judged)(train.inputs), dim=1)
    nearest = torch.cat(
        [torch.cdist(part, A).topk(NUM_NEIGHBOURS[-1] + 1, largest=False).indices for part in A.split(500)]
    )
    labels = train.labels[nearest[:, 1:]]  # the first one is the point itself

    def votes(k: int) -> Tensor:
        return F.one_hot(labels[:, :k], train.num_classes).double().mean(1)

    k = max(NUM_NEIGHBOURS, key=lambda k: float((votes(k).argmax(1) == train.labels).double().mean()))
    return -votes(k).gather(1, train.labels[:, None])[:, 0]


@lru_cache(maxsize=1)  # two methods use it, one after the other
def rbf_log_probability(judged: Judged, *, median: bool = False) -> Tensor:
    """Rank by what an RBF process on the pixels expects of each label from all others, as ours is ranked."""
    train, generator = training_data(judged), judged.generator()
    X = pixels(judged)(train.inputs)
    lengthscale = median_distance(X) if median else None
    gp = fit_rbf_process(X, train.labels, train.num_classes, generator, lengthscale=lengthscale)
    mean, _ = gp.leave_one_out()
    log_p = (mean * most_likely_temperature(mean, train.labels)).log_softmax(1)
    return -log_p.gather(1, train.labels[:, None])[:, 0]


def with_aum(judged: Judged, other: Suspicion) -> Tensor:
    """Rank by the mean of the ranks by another method and by the area under the margin, as `epk.label_errors` does."""
    return sum(torch.from_numpy(rankdata(scores)) for scores in (other(judged), aum(judged))) / 2


@lru_cache(maxsize=1)  # two methods use it, one after the other
def found_errors(judged: Judged) -> LabelErrors:
    """Return what `epk.label_errors` finds."""
    return epk.label_errors(judged.trajectory)


def epk_log_probability(judged: Judged) -> Tensor:
    """Rank by our process alone."""
    return -found_errors(judged).log_probability.double()


def ntk_log_probability(judged: Judged) -> Tensor:
    """Rank by our process with the neural tangent kernel at the last step."""
    return -epk.label_errors(tangent_trajectory(judged.trajectory)).log_probability.double()


def epk_label_errors(judged: Judged) -> Tensor:
    """Rank as `epk.label_errors` does: by our process and by the area under the margin."""
    return found_errors(judged).scores.double()


METHODS: dict[str, Suspicion] = {
    "loss of the network": loss,
    "TracIn, self-influence": tracin,
    "kNN labels, hidden": partial(neighbours, features=hidden),
    "kNN labels, pixels": partial(neighbours, features=pixels),
    "cleanlab, 5 folds": cleanlab,
    "AUM": aum,
    "RBF-GP, median length": partial(rbf_log_probability, median=True),
    "RBF-GP": rbf_log_probability,
    "RBF-GP with AUM": partial(with_aum, other=rbf_log_probability),
    "NTK-GP, last step": ntk_log_probability,
    "EPK-GP": epk_log_probability,
    "EPK-GP with AUM: label_errors": epk_label_errors,
}


def why_not(name: str) -> str | None:
    """Say why a method cannot be run here, if so."""
    if name.startswith("cleanlab") and not find_spec("cleanlab"):
        return "cleanlab: not installed"
    return None


def precision_at_k(scores: Tensor, sought: Tensor, k: int | None = None) -> float:
    """Return the share of sought points among the k points with the largest scores, k by default as many as are sought.

    Points that share the k-th largest score stand in random order, and the share is the expected one.

    Raises:
        ValueError: k does not lie in 1 .. n.
    """
    k = int(sought.sum()) if k is None else k
    if not 1 <= k <= len(scores):
        raise ValueError(f"k must lie in 1..{len(scores)}, the number of scores: got {k}.")
    last = scores.sort(descending=True).values[k - 1]
    above, tied = scores > last, scores == last
    share = (k - int(above.sum())) / int(tied.sum())
    return float(sought[above].sum() + share * sought[tied].sum()) / k
