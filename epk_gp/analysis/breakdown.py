"""The contributions behind each predicted output: selected, ranked, summarised and as the rows of a table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import Attribution, GroupedAttribution, terms_by_sample
from epk_gp.kernel_machine.axes import Axis, by_step

_MAX_RANGES = 100  # ranges of steps in the curve of an output over training
COLUMNS = ("point", "output", "network", "initial", "rank", "training_point", "label", "contribution")  # of a table


@dataclass(frozen=True, eq=False)
class PredictionBreakdown:
    """The predicted outputs of n points, and the contributions whose sums they are.

    Attributes:
        output: Index of the predicted output, (n,).
        initial: Value of this output at the initial weights, (n,).
        network: Value of this output at the trained weights, (n,).
        samples: Contributions of the M training points, (n, M).
        decay: Contribution of weight decay, (n,).
        statistics: Contribution of the moving statistics, (n,).
        unexplained: Contribution of the difference between the steps and the update rule on exact gradients, (n,).
        sources: Contributions of data outside the training set, (n,) by name.
        steps: Contributions of R ranges of steps, all terms together, (n, R).
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
    place = torch.arange(len(predicted)), torch.zeros_like(predicted) if by_sample.network.shape[1] == 1 else predicted
    whole = Attribution(**terms_by_sample(by_sample))
    names = ("initial", "network", "samples", "decay", "statistics", "unexplained")
    return PredictionBreakdown(
        output=predicted,
        **{name: getattr(whole, name)[place] for name in names},
        sources={name: term[place] for name, term in whole.sources.items()},
        steps=sum(by_range._terms.values(), torch.zeros(()))[place],
        range_ends=tuple(torch.bincount(by_range.axes[0].group).cumsum(0).tolist()),
    )


def step_ranges(trajectory: Trajectory) -> Axis:
    """Divide the run into at most 100 ranges of steps of about equal length."""
    edges = torch.linspace(0, trajectory.num_steps, min(_MAX_RANGES, trajectory.num_steps) + 1).round().long()
    return by_step(trajectory, edges[1:-1].tolist())


def table_rows(breakdown: PredictionBreakdown, targets: Tensor, top: int) -> Iterator[list[Any]]:
    """Yield the training points that raised and lowered each predicted output most, one row each."""
    for n, samples in enumerate(breakdown.samples):
        raised, lowered = extremes(samples, targets, top)
        point = [n, int(breakdown.output[n]), float(breakdown.network[n]), float(breakdown.initial[n])]
        ranked = [*enumerate(raised, start=1), *zip(range(-len(lowered), 0), lowered[::-1], strict=True)]
        for rank, entry in ranked:
            yield [*point, rank, entry["training_point"], entry.get("label", ""), entry["contribution"]]


def summarise(
    parts: GroupedAttribution, breakdown: PredictionBreakdown, targets: Tensor, top: int
) -> dict[str, object]:
    """List for each point the training points that contributed most to its predicted output.

    Args:
        parts: Contributions by sample to all outputs.
        breakdown: Contributions to the predicted outputs.
        targets: Training targets; if they are class labels, the labels are listed too.
        top: Number of listed training points of each sign.
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
    relative = errors / parts.network.abs().amax(dim=1)
    sums = {"max_error": float(errors.max()), "max_relative_error": float(relative.max())}
    return sums | {"max_residual": parts.max_residual, "evaluations": parts.evaluations, "points": summaries}


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
