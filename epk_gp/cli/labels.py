"""The class labels in a user's file: how many classes there are, and whether each has a training point."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

_SHUFFLE = (
    "The file may be sorted by class: shuffle its points, or pass --num-classes if classes have no training point."
)


@dataclass(frozen=True, eq=False)
class FileLabels:
    """The labels of a file.

    Attributes:
        file: The file.
        labels: Those of all its `inputs`.
        start: Number of training points, the first ones.
        test_labels: Those of its `test_inputs`, empty if it has none.
    """

    file: Path
    labels: Int64[Tensor, " n"]
    start: int
    test_labels: Int64[Tensor, " m"]


def count_classes(taken: FileLabels, num_classes: int | None) -> int:
    """Return the number of classes. Nothing here, nor before it, has a size that depends on the largest label.

    Args:
        taken: The labels.
        num_classes: The number of classes, or None if every class has a training point.

    Raises:
        ValueError: The labels of the training points are not 0..C-1 without gaps, or name a single class, or another
            label lies outside; or, with `num_classes`, any label lies outside.
    """
    file = taken.file
    if num_classes is not None:
        low, high = _range(torch.cat([taken.labels, taken.test_labels]))
        if not 0 <= low <= high < num_classes:
            raise ValueError(
                f"labels in {file} must lie in 0..{num_classes - 1} (--num-classes {num_classes}): got {low}..{high}."
            )
        return num_classes
    distinct, others = taken.labels[: taken.start].unique(), taken.labels[taken.start :]
    (low, high), count = _range(distinct), len(distinct)
    is_part = len(others) > 0 and _range(taken.labels) == (0, len(taken.labels.unique()) - 1)  # of a file without gaps
    whose = (
        f"labels of the first {taken.start} points of {file}, the training points," if is_part else f"labels in {file}"
    )
    if low != 0 or high != count - 1:
        if is_part:
            advice = _SHUFFLE
        elif high - low == count - 1:
            advice = f"Subtract {low}." if low > 0 else f"Add {-low}."
        else:
            advice = "Renumber them, as numpy.unique(labels, return_inverse=True) does"
            advice += ", or pass --num-classes if the others exist but have no point." if low >= 0 else "."
        raise ValueError(
            f"{whose} must be 0..C-1 without gaps: got {count} different ones from {low} to {high}. {advice}"
        )
    if count == 1:
        advice = _SHUFFLE if is_part else "Pass --num-classes if others exist but have no point."
        raise ValueError(f"{whose} must name at least two classes: all are 0. {advice}")
    for whose, labels, advice in (
        (f"labels of the other points of {file}", others, _SHUFFLE),
        (
            f"`test_labels` in {file}",
            taken.test_labels,
            "Pass --num-classes if others exist but have no training point.",
        ),
    ):
        if len(labels) and not 0 <= _range(labels)[0] <= _range(labels)[1] < count:
            low, high = _range(labels)
            raise ValueError(
                f"{whose} must lie in 0..{count - 1}, the classes of the training points: got {low}..{high}. {advice}"
            )
    return count


def _range(labels: Int64[Tensor, " n"]) -> tuple[int, int]:
    return int(labels.min()), int(labels.max())
