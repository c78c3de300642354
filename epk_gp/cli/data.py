"""The data of commands: named data sets or files to train on, and the points at which a run is explained or scored."""

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy.lib.npyio import NpzFile
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from epk_gp.cli.networks import held_out_checksum
from epk_gp.core.checks import validate_finite
from epk_gp.core.trajectory import Trajectory
from epk_gp.datasets import Dataset, digits, mnist_folder, three_gaussians
from epk_gp.storage.files import atomic_write, checksum, checksum_file, tensor_file_size

HELD_OUT = "held_out.safetensors"
_HELD_OUT_SOURCE = "held-out"  # as a source of points: those of the run
_NUM_TEST = 102  # held-out points of a named data set by default: as many as the paper verifies
_MAX_NAMES = 10  # of arrays, in a message
_ARRAYS = ("inputs", "labels", "test_inputs", "test_labels")  # what is read of a file; others may hold anything
_SHUFFLE = (
    "The file may be sorted by class: shuffle its points, or pass --num-classes if classes have no training point."
)


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
            f"--data must be three-gaussians, digits, mnist, or a .safetensors or .npz file: got {name!r}."
        )
    if num_train is not None and not 1 <= num_train <= len(train):
        raise ValueError(f"--num-train must lie in 1..{len(train)} (the training points): got {num_train}.")
    return train[:num_train], test[:most], len(test)


def write_held_out(run: Path, data: Dataset) -> str | None:
    """Write the held-out points, if there are any, into a run's folder, and return the checksum of the file."""
    if not len(data):
        return None
    content = _serialise(data)
    atomic_write(run / HELD_OUT, content)
    return checksum(content)


def validate_held_out(run: Path, data: Dataset) -> None:
    """Raise if the held-out points are not those that a run was recorded with.

    Raises:
        ValueError: The points differ, or the manifest is damaged.
    """
    recorded = held_out_checksum(run)
    if recorded != (checksum(_serialise(data)) if len(data) else None):
        raise ValueError(
            f"the held-out points must be the recorded ones to resume the run at {run}: the data hold others. "
            "Pass --data and --num-test as they were."
        )


def _serialise(data: Dataset) -> bytes:
    return save({"inputs": data.inputs.contiguous(), "labels": data.labels.contiguous()})


@dataclass(frozen=True, eq=False)
class ChosenPoints:
    """The points at which a run is explained or scored.

    Attributes:
        X: n inputs.
        labels: Their classes, or None where they are not known.
        rows: Their rows in the source, ascending.
        available: Number of points that they were chosen from.
        origin: What they are: "held-out points", "points of FILE" or training inputs.
    """

    X: Shaped[Tensor, "n ..."]
    labels: Int64[Tensor, " n"] | None
    rows: Int64[Tensor, " n"]
    available: int
    origin: str

    def __str__(self) -> str:
        """Say how many points there are, and which."""
        chosen = len(self.X)
        return f"{chosen} {self.origin}" if chosen == self.available else f"{chosen} of {self.available} {self.origin}"

    def halves(self, seed: int) -> tuple["ChosenPoints", "ChosenPoints"]:
        """Divide the points in two at random; each half is a source of its own."""
        order = torch.randperm(len(self.X), generator=torch.Generator().manual_seed(seed))
        first, second = (
            ChosenPoints(
                self.X[half],
                None if self.labels is None else self.labels[half],
                self.rows[half],
                len(half),
                self.origin,
            )
            for half in (part.sort().values for part in order.tensor_split(2))
        )
        return first, second


