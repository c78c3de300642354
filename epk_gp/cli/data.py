"""The data of commands: named data sets or files to train on, and the points at which a run is explained."""

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

from epk_gp.cli.labels import FileLabels, count_classes
from epk_gp.cli.manifest import held_out_checksum
from epk_gp.core.checks import validate_finite
from epk_gp.core.trajectory import Trajectory
from epk_gp.datasets import Dataset, digits, mnist_folder, three_gaussians
from epk_gp.storage.files import atomic_write, checksum, checksum_file, tensor_file_size

HELD_OUT = "held_out.safetensors"
_NUM_TEST = 102  # held-out points of a named data set by default: as many as the paper verifies
_MAX_NAMES = 10  # of arrays, in a message
_ARRAYS = ("inputs", "labels", "test_inputs", "test_labels")  # what is read of a file; others may hold anything


@dataclass(frozen=True, eq=False)
class Split:
    """Training data, and held-out data that may be empty, of so many points that there are to hold out."""

    train: Dataset
    held_out: Dataset
    available: int


@dataclass(frozen=True)
class SplitOptions:
    """What a user asks of the training data and the held-out data.

    Attributes:
        num_train: Number of training points; all by default.
        num_test: Largest number of held-out points; None means all that a file has, and 102 of a named data set.
        num_classes: Number of classes of a file's labels; None means that every class has a point.
        data_dir: Folder of MNIST-format files.
    """

    num_train: int | None = None
    num_test: int | None = None
    num_classes: int | None = None
    data_dir: Path | None = None


def is_data_file(name: str) -> bool:
    """Return whether --data names a file, rather than one of the named data sets."""
    return Path(name).suffix in (".safetensors", ".npz")


