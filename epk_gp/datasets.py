"""The data sets of the experiments: three Gaussians, scikit-learn's digits, and MNIST-format files in a folder."""

import gzip
import importlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int64, Num, UInt8
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_generator, validate_labels
from epk_gp.core.show import SHOWN_ROWS, Displayed, Entry, Summary, count, kind_of

DATA_VARIABLE = "EPK_GP_DATA"

# The first two coordinates of the class means, Bell et al. (2023), section 4.1; the others are 0.
GAUSSIAN_MEANS = ((1.0, 4.0), (4.0, 1.0), (5.0, 5.0))

_IMAGES_MAGIC, _LABELS_MAGIC = 0x00000803, 0x00000801  # IDX: unsigned bytes in 3 and in 1 dimensions
_DEFLATE_LIMIT = 1032  # a deflate stream expands by at most this factor


@dataclass(frozen=True, repr=False)
class Dataset(Displayed):
    """Labelled inputs of a classification problem.

    Attributes:
        inputs: n inputs, of any shape each.
        labels: Class of each input, in 0 … num_classes − 1.
        num_classes: Number C of classes.
        name: Name of the data set in titles and reports.
    """

    inputs: Num[Tensor, "n *shape"]
    labels: Int64[Tensor, " n"]
    num_classes: int
    name: str

    def __post_init__(self) -> None:
        """Check that the labels fit the inputs."""
        validate_labels(self.labels, len(self.inputs), self.num_classes)

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self.inputs)

    def _summary(self) -> Summary:
        sizes = self.labels.bincount(minlength=self.num_classes).tolist()
        listed = ", ".join(f"{size} of class {c}" for c, size in enumerate(sizes[:SHOWN_ROWS]))
        more = "" if len(sizes) <= SHOWN_ROWS else f" and {len(sizes) - SHOWN_ROWS:,} classes more"
        entries = (
            Entry("inputs", f"shape {tuple(self.inputs.shape)}", kind_of(self.inputs)),
            Entry("labels", f"{listed}{more}"),
        )
        return Summary(f"{self.name}: {count(len(self), 'labelled input')}", entries)

    def __getitem__(self, index: slice | Tensor) -> "Dataset":
        """Select inputs and their labels by a slice, a tensor of indices or a mask."""
        return Dataset(self.inputs[index], self.labels[index], self.num_classes, self.name)