def read_points(
    trajectory: Trajectory,
    run: Path,
    file: Path | None,
    num_points: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> ChosenPoints:
    """Choose points of a file, or of the run's held-out points, or of its training inputs if it has none.

    Args:
        trajectory: The run.
        run: Its folder, whose held-out points are taken by default.
        file: File with `inputs`, or None.
        num_points: Largest number of points; all by default.
        dtype: Floating-point type of the points; the run's by default.
        seed: Seed with which the points are drawn; the first ones are taken by default.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged or has no `inputs`, or there are no points.
    """
    path = run / HELD_OUT if file is None else file
    has_file = file is not None or path.is_file()
    if file is not None:
        origin = f"points of {file}"
    elif has_file:
        _validate_checksum(path, run)
        origin = "held-out points"
    elif held_out_checksum(run) is not None:
        raise FileNotFoundError(f"{path} must hold the held-out points of the run: it is missing. Pass --points.")
    else:
        origin = "training inputs, for the run has no held-out points (--points names others)"
    arrays = read_arrays(path) if has_file else {"inputs": trajectory.inputs, "labels": trajectory.targets}
    X = _inputs_like_the_run(arrays, path, trajectory)
    rows = draw_rows(len(X), num_points, seed)
    chosen = cast_points(X[rows], trajectory, dtype)
    validate_finite(chosen, f"`inputs` in {path} as {chosen.dtype}" if has_file else "training inputs")
    labels = arrays.get("labels")  # for pictures alone: none are drawn that are no classes
    is_known = labels is not None and labels.dtype == torch.int64 and labels.shape == (len(X),)
    return ChosenPoints(chosen, labels[rows] if labels is not None and is_known else None, rows, len(X), origin)


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
        if held_out_checksum(run) is None and not path.is_file():
            raise ValueError(
                f"held-out points must lie beside the run: {run} has none. Record with --num-test, or name a file."
            )
        _validate_checksum(path, run)
    if path.is_dir():
        images = mnist_folder(path, split="test", dtype=trajectory.dtype)
        arrays = {"inputs": images.inputs, "labels": images.labels}
    else:
        arrays = read_arrays(path)
    X = cast_points(_inputs_like_the_run(arrays, path, trajectory), trajectory, None)
    validate_finite(X, f"`inputs` in {path} as {X.dtype}")
    labels = arrays.get("labels")
    if labels is not None:
        if labels.is_floating_point() or labels.is_complex() or labels.shape != (len(X),):
            raise ValueError(
                f"`labels` in {path} must be class indices, one per point: got {_describe(labels)} for {len(X)} points."
            )
        labels, last = labels.long(), trajectory.num_outputs - 1
        low, high = _range(labels)
        if not 0 <= low <= high <= last:
            raise ValueError(f"`labels` in {path} must lie in 0..{last}, the run's classes: got {low}..{high}.")
    return ChosenPoints(X, labels, torch.arange(len(X)), len(X), origin)


def _inputs_like_the_run(arrays: dict[str, Tensor], file: Path, trajectory: Trajectory) -> Shaped[Tensor, "n ..."]:
    """Return the inputs of a file. Raise if there are none, or if they are not of the shape of the run's."""
    X = _require_array(arrays, "inputs", file)
    if not len(X):
        raise ValueError(f"{file} must hold at least one point: `inputs` is empty.")
    _validate_inputs(X, "inputs", file)
    expected = tuple(trajectory.inputs.shape[1:])
    if tuple(X.shape[1:]) != expected:
        raise ValueError(f"`inputs` in {file} must have the shape of the run's, {expected} each: got {_describe(X)}.")
    return X


def cast_points(
    X: Shaped[Tensor, "n ..."], trajectory: Trajectory, dtype: torch.dtype | None
) -> Shaped[Tensor, "n ..."]:
    """Cast floating-point inputs to a type, or to the run's by default; integer inputs are left as they are."""
    if not trajectory.inputs.is_floating_point():
        return X
    return X.to(trajectory.dtype if dtype is None else dtype)


def _validate_checksum(file: Path, run: Path) -> None:
    """Raise if the file of a run's held-out points is not the one that was written."""
    expected = held_out_checksum(run)
    if expected is not None and checksum_file(file, tensor_file_size(file, str(file)), str(file)) != expected:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Pass --points.")


def draw_rows(count: int, size: int | None, seed: int | None) -> Int64[Tensor, " n"]:
    """Return the sorted indices of at most `size` of `count` rows: the first rows, or with a seed random ones."""
    if seed is None:
        return torch.arange(count)[:size]
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Return the arrays of a .safetensors or .npz file that commands use; nothing in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind, or is damaged.
    """
    if file.is_dir():
        raise ValueError(f"{file} must be a .safetensors or .npz file: it is a folder.")
    if not file.is_file():
        raise FileNotFoundError(f"{file} must be a .safetensors or .npz file: it does not exist.")
    try:
        if file.suffix == ".safetensors":
            found = load_file(file)
            return {name: found[name] for name in _ARRAYS if name in found}
        if file.suffix == ".npz":
            with file.open("rb") as stream:
                arrays = np.load(stream, allow_pickle=False)
                if not isinstance(arrays, NpzFile):
                    raise ValueError("it holds a single array, as an .npy file does")
                return {name: _as_tensor(arrays[name]) for name in _ARRAYS if name in arrays.files}
    except (SafetensorError, BadZipFile, zlib.error, ValueError, EOFError, TypeError, MemoryError) as error:
        raise ValueError(f"{file} must be a whole {file.suffix} file of numbers: {error}.") from error
    raise ValueError(f"{file} must be a .safetensors or .npz file: got {file.suffix or 'no suffix'}.")


def _as_tensor(values: np.ndarray) -> Tensor:
    if values.dtype.kind not in "biufc":
        raise ValueError(f"got an array of {values.dtype}")
    return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))


def _split_of_file(
    file: Path, num_train: int | None, num_test: int | None, num_classes: int | None, dtype: torch.dtype
) -> tuple[Dataset, Dataset]:
    """Return the training points and the held-out points of a file."""
    arrays = read_arrays(file)
    inputs, labels = _require_array(arrays, "inputs", file), _require_array(arrays, "labels", file)
    if not len(labels):
        raise ValueError(f"{file} must hold at least one point: `labels` is empty.")
    has_test = "test_inputs" in arrays
    if has_test:
        test_inputs, test_labels = arrays["test_inputs"], _require_array(arrays, "test_labels", file)
        if test_inputs.shape[1:] != inputs.shape[1:]:
            raise ValueError(
                f"`test_inputs` in {file} must have the shape of `inputs`, {tuple(inputs.shape[1:])} each: "
                f"got {tuple(test_inputs.shape[1:])}."
            )
        _require_same_length(test_inputs, test_labels, "test_labels", file)
        start = _count_training_points(file, len(inputs), num_train, None)
    else:
        if "test_labels" in arrays:
            _require_array(arrays, "test_inputs", file)  # raises: the labels alone would be ignored
        start = _count_training_points(file, len(inputs), num_train, num_test)
        test_inputs, test_labels = inputs[start:], labels[start:]
    _require_same_length(inputs, labels, "labels", file)
    for name, values in (("labels", labels), ("test_labels", test_labels)):
        if values.is_floating_point() or values.is_complex() or values.ndim != 1:
            raise ValueError(
                f"`{name}` in {file} must be a list of class indices: got {_describe(values)}. Write integers, one per "
                "point."
            )
        if values.dtype == torch.uint64 and len(values) and int(values.long().min()) < 0:  # from 2**63 on
            raise ValueError(f"`{name}` in {file} must be class indices, 0..C-1: got numbers of 2**63 or more.")
    labels, test_labels = labels.long(), test_labels.long()
    num_classes = _count_classes(file, labels, start, test_labels if has_test else test_labels[:0], num_classes)

    def dataset(X: Tensor, y: Tensor, name: str) -> Dataset:
        _validate_inputs(X, name, file)
        X = (X.to(dtype) if X.is_floating_point() else X).contiguous()
        validate_finite(X, f"`{name}` in {file} as {X.dtype}")
        return Dataset(X, y, num_classes, file.stem)

    return dataset(inputs[:start], labels[:start], "inputs"), dataset(test_inputs, test_labels, "test_inputs")


def _require_same_length(inputs: Tensor, labels: Tensor, name: str, file: Path) -> None:
    if len(inputs) != len(labels):
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {len(labels)} for {len(inputs)}.")


def _count_training_points(file: Path, count: int, num_train: int | None, num_test: int | None) -> int:
    """Return how many of a file's points are training points; the others are held out."""
    if num_train is None:
        if (num_test or 0) >= count:
            raise ValueError(f"--num-test must leave training points: got {num_test} of the {count} points of {file}.")
        return count - (num_test or 0)
    if not 1 <= num_train <= count:
        raise ValueError(f"--num-train must lie in 1..{count} (the points of {file}): got {num_train}.")
    if num_test is not None and num_train + num_test > count:
        raise ValueError(
            f"--num-train and --num-test must sum to at most the {count} points of {file}: got {num_train} and "
            f"{num_test}."
        )
    return num_train


def _count_classes(
    file: Path, labels: Int64[Tensor, " n"], start: int, test_labels: Int64[Tensor, " m"], num_classes: int | None
) -> int:
    """Return the number of classes. Nothing here, nor before it, has a size that depends on the largest label.

    Args:
        file: The file.
        labels: Those of all its `inputs`.
        start: Number of training points, the first ones.
        test_labels: Those of its `test_inputs`, empty if it has none.
        num_classes: The number of classes, or None if every class has a training point.

    Raises:
        ValueError: The labels of the training points are not 0..C-1 without gaps, or name a single class, or another
            label lies outside; or, with `num_classes`, any label lies outside.
    """
    if num_classes is not None:
        low, high = _range(torch.cat([labels, test_labels]))
        if not 0 <= low <= high < num_classes:
            raise ValueError(
                f"labels in {file} must lie in 0..{num_classes - 1} (--num-classes {num_classes}): got {low}..{high}."
            )
        return num_classes
    distinct, others = labels[:start].unique(), labels[start:]
    (low, high), count = _range(distinct), len(distinct)
    is_part = len(others) > 0 and _range(labels) == (0, len(labels.unique()) - 1)  # of a file without gaps
    whose = f"labels of the first {start} points of {file}, the training points," if is_part else f"labels in {file}"
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
    for whose, values, advice in (
        (f"labels of the other points of {file}", others, _SHUFFLE),
        (f"`test_labels` in {file}", test_labels, "Pass --num-classes if others exist but have no training point."),
    ):
        if len(values) and not 0 <= _range(values)[0] <= _range(values)[1] < count:
            low, high = _range(values)
            raise ValueError(
                f"{whose} must lie in 0..{count - 1}, the classes of the training points: got {low}..{high}. {advice}"
            )
    return count


def _range(labels: Int64[Tensor, " n"]) -> tuple[int, int]:
    return int(labels.min()), int(labels.max())


def _validate_inputs(X: Tensor, name: str, file: Path) -> None:
    """Raise if inputs are complex or empty."""
    if X.is_complex():
        raise ValueError(f"`{name}` in {file} must be real numbers: got {_describe(X)}.")
    if not X[:1].numel() and len(X):
        raise ValueError(f"`{name}` in {file} must have at least one entry per point: got {_describe(X)}.")


def _require_array(arrays: dict[str, Tensor], name: str, file: Path) -> Tensor:
    """Return an array of a file. Raise if the file has none of this name, or if it is a single number."""
    if name not in arrays:
        raise ValueError(f"{file} must hold `{name}`: got {_name_arrays(file)}.")
    if arrays[name].ndim < 1:
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {_describe(arrays[name])}.")
    return arrays[name]


def _name_arrays(file: Path) -> str:
    """Return the names of the arrays in a .safetensors or .npz file, in words."""
    if file.suffix == ".npz":
        with file.open("rb") as stream:
            names = list(np.load(stream, allow_pickle=False).files)
    else:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(f"`{name[:40]}`" for name in names[:_MAX_NAMES]) or "no array") + more


def _describe(values: Tensor) -> str:
    """Return shape and type in words."""
    return f"shape {tuple(values.shape)}, {values.dtype}"
