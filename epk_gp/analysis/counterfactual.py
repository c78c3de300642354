"""Comparison of scores of training samples with the effects of training without them.

Scores are larger for samples that raise a number more: contributions, or the derivative in a sample's weight. They are
compared with retrained networks (`retrain`), point by point, so that every figure has a spread.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from epk_gp.analysis.measures import rank_correlations
from epk_gp.core.checks import ComputeSettings, parse_indices, validate_count, validate_tensor
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.show import Tabular
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs
from epk_gp.kernel_machine.retrain import retrain


@dataclass(frozen=True, eq=False, repr=False)
class Agreement(Tabular):
    """The agreement of scores with effects, test point by test point.

    Attributes:
        per_point: Spearman's rank correlation at each test point, (n,); NaN if scores or effects are constant.
    """

    per_point: Float64[Tensor, " n"]
    _columns = ("per_point",)

    @property
    def mean(self) -> float:
        """Mean over the test points that have a correlation."""
        return float(self.per_point.nanmean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over test points; NaN for fewer than two."""
        values = self.per_point[~self.per_point.isnan()]
        return float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")


def leave_one_out(
    trajectory: Trajectory,
    X: Inputs,
    *,
    samples: Int64[Tensor, " k"] | None = None,
    head: Head | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "n C k"]:
    """Train once without each sample, and return the sample's effect on the outputs: f minus f without it.

    Args:
        trajectory: Training run.
        X: n inputs, with the structure of the training inputs.
        samples: Indices of the samples; all by default.
        head: "logits" or "log_softmax"; None follows the loss.
        options: The options of `retrain`.

    Raises:
        TypeError, ValueError: As in `retrain`; or a sample is not one of the run's.
    """
    X = parse_inputs(trajectory, X)
    M = trajectory.num_points
    chosen = torch.arange(M) if samples is None else parse_indices(samples, M, "samples")
    outputs = retrain(trajectory, without(M, chosen[:, None]), **options).outputs(X, head=head)
    return (network_outputs(trajectory, X, head=head)[None] - outputs).permute(1, 2, 0)


def without(num_samples: int, places: Int64[Tensor, "m k"]) -> Float64[Tensor, "m M"]:
    """Return weights of samples: 0 for the samples that each of m networks leaves out, and 1 for the others."""
    return torch.ones(len(places), num_samples, dtype=torch.float64).scatter_(1, places.cpu(), 0.0)


def random_subsets(num_samples: int, num_subsets: int, *, share: float = 0.5, seed: int = 0) -> Float64[Tensor, "m M"]:
    """Draw subsets of the training samples, as weights of 0 and 1.

    Args:
        num_samples: M.
        num_subsets: m.
        share: Share of the samples that are kept, the alpha of the linear datamodeling score.
        seed: Seed of the draw.

    Raises:
        TypeError: A number has a wrong type.
        ValueError: A number is not positive, or the share is not between 0 and 1 or keeps no or all samples.
    """
    validate_count(num_samples, "num_samples")
    validate_count(num_subsets, "num_subsets")
    kept = round(share * num_samples)
    if not 0 < kept < num_samples:
        raise ValueError(f"share must keep some of {num_samples} samples and leave out others: got {share}.")
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(num_subsets, num_samples, dtype=torch.float64)
    for row in weights:
        row[torch.randperm(num_samples, generator=generator)[:kept]] = 1
    return weights


def rank_agreement(scores: Float[Tensor, "n M"], effects: Float[Tensor, "n M"]) -> Agreement:
    """Correlate the ranks of scores with those of effects, such as `leave_one_out`'s, at each test point.

    Raises:
        TypeError: An argument is not a tensor of floating-point numbers.
        ValueError: The shapes differ, or there are fewer than two samples.
    """
    validate_tensor(scores, "scores", ndim=2, floating=True)
    validate_tensor(effects, "effects", ndim=2, floating=True)
    return Agreement(rank_correlations(scores, effects))


def datamodeling_score(
    scores: Float[Tensor, "n M"], subsets: Float[Tensor, "m M"], outcomes: Float[Tensor, "m n"]
) -> Agreement:
    """Compute the linear datamodeling score (Park et al. 2023): do sums of scores rank subsets as training does?

    Args:
        scores: Score of each sample for each test point.
        subsets: Weights of the samples, 1 for the samples in a subset (`random_subsets`).
        outcomes: The number at each test point after training on each subset.

    Raises:
        TypeError: An argument is not a tensor of floating-point numbers.
        ValueError: The shapes do not fit.
    """
    for value, name in ((scores, "scores"), (subsets, "subsets"), (outcomes, "outcomes")):
        validate_tensor(value, name, ndim=2, floating=True)
    if subsets.shape[1] != scores.shape[1] or outcomes.shape != (len(subsets), len(scores)):
        raise ValueError(
            "scores (n, M), subsets (m, M) and outcomes (m, n) must fit: got "
            f"{tuple(scores.shape)}, {tuple(subsets.shape)} and {tuple(outcomes.shape)}."
        )
    return rank_agreement(scores @ subsets.to(scores).T, outcomes.T.to(scores))
