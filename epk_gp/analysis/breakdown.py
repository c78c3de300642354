"""The contributions behind each predicted output: selected, ranked, summarised and written as a table."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import GroupedAttribution
from epk_gp.kernel_machine.axes import Axis, by_step

_MAX_RANGES = 100  # ranges of steps that the curve of an output over training is drawn with


@dataclass(frozen=True, eq=False)
class PredictionBreakdown:
    """The predicted outputs of n points and the contributions that they are the sum of.

    Attributes:
        output: Index of the predicted output, (n,).
        initial: Value of this output at the initial weights, (n,).
        network: Value of this output at the trained weights, (n,).
        samples: Contributions of the M training points, (n, M).
        decay: Contribution of weight decay, (n,).
        statistics: Contribution of the moving statistics, (n,).
        unexplained: Contribution of what update rule and exact gradients leave of the steps, (n,).
        sources: Contributions of what is no training point, (n,) by name.
        steps: What R ranges of steps add, all terms together, (n, R).
        range_ends: The last step of each range, plus one.
    """

    output: Int64[Tensor, " n"]
    initial: Float[Tensor, " n"]
    network: Float[Tensor, " n"]
    samples: Float[Tensor, "n M"]
    decay: Float[Tensor, " n"]
    statistics: Float[Tensor, " n"]
    unexplained: Float[Tensor, " n"]
    sources: Mapping[str, Float[Tensor, " n"]]
    steps: Float[Tensor, "n R"]
    range_ends: tuple[int, ...]


def prediction_breakdown(
    by_sample: GroupedAttribution, by_range: GroupedAttribution, predicted: Int64[Tensor, " n"]
) -> PredictionBreakdown:
    """Select the predicted output of each point from its contributions by sample and by range of steps."""
    column = torch.zeros_like(predicted) if by_sample.network.shape[1] == 1 else predicted
    rows = torch.arange(len(predicted))
    statistics = by_sample.statistics.sum(dim=2) + by_sample.statistics_of_no_sample.squeeze(2)
    steps = by_range.values + by_range.decay + by_range.statistics + by_range.statistics_of_no_sample
    return PredictionBreakdown(
        output=predicted,
        initial=by_sample.initial[rows, column],
        network=by_sample.network[rows, column],
        samples=by_sample.values[rows, column],
        decay=by_sample.decay.squeeze(2)[rows, column],
        statistics=statistics[rows, column],
        unexplained=by_sample.unexplained.squeeze(2)[rows, column],
        sources={name: term.squeeze(2)[rows, column] for name, term in by_sample.sources.items()},
        steps=sum(by_range.sources.values(), steps + by_range.unexplained)[rows, column],
        range_ends=tuple(torch.bincount(by_range.axes[0].group).cumsum(0).tolist()),
    )


def step_ranges(trajectory: Trajectory) -> Axis:
    """Divide the run into at most 100 ranges of steps of about equal length."""
    edges = torch.linspace(0, trajectory.num_steps, min(_MAX_RANGES, trajectory.num_steps) + 1).round().long()
    return by_step(trajectory, edges[1:-1].tolist())


def write_table(file: Path, breakdown: PredictionBreakdown, targets: Tensor, top: int) -> None:
    """Write the training points that raised and lowered each predicted output most, one line each, as CSV."""
    with file.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["point", "output", "network", "initial", "rank", "training_point", "label", "contribution"])
        for n, samples in enumerate(breakdown.samples):
            raised, lowered = extremes(samples, targets, top)
            point = [n, int(breakdown.output[n]), float(breakdown.network[n]), float(breakdown.initial[n])]
            ranked = [*enumerate(raised, start=1), *reversed([(-k, entry) for k, entry in enumerate(lowered, start=1)])]
            for rank, entry in ranked:
                own = (entry["training_point"], entry.get("label", ""), entry["contribution"])
                table.writerow([*point, rank, *own])


def summarise(
    parts: GroupedAttribution, breakdown: PredictionBreakdown, targets: Tensor, top: int
) -> dict[str, object]:
    """List for each point the training points that contributed most to its predicted output.

    Args:
        parts: Contributions by sample to all outputs.
        breakdown: Contributions to the predicted outputs.
        targets: Training targets; if they are class labels, the labels are listed too.
        top: Number of training points listed of either sign.
    """
    summaries = []
    for n, samples in enumerate(breakdown.samples):
        raised, lowered = extremes(samples, targets, top)
        names = ("network", "initial", "decay", "statistics", "unexplained")
        outputs = {name: float(getattr(breakdown, name)[n]) for name in names}
        outputs |= {name: float(term[n]) for name, term in breakdown.sources.items()}
        values = samples.sort(descending=True).values
        sums = {"raised_by": float(values[values > 0].sum()), "lowered_by": float(values[values < 0].sum())}
        listed = {"most_raising": raised, "most_lowering": lowered}
        summaries.append({"point": n, "output": int(breakdown.output[n]), **outputs, **sums, **listed})
    errors = (parts.total - parts.network).abs().amax(dim=1)
    return {
        "max_error": float(errors.max()),
        "max_relative_error": float((errors / parts.network.abs().amax(dim=1)).max()),
        "max_residual": parts.max_residual,
        "evaluations": parts.evaluations,
        "points": summaries,
    }


def extremes(samples: Tensor, targets: Tensor, top: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """List the training points that raised an output most, and those that lowered it most, with their labels."""
    values, order = samples.sort(descending=True)
    ranked = list(zip(order.tolist(), values.tolist(), strict=True))
    has_labels = targets.ndim == 1 and targets.dtype == torch.int64

    def entry(index: int, contribution: float) -> dict[str, Any]:
        label = {"label": int(targets[index])} if has_labels else {}
        return {"training_point": index, "contribution": contribution} | label

    raised = [entry(m, v) for m, v in ranked[:top] if v > 0]
    return raised, [entry(m, v) for m, v in ranked[::-1][:top] if v < 0]