def load_split(name: str, options: SplitOptions, *, seed: int, dtype: torch.dtype) -> Split:
    """Load training data and held-out data.

    Args:
        name: "three-gaussians" (3 x 1000 points in 100-D), "digits", "mnist", or a .safetensors or .npz file.
        options: Sizes of the parts. A file's held-out points are its `test_inputs` and `test_labels`; or else the
            points after the first `num_train`; or else, where only `num_test` is given, the last ones.
        seed: Seed of the draw, or of the order of the named data sets. The order of files is kept.
        dtype: Floating-point type of the inputs.

    Raises:
        ValueError: There is no data set of this name, or a file is damaged, or its labels are not 0 .. C-1, or there
            are fewer points than requested, or an option does not belong to the data.
        OSError: A file is missing.
        ImportError: scikit-learn is not installed.
    """
    is_file = is_data_file(name)
    if options.data_dir is not None and name != "mnist":
        raise ValueError(f"--data-dir belongs to --data mnist: got --data {name}.")
    if options.num_classes is not None and not is_file:
        raise ValueError(f"--num-classes belongs to a file of one's own: got --data {name}.")
    num_train, num_test = options.num_train, options.num_test or (None if is_file else _NUM_TEST)
    generator = torch.Generator().manual_seed(seed)
    if name == "three-gaussians":
        train = three_gaussians(1000, generator=generator, dtype=dtype)
        test = three_gaussians(-(-(num_test or _NUM_TEST) // 3), generator=generator, dtype=dtype)
    elif name == "digits":
        whole = digits(dtype=dtype)
        whole = whole[torch.randperm(len(whole), generator=generator)]
        train, test = whole[:1437], whole[1437:]
    elif name == "mnist":
        train = mnist_folder(options.data_dir, split="train", dtype=dtype)
        train = train[torch.randperm(len(train), generator=generator)]
        test = mnist_folder(options.data_dir, split="test", dtype=dtype)
    elif is_file:
        train, test = _from_file(Path(name), options, dtype)
    else:
        raise ValueError(
            f"--data must be three-gaussians, digits, mnist, or a .safetensors or .npz file: got {name!r}."
        )
    if num_train is not None and not 1 <= num_train <= len(train):
        raise ValueError(f"--num-train must lie in 1..{len(train)} (the training points): got {num_train}.")
    return Split(train[:num_train], test[:num_test], len(test))


def write_held_out(run: Path, data: Dataset) -> str | None:
    """Write the held-out points, if there are any, into a run's folder, and return the checksum of the file."""
    if not len(data):
        return None
    content = _serialised(data)
    atomic_write(run / HELD_OUT, content)
    return checksum(content)


def validate_held_out(run: Path, data: Dataset) -> None:
    """Raise if the held-out points are not those that a run was recorded with.

    Raises:
        ValueError: The points differ, or the manifest is damaged.
    """
    recorded = held_out_checksum(run)
    if recorded is None and (run / HELD_OUT).exists():  # of an early version, which stored no checksum
        return
    if recorded != (checksum(_serialised(data)) if len(data) else None):
        raise ValueError(
            f"the held-out points must be the recorded ones to resume the run at {run}: the data hold others. "
            "Pass --data and --num-test as they were."
        )


def _serialised(data: Dataset) -> bytes:
    return save({"inputs": data.inputs.contiguous(), "labels": data.labels.contiguous()})


@dataclass(frozen=True)
class PointSource:
    """Where the points of a command come from.

    Attributes:
        run: Folder of the run, whose held-out points are taken by default.
        file: File with `inputs`, or None.
        dtype: Floating-point type of the points; the run's by default.
        seed: Seed with which the points are drawn; the first ones are taken by default.
    """

    run: Path
    file: Path | None = None
    dtype: torch.dtype | None = None
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class ChosenPoints:
    """The points at which a run is explained.

    Attributes:
        X: n inputs.
        available: Number of points that they were chosen from.
        origin: What they are: "held-out points", "points of FILE" or training inputs.
        labels: Their classes, or None where the source has no classes.
    """

    X: Shaped[Tensor, "n ..."]
    available: int
    origin: str
    labels: Int64[Tensor, " n"] | None = None

    def __str__(self) -> str:
        """Say how many points there are, and which."""
        chosen = len(self.X)
        return f"{chosen} {self.origin}" if chosen == self.available else f"{chosen} of {self.available} {self.origin}"


def read_points(source: PointSource, trajectory: Trajectory, num_points: int | None) -> ChosenPoints:
    """Choose points of a file, or of the run's held-out points, or of its training inputs if it has none.

    Args:
        source: The file or run.
        trajectory: The run.
        num_points: Largest number of points; all by default.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged or has no `inputs`, or there are no points.
    """
    file = source.run / HELD_OUT if source.file is None else source.file
    if source.file is not None:
        origin = f"points of {source.file}"
    elif file.is_file():
        validate_checksum(file, held_out_checksum(source.run))
        origin = "held-out points"
    elif held_out_checksum(source.run) is not None:
        raise FileNotFoundError(f"{file} must hold the held-out points of the run: it is missing. Pass --points.")
    else:
        origin = "training inputs, for the run has no held-out points (--points names others)"
    has_file = source.file is not None or file.is_file()
    arrays = read_arrays(file) if has_file else {"inputs": trajectory.inputs, "labels": trajectory.targets}
    X = require_array(arrays, "inputs", file)
    if not len(X):
        raise ValueError(f"{file} must hold at least one point: `inputs` is empty.")
    validate_inputs(X, "inputs", file)
    expected = tuple(trajectory.inputs.shape[1:])
    if tuple(X.shape[1:]) != expected:
        raise ValueError(f"`inputs` in {file} must have the shape of the run's, {expected} each: got {describe(X)}.")
    rows = draw_rows(len(X), num_points, source.seed)
    chosen = cast_points(X[rows], trajectory, source.dtype)
    validate_finite(chosen, f"`inputs` in {file} as {chosen.dtype}" if has_file else "training inputs")
    labels = arrays.get("labels")  # for pictures alone: none are drawn that are no classes
    is_known = labels is not None and labels.dtype == torch.int64 and labels.shape == (len(X),)
    return ChosenPoints(chosen, len(X), origin, labels[rows] if labels is not None and is_known else None)


def cast_points(
    X: Shaped[Tensor, "n ..."], trajectory: Trajectory, dtype: torch.dtype | None
) -> Shaped[Tensor, "n ..."]:
    """Cast floating-point inputs to a type, or to the run's by default; integer inputs are left as they are."""
    if not trajectory.inputs.is_floating_point():
        return X
    return X.to(trajectory.dtype if dtype is None else dtype)


def validate_checksum(file: Path, expected: str | None) -> None:
    """Raise if the file of the held-out points is not the one that was written.

    Raises:
        ValueError: It has another checksum.
    """
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


def _from_file(file: Path, options: SplitOptions, dtype: torch.dtype) -> tuple[Dataset, Dataset]:
    arrays = read_arrays(file)
    inputs, labels = require_array(arrays, "inputs", file), require_array(arrays, "labels", file)
    if not len(labels):
        raise ValueError(f"{file} must hold at least one point: `labels` is empty.")
    if "test_inputs" in arrays:
        test_inputs, test_labels = arrays["test_inputs"], require_array(arrays, "test_labels", file)
        if test_inputs.shape[1:] != inputs.shape[1:]:
            raise ValueError(
                f"`test_inputs` in {file} must have the shape of `inputs`, {tuple(inputs.shape[1:])} each: "
                f"got {tuple(test_inputs.shape[1:])}."
            )
        _require_same_length(test_inputs, test_labels, "test_labels", file)
        start = _num_train(file, len(inputs), SplitOptions(options.num_train))
    else:
        if "test_labels" in arrays:
            require_array(arrays, "test_inputs", file)  # raises: the labels alone would be ignored
        start = _num_train(file, len(inputs), options)
        test_inputs, test_labels = inputs[start:], labels[start:]
    _require_same_length(inputs, labels, "labels", file)
    for name, values in (("labels", labels), ("test_labels", test_labels)):
        if values.is_floating_point() or values.is_complex() or values.ndim != 1:
            raise ValueError(
                f"`{name}` in {file} must be a list of class indices: got {describe(values)}. Write integers, one per "
                "point."
            )
        if values.dtype == torch.uint64 and len(values) and int(values.long().min()) < 0:  # from 2**63 on
            raise ValueError(f"`{name}` in {file} must be class indices, 0..C-1: got numbers of 2**63 or more.")
    none = labels.new_empty(0).long()
    taken = FileLabels(file, labels.long(), start, test_labels.long() if "test_inputs" in arrays else none)
    num_classes = count_classes(taken, options.num_classes)

    def dataset(X: Tensor, y: Tensor, name: str) -> Dataset:
        validate_inputs(X, name, file)
        X = (X.to(dtype) if X.is_floating_point() else X).contiguous()
        validate_finite(X, f"`{name}` in {file} as {X.dtype}")
        return Dataset(X, y.long(), num_classes, file.stem)

    return dataset(inputs[:start], labels[:start], "inputs"), dataset(test_inputs, test_labels, "test_inputs")


def _require_same_length(inputs: Tensor, labels: Tensor, name: str, file: Path) -> None:
    if len(inputs) != len(labels):
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {len(labels)} for {len(inputs)}.")


def _num_train(file: Path, count: int, options: SplitOptions) -> int:
    """Return how many points of a file without `test_inputs` are training points; the others are held out."""
    if options.num_train is None:
        held_out = 0 if options.num_test is None else options.num_test
        if held_out >= count:
            raise ValueError(f"--num-test must leave training points: got {held_out} of the {count} points of {file}.")
        return count - held_out
    if not 1 <= options.num_train <= count:
        raise ValueError(f"--num-train must lie in 1..{count} (the points of {file}): got {options.num_train}.")
    if options.num_test is not None and options.num_train + options.num_test > count:
        raise ValueError(
            f"--num-train and --num-test must sum to at most the {count} points of {file}: got {options.num_train} and "
            f"{options.num_test}."
        )
    return options.num_train


def validate_inputs(X: Tensor, name: str, file: Path) -> None:
    """Raise if inputs are complex or empty.

    Raises:
        ValueError: They are.
    """
    if X.is_complex():
        raise ValueError(f"`{name}` in {file} must be real numbers: got {describe(X)}.")
    if not X[:1].numel() and len(X):
        raise ValueError(f"`{name}` in {file} must have at least one entry per point: got {describe(X)}.")


def require_array(arrays: dict[str, Tensor], name: str, file: Path) -> Tensor:
    """Return an array of a file.

    Raises:
        ValueError: The file has none of this name, or it is a single number.
    """
    if name not in arrays:
        raise ValueError(f"{file} must hold `{name}`: got {_names(file)}.")
    if arrays[name].ndim < 1:
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {describe(arrays[name])}.")
    return arrays[name]


def _names(file: Path) -> str:
    """Return the names of the arrays in a .safetensors or .npz file, in words."""
    if file.suffix == ".npz":
        with file.open("rb") as stream:
            names = list(np.load(stream, allow_pickle=False).files)
    else:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(f"`{name[:40]}`" for name in names[:_MAX_NAMES]) or "no array") + more


def describe(values: Tensor) -> str:
    """Return shape and type in words."""
    return f"shape {tuple(values.shape)}, {values.dtype}"
