"""The data of commands: named data sets or files to train on, and the points at which a run is explained or scored."""

import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy.lib.npyio import NpzFile
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from epk_gp.autodiff.scalars import RowFunction
from epk_gp.cli.networks import read_manifest
from epk_gp.core.checks import as_tensor, validate_finite, validate_labels
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.datasets import Dataset, digits, mnist_folder, three_gaussians
from epk_gp.storage.files import checksum, verify_file
from epk_gp.storage.run import is_run

HELD_OUT = "held_out.safetensors"
_HELD_OUT_SOURCE = "held-out"  # as a source of points: those of the run
_NUM_TEST = 102  # held-out points of a named data set by default: as many as the paper verifies
# What is read of a file; other arrays may hold anything.
_ARRAYS = ("inputs", "labels", "answers", "test_inputs", "test_labels")


def is_data_file(name: str) -> bool:
    """Return whether --data names a file, rather than one of the named data sets."""
    return Path(name).suffix in (".safetensors", ".npz")


def load_split(
    name: str,
    *,
    seed: int,
    dtype: torch.dtype,
    num_train: int | None = None,
    num_test: int | None = None,
    num_classes: int | None = None,
    data_dir: Path | None = None,
) -> tuple[Dataset, Dataset, int]:
    """Load training data and held-out data, which may be empty, and count the points that could be held out.

    Args:
        name: "three-gaussians" (3 x 1000 points in 100-D), "digits", "mnist", or a .safetensors or .npz file.
        seed: Seed of the draw, or of the order of the named data sets. The order of files is kept.
        dtype: Floating-point type of the inputs.
        num_train: Number of training points; all by default.
        num_test: Largest number of held-out points; None means all that a file has, and 102 of a named data set. A
            file's held-out points are its `test_inputs` and `test_labels`; or else the points after the first
            `num_train`; or else, where only `num_test` is given, the last ones.
        num_classes: Number of classes of a file's labels; None means that every class has a point.
        data_dir: Folder of MNIST-format files.

    Raises:
        ValueError: There is no data set of this name, or a file is damaged, or its labels are not 0 .. C-1, or there
            are fewer points than requested, or an option does not belong to the data.
        OSError: A file is missing.
        ImportError: scikit-learn is not installed.
    """
    is_file = is_data_file(name)
    if data_dir is not None and name != "mnist":
        raise ValueError(f"--data-dir belongs to --data mnist: got --data {name}.")
    if num_classes is not None and not is_file:
        raise ValueError(f"--num-classes belongs to a file of one's own: got --data {name}.")
    most = num_test or (None if is_file else _NUM_TEST)
    generator = torch.Generator().manual_seed(seed)
    if name == "three-gaussians":
        train = three_gaussians(1000, generator=generator, dtype=dtype)
        test = three_gaussians(math.ceil((num_test or _NUM_TEST) / 3), generator=generator, dtype=dtype)
    elif name == "digits":
        whole = digits(dtype=dtype)
        whole = whole[torch.randperm(len(whole), generator=generator)]
        train, test = whole[:1437], whole[1437:]
    elif name == "mnist":
        train = mnist_folder(data_dir, split="train", dtype=dtype)
        train = train[torch.randperm(len(train), generator=generator)]
        test = mnist_folder(data_dir, split="test", dtype=dtype)
    elif is_file:
        train, test = _split_of_file(Path(name), num_train, num_test, num_classes, dtype)
    else:
        raise ValueError(
            "--data must be three-gaussians, digits, mnist, or a .npz or .safetensors file with `inputs`, numbers, and "
            f"`labels`, 0 .. C-1: got {name!r}."
        )
    if num_train is not None and not 1 <= num_train <= len(train):
        raise ValueError(f"--num-train must lie in 1..{len(train)} (the training points): got {num_train}.")
    return train[:num_train], test[:most], len(test)


def held_out_content(run: Path, data: Dataset) -> bytes:
    """Return the content of the file of held-out points, empty if there are none.

    Raises:
        ValueError: The folder holds a run that was recorded with others, or its manifest is damaged.
    """
    content = save({"inputs": data.inputs.contiguous(), "labels": data.labels.contiguous()}) if len(data) else b""
    recorded = read_manifest(run) if is_run(run) else None
    if recorded is not None and recorded.held_out_blake2b != checksum(content):
        raise ValueError(f"the held-out points must be the recorded ones to resume {run}: the data hold others.")
    return content


