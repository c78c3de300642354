"""How well scores say what happens without some of the samples: 0 stands for scores or outcomes that are constant."""

import torch
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from torch import Tensor

from epk_gp.analysis.score_check import datamodeling_score, rank_agreement


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


def bootstrap_interval(predicted: Tensor, true: Tensor, *, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Return where the mean rank correlation lies with 95 %: a bootstrap over both test samples and networks.

    Ranks are those among all networks, so that no draw has to be ranked again.

    Args:
        predicted: (n, m).
        true: (n, m).
        draws: How often both are drawn.
        seed: Draws them.
    """
    n, m = true.shape
    generator = torch.Generator().manual_seed(seed)
    x, y = (_centred(torch.from_numpy(rankdata(value.double(), axis=1))) for value in (predicted, true))

    def counts(size: int) -> Tensor:
        chosen = torch.randint(size, (draws, size), generator=generator)
        return torch.zeros(draws, size, dtype=torch.float64).scatter_add_(1, chosen, torch.ones(draws, size).double())

    networks, samples = counts(m) / m, counts(n) / n
    mean_x, mean_y = networks @ x.T, networks @ y.T
    spread = (networks @ x.T**2 - mean_x**2) * (networks @ y.T**2 - mean_y**2)
    found = (networks @ (x * y).T - mean_x * mean_y) / spread.clamp(min=0).sqrt()
    means = (found.nan_to_num(posinf=0.0, neginf=0.0) * samples).sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(dim=1, keepdim=True)
