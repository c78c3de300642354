"""Which points of a pool to label next."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.core.show import SHOWN_ROWS, Displayed, Summary, Table, columns_note, number
from epk_gp.core.show import count as counted
from epk_gp.gp.class_data import class_inputs, float_inputs
from epk_gp.gp.label_process import LabelProcess, without_rounding
from epk_gp.gp.uncertain_classifier import UncertainClassifier

# Points of the pool whose variance is to fall. Their mean stands for that of the whole pool: the variances lie in
# [0, 1], so its standard error is at most 1 / (2 sqrt(4000)) = 0.8 %. Their covariances take 0.13 GB.
NUM_REFERENCE = 4000


@dataclass(frozen=True, eq=False, repr=False)
class NextToLabel(Displayed):
    """Points of a pool to label next, in the order in which they are chosen.

    Attributes:
        indices: Which points of the pool, (count,).
        scores: What each promised when it was chosen: the total variance that its label removes over the pool, times
            the probability that its class is mistaken.
        variance_removed: The first factor, as a share of the pool's total variance before any was chosen.
        misclassification: The second factor.
    """

    indices: Int64[Tensor, " count"]
    scores: Float[Tensor, " count"]
    variance_removed: Float[Tensor, " count"]
    misclassification: Float[Tensor, " count"]

    def __len__(self) -> int:
        return len(self.indices)

    def _summary(self) -> Summary:
        columns = ("", "promised gain", "variance removed", "probability of a mistake")
        scores = torch.stack([self.scores, self.variance_removed, self.misclassification], dim=1)[:SHOWN_ROWS]
        rows = tuple(
            (f"point {index}", *map(number, row))
            for index, row in zip(self.indices.tolist(), scores.tolist(), strict=False)
        )
        table = Table(columns, rows, columns_note(len(rows), len(self)))
        return Summary(f"{counted(len(self), 'point')} of a pool to label next", (), table)


def next_to_label(
    model: UncertainClassifier, pool: object, count: int = 10, *, num_reference: int = NUM_REFERENCE, seed: int = 0
) -> NextToLabel:
    """Choose points of a pool whose labels teach most.

        score(x) = sum_{x' in pool} cov(x, x')^2 / (var(x) + noise)  *  (1 - max_c p_c(x))

    The first factor is the exact reduction of the process's total variance over the pool by a label at x, whatever the
    label. After each choice the process is conditioned on the chosen point, which no label is needed for, so a batch is
    chosen without training anew and does not hold the same point twice.

    Args:
        model: A fitted classifier.
        pool: n points.
        count: How many to choose.
        num_reference: Points of the pool, drawn with the seed, over which variances are added up.
        seed: Of that draw.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The network cannot take the pool, or `count` is not in 1 .. n.
        RuntimeError: The classifier is not fitted.
    """
    if not isinstance(model, UncertainClassifier):
        raise TypeError(
            f"model must be an UncertainClassifier: got {type(model).__name__}. Make one with "
            "epk_gp.UncertainClassifier(trajectory).fit(X_val, y_val)."
        )
    X = class_inputs(model.trajectory, pool, "pool")
    validate_count(count, "count")
    validate_count(num_reference, "num_reference")
    validate_integer(seed, "seed")
    if count > len(X):
        raise ValueError(f"count must be at most the number of points in the pool, {len(X)}: got {count}.")
    with torch.no_grad():
        mistaken = 1 - torch.as_tensor(model.predict_proba(X)).amax(1)
        variance = torch.as_tensor(model.uncertainty(X, num_samples=2).out_of_distribution)
        points = float_inputs(X.to(model.process_.values.device), torch.float64)
        reference = _reference(len(X), int(num_reference), seed, points)
        return _choose(
            model.process_, points, (mistaken.to(points.device), variance.to(points.device)), reference, int(count)
        )


def _choose(
    process: LabelProcess, X: Tensor, mistaken_and_variance: tuple[Tensor, Tensor], drawn: Tensor, count: int
) -> NextToLabel:
    """Choose greedily: covariances are updated by what each chosen point explains."""
    mistaken, variance = mistaken_and_variance
    covariance = process.covariance(X if len(drawn) == len(X) else X[drawn], X)  # (reference, n)
    row_of = {int(point): row for row, point in enumerate(drawn)}
    total = float(variance[drawn].sum())
    chosen: list[int] = []
    columns: list[Tensor] = []  # cov(x, chosen) / sqrt(var(chosen) + noise) over the pool, one per chosen point
    kept: list[tuple[float, float]] = []
    for _ in range(count):
        removed = covariance.square().sum(0) / (variance + process.noise)
        score = removed * mistaken
        score[chosen] = -torch.inf
        best = int(score.argmax())
        kept.append((float(score[best]), float(removed[best]) / total if total > 0 else 0.0))
        if best in row_of:
            column = covariance[row_of[best]].clone()
        else:
            column = process.covariance(X[best : best + 1], X)[0]
            for other in columns:
                column = column - other * other[best]
        column = column / (variance[best] + process.noise).sqrt()
        covariance = covariance.addr_(column[drawn], column, alpha=-1)
        variance = without_rounding(variance - column.square(), process.rounding, "variances")
        columns.append(column)
        chosen.append(best)
    indices = torch.tensor(chosen, device=X.device)
    scores, removed_shares = torch.tensor(kept, dtype=torch.float64, device=X.device).T
    return NextToLabel(indices, scores, removed_shares, mistaken[indices])


def _reference(num_points: int, num_reference: int, seed: int, X: Tensor) -> Tensor:
    """Draw the points over which variances are added up; all of them in their order if they are few enough."""
    if num_points <= num_reference:
        return torch.arange(num_points, device=X.device)
    drawn = torch.randperm(num_points, generator=torch.Generator().manual_seed(seed))
    return drawn[:num_reference].to(X.device)
