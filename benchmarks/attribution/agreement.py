"""How well scores say what happens without some of the samples: 0 stands for scores or outcomes that are constant."""

from sklearn.metrics import roc_auc_score
from torch import Tensor

from epk_gp.analysis.counterfactual import datamodeling_score, rank_agreement


def mean_rank_correlation(predicted: Tensor, true: Tensor) -> float:
    """Return the mean over test samples of Spearman's correlation.

    Args:
        predicted: (n, m).
        true: (n, m).
    """
    return float(rank_agreement(predicted.double(), true.double()).per_point.nan_to_num().mean())


def linear_datamodeling_score(scores: Tensor, subsets: Tensor, outcomes: Tensor) -> float:
    """Correlate the sums of scores over subsets with the outcomes of retraining on them.

    Args:
        scores: (n, M).
        subsets: (m, M).
        outcomes: log p(target) of the test samples, (m, n or more).
    """
    found = datamodeling_score(scores.double(), subsets.double(), outcomes[:, : len(scores)].double())
    return float(found.per_point.nan_to_num().mean())


def area_under_roc(values: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive has a larger value than a negative; ties count half."""
    return float(roc_auc_score(positive, values))
