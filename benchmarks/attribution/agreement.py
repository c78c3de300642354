"""How well scores say what happens without some of the samples."""

from scipy.stats import spearmanr
from torch import Tensor


def mean_rank_correlation(predicted: Tensor, true: Tensor) -> float:
    """Return the mean over test samples of Spearman's correlation: 0 where one side is constant.

    Args:
        predicted: (n, m).
        true: (n, m).
    """
    values = []
    for a, b in zip(predicted.double(), true.double(), strict=True):
        constant = bool((a == a[0]).all() or (b == b[0]).all())
        values.append(0.0 if constant else float(spearmanr(a.numpy(), b.numpy()).statistic))
    return sum(values) / len(values)


def linear_datamodeling_score(scores: Tensor, subsets: Tensor, outcomes: Tensor) -> float:
    """Correlate the sums of scores over subsets with the outcomes of retraining on them.

    Args:
        scores: (n, M).
        subsets: (m, M).
        outcomes: log p(target) of the test samples, (m, n or more).
    """
    predicted = scores.double() @ subsets.double().T
    return mean_rank_correlation(predicted, outcomes[:, : len(scores)].T)


def area_under_roc(values: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive has a larger value than a negative; ties count half."""
    difference = values[positive][:, None] - values[~positive]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
