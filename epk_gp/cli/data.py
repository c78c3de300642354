"""Which data a run is trained on and explained at: named data sets, or files with `inputs` and `labels`."""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from epk_gp.cli.networks import manifest_held_out
from epk_gp.core.trajectory import Trajectory
from epk_gp.datasets import Dataset, digits, mnist_folder, three_gaussians
from epk_gp.storage.atomic_files import atomic_write, checksum, checksum_file

_HELD_OUT = "held_out.safetensors"


@dataclass(frozen=True, eq=False)
class Split:
    """Training data and held-out data; the latter may be empty."""

    train: Dataset
    held_out: Dataset


def load_split(
    name: str, data_dir: Path | None, *, num_train: int | None, num_test: int, seed: int, dtype: torch.dtype
) -> Split:
    """Load data to train on, and others to explain.

    Args:
        name: "three-gaussians" (3 x 1000 points in 100-D), "digits", "mnist", or a .safetensors or .npz file.
        data_dir: Folder of MNIST-format files.
        num_train: Training points; all by default.
        num_test: Held-out points at most. Of a file, `test_inputs` and `test_labels`, or else what follows the first
            `num_train` entries.
        seed: Of the draw, or of the order of the named data sets. Files are kept in order.
        dtype: Floating type of the inputs.

    Raises:
        ValueError: No such data, a damaged file, or more points than there are.
        OSError, ImportError: A file or scikit-learn is missing.
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
    """Keep the held-out points in a run's folder, if there are any, and give the file's checksum."""
    if not len(data):
        return None
    content = save({"inputs": data.inputs.contiguous(), "labels": data.labels.contiguous()})
    atomic_write(run / _HELD_OUT, content)
    return checksum(content)


def read_points(
    run: Path,
    file: Path | None,
    trajectory: Trajectory,
    num_points: int | None,
    dtype: torch.dtype | None,
    seed: int | None = None,
) -> Shaped[Tensor, "n ..."]:
    """Read the points to explain: those of a file, or the run's held-out points, or else its training inputs.

    Args:
        run: Folder of the run.
        file: File with `inputs`, or None.
        trajectory: The run.
        num_points: Points at most; all by default.
        dtype: Floating type of the points; the run's by default.
        seed: Draw the points at random; by default the first ones are taken.

    Raises:
        FileNotFoundError, ValueError: A file that is missing or damaged or has no `inputs`; no points.
    """
    if num_points is not None and num_points < 1:
        raise ValueError(f"--num-points must be at least 1: got {num_points}.")
    source = file if file is not None else run / _HELD_OUT
    if file is None and source.is_file():
        _check_held_out(source, manifest_held_out(run))
    X = _array(read_arrays(source), "inputs", source) if file is not None or source.is_file() else trajectory.inputs
    if not len(X):
        raise ValueError(f"{source} must hold at least one point: `inputs` is empty.")
    X = X[draw_rows(len(X), num_points, seed)]
    if not trajectory.inputs.is_floating_point():
        return X
    return X.to(dtype if dtype is not None else trajectory.dtype)


def _check_held_out(source: Path, noted: str | None) -> None:
    if noted is not None and checksum_file(source, None, str(source)) != noted:
        raise ValueError(f"{source} must have the checksum it was written with: it is damaged. Pass --points.")


def draw_rows(count: int, size: int | None, seed: int | None) -> Int64[Tensor, " n"]:
    """Choose at most `size` of `count` rows: the first, or with a seed random ones, in their order."""
    if seed is None:
        return torch.arange(count)[:size]
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Read a .safetensors or .npz file; nothing in it is executed.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another kind of file, or a damaged one.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} must be a .safetensors or .npz file: it does not exist.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".npz":
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (SafetensorError, BadZipFile, ValueError, EOFError, TypeError) as error:
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
            raise ValueError(f"`{name}` in {file} must be a list of class indices: got {_kind(values)}.")
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
        raise ValueError(f"`{name}` in {file} must have one entry per point: got {_kind(arrays[name])}.")
    return arrays[name]


def _kind(values: Tensor) -> str:
    return f"shape {tuple(values.shape)}, {values.dtype}"
