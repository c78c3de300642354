"""Labels: the suspicious ones among the training points, and the points of a pool to label next."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float, Int, Int64, Shaped
from scipy.stats import rankdata
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, parse_options, validate_count
from epk_gp.core.show import SHOWN_ROWS, Summary, Table, Tabular, columns_note, number, require_labels
from epk_gp.core.show import count as counted
from epk_gp.core.trajectory import Trajectory, network_outputs, validate_trajectory
from epk_gp.gp.data import class_inputs, float_inputs, is_array, labelled_points, row_labels
from epk_gp.gp.label_process import InputsKernel, LabelSettings, fit_labels, without_rounding
from epk_gp.gp.stacking import most_likely_temperature
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.gram.sketch import is_one_state
from epk_gp.quadrature.rules import WeightPath, straight

AUM_STATES = 50  # states of the run whose margins are averaged: they change slowly from state to state

# Number of points of the pool whose variance is reduced. Their mean represents that of the whole pool: the variances
# lie in [0, 1], so its standard error is at most 1 / (2 sqrt(4000)) = 0.8 %. Their covariances take 0.13 GB.
NUM_REFERENCE = 4000


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors(Tabular):
    """Suspicion scores of the labels of M training points.

    Attributes:
        indices: The training points, worst first.
        scores: Scores from 0 to 1, larger is more suspicious, in the order of `points`: the mean of the ranks by
            `log_probability` and `aum`, divided by M.
        points: Indices of the judged training points, (M,); all of them by default.
        margin: Margin in the process's prediction of each point from all others: the value of the point's label minus
            the largest other one. Below 0 another class is expected. It is best if errors go to any class.
        own_label: The value of the point's label in that prediction. It is best if errors go to similar classes.
        log_probability: Logarithm of the probability of the point's label, by the softmax of that prediction.
        predicted: The class expected by that prediction; the label may be an error for it.
        aum: Area under the margin (Pleiss et al. 2020): the network's logit of the point's label minus the largest
            other one, on average over the run. It is small or negative if the network fits the label late. For a
            network that was not recorded it is the margin at its weights, which is not ranked.
    """

    indices: Int64[Tensor, " M"]
    scores: Float[Tensor, " M"]
    points: Int64[Tensor, " M"]
    margin: Float[Tensor, " M"]
    own_label: Float[Tensor, " M"]
    log_probability: Float[Tensor, " M"]
    predicted: Int64[Tensor, " M"]
    aum: Float[Tensor, " M"]
    _names_of_values = ("output",)

    def __len__(self) -> int:
        return len(self.indices)

    def _frame(self) -> tuple[Any, ...]:
        order = self.scores.argsort(descending=True, stable=True)  # worst first
        names = ("scores", "margin", "own_label", "log_probability", "aum", "predicted")
        terms: dict[str, Any] = {name: getattr(self, name)[order] for name in names}
        if "output" in self._labels:  # labels are names of classes
            classes, predicted = list(self._labels["output"]), terms["predicted"].tolist()
            require_labels("output", classes, max(predicted, default=-1) + 1, is_exact=False)
            terms["predicted"] = [classes[c] for c in predicted]
        return {"sample": self.indices.cpu()}, terms, ()

    def _summary(self) -> Summary:
        columns = ("", "suspicion", "expected class", "own label", "margin", "area under the margin")
        values = (self.scores, self.predicted, self.own_label, self.margin, self.aum)
        worst = self.scores.argsort(descending=True, stable=True)[:SHOWN_ROWS].tolist()
        rows = tuple((f"point {int(self.points[i])}", *(number(float(v[i])) for v in values)) for i in worst)
        table = Table(columns, rows, columns_note(len(rows), len(self)))
        return Summary(f"Labels of {counted(len(self), 'training point')}, most suspicious first", (), table)


def label_errors(
    trajectory: Trajectory,
    *,
    nodes: int | None = None,
    features: int | Literal["exact"] | None = None,
    inputs_kernel: InputsKernel = "rbf",
    points: Int[Tensor, " M"] | Sequence[int] | None = None,
    seed: int = 0,
    power: int | None = None,
    path: WeightPath = straight(),
    **options: Unpack[ComputeSettings],
) -> LabelErrors:
    """Rank training points by the suspicion of their labels.

    A process on all labels (`UncertainClassifier`) predicts each point from all others, in closed form. In addition the
    area under the margin along the recorded run is computed. The two make errors at different points: their ranks are
    averaged.

    Args:
        trajectory: Run of a classifier, trained on class labels with cross entropy; or that of a network that was not
            recorded, `UncertainClassifier.of(model, X, y).trajectory`, which has no path: then only the process judges.
        nodes: The argument of `UncertainClassifier`.
        features: The argument of `UncertainClassifier`.
        inputs_kernel: The argument of `UncertainClassifier`.
        points: Indices of the training points to judge from each other; all by default.
        seed: Seed of the sketch.
        power: The argument of `UncertainClassifier`.
        path: The argument of `UncertainClassifier`.
        options: `memory_budget`, `progress` and `executor`; see `ComputeOptions`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The run is not a classifier's, there are fewer than 2 points, or a setting is invalid.
    """
    validate_trajectory(trajectory)
    judged, own = labelled_points(trajectory, points, "label_errors")
    settings = LabelSettings(nodes, features, inputs_kernel, seed, power, path)
    if len(judged) < 2:
        raise ValueError("points are judged from each other, so there must be at least 2: got 1.")
    parsed = parse_options("label_errors", ("checkpoint", "accumulate"), **options)
    with torch.no_grad():
        process = fit_labels(trajectory, settings, judged, parsed)
        mean, _ = process.leave_one_out()
        log_p = (mean * most_likely_temperature(mean, own)).log_softmax(1).gather(1, own[:, None])[:, 0]
        aum = area_under_margin(trajectory, trajectory.inputs[judged], own)
    second = log_p if is_one_state(trajectory) else aum.to(log_p)  # fitted labels have large margins at the end
    ranks = torch.from_numpy(rankdata(torch.stack([log_p, second]).cpu().numpy(), axis=1)).to(log_p)
    suspicion = 1 - ((ranks[0] - 0.5) / len(log_p) + (ranks[1] - 0.5) / len(log_p)) / 2
    return LabelErrors(
        indices=judged[suspicion.argsort(descending=True, stable=True)],
        scores=suspicion,
        points=judged,
        margin=margins(mean, own),
        own_label=mean.gather(1, own[:, None])[:, 0],
        log_probability=log_p,
        predicted=mean.argmax(1),
        aum=aum,
    )


def area_under_margin(
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], labels: Int64[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the margin of each point's label along a run, on average over 50 evenly spaced states after the first.

    Section 3 of Pleiss et al. (2020), with states instead of epochs.

    Args:
        trajectory: The run.
        X: n inputs.
        labels: Their labels.

    Raises:
        TypeError, ValueError: The network cannot take the points.
    """
    S = trajectory.num_steps
    count = min(S, AUM_STATES)
    total = torch.zeros(len(X), dtype=torch.float64, device=X.device)
    for j in range(1, count + 1):
        total += margins(network_outputs(trajectory, X, state=j * S // count).to(torch.float64), labels)
    return total / count


def margins(values: Float[Tensor, "n C"], labels: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return each point's value for its label minus the largest value for another class."""
    own = values.gather(1, labels[:, None])
    others = values.scatter(1, labels[:, None], -torch.inf)
    return (own[:, 0] - others.amax(1)).to(values)


@dataclass(frozen=True, eq=False, repr=False)
class NextToLabel(Tabular):
    """Points of a pool to label next, in the order of their choice.

    Attributes:
        indices: Indices of the points in the pool, (count,).
        scores: Expected benefit of each point when it was chosen: the total variance that its label removes over the
            pool, times the probability that its class is predicted wrongly.
        variance_removed: The first factor, as a share of the pool's total variance before the first choice.
        misclassification: The second factor.
    """

    indices: Int64[Tensor, " count"]
    scores: Float[Tensor, " count"]
    variance_removed: Float[Tensor, " count"]
    misclassification: Float[Tensor, " count"]

    def __len__(self) -> int:
        return len(self.indices)

    def _frame(self) -> tuple[Any, ...]:
        return {"point": self.indices.cpu()}, {f.name: getattr(self, f.name) for f in fields(self)[1:]}, ()

    def _summary(self) -> Summary:
        columns = ("", "promised gain", "variance removed", "probability of a mistake")
        scores = torch.stack([self.scores, self.variance_removed, self.misclassification], dim=1)[:SHOWN_ROWS]
        rows = tuple(
            (f"point {index}", *map(number, row))
            for index, row in zip(self.indices.tolist(), scores.tolist(), strict=False)
        )
        table = Table(columns, rows, columns_note(len(rows), len(self)))
        return Summary(f"{counted(len(self), 'point')} of a pool to label next", (), table)


def next_to_label(model: UncertainClassifier, pool: object, count: int = 10) -> NextToLabel:
    """Choose points of a pool whose labels teach most.

        score(x) = sum_{x' in pool} cov(x, x')^2 / (var(x) + noise)  *  (1 - max_c p_c(x))

    The first factor is the exact reduction of the process's total variance over the pool by a label at x, for any
    label. After each choice the process is conditioned on the chosen point, which needs no label, so a batch is chosen
    without retraining and does not contain the same point twice.

    Args:
        model: A fitted classifier.
        pool: n points.
        count: Number of points to choose.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The network cannot take the pool, or `count` is not in 1 .. n.
        RuntimeError: The classifier is not fitted.
    """
    if not isinstance(model, UncertainClassifier):
        raise TypeError(f"model must be a fitted UncertainClassifier: got {type(model).__name__}.")
    X = class_inputs(model.trajectory, pool, "pool")
    validate_count(count, "count")
    if count > len(X):
        raise ValueError(f"count must be at most the number of points in the pool, {len(X)}: got {count}.")
    with torch.no_grad():
        process, given = model.process_, pool if is_array(pool) else X  # compare a data frame's columns
        mistaken = 1 - torch.as_tensor(model.predict_proba(given)).amax(1).to(process.factor.device)
        points = float_inputs(X.to(process.factor.device), torch.float64)
        variance = torch.as_tensor(model.uncertainty(X, num_samples=2).out_of_distribution).to(points.device)
        drawn = torch.arange(len(X))
        if len(X) > NUM_REFERENCE:
            drawn = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:NUM_REFERENCE]
        row_of, drawn = {int(point): row for row, point in enumerate(drawn)}, drawn.to(points.device)
        covariance = process.covariance(points if len(drawn) == len(X) else points[drawn], points)  # (reference, n)
        total = float(variance[drawn].sum())
        chosen: list[int] = []
        columns: list[Tensor] = []  # cov(x, chosen) / sqrt(var(chosen) + noise) over the pool, one per chosen point
        kept: list[tuple[float, float]] = []
        for _ in range(count):  # greedily: covariances are updated by each chosen point
            removed = covariance.square().sum(0) / (variance + process.noise)
            score = removed * mistaken
            score[chosen] = -torch.inf
            best = int(score.argmax())
            kept.append((float(score[best]), float(removed[best]) / total if total > 0 else 0.0))
            if best in row_of:
                column = covariance[row_of[best]].clone()
            else:
                column = process.covariance(points[best : best + 1], points)[0]
                for other in columns:
                    column = column - other * other[best]
            column = column / (variance[best] + process.noise).sqrt()
            covariance = covariance.addr_(column[drawn], column, alpha=-1)
            variance = without_rounding(variance - column.square(), process.rounding, "variances")
            columns.append(column)
            chosen.append(best)
        indices = torch.tensor(chosen, device=points.device)
        scores, removed_shares = torch.tensor(kept, dtype=torch.float64, device=points.device).T
        return NextToLabel(indices, scores, removed_shares, mistaken[indices]).labelled(point=row_labels(pool))