def three_gaussians(
    num_per_class: int = 1000,
    *,
    dim: int = 100,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """Draw the three Gaussians of Bell et al. (2023), section 4.1.

    Class c is N(m_c, I) with means (1, 4, 0, …), (4, 1, 0, …) and (5, 5, 0, …). The noise is drawn in float64, class
    after class, and the points are then shuffled by the same generator: one seed gives one data set, in any dtype.

    Args:
        num_per_class: Points drawn from each of the three classes, at least 1.
        dim: Number D of coordinates, at least 2.
        generator: Source of the noise and of the order. None means a new generator with seed 0, so that the data never
            depend on the global state.
        dtype: Floating type of the inputs.

    Returns:
        Inputs (3 num_per_class, D) and labels, on the generator's device.

    Raises:
        ValueError: `num_per_class` < 1 or `dim` < 2.
        TypeError: A number is not an integer, `generator` is not a generator, or `dtype` is not a floating type.
    """
    _require_floating(dtype)
    validate_count(num_per_class, "num_per_class")
    validate_count(dim, "dim", minimum=2)  # the class means differ in the first two coordinates
    validate_generator(generator)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    device = generator.device
    num_classes = len(GAUSSIAN_MEANS)
    means = torch.zeros(num_classes, int(dim), dtype=torch.float64, device=device)
    means[:, :2] = torch.tensor(GAUSSIAN_MEANS, dtype=torch.float64, device=device)
    labels = torch.arange(num_classes, device=device).repeat_interleave(int(num_per_class))
    noise = torch.randn(len(labels), int(dim), generator=generator, dtype=torch.float64, device=device)
    order = torch.randperm(len(labels), generator=generator, device=device)
    inputs = (means[labels] + noise)[order].to(dtype)
    return Dataset(inputs, labels[order], num_classes, "three Gaussians")


def digits(*, dtype: torch.dtype = torch.float64) -> Dataset:
    """Load scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels, without a download.

    Args:
        dtype: Floating type of the inputs.

    Returns:
        Inputs (1797, 1, 8, 8), scaled from 0 … 16 to [0, 1], and labels 0 … 9 in scikit-learn's order.

    Raises:
        TypeError: `dtype` is not a floating type.
    """
    _require_floating(dtype)
    bunch = importlib.import_module("sklearn.datasets").load_digits()  # a slow import
    inputs = torch.from_numpy(bunch.images).to(dtype)[:, None] / 16
    return Dataset(inputs, torch.from_numpy(bunch.target).to(torch.int64), 10, "digits")


def mnist_folder(
    folder: str | os.PathLike[str] | None = None,
    *,
    split: Literal["train", "test"] = "train",
    num_classes: int = 10,
    dtype: torch.dtype = torch.float64,
) -> Dataset:
    """Read a data set in MNIST's format (IDX) from a folder.

    The files are `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, or `t10k-…` for the test part, plain or
    gzipped (`.gz`). If both exist, the plain file is read. Nothing is downloaded.

    Args:
        folder: Folder of the files; None means the folder `mnist` in the folder named by EPK_GP_DATA.
        split: "train" or "test".
        num_classes: Number C of classes: 10 for MNIST, Fashion-MNIST and KMNIST.
        dtype: Floating type of the inputs.

    Returns:
        Images (n, 1, height, width), scaled from 0 … 255 to [0, 1], and labels, named after the folder.

    Raises:
        FileNotFoundError: The folder or a file is missing.
        ValueError: `split` is unknown, a file is truncated, too long, damaged or of another kind, or there is not one
            label per image.
        TypeError: `dtype` is not a floating type.
    """
    _require_floating(dtype)
    prefixes = {"train": "train", "test": "t10k"}
    validate_count(num_classes, "num_classes")
    if split not in prefixes:
        raise ValueError(f'split must be "train" or "test": got {split!r}. Choose one of the two.')
    if folder is None and not os.environ.get(DATA_VARIABLE):
        raise FileNotFoundError(
            f"mnist_folder must know where the files are: got no folder, and {DATA_VARIABLE} is not set. "
            f"Pass the folder, or set {DATA_VARIABLE} to the one that holds mnist/."
        )
    path = (Path(os.environ[DATA_VARIABLE], "mnist") if folder is None else Path(folder)).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"the data folder must exist, with four idx-ubyte files: got {path}, which is none.")
    images_path = _find(path, f"{prefixes[split]}-images-idx3-ubyte")
    labels_path = _find(path, f"{prefixes[split]}-labels-idx1-ubyte")
    images, labels = _read_idx(images_path, _IMAGES_MAGIC), _read_idx(labels_path, _LABELS_MAGIC)
    if len(images) != len(labels):
        raise ValueError(
            f"{path} must hold one label per image: got {len(images)} images in {images_path.name} and {len(labels)} "
            f"labels in {labels_path.name}. Take both files from the same data set."
        )
    if int(labels.max()) >= num_classes:
        raise ValueError(f"{labels_path} must hold labels below num_classes = {num_classes}: got {int(labels.max())}.")
    return Dataset(images[:, None].to(dtype) / 255, labels.to(torch.int64), num_classes, path.resolve().name)


def _require_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating type: got {dtype}. Pass torch.float64 or torch.float32.")


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} must hold {name} or {name}.gz: got neither. Put the file there under that name.")


def _read_idx(path: Path, magic: int) -> UInt8[Tensor, "n *shape"]:
    """Read a file of unsigned bytes in the IDX format, and no more of it than its header announces."""
    num_dims = magic & 0xFF  # the last byte of the magic number is the number of dimensions
    limit = path.stat().st_size * (_DEFLATE_LIMIT if path.suffix == ".gz" else 1)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * num_dims)
            found, *shape = struct.unpack(f">{1 + num_dims}I", header.ljust(4 + 4 * num_dims, b"\0"))
            count = math.prod(shape)
            payload = bytearray(file.read(count + 1)) if count <= limit else bytearray()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file: it is truncated or damaged ({error}).") from error
    if found != magic:
        raise ValueError(f"{path} must begin with 0x{magic:08x} (are two files swapped?): got 0x{found:08x}.")
    if len(payload) != count or not count:
        raise ValueError(
            f"{path} must hold the {count} bytes that its header announces ({' × '.join(map(str, shape))}), at least "
            f"one: got {'more' if len(payload) > count else 'fewer'}. Fetch the file again."
        )
    return torch.frombuffer(payload, dtype=torch.uint8).reshape(shape)