@dataclass(frozen=True, eq=False)
class ChosenPoints:
    """The points at which a run is explained or scored.

    Attributes:
        X: n inputs.
        labels: Their classes, or None where they are not known.
        rows: Their rows in the source, ascending.
        available: Number of points that they were chosen from.
        origin: Description of the points: "held-out points", "points of FILE" or training inputs.
        answers: Classes or words whose log-probability is explained, (n, ...), or None where there are none.
    """

    X: Shaped[Tensor, "n ..."]
    labels: Int64[Tensor, " n"] | None
    rows: Int64[Tensor, " n"]
    available: int
    origin: str
    answers: Shaped[Tensor, "n ..."] | None = None

    def __str__(self) -> str:
        """Describe the number and the origin of the points."""
        chosen = len(self.X)
        return f"{chosen} {self.origin}" if chosen == self.available else f"{chosen} of {self.available} {self.origin}"

    def explained(self, trajectory: Trajectory, outputs: str, head: Head | None) -> tuple[dict[str, Any], Tensor]:
        """Return the options of `attribute` for what --outputs names, and the output of each point.

        Raises:
            ValueError: The log-probability of answers is wanted, and the points have none; or a head is named too.
        """
        if outputs == "answers":
            if head is not None:
                raise ValueError(f"--outputs answers must stand without --head: got --head {head}. Leave one out.")
            return self.answered(), torch.zeros(len(self.X), dtype=torch.int64)
        predicted = network_outputs(trajectory, self.X).argmax(dim=1)
        resolved = resolve_head(head, trajectory.loss, trajectory.num_outputs)
        return {"head": resolved, "classes": predicted if outputs == "predicted" else None}, predicted

    def answered(self) -> dict[str, Any]:
        """Return the options of `attribute` and `write_report` for answers.

        Raises:
            ValueError: The points have no answers.
        """
        if self.answers is None:
            raise ValueError(
                "--outputs answers explains the log-probability of `answers`, a tensor beside `inputs` in the file "
                f"of --points: got {self.origin}."
            )
        return {"function": RowFunction.log_probability(self.answers)}

    def halves(self, seed: int) -> tuple["ChosenPoints", "ChosenPoints"]:
        """Divide the points in two at random; each half is a source of its own."""
        order = torch.randperm(len(self.X), generator=torch.Generator().manual_seed(seed))
        first, second = (self.taken(half.sort().values) for half in order.tensor_split(2))
        return first, second

    def taken(self, rows: Int64[Tensor, " m"]) -> "ChosenPoints":
        """Return some of the points, as a source of their own."""
        labels, answers = (None if values is None else values[rows] for values in (self.labels, self.answers))
        return replace(self, X=self.X[rows], labels=labels, answers=answers, rows=self.rows[rows], available=len(rows))


def read_points(
    trajectory: Trajectory,
    run: Path,
    file: Path | None,
    num_points: int | None = None,
) -> ChosenPoints:
    """Take the first points of a file, or of the run's held-out points, or of its training inputs if it has none.

    Args:
        trajectory: The run.
        run: Its folder, whose held-out points are taken by default.
        file: File with `inputs`, or None.
        num_points: Largest number of points; all by default.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged or has no `inputs`, or there are no points.
    """
    path, origin = (run / HELD_OUT, "held-out points") if file is None else (file, f"points of {file}")
    if file is None and not _has_held_out(run):
        origin = "training inputs, for the run has no held-out points (--points names others)"
        arrays = {"inputs": trajectory.inputs, "labels": trajectory.targets}
    else:
        arrays = read_arrays(path)
    X = _inputs_like_the_run(arrays, path, trajectory)
    rows = torch.arange(len(X))[:num_points]
    labels = arrays.get("labels")  # for pictures alone: none are drawn that are no classes
    if labels is not None:
        labels = labels[rows] if labels.dtype == torch.int64 and labels.shape == (len(X),) else None
    answers = arrays.get("answers")
    if answers is not None and (not answers.ndim or len(answers) != len(X)):
        raise ValueError(f"`answers` in {path} must have a row for each of {len(X)} points: got {_describe(answers)}.")
    return ChosenPoints(X[rows], labels, rows, len(X), origin, None if answers is None else answers[rows])


def read_labelled(source: str, run: Path, trajectory: Trajectory) -> ChosenPoints:
    """Read all points of a source and, if they are there, labels.

    Args:
        source: "held-out" for the points held out of the run; or a folder of MNIST-format files, of which the test part
            is read; or a .safetensors or .npz file with `inputs` and perhaps `labels`.
        run: Folder of the run.
        trajectory: The run.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or its points or labels are none of the run's kind.
    """
    path, origin = Path(source), f"points of {Path(source)}"
    if source == _HELD_OUT_SOURCE:
        path, origin = run / HELD_OUT, "held-out points"
        if not _has_held_out(run):
            raise ValueError(f"--validation must name labelled points: {run} has no held-out ones. Name a file.")
    if path.is_dir():
        images = mnist_folder(path, split="test", dtype=trajectory.dtype)
        arrays = {"inputs": images.inputs, "labels": images.labels}
    else:
        arrays = read_arrays(path)
    X = _inputs_like_the_run(arrays, path, trajectory)
    labels = _class_indices(arrays, "labels", len(X), path) if "labels" in arrays else None
    if labels is not None:
        validate_labels(labels, len(X), trajectory.num_outputs, name=f"`labels` in {path}")
    return ChosenPoints(X, labels, torch.arange(len(X)), len(X), origin)


def _has_held_out(run: Path) -> bool:
    """Return whether a run has held-out points. Raise if they are not those that were written."""
    file, manifest = run / HELD_OUT, read_manifest(run)
    if manifest is None or not manifest.held_out_bytes:
        return file.is_file()
    if not file.is_file():
        raise FileNotFoundError(f"{file} must hold the held-out points of the run: it is missing. Pass --points.")
    verify_file(file, manifest.held_out_bytes, manifest.held_out_blake2b, str(file))
    return True


