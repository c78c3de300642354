"""Predictions beside networks that were trained again: what predictions are worth."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from scipy.stats import rankdata
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cosine_similarity

from epk_gp.core.show import SHOWN_ROWS, Displayed, Entry, Summary, Table, count, number

LEAST_PAIRS = 3  # of halves: fewer tell nothing of the spread


@dataclass(frozen=True, eq=False)
class Forecast:
    """What predictions are worth, measured on networks that were trained on random halves of the samples.

    Attributes:
        method: The better method, "path training" or "path ridge".
        lds: The linear datamodeling score that is to be expected: mean rank correlation over questions.
        interval: Where it lies with 95 %: jackknife over the pairs of halves.
        slope: Change of the measured numbers for each predicted one.
        scatter: Root mean square of what the predictions leave, in the unit of the numbers.
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


def complementary_halves(num_samples: int, pairs: int, seed: int) -> Float64[Tensor, "m M"]:
    """Draw pairs of random halves, the second of which has the samples that the first has not."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(pairs, num_samples, dtype=torch.float64)
    for row in first:
        row[torch.randperm(num_samples, generator=generator)[: num_samples // 2]] = 1
    return torch.stack([first, 1 - first], dim=1).flatten(0, 1)


def forecast_of(
    predicted: Mapping[str, Float[Tensor, "m Q"]], measured: Float[Tensor, "m Q"], sample_weights: Float[Tensor, "m M"]
) -> Forecast:
    """Compare the predictions of each method with networks that were trained on pairs of complementary halves.

    The first method counts unless another is better by more than two standard errors of their difference.
    """
    pairs = len(measured) // 2
    rest = [torch.arange(len(measured)) // 2 != pair for pair in range(pairs)]
    found = {
        name: (rank_agreement(own, measured), [rank_agreement(own[k], measured[k]) for k in rest])
        for name, own in predicted.items()
    }
    method, *others = found
    for other in others:
        gain = found[other][0] - found[method][0]
        if gain > 2 * _jackknife([b - a for a, b in zip(found[method][1], found[other][1], strict=True)]):
            method = other
    lds, without = found[method]
    wide = float(student.ppf(0.975, pairs - 1)) * _jackknife(without)
    slope, scatter = line_through(predicted[method], measured)
    return Forecast(
        method, lds, (max(-1.0, lds - wide), min(1.0, lds + wide)), slope, scatter, measured, sample_weights
    )


def _jackknife(without: list[float]) -> float:
    """Return the standard error of a number, from those without each of its parts."""
    values = torch.tensor(without, dtype=torch.float64)
    return float(((len(values) - 1) * values.var(correction=0)) ** 0.5)


def rank_agreement(predicted: Float[Tensor, "m Q"], measured: Float[Tensor, "m Q"]) -> float:
    """Return the mean rank correlation over questions that have one."""
    ranks = [torch.from_numpy(rankdata(value.double().cpu(), axis=0)) for value in (predicted, measured)]
    a, b = (own - own.mean(dim=0) for own in ranks)
    varies = a.any(dim=0) & b.any(dim=0)
    return float(cosine_similarity(a, b, dim=0)[varies].mean())


def line_through(predicted: Float[Tensor, "m Q"], measured: Float[Tensor, "m Q"]) -> tuple[float, float]:
    """Return the slope of measured numbers in predicted ones, around each question's mean, and the scatter."""
    x, y = (value.double() - value.double().mean(dim=0) for value in (predicted, measured))
    slope = float((x * y).sum() / x.square().sum().clamp(min=1e-300))
    return slope, float((y - slope * x).square().mean().sqrt())


@dataclass(frozen=True, eq=False, repr=False)
class Verification(Displayed):
    """Predictions beside the networks that they are about; `epk_gp.plots.scores.verification_figure` draws them.

    Attributes:
        predicted: The predicted numbers, (s, Q).
        measured: Those of the trained networks, (s, Q).
        outputs: Those of the recorded network, (Q,).
        findings: Why the retraining is not certified; empty if it is.
    """

    predicted: Float[Tensor, "s Q"]
    measured: Float[Tensor, "s Q"]
    outputs: Float[Tensor, " Q"]
    findings: tuple[str, ...] = ()

    @property
    def correlation(self) -> float:
        """Pearson's correlation of predicted and measured changes, over all networks and questions."""
        x, y = ((value - self.outputs).double().flatten() for value in (self.predicted, self.measured))
        return float(cosine_similarity(x - x.mean(), y - y.mean(), dim=0))

    @property
    def slope(self) -> float:
        """Measured change for each predicted one, by least squares."""
        x, y = ((value - self.outputs).double().flatten() for value in (self.predicted, self.measured))
        return float(x @ y / x.square().sum().clamp(min=1e-300))

    def _summary(self) -> Summary:
        s, Q = self.predicted.shape
        change, own = (value - self.outputs for value in (self.measured, self.predicted))
        miss = float((change - own).double().square().mean().sqrt())
        rows = [
            (f"{k}", number(float(a.mean())), number(float(b.mean())), number(float((a - b).square().mean().sqrt())))
            for k, (a, b) in enumerate(zip(own[:SHOWN_ROWS], change[:SHOWN_ROWS], strict=True))
        ]
        entries = [
            Entry(
                "changes", f"correlation {self.correlation:.2f}, slope {self.slope:.2f}", "measured against predicted"
            ),
            Entry(
                "miss",
                number(miss),
                f"root mean square; the changes' is {number(float(change.square().mean().sqrt()))}",
            ),
        ]
        entries += [Entry("not certified", finding) for finding in self.findings]
        if s > 2:
            entries.append(Entry("rank correlation", f"{rank_agreement(self.predicted, self.measured):.2f}", "LDS"))
        note = "Means over questions of the change of the number; root mean square of what is missed."
        table = Table(("network", "predicted", "measured", "missed"), tuple(rows), note)
        return Summary(f"{count(s, 'network')} trained again, {count(Q, 'question')}", tuple(entries), table)
