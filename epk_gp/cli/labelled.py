"""Points of which labels may be known: of a file, of a folder in MNIST's format, or those held out of a run."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.cli.data import HELD_OUT, cast_points, describe, read_arrays, require_array, validate_checksum
from epk_gp.cli.data import validate_inputs as validate_real_inputs
from epk_gp.cli.manifest import held_out_checksum
from epk_gp.core.checks import validate_finite
from epk_gp.core.trajectory import Trajectory
from epk_gp.datasets import mnist_folder

HELD_OUT_POINTS = "held-out"  # as a source: those of the run


@dataclass(frozen=True, eq=False)
class LabelledPoints:
    """Points of a source.

    Attributes:
        X: n inputs, in the run's type.
        labels: Their classes, or None.
        rows: Their rows in the source, ascending.
        origin: What they are, in words.
    """

    X: Shaped[Tensor, "n ..."]
    labels: Int64[Tensor, " n"] | None
    rows: Int64[Tensor, " n"]
    origin: str

    def __getitem__(self, index: Int64[Tensor, " m"]) -> "LabelledPoints":
        """Select points."""
        labels = None if self.labels is None else self.labels[index]
        return LabelledPoints(self.X[index], labels, self.rows[index], self.origin)

    def __str__(self) -> str:
        """Say how many points there are, and which."""
        return f"{len(self.X)} {self.origin}"


def read_labelled(source: str, run: Path, trajectory: Trajectory) -> LabelledPoints:
    """Read points and, if they are there, labels.

    Args:
        source: "held-out" for the points held out of the run; or a folder of MNIST-format files, of which the test part
            is read; or a .safetensors or .npz file with `inputs` and perhaps `labels`.
        run: Folder of the run.
        trajectory: The run.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or its points or labels are none of the run's kind.
    """
    path = run / HELD_OUT if source == HELD_OUT_POINTS else Path(source)
    if source == HELD_OUT_POINTS:
        if held_out_checksum(run) is None and not path.is_file():
            raise ValueError(
                f"held-out points must lie beside the run: {run} has none. Record with --num-test, or name a file."
            )
        validate_checksum(path, held_out_checksum(run))
        origin = "held-out points"
    else:
        origin = f"points of {path}"
    if path.is_dir():
        images = mnist_folder(path, split="test", dtype=trajectory.dtype)
        arrays = {"inputs": images.inputs, "labels": images.labels}
    else:
        arrays = read_arrays(path)
    X = require_array(arrays, "inputs", path)
    if not len(X):
        raise ValueError(f"{path} must hold at least one point: `inputs` is empty.")
    validate_real_inputs(X, "inputs", path)
    shape = tuple(trajectory.inputs.shape[1:])
    if tuple(X.shape[1:]) != shape:
        raise ValueError(f"`inputs` in {path} must have the shape of the run's, {shape} each: got {describe(X)}.")
    X = cast_points(X, trajectory, None)
    validate_finite(X, f"`inputs` in {path} as {X.dtype}")
    labels = _labels(arrays["labels"], len(X), trajectory.num_outputs, path) if "labels" in arrays else None
    return LabelledPoints(X, labels, torch.arange(len(X)), origin)


def without_labels(points: LabelledPoints) -> LabelledPoints:
    """Return the points alone."""
    return replace(points, labels=None)


def halves(points: LabelledPoints, seed: int) -> tuple[LabelledPoints, LabelledPoints]:
    """Divide points in two at random."""
    order = torch.randperm(len(points.X), generator=torch.Generator().manual_seed(seed))
    first, second = (part.sort().values for part in order.tensor_split(2))
    return points[first], points[second]


def _labels(labels: Tensor, count: int, num_classes: int, file: Path) -> Int64[Tensor, " n"]:
    if labels.is_floating_point() or labels.is_complex() or labels.shape != (count,):
        raise ValueError(
            f"`labels` in {file} must be class indices, one per point: got {describe(labels)} for {count} points."
        )
    values = labels.long()
    low, high = int(values.min()), int(values.max())
    if not 0 <= low <= high < num_classes:
        raise ValueError(f"`labels` in {file} must lie in 0..{num_classes - 1}, the run's classes: got {low}..{high}.")
    return values
