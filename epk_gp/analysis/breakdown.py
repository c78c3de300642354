"""What made the predicted outputs: picked, ranked, summarised and tabled."""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import GroupedAttribution
from epk_gp.kernel_machine.axes import Axis, by_step

_CURVE = 100  # ranges of steps in the curve, at most


@dataclass(frozen=True, eq=False)
class PredictionBreakdown:
    """The predicted output of n points and what made it.

    Attributes:
        output: The output, (n,).
        initial: Its value at the initial weights, (n,).
        network: Its value at the trained weights, (n,).
        samples: Contributions of the M training points, (n, M).
        decay: What weight decay added, (n,).
        steps: What ranges of steps added, weight decay included, (n, R).
        ends: The last step of each range, plus one.
    """

    output: Int64[Tensor, " n"]
    initial: Float[Tensor, " n"]
    network: Float[Tensor, " n"]
    samples: Float[Tensor, "n M"]
    decay: Float[Tensor, " n"]
    steps: Float[Tensor, "n R"]
    ends: tuple[int, ...]


def explain(
    parts: GroupedAttribution, curve: GroupedAttribution, predicted: Int64[Tensor, " n"]
) -> PredictionBreakdown:
    """Pick each point's predicted output from its contributions by sample and by range of steps."""
    column = torch.zeros_like(predicted) if parts.network.shape[1] == 1 else predicted
    rows = torch.arange(len(predicted))
    return PredictionBreakdown(
        output=predicted,
        initial=parts.initial[rows, column],
        network=parts.network[rows, column],
        samples=parts.values[rows, column],
        decay=parts.decay.squeeze(2)[rows, column],
        steps=(curve.values + curve.decay)[rows, column],
        ends=tuple(torch.bincount(curve.axes[0].group).cumsum(0).tolist()),
    )


def step_ranges(trajectory: Trajectory) -> Axis:
    """Cut the run into at most so many ranges of steps, of about equal length."""
    edges = torch.linspace(0, trajectory.num_steps, min(_CURVE, trajectory.num_steps) + 1).round().long()
    return by_step(trajectory, edges[1:-1].tolist())


def write_table(path: Path, explained: PredictionBreakdown, targets: Tensor, top: int) -> None:
    """Write each point's most helpful and most harmful training points, one line each."""
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["point", "output", "network", "initial", "rank", "training_point", "label", "contribution"])
        for n, samples in enumerate(explained.samples):
            values, order = samples.sort(descending=True)
            ranked = list(enumerate(zip(order.tolist(), values.tolist(), strict=True), start=1))
            lowest = [(rank - 1 - len(ranked), pair) for rank, pair in ranked[::-1][:top] if pair[1] < 0]
            for rank, (index, value) in [(rank, pair) for rank, pair in ranked[:top] if pair[1] > 0] + lowest[::-1]:
                about = [
                    n,
                    int(explained.output[n]),
                    float(explained.network[n]),
                    float(explained.initial[n]),
                ]
                table.writerow([*about, rank, index, _entry(index, value, targets).get("label", ""), value])


def summarise(
    parts: GroupedAttribution, explained: PredictionBreakdown, targets: Tensor, top: int
) -> dict[str, object]:
    """List, for each point, the training points that moved its predicted output most.

    Args:
        parts: All contributions.
        explained: Those to the predicted outputs.
        targets: Training targets; labels are listed where there are any.
        top: Training points of either sign.
    """
    summaries = []
    for n, samples in enumerate(explained.samples):
        values, order = samples.sort(descending=True)
        ranked = list(zip(order.tolist(), values.tolist(), strict=True))
        raised = [_entry(m, v, targets) for m, v in ranked[:top] if v > 0]
        lowered = [_entry(m, v, targets) for m, v in ranked[::-1][:top] if v < 0]
        own: dict[str, object] = {
            "point": n,
            "output": int(explained.output[n]),
            "network": float(explained.network[n]),
            "initial": float(explained.initial[n]),
            "decay": float(explained.decay[n]),
        }
        sums = {"raised_by": float(values[values > 0].sum()), "lowered_by": float(values[values < 0].sum())}
        summaries.append(own | sums | {"most_raising": raised, "most_lowering": lowered})
    errors = (parts.total - parts.network).abs().amax(dim=1)
    return {
        "max_error": float(errors.max()),
        "max_relative_error": float((errors / parts.network.abs().amax(dim=1)).max()),
        "max_residual": parts.max_residual,
        "evaluations": parts.evaluations,
        "points": summaries,
    }


def _entry(index: int, contribution: float, targets: Tensor) -> dict[str, object]:
    labelled = targets.ndim == 1 and targets.dtype == torch.int64
    label: dict[str, object] = {"label": int(targets[index])} if labelled else {}
    entry: dict[str, object] = {"training_point": index, "contribution": contribution}
    return entry | label