def _inputs_like_the_run(arrays: dict[str, Tensor], file: Path, trajectory: Trajectory) -> Shaped[Tensor, "n ..."]:
    """Return a file's inputs in the run's type. Raise if there are none, or not of its shape, or not finite."""
    X, expected = _inputs(arrays, "inputs", file), tuple(trajectory.inputs.shape[1:])
    if not len(X) or tuple(X.shape[1:]) != expected:
        raise ValueError(f"`inputs` in {file} must be points of the run's shape, {expected} each: got {_describe(X)}.")
    X = X.to(trajectory.dtype) if trajectory.inputs.is_floating_point() else X  # token numbers stay as they are
    validate_finite(X, f"`inputs` in {file} as {X.dtype}")
    return X


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Return the arrays of a .safetensors or .npz file that commands use; nothing in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind, or is damaged.
    """
    if not is_data_file(file.name) or file.is_dir():
        raise ValueError(f"{file} must be a .safetensors or .npz file: it is another, or a folder.")
    if not file.is_file():
        raise FileNotFoundError(f"{file} must be a .safetensors or .npz file: it does not exist.")
    try:
        if file.suffix == ".safetensors":
            found = load_file(file)
            return {name: found[name] for name in _ARRAYS if name in found}
        with file.open("rb") as stream:
            arrays = np.load(stream, allow_pickle=False)
            if not isinstance(arrays, NpzFile):
                raise ValueError("it holds a single array, as an .npy file does")
            return {name: as_tensor(arrays[name]) for name in _ARRAYS if name in arrays.files}
    except (SafetensorError, BadZipFile, zlib.error, ValueError, EOFError, TypeError, MemoryError) as error:
        raise ValueError(f"{file} must be a whole {file.suffix} file of numbers: {error}.") from error


def _split_of_file(
    file: Path, num_train: int | None, num_test: int | None, num_classes: int | None, dtype: torch.dtype
) -> tuple[Dataset, Dataset]:
    """Return the training points and the held-out points of a file."""
    arrays = read_arrays(file)
    X = _inputs(arrays, "inputs", file)
    y = _class_indices(arrays, "labels", len(X), file)
    has_test = "test_inputs" in arrays or "test_labels" in arrays
    count = num_train or len(X) - (0 if has_test else num_test or 0)
    if not 1 <= count <= len(X) - (0 if has_test or num_train is None else num_test or 0):
        raise ValueError(f"--num-train and --num-test must divide {len(X)} points: got {num_train} and {num_test}.")
    test_X, test_y = X[count:], y[count:]
    if has_test:
        test_X = _inputs(arrays, "test_inputs", file)
        test_y = _class_indices(arrays, "test_labels", len(test_X), file)
        if test_X.shape[1:] != X.shape[1:]:
            raise ValueError(f"`test_inputs` in {file} must have the shape of `inputs`: got {_describe(test_X)}.")
    # Nothing here, nor before it, has a size that depends on the largest label.
    C, every = num_classes or len(y[:count].unique()), torch.cat([y, test_y])
    low, high = int(every.min()), int(every.max())
    if C < 2 or not 0 <= low <= high < C:
        raise ValueError(
            f"labels in {file} must be 0..C-1 for C >= 2 classes, each with a training point: got {low}..{high}, and "
            f"{C} classes of the {count} training points or --num-classes. Renumber them, as numpy.unique(labels, "
            "return_inverse=True) does; shuffle a file that is sorted by class; or pass --num-classes."
        )

    def dataset(X: Tensor, y: Tensor, name: str) -> Dataset:
        X = (X.to(dtype) if X.is_floating_point() else X).contiguous()
        validate_finite(X, f"`{name}` in {file} as {X.dtype}")
        return Dataset(X, y, C, file.stem)

    return dataset(X[:count], y[:count], "inputs"), dataset(test_X, test_y, "test_inputs" if has_test else "inputs")


def _inputs(arrays: dict[str, Tensor], name: str, file: Path) -> Shaped[Tensor, "n ..."]:
    """Return the inputs that a file holds under a name. Raise if there are none, or if they are no real numbers."""
    X = arrays.get(name)
    if X is None or X.is_complex() or X.ndim < 1 or (len(X) and not X[:1].numel()):
        got = "none" if X is None else _describe(X)
        raise ValueError(f"{file} must hold `{name}`, at least one real number per point: got {got}.")
    return X


def _class_indices(arrays: dict[str, Tensor], name: str, count: int, file: Path) -> Int64[Tensor, " n"]:
    """Return the labels of so many points that a file holds under a name."""
    y = arrays.get(name)
    if y is None or y.is_floating_point() or y.is_complex() or y.shape != (count,) or not count:
        got = "none" if y is None else _describe(y)
        raise ValueError(f"{file} must hold `{name}`, a whole number 0..C-1 for each of {count} points: got {got}.")
    return y.long()


def _describe(values: Tensor) -> str:
    return f"shape {tuple(values.shape)}, {values.dtype}"
