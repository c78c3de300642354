"""The data of commands: named data sets or files to train on, and the points at which a run is explained."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from epk_gp.cli.manifest import held_out_checksum
from epk_gp.core.trajectory import Trajectory
from epk_gp.datasets import Dataset, digits, mnist_folder, three_gaussians
from epk_gp.storage.atomic_files import atomic_write, checksum, checksum_file, tensor_file_size

_HELD_OUT = "held_out.safetensors"


@dataclass(frozen=True, eq=False)
class Split:
    """Training data, and held-out data that may be empty."""

    train: Dataset
    held_out: Dataset


def load_split(
    name: str, data_dir: Path | None, *, num_train: int | None, num_test: int, seed: int, dtype: torch.dtype
) -> Split:
    """Load training data and held-out data.

    Args:
        name: "three-gaussians" (3 x 1000 points in 100-D), "digits", "mnist", or a .safetensors or .npz file.
        data_dir: Folder of MNIST-format files.
        num_train: Number of training points; all by default.
        num_test: Largest number of held-out points. A file's held-out points are its `test_inputs` and `test_labels`,
            or else the entries after the first `num_train`.
        seed: Seed of the draw, or of the order of the named data sets. The order of files is kept.
        dtype: Floating-point type of the inputs.

    Raises:
        ValueError: There is no data set of this name, or a file is damaged, or there are fewer points than requested.
        OSError: A file is missing.
        ImportError: scikit-learn is not installed.
    """
    if num_test < 1:
        raise ValueError(f"--num-test must be at least 1: got {num_test}.")
    generator = torch.Generator().manual_seed(seed)
    if name == "three-gaussians":
        train = three_gaussians(1000, generator=generator, dtype=dtype)
        test = three_gaussians(-(-num_test // 3), generator=generator, dtype=dtype)
    elif name == "digits":
        whole = digits(dtype=dtype)
        whole = whole[torch.randperm(len(whole), generator=generator)]
        train, test = whole[:1437], whole[1437:]
    elif name == "mnist":
        train = mnist_folder(data_dir, split="train", dtype=dtype)
        train = train[torch.randperm(len(train), generator=generator)]
        test = mnist_folder(data_dir, split="test", dtype=dtype)
    elif Path(name).suffix in (".safetensors", ".npz"):
        train, test = _from_file(Path(name), num_train, dtype)
    else:
        raise ValueError(
            f"--data must be three-gaussians, digits, mnist, or a .safetensors or .npz file: got {name!r}."
        )
    if num_train is not None and not 1 <= num_train <= len(train):
        raise ValueError(f"--num-train must lie in 1..{len(train)} (the training points): got {num_train}.")
    return Split(train[:num_train], test[:num_test])


def write_held_out(run: Path, data: Dataset) -> str | None:
    """Write the held-out points, if there are any, into a run's folder, and return the checksum of the file."""
    if not len(data):
        return None
    content = save({"inputs": data.inputs.contiguous(), "labels": data.labels.contiguous()})
    atomic_write(run / _HELD_OUT, content)
    return checksum(content)


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


def read_points(source: PointSource, trajectory: Trajectory, num_points: int | None) -> Shaped[Tensor, "n ..."]:
    """Return the points of a file, or the run's held-out points, or its training inputs if it has none.

    Args:
        source: The file or run.
        trajectory: The run.
        num_points: Largest number of points; all by default.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged or has no `inputs`, or there are no points.
    """
    if num_points is not None and num_points < 1:
        raise ValueError(f"--num-points must be at least 1: got {num_points}.")
    file = source.run / _HELD_OUT if source.file is None else source.file
    has_file = source.file is not None or file.is_file()
    if source.file is None and has_file:
        _validate_held_out(file, held_out_checksum(source.run))
    X = _array(read_arrays(file), "inputs", file) if has_file else trajectory.inputs
    if not len(X):
        raise ValueError(f"{file} must hold at least one point: `inputs` is empty.")
    X = X[draw_rows(len(X), num_points, source.seed)]
    return cast_points(X, trajectory, source.dtype)


def cast_points(
    X: Shaped[Tensor, "n ..."], trajectory: Trajectory, dtype: torch.dtype | None
) -> Shaped[Tensor, "n ..."]:
    """Cast floating-point inputs to a type, or to the run's by default; integer inputs are left as they are."""
    if not trajectory.inputs.is_floating_point():
        return X
    return X.to(trajectory.dtype if dtype is None else dtype)


def _validate_held_out(file: Path, expected: str | None) -> None:
    if expected is not None and checksum_file(file, tensor_file_size(file, str(file)), str(file)) != expected:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Pass --points.")


def draw_rows(count: int, size: int | None, seed: int | None) -> Int64[Tensor, " n"]:
    """Return the sorted indices of at most `size` of `count` rows: the first rows, or with a seed random ones."""
    if seed is None:
        return torch.arange(count)[:size]
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Return the arrays of a .safetensors or .npz file; nothing in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind, or is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} must be a .safetensors or .npz file: it does not exist.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".npz":
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (SafetensorError, BadZipFile, ValueError, EOFError, TypeError, MemoryError, zlib.error) as error:
        raise ValueError(f"{file} must be a whole {file.suffix} file of numbers: {error}.") from error
    raise ValueError(f"{file} must be a .safetensors or .npz file: got {file.suffix or 'no suffix'}.")


def _from_file(file: Path, num_train: int | None, dtype: torch.dtype) -> tuple[Dataset, Dataset]:
    arrays = read_arrays(file)
    inputs, labels = _array(arrays, "inputs", file), _array(arrays, "labels", file)
    if "test_inputs" in arrays:
        test_inputs, test_labels = arrays["test_inputs"], _array(arrays, "test_labels", file)
    else:
        start = len(inputs) if num_train is None else num_train
        test_inputs, test_labels = inputs[start:], labels[start:]
    for name, values in (("labels", labels), ("test_labels", test_labels)):
        if values.is_floating_point() or values.ndim != 1:
            raise ValueError(f"`{name}` in {file} must be a list of class indices: got {_describe(values)}.")
    classes = int(torch.cat([labels.long(), test_labels.long()]).max()) + 1 if len(labels) else 1
    if not len(labels):
        raise ValueError(f"{file} must hold at least one point: `labels` is empty.")

    def dataset(X: Tensor, y: Tensor) -> Dataset:
        return Dataset((X.to(dtype) if X.is_floating_point() else X).contiguous(), y.long(), classes, file.stem)

    return dataset(inputs, labels), dataset(test_inputs, test_labels)


def _array(arrays: dict[str, Tensor], name: str, file: Path) -> Tensor:
    if name not in arrays:
        raise ValueError(f"{file} must hold `{name}`: it holds {sorted(arrays)}.")
    if arrays[name].ndim < 1:
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {_describe(arrays[name])}.")
    return arrays[name]


def _describe(values: Tensor) -> str:
    return f"shape {tuple(values.shape)}, {values.dtype}"
