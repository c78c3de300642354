"""Label errors: training points whose label is unlike what the process and the training run expect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from jaxtyping import Float, Int, Int64, Shaped
from scipy.stats import rankdata
from torch import Tensor

from epk_gp.core.checks import validate_count
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.show import SHOWN_ROWS, Displayed, Summary, Table, columns_note, count, number
from epk_gp.core.trajectory import Trajectory, network_outputs, validate_trajectory
from epk_gp.gp.class_data import labelled_points, training_labels
from epk_gp.gp.label_fit import InputsKernel, LabelSettings, fit_labels
from epk_gp.gp.stacking import most_likely_temperature
from epk_gp.quadrature.paths import WeightPath, straight

AUM_STATES = 50  # of the run, whose margins are averaged: they change slowly from state to state


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors(Displayed):
    """How suspicious the label of each of M training points is.

    Attributes:
        indices: The training points, worst first.
        scores: From 0 to 1, larger is more suspicious, in the order of `points`: the mean of the ranks by
            `log_probability` and `aum`, divided by M.
        points: Which training points were judged, (M,); all of them by default.
        margin: Of the process's prediction of each point from all others: that of the point's label minus the largest
            other one. Below 0 another class is expected. Best where errors go to any class.
        own_label: That prediction for the point's label. Best where errors go to similar classes.
        log_probability: Logarithm of the probability of the point's label, by the softmax of that prediction.
        predicted: The class that it expects, of which the label may be an error.
        aum: Area under the margin (Pleiss et al. 2020): the network's logit of the point's label minus the largest
            other one, on average over the run. Small or negative where the network fits the label late.
    """

    indices: Int64[Tensor, " M"]
    scores: Float[Tensor, " M"]
    points: Int64[Tensor, " M"]
    margin: Float[Tensor, " M"]
    own_label: Float[Tensor, " M"]
    log_probability: Float[Tensor, " M"]
    predicted: Int64[Tensor, " M"]
    aum: Float[Tensor, " M"]

    def __len__(self) -> int:
        return len(self.indices)

    def _summary(self) -> Summary:
        columns = ("", "suspicion", "expected class", "own label", "margin", "area under the margin")
        values = (self.scores, self.predicted, self.own_label, self.margin, self.aum)
        worst = self.scores.argsort(descending=True, stable=True)[:SHOWN_ROWS].tolist()
        rows = tuple((f"point {int(self.points[i])}", *(number(float(v[i])) for v in values)) for i in worst)
        table = Table(columns, rows, columns_note(len(rows), len(self)))
        return Summary(f"Labels of {count(len(self), 'training point')}, most suspicious first", (), table)


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
    """Rank training points by how suspicious their labels are.

    A process on all labels (`UncertainClassifier`) predicts each point from all others, in closed form. Beside it
    stands the area under the margin along the recorded run. The two err at different points: ranks by either are
    averaged.

    Args:
        trajectory: Run of a classifier, trained on class labels with cross entropy.
        nodes: As in `UncertainClassifier`.
        features: As in `UncertainClassifier`.
        inputs_kernel: As in `UncertainClassifier`.
        points: Indices of the training points to judge, from each other; all by default.
        seed: Seed of the sketch.
        power: As in `UncertainClassifier`.
        path: As in `UncertainClassifier`.
        options: `memory_budget`, `progress` and `executor`; see `ComputeOptions`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The run is no classifier's, there are fewer than 2 points, or a setting cannot be used.
    """
    validate_trajectory(trajectory)
    labels = training_labels(trajectory, "label_errors")
    settings = LabelSettings(nodes, features, inputs_kernel, seed, power, path)
    settings.validate()
    judged = labelled_points(trajectory, labels, points)
    if len(judged) < 2:
        raise ValueError("points are judged from each other, so there must be at least 2: got 1.")
    parsed = parse_options("label_errors", ("checkpoint", "accumulate"), **options)
    with torch.no_grad():
        process = fit_labels(trajectory, labels, settings, judged, parsed)
        mean, _ = process.leave_one_out()
        own = labels[judged]
        log_p = (mean * most_likely_temperature(mean, own)).log_softmax(1).gather(1, own[:, None])[:, 0]
        aum = area_under_margin(trajectory, trajectory.inputs[judged], own)
    suspicion = 1 - (_ranks(log_p) + _ranks(aum)) / 2
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
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], labels: Int64[Tensor, " n"], num_states: int = AUM_STATES
) -> Float[Tensor, " n"]:
    """Return the margin of each point's label along a run, on average over evenly spaced states after the first.

    Section 3 of Pleiss et al. (2020), with states in place of epochs.

    Args:
        trajectory: The run.
        X: n inputs.
        labels: Their labels.
        num_states: States, at most.

    Raises:
        TypeError, ValueError: The network cannot take the points, or `num_states` is no whole number above 0.
    """
    validate_count(num_states, "num_states")
    S = trajectory.num_steps
    count = min(S, int(num_states))
    total = torch.zeros(len(X), dtype=torch.float64, device=X.device)
    for j in range(1, count + 1):
        total += margins(network_outputs(trajectory, X, state=j * S // count).to(torch.float64), labels)
    return total / count


def margins(values: Float[Tensor, "n C"], labels: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return each point's value of its label minus the largest value of another class."""
    own = values.gather(1, labels[:, None])
    others = values.scatter(1, labels[:, None], -torch.inf)
    return (own[:, 0] - others.amax(1)).to(values)


def _ranks(values: Tensor) -> Tensor:
    """Return ranks in (0, 1), equal ones for equal values."""
    ranks = torch.from_numpy(rankdata(values.cpu().numpy())).to(values)
    return (ranks - 0.5) / len(values)
