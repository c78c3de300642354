"""A datamodel: what a network would say after training on other weights of its samples, for all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, door, validate_count, validate_finite, validate_tensor
from epk_gp.core.show import Entry, Summary, Tabular, certificate_entry, count, kind_of, number
from epk_gp.core.trajectory import Trajectory
from epk_gp.datamodel.forecast import LEAST_PAIRS, Forecast, Verification, complementary_halves, forecast_of
from epk_gp.datamodel.kernels import Questions
from epk_gp.datamodel.training import GaussNewton, PathTraining
from epk_gp.kernel_machine.axes import PointsTable, by_sample, group_name
from epk_gp.kernel_machine.retrain import retrain
from epk_gp.trained.between import CHECKPOINTS

TRAINING, RIDGE, LINEAR = "path training", "path ridge", "linearised training"
CORRECTION = 0.25  # of an exact derivative's difference from that of path training (docs/capabilities/datamodel.md)


class Top(NamedTuple):
    """The samples whose presence raises a number most, the largest score first: their indices, (k,), and scores."""

    samples: Int64[Tensor, " k"]
    scores: Float[Tensor, " k"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Datamodel(Tabular):
    """A function from the training samples that are kept to numbers of a network: Q questions about M samples.

    Attributes:
        outputs: The numbers of the trained network, (Q,): log-odds, unless others were asked for.
        scores: Change of each number by the whole of each sample, (Q, M), by path ridge: the change of the number
            without samples is minus the sum of their scores.
        trainings: The path training of each run, whose predictions are averaged.
        trajectories: The runs.
        questions: What was asked, of the first run.
        method: How numbers are predicted: by "path training" or "path ridge", or, of positions, "linearised training".
        metric: How the optimizer's metric goes into outer products: "exact" or "factored".
        correction: What an exact derivative adds to the change by the whole of each sample, (Q, M); None without.
        forecast: What predictions are worth; None if it was not asked for (`pairs=`).
        findings: What the result does not stand for, in words; empty if nothing was found.
    """

    outputs: Float[Tensor, " Q"]
    scores: Float[Tensor, "Q M"]
    trainings: tuple[PathTraining | GaussNewton, ...]
    trajectories: tuple[Trajectory, ...]
    questions: Questions
    method: str = TRAINING
    metric: str = "exact"
    correction: Float[Tensor, "Q M"] | None = None
    forecast: Forecast | None = None
    findings: tuple[str, ...] = ()

    @door
    def predict(self, kept: Shaped[Tensor, "*s M"]) -> Float[Tensor, "*s Q"]:
        """Predict the numbers of networks that are trained on some of the samples.

        Args:
            kept: Which samples are kept, (M,) or (s, M) booleans; or their weights >= 0, 1 as recorded.

        Raises:
            TypeError: It is no tensor of booleans or numbers.
            ValueError: There is not one finite weight >= 0 per sample.
        """
        weights = self._weights(kept)
        slope = 1.0 if self.forecast is None else self.forecast.slope
        return (self.outputs + slope * self._changes(weights, self.method)).reshape(*kept.shape[:-1], -1)

    def _changes(self, weights: Float[Tensor, "s M"], method: str) -> Float[Tensor, "s Q"]:
        """Predict the change of the numbers by a method."""
        if method != TRAINING:
            change = (weights - self.present) @ self.scores.T
        else:
            change = torch.stack([own.predict(weights) - own.recorded for own in self.trainings]).mean(dim=0)
        return change if self.correction is None else change.add(weights.sub(self.present) @ self.correction.T)

    @property
    def present(self) -> Float[Tensor, " M"]:
        """The weights at which predictions are `outputs`: 1, but for samples that no run saw."""
        return torch.stack([own.present for own in self.trainings]).mean(dim=0)

    @property
    def miss(self) -> float:
        """By how much the repeated training misses the outputs, relative to their change in training, by norms."""
        parts = [(own.repeated - own.recorded, own.change) for own in self.trainings]
        missed, change = (torch.cat(values).norm() for values in zip(*parts, strict=True))
        return float(missed / change.clamp(min=torch.finfo(change.dtype).tiny))

    def derivative(self) -> Float[Tensor, "Q M"]:
        """Return the derivative of the predictions in the weight of each sample at `present`, without a correction."""
        if self.method != TRAINING:
            return self.scores
        return torch.stack([own.derivative() for own in self.trainings]).mean(dim=0)

    def top(self, question: int, k: int = 10) -> Top:
        """Return the k samples whose presence raises a number most.

        Args:
            question: Which number, 0 .. Q - 1.
            k: How many.

        Raises:
            TypeError: A number is no integer.
            ValueError: There is no such question, or there are fewer samples.
        """
        validate_count(question, "question", minimum=0)
        validate_count(k, "k")
        if question >= len(self.scores) or k > self.scores.shape[1]:
            Q, M = self.scores.shape
            raise ValueError(f"there must be such a question and so many samples: got {question} of {Q}, {k} of {M}.")
        values, samples = self.scores[question].topk(k)
        return Top(samples, values)

    @door
    def verify(self, kept: Shaped[Tensor, "*s M"], **options: Unpack[ComputeSettings]) -> Verification:
        """Train again on some of the samples (`retrain`), and set what was predicted beside what is measured.

        Args:
            kept: As of `predict`.
            options: As of `retrain`.

        Raises:
            TypeError, ValueError: As `predict` and `retrain`; or the run did not see all samples.
        """
        weights = self._weights(kept)
        measured, findings = self._measured(weights, options)
        return Verification(self.predict(weights), measured, self.outputs, findings)

    def with_forecast(self, pairs: int, seed: int, **options: Unpack[ComputeSettings]) -> "Datamodel":
        """Return the same datamodel with a forecast, and the method and the unit that it shows; see `datamodel`."""
        validate_count(pairs, "pairs", minimum=LEAST_PAIRS)
        halves = complementary_halves(self.scores.shape[1], pairs, seed).to(self.scores)
        measured, findings = self._measured(halves, options)
        predicted = {method: self._changes(halves, method) for method in self._methods}
        forecast = forecast_of(predicted, measured, halves)
        return replace(self, forecast=forecast, method=forecast.method, findings=(*self.findings, *findings))

    def _measured(
        self, weights: Float[Tensor, "s M"], options: ComputeSettings
    ) -> tuple[Float[Tensor, "s Q"], tuple[str, ...]]:
        """Train again, and return the numbers of these networks, and why they are not certified."""
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
        (n, K), (Q, M), first = self._per_input, self.scores.shape, self.trainings[0]
        table = PointsTable(outputs := self.outputs.view(n, K), self.questions.kind)
        rows = [table.row("trained network", outputs)]
        if self.method == TRAINING:
            repeated = torch.stack([own.repeated for own in self.trainings]).mean(dim=0)
            rows.append(table.row("by path training", repeated.view(n, K)))
        axes = [by_sample(self.trajectories[0])]
        rows += table.largest("largest scores", self.scores.view(n, K, M), lambda k: group_name(axes, k))
        run, S = self.trajectories[0], self.trajectories[0].num_steps
        B = sum(run.num_points if step.batch is None else len(step.batch) for step in run.steps)
        asked = f"gradients of {len(self.trainings) * len(first.steps) * (M + n):,} rows at {len(first.steps)} states"
        entries = [
            certificate_entry(self.findings, "the run is whole, and its samples are those of its steps"),
            Entry("predicts by", *self._method_words()),
            Entry("runs", count(len(self.trajectories), "run"), f"the first of {S} steps, time {number(first.time)}"),
            Entry("cost", asked, f"the training took those of {B:,}"),
            Entry("forecast", *self._forecast_words()),
            Entry("repeats the run", f"to within {self.miss:.0%}", "of the outputs' change in training"),
            Entry("not for", "single samples: epk_gp.influence is exact there"),
            Entry("shape of scores", f"{tuple(self.scores.shape)}", kind_of(self.scores)),
        ]
        title = f"Datamodel of {count(M, 'training sample')} for {count(Q, 'question')}"
        return Summary(title, tuple(entries), table.table(rows))

    @property
    def _methods(self) -> tuple[str, ...]:
        """How numbers can be predicted, the default first."""
        return (LINEAR,) if isinstance(self.trainings[0], GaussNewton) else (TRAINING, RIDGE)

    def _method_words(self) -> tuple[str, str]:
        first = self.trainings[0]
        if isinstance(first, GaussNewton):
            return f"the end of the {LINEAR}", f"curvature of drawn labels; {self.metric} metric"
        return self.method, f"scores by {RIDGE}, damping {number(first.damping)} of the diagonal; {self.metric} metric"

    def _forecast_words(self) -> tuple[str, str]:
        if (found := self.forecast) is None:
            return "not asked for", "pairs=5 trains ten networks on halves"
        low, high = found.interval
        words = f"LDS {found.lds:.2f} [{low:.2f}, {high:.2f}] on random halves"
        return words, f"slope {found.slope:.2f}, scatter {found.scatter:.2g}, from {len(found.measured)} networks"


def joined(models: Sequence[Datamodel]) -> Datamodel:
    """Return one datamodel of several runs: means of their numbers, scores and predictions."""
    first = models[0]
    if len(models) == 1:
        return first
    return replace(
        first,
        outputs=torch.stack([own.outputs for own in models]).mean(dim=0),
        scores=torch.stack([own.scores for own in models]).mean(dim=0),
        trainings=tuple(training for own in models for training in own.trainings),
        trajectories=tuple(run for own in models for run in own.trajectories),
        findings=tuple(f"of run {k} {finding}" for k, own in enumerate(models) for finding in own.findings),
    )
