"""A datamodel: predictions of a network's answers for other weights of its samples, for all samples together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from scipy.optimize import brentq
from scipy.stats import rankdata
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cosine_similarity

from epk_gp.core.checks import ComputeSettings, door, validate_count, validate_finite, validate_tensor
from epk_gp.core.show import SHOWN_ROWS, Displayed, Entry, Summary, Table, Tabular, certificate_entry, count, number
from epk_gp.core.trajectory import Trajectory
from epk_gp.datamodels.kernels import Questions
from epk_gp.datamodels.training import PathTraining
from epk_gp.kernel_machine.axes import PointsTable, by_sample, group_name
from epk_gp.kernel_machine.retrain import retrain
from epk_gp.trained.between import CHECKPOINTS

TRAINING, RIDGE, LINEAR = "path training", "path ridge", "linearised training"
CORRECTION = 0.25  # share of the difference between exact derivative and path training (docs/capabilities/datamodel.md)
LEAST_PAIRS = 3  # pairs of halves: fewer do not show the spread


@dataclass(frozen=True, eq=False, repr=False)
class Forecast(Displayed):
    """The quality of predictions, measured on networks that were trained on random halves of the samples.

    Attributes:
        method: The better method; the default unless another one is better by two standard errors of their difference.
        lds: The expected linear datamodeling score: mean rank correlation over questions.
        interval: Its 95 % interval, by a jackknife over the pairs of halves.
        slope: Factor of predicted changes: the measured change per unit of predicted change, by least squares, if this
            factor lowers the error on pairs that its fit has not seen; otherwise 1.
        scatter: Root mean square of the prediction errors, in the unit of the numbers.
        measured: The numbers of the trained networks, (m, Q).
        sample_weights: Their halves, (m, M).
    """

    method: str
    lds: float
    interval: tuple[float, float]
    slope: float
    scatter: float
    measured: Float[Tensor, "m Q"]
    sample_weights: Float[Tensor, "m M"]

    def _summary(self) -> Summary:
        low, high = self.interval
        entries = (
            Entry("predicts by", self.method),
            Entry("LDS", f"{self.lds:.2f}", f"95 % [{low:.2f}, {high:.2f}]"),
            Entry("slope", f"{self.slope:.2f}", "factor of predicted changes"),
            Entry("scatter", number(self.scatter), "root mean square of the prediction errors"),
        )
        return Summary(f"Forecast from {count(len(self.measured), 'network')} trained on random halves", entries)


def _complementary_halves(num_samples: int, pairs: int, seed: int) -> Float64[Tensor, "m M"]:
    """Draw pairs of random halves; the second half has the samples that the first does not have."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(pairs, num_samples, dtype=torch.float64)
    for row in first:
        row[torch.randperm(num_samples, generator=generator)[: num_samples // 2]] = 1
    return torch.stack([first, 1 - first], dim=1).flatten(0, 1)


def _forecast(
    predicted: Mapping[str, Float[Tensor, "m Q"]],
    measured: Float[Tensor, "m Q"],
    sample_weights: Float[Tensor, "m M"],
    outputs: Float[Tensor, " Q"],
) -> Forecast:
    """Compare the predictions of each method, the default first, with networks trained on pairs of halves.

    Args:
        predicted: Predicted changes from `outputs`, by method.
        measured: The numbers of the trained networks.
        sample_weights: Their halves.
        outputs: The numbers of the recorded network.
    """
    place = torch.arange(len(measured)) // 2
    rest: list[Any] = [slice(None), *(place != pair for pair in range(len(measured) // 2))]
    found = {name: [_rank_agreement(own[k], measured[k]) for k in rest] for name, own in predicted.items()}
    method, *others = found
    for other in others:
        gain, *without = (b - a for a, b in zip(found[method], found[other], strict=True))
        method = other if gain > 2 * _jackknife(without) else method
    lds, *without = found[method]
    wide = float(student.ppf(0.975, len(without) - 1)) * _jackknife(without)
    x, y = predicted[method].double(), (measured - outputs).double()  # whole changes, with the part that all share
    unseen = [y[~own] - _slope(x[own], y[own]) * x[~own] for own in rest[1:]]
    slope = _slope(x, y) if torch.cat(unseen).norm() < (y - x).norm() else 1.0
    scatter = float((y - slope * x).square().mean().sqrt())
    interval = max(-1.0, lds - wide), min(1.0, lds + wide)
    return Forecast(method, lds, interval, slope, scatter, measured, sample_weights)


def _slope(x: Float64[Tensor, "m Q"], y: Float64[Tensor, "m Q"]) -> float:
    """Return the factor of x that is nearest to y, by least squares."""
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def _jackknife(without: Sequence[float]) -> float:
    """Return the standard error of a number, from its values without each part."""
    values = torch.tensor(without, dtype=torch.float64)
    return float(((len(values) - 1) * values.var(correction=0)) ** 0.5)


def _rank_agreement(predicted: Float[Tensor, "m Q"], measured: Float[Tensor, "m Q"]) -> float:
    """Return the mean rank correlation over questions that have one, corrected for a small number of networks.

    For m normal pairs with correlation rho its mean is 6 / (pi (m + 1)) (arcsin rho + (m - 2) arcsin(rho / 2)), and for
    infinitely many pairs it is 6 / pi arcsin(rho / 2) (Moran, 1948).
    """
    ranks = [torch.from_numpy(rankdata(value.double().cpu(), axis=0)) for value in (predicted, measured)]
    a, b = (own - own.mean(dim=0) for own in ranks)
    varies = a.any(dim=0) & b.any(dim=0)
    found, m = float(cosine_similarity(a, b, dim=0)[varies].mean()), len(a)

    def expected(rho: float) -> float:
        return 6 / (math.pi * (m + 1)) * (math.asin(rho) + (m - 2) * math.asin(rho / 2))

    if math.isnan(found) or not expected(-1.0) < found < expected(1.0):
        return found
    return 6 / math.pi * math.asin(brentq(lambda rho: expected(rho) - found, -1.0, 1.0) / 2)


@dataclass(frozen=True, eq=False, repr=False)
class Verification(Tabular):
    """Predictions next to measured networks; `epk_gp.plots.scores.verification_figure` draws them.

    Attributes:
        predicted: The predicted numbers, (s, Q).
        measured: The numbers of the trained networks, (s, Q).
        outputs: The numbers of the recorded network, (Q,).
        findings: Reasons that the retraining is not certified; empty if it is certified.
    """

    predicted: Float[Tensor, "s Q"]
    measured: Float[Tensor, "s Q"]
    outputs: Float[Tensor, " Q"]
    findings: tuple[str, ...] = ()
    _columns, _rows = ("predicted", "measured"), ("network", "question")

    @property
    def _changes(self) -> tuple[Float64[Tensor, "s Q"], Float64[Tensor, "s Q"]]:
        x, y = ((value - self.outputs).double() for value in (self.predicted, self.measured))
        return x, y

    @property
    def correlation(self) -> float:
        """Pearson's correlation of predicted and measured changes, over all networks and questions."""
        x, y = (value.flatten() - value.mean() for value in self._changes)
        return float(cosine_similarity(x, y, dim=0))

    @property
    def slope(self) -> float:
        """Measured change per unit of predicted change, by least squares."""
        return _slope(*self._changes)

    def _summary(self) -> Summary:
        (x, y), (s, Q) = self._changes, self.predicted.shape
        means = zip(x.mean(dim=1), y.mean(dim=1), (x - y).square().mean(dim=1).sqrt(), strict=True)
        rows = tuple((f"{k}", *(number(float(value)) for value in own)) for k, own in enumerate(means))[:SHOWN_ROWS]
        miss, size = (number(float(value.square().mean().sqrt())) for value in (x - y, y))
        words = f"correlation {self.correlation:.2f}, slope {self.slope:.2f}"
        ranks = f", LDS {_rank_agreement(self.predicted, self.measured):.2f}" if s > 2 else ""
        entries = [
            Entry("changes", words + ranks, "measured against predicted"),
            Entry("miss", miss, f"of {size}, rms"),
        ]
        entries += [Entry("not certified", finding) for finding in self.findings]
        note = "Means over questions of the change of the number; root mean square of what is missed."
        table = Table(("network", "predicted", "measured", "missed"), rows, note)
        return Summary(f"{count(s, 'network')} trained again, {count(Q, 'question')}", tuple(entries), table)


class Top(NamedTuple):
    """The samples whose presence raises a number most, the largest score first: their indices, (k,), and scores."""

    samples: Int64[Tensor, " k"]
    scores: Float[Tensor, " k"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Datamodel(Tabular):
    """A function from the training samples that are kept to numbers of a network: Q questions about M samples.

    Attributes:
        outputs: The numbers of the trained network, (Q,): log-odds, unless others were requested.
        scores: Change of each number by the whole of each sample, (Q, M), by path ridge: the change of the number
            without some samples is minus the sum of their scores.
        present: The weights of the samples for which predictions equal `outputs`, (M,): 1, or 0 for samples that a run
            did not see.
        states: The examined states along the run, for the first run.
        num_gradients: Number of computed gradients.
        trajectories: The runs.
        questions: The requested numbers, for the first run.
        method: The method of prediction: "path training", "path ridge" for more than 5,000 samples, or "linearised
            training" for losses of positions.
        metric: The form of the optimizer's metric in outer products: "exact" or "factored".
        trainings: The path training of each run, whose predictions are averaged.
        correction: Addition by an exact derivative to the change by the whole of each sample, (Q, M); None without.
        forecast: The measured quality of predictions; None if it was not requested (`pairs=`).
        findings: Limits of the result, in words; empty if none were found.
    """

    outputs: Float[Tensor, " Q"]
    scores: Float[Tensor, "Q M"]
    present: Float[Tensor, " M"]
    states: tuple[int, ...]
    num_gradients: int
    trajectories: tuple[Trajectory, ...]
    questions: Questions
    method: str
    metric: str
    trainings: tuple[PathTraining, ...] = ()
    correction: Float[Tensor, "Q M"] | None = None
    forecast: Forecast | None = None
    findings: tuple[str, ...] = ()

    @door
    def predict(self, kept: Shaped[Tensor, "*s M"]) -> Float[Tensor, "*s Q"]:
        """Predict the numbers of networks that are trained on some of the samples.

        Args:
            kept: Booleans of the kept samples, (M,) or (s, M); or their weights >= 0, 1 as recorded.

        Raises:
            TypeError: `kept` is not a tensor of booleans or numbers.
            ValueError: There is not one finite weight >= 0 per sample.
        """
        change = self._changes(self._weights(kept), self.method)
        slope = 1.0 if self.forecast is None else self.forecast.slope
        return (self.outputs + slope * change).reshape(*kept.shape[:-1], len(self.outputs))

    def _changes(self, weights: Float[Tensor, "s M"], method: str) -> Float[Tensor, "s Q"]:
        """Predict the change of the numbers by a method."""
        linear = self.scores if method != TRAINING else torch.zeros_like(self.scores)
        change: Tensor = (weights - self.present) @ (linear if self.correction is None else linear + self.correction).T
        if method == TRAINING:
            change = change + torch.stack([own.changes(weights) for own in self.trainings]).mean(dim=0)
        return change

    @property
    def miss(self) -> float:
        """Distance between path training of the recorded samples and `outputs`, relative to the change by training."""
        parts = [(own.repeated - own.recorded, own.recorded - own.asked_start) for own in self.trainings]
        missed, change = (torch.cat(values).norm() for values in zip(*parts, strict=True))
        return float(missed / change.clamp(min=torch.finfo(change.dtype).tiny))

    def derivative(self) -> Float[Tensor, "Q M"]:
        """Return the derivative of the predictions in the weight of each sample at `present`, without a correction."""
        found, slope = self.scores, 1.0 if self.forecast is None else self.forecast.slope
        if self.method == TRAINING:
            found = torch.stack([own.derivative() for own in self.trainings]).mean(dim=0)
        return slope * found

    def top(self, question: int, k: int = 10) -> Top:
        """Return the k samples whose presence raises a number most.

        Args:
            question: Index of the number, 0 .. Q - 1.
            k: Number of samples.

        Raises:
            TypeError: A number is not an integer.
            ValueError: The question does not exist, or there are fewer samples.
        """
        validate_count(question, "question", minimum=0)
        validate_count(k, "k")
        Q, M = self.scores.shape
        if question >= Q or k > M:
            raise ValueError(f"there must be such a question and so many samples: got {question} of {Q}, {k} of {M}.")
        values, samples = self.scores[question].topk(k)
        return Top(samples, values)

    @door
    def verify(self, kept: Shaped[Tensor, "*s M"], **options: Unpack[ComputeSettings]) -> Verification:
        """Retrain on some of the samples (`retrain`), and compare predictions with measured numbers.

        Args:
            kept: The argument of `predict`.
            options: The options of `retrain`.

        Raises:
            TypeError, ValueError: As in `predict` and `retrain`; or the run did not see all samples.
        """
        weights = self._weights(kept)
        measured, findings = self._measured(weights, options)
        return Verification(self.predict(weights), measured, self.outputs, findings)

    def with_forecast(self, pairs: int, seed: int, **options: Unpack[ComputeSettings]) -> "Datamodel":
        """Return the same datamodel with a forecast, and the method and unit that it shows; see `datamodel`."""
        halves = _complementary_halves(self.scores.shape[1], pairs, seed).to(self.scores)
        measured, findings = self._measured(halves, options)
        methods = (TRAINING, RIDGE) if self.method == TRAINING else (self.method,)
        forecast = _forecast(
            {method: self._changes(halves, method) for method in methods}, measured, halves, self.outputs
        )
        return replace(self, forecast=forecast, method=forecast.method, findings=(*self.findings, *findings))

    def _measured(
        self, weights: Float[Tensor, "s M"], options: ComputeSettings
    ) -> tuple[Float[Tensor, "s Q"], tuple[str, ...]]:
        """Retrain, and return the numbers of these networks, and the reasons that they are not certified."""
        if not bool((self.present == 1).all()) or self.trajectories[0].update_rule == CHECKPOINTS:
            raise ValueError(
                "networks are trained again as a recorded run that saw all samples: got a run that saw some of them, "
                "or checkpoints. Record a run on all samples, and ask of it alone."
            )
        asked, networks = self.questions, retrain(self.trajectories[0], weights.double(), **options)
        outputs = replace(networks, trajectory=asked.run).outputs(asked.X, head="logits")
        return torch.stack([asked.numbers(z) for z in outputs]), networks.findings

    def _weights(self, kept: Any) -> Float[Tensor, "s M"]:
        validate_tensor(kept, "kept")
        if kept.is_complex():
            raise TypeError(f"kept must be booleans or numbers: got {kept.dtype}.")
        M = self.scores.shape[1]
        if kept.ndim not in (1, 2) or kept.shape[-1] != M:
            raise ValueError(f"kept must have one entry per sample, ({M},) or (s, {M}): got shape {tuple(kept.shape)}.")
        weights: Tensor = torch.atleast_2d(kept).to(self.scores)
        validate_finite(weights, "kept", "Weights are finite numbers >= 0.")
        if bool((weights < 0).any()):
            raise ValueError(f"kept must be booleans, or weights >= 0: got {float(weights.min()):.3g}.")
        return weights

    @property
    def _per_input(self) -> tuple[int, int]:
        return len(self.questions.X), self.questions.per_input

    def _frame(self) -> tuple[Any, ...]:
        shape, axes = self._per_input, [by_sample(self.trajectories[0])]
        terms = {"outputs": self.outputs.view(shape), "scores": self.scores.view(*shape, -1)}
        return PointsTable(terms["outputs"], self.questions.kind).frame(terms, axes)

    def _summary(self) -> Summary:
        shape, (Q, M), runs = self._per_input, self.scores.shape, self.trajectories
        table, axes = PointsTable(self.outputs.view(shape), self.questions.kind), [by_sample(runs[0])]
        rows = [table.row("trained network", self.outputs.view(shape))]
        entries = [
            certificate_entry(self.findings, "the run is whole, and its samples are those of its steps"),
            Entry("predicts by", self.method, f"scores by {RIDGE}" * (self.method != LINEAR)),
        ]
        if self.method == TRAINING:
            repeated = torch.stack([own.repeated for own in self.trainings]).mean(dim=0)
            rows.append(table.row(f"by {TRAINING}", repeated.view(shape)))
            entries.append(Entry("repeats the run", f"to within {self.miss:.0%}", "of the numbers' change in training"))
        rows += table.largest("largest scores", self.scores.view(*shape, M), lambda k: group_name(axes, k))
        B = sum(run.num_points if step.batch is None else len(step.batch) for run in runs for step in run.steps)
        gradients = f"{self.num_gradients:,} gradients at {len(self.states)} states"
        entries += [
            Entry("cost", f"{gradients}, {self.metric} metric", f"the training took those of {B:,} rows"),
            Entry("forecast", *self._forecast_words()),
            Entry("not for", "single samples: epk_gp.influence is exact there"),
        ]
        title = f"Datamodel of {count(M, 'training sample')} for {count(Q, 'question')}, from {count(len(runs), 'run')}"
        return Summary(title, tuple(entries), table.table(rows))

    def _forecast_words(self) -> tuple[str, str]:
        if (found := self.forecast) is None:
            return "not asked for", "pairs=5 trains ten networks on halves"
        low, high = found.interval
        words = f"LDS {found.lds:.2f} [{low:.2f}, {high:.2f}] on random halves"
        return words, f"slope {found.slope:.2f}, scatter {found.scatter:.2g}, from {len(found.measured)} networks"


def joined(models: Sequence[Datamodel]) -> Datamodel:
    """Return one datamodel for several runs: means of their numbers, scores and predictions."""
    if len(models) == 1:
        return models[0]

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(own, name) for own in models]).mean(dim=0)

    return replace(
        models[0],
        outputs=mean("outputs"),
        scores=mean("scores"),
        present=mean("present"),
        num_gradients=sum(own.num_gradients for own in models),
        trainings=tuple(training for own in models for training in own.trainings),
        trajectories=tuple(run for own in models for run in own.trajectories),
        findings=tuple(f"of run {k} {finding}" for k, own in enumerate(models) for finding in own.findings),
    )
