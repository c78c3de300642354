"""Training data that need not fit into memory: rows are read once, block by block, written to a file, and mapped.

Later computations see tensors whose pages belong to the file: they take no memory of the process, and the system drops
them when memory is short. Datasets are read in their own order, by the workers of a `DataLoader` if one was given.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from epk_gp.core.checks import BLOCK_BYTES, as_tensor, validate_tensor
from epk_gp.core.graphs import Graph, as_ragged, tensors_of
from epk_gp.core.inputs import InputLayout, Inputs, parse_signature
from epk_gp.core.model import random_state_kept
from epk_gp.core.step import Step, fingerprint_data, tensor_bytes

TrainingInputs = Any  # `Inputs`, arrays, a map-style dataset (also of `datasets`), a `DataLoader` or a `Stream`
Targets = Shaped[Tensor, "M ..."] | np.ndarray[Any, np.dtype[Any]] | str | None  # a text: the key of targets

_ITEMS = 64  # items of a dataset that are read at a time
_READ_TWICE = 16  # items that are read twice, to test whether they stay the same
_TARGETS = ("labels", "label", "targets", "target", "y")  # keys of the target in items that are dictionaries
_OF_LOADER = ("num_workers", "collate_fn", "worker_init_fn", "multiprocessing_context", "timeout")


@dataclass(frozen=True, eq=False)
class Stream:
    """Training data that are unknown before the training: rows are recorded as the network sees them.

        with epk.Recorder(net, optimizer, epk.Stream(inputs, labels)) as recorder:
            for inputs, labels in loader:
                ...
                recorder.batch(targets=labels)

    Each distinct row with its target is one training point, however often it occurs, numbered in the order of first
    occurrence. The run keeps each row once.

    Attributes:
        X: A few inputs, in the form of the network's input, such as a first batch. They are the first points.
        y: Their targets; None if no loss is stated.
    """

    X: Inputs
    y: Shaped[Tensor, "M ..."] | None = None


class Rows:
    """Training points in temporary files, deleted with the object; points can be added, points of a stream by content.

    Args:
        folder: Folder of the files; None for the system's temporary folder (TMPDIR).

    Attributes:
        layout: Layout of several input tensors in X; None for one.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="epk_gp-", dir=folder)
        self.layout: InputLayout | None = None
        self._kinds, self._count, self._number_of = list[tuple[Any, ...]](), 0, dict[str, int]()
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # Windows keeps a mapped file

    def __len__(self) -> int:
        """Count the points."""
        return self._count

    def append(self, X: Shaped[Tensor, "n ..."], y: Shaped[Tensor, "m ..."]) -> None:
        """Add points: inputs and targets.

        Raises:
            ValueError: Their shape or dtype differs from earlier points, or there is not one target per row.
        """
        kinds = [(tuple(column.shape[1:]), column.dtype) for column in (X, y)]
        if len(X) != len(y) or (self._count and kinds != self._kinds):
            raise ValueError(
                f"all rows must have one shape and dtype, and a target: row {self._count} is {kinds[0]} with {kinds[1]}"
                f", those before are {self._kinds}; got {len(X)} rows and {len(y)} targets. Pad them to one shape."
            )
        for name, column in zip("Xy", (X, y), strict=True):
            with open(f"{self._folder}/{name}", "ab") as file:
                file.write(tensor_bytes(column))
        self._kinds, self._count = kinds, self._count + len(X)

    def number(self, X: Shaped[Tensor, "n ..."], y: Shaped[Tensor, "m ..."]) -> Int64[Tensor, " n"]:
        """Return the numbers of points by their content, and add new points; errors as in `append`."""
        X, y = X.detach().cpu(), y.detach().cpu()
        keys = [fingerprint_data(*row) for row in zip(X, y, strict=True)]
        new = {key: row for row, key in reversed([*enumerate(keys)]) if key not in self._number_of}
        rows = sorted(new.values())
        if rows:
            self.append(X[rows], y[rows])
        self._number_of |= {keys[row]: len(self._number_of) + place for place, row in enumerate(rows)}
        return torch.tensor([self._number_of[key] for key in keys])

    def mapped(self) -> tuple[Shaped[Tensor, "M ..."], ...]:
        """Return inputs, packed, and targets of all points so far, mapped from the files."""
        columns = []
        for name, (shape, dtype) in zip("Xy", self._kinds, strict=True):
            size, file = self._count * torch.Size(shape).numel() * dtype.itemsize, f"{self._folder}/{name}"
            content = torch.empty(0, dtype=torch.uint8)
            content = torch.from_file(file, shared=False, size=size, dtype=torch.uint8) if size else content
            columns.append(content.view(dtype).view(self._count, *shape))
        return tuple(columns)


def as_bytes(X: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
    """Return inputs of the form k / 255, as 8-bit images give, as the integers k; others unchanged."""
    if not X.is_floating_point() or not bool(((X >= 0) & (X <= 1)).all()):
        return X
    k = (255 * X).round().to(torch.uint8)
    return k if bytes(tensor_bytes(from_bytes(k, X.dtype))) == bytes(tensor_bytes(X)) else X  # -0.0 has no such form


def from_bytes(X: Shaped[Tensor, "n ..."], dtype: torch.dtype) -> Shaped[Tensor, "n ..."]:
    """Return the original inputs, of the given dtype, from the result of `as_bytes`."""
    return X if X.dtype == dtype else X.to(dtype) / 255


def num_seen(steps: Iterable[Step], least: int = 0) -> int:
    """Return the number of points of a stream that steps up to the last of these have seen; `least` without a batch."""
    return max([least, *(int(step.batch.max()) + 1 for step in steps if step.batch is not None)])


def num_rows(X: Any, y: Any) -> int:
    """Return the number of points of a recorder's data; 0 if their form is unknown."""
    sized = y if isinstance(y, Tensor | np.ndarray) and y.ndim else _dataset_of(X)
    return 0 if sized is None else len(sized)


def map_data(X: TrainingInputs, y: Targets, folder: str | os.PathLike[str] | None) -> Rows | None:
    """Write training data to temporary files; None if they are tensors in memory.

    Args:
        X: A NumPy array or memory map, or a tuple or dict of them; a map-style dataset, whose items are inputs, pairs
            (inputs, target), or dictionaries; or a `DataLoader`, whose dataset is read by its workers and `collate_fn`.
        y: The targets, a tensor or an array; None if the dataset's items contain them, or the key of the items'
            targets.
        folder: The folder of the run, beside which the files are written; None for the system's temporary folder.

    Raises:
        TypeError: A dataset is iterable only, or its items contain other objects than numbers.
        ValueError: Rows differ in shape or dtype; there are no rows, or not one target per row; or an item differs
            when it is read again.
    """
    is_stream = isinstance(X, Stream)
    X, y = (X.X, X.y if y is None else y) if isinstance(X, Stream) else (X, y)
    dataset = None if is_stream else _dataset_of(X)
    parts = list(X.values()) if isinstance(X, Mapping) else [*X] if isinstance(X, tuple | list) else [X]
    has_arrays = any(isinstance(part, np.ndarray) for part in (*parts, y)) and not isinstance(X, Graph)
    if not is_stream and dataset is None and not has_arrays:
        return None
    if not isinstance(y, np.ndarray | str | None):
        validate_tensor(y, "y")
    counts = {part.shape[:1] for part in (*parts, y) if isinstance(part, Tensor | np.ndarray)}
    counts |= set() if dataset is None else {(len(dataset),)}
    if len(counts) > 1 or counts & {(), (0,)}:
        raise ValueError(f"X and y must have one row per point, at least one: got {sorted(map(tuple, counts))} rows.")
    is_whole = is_stream or as_ragged(X) is not None
    of_arrays: Iterable[tuple[Any, Any]] = [(X, None)] if is_whole else _slices(X, parts)
    blocks = of_arrays if dataset is None else _items(X, dataset, y)
    place = None if folder is None else next(p for p in Path(folder).absolute().parents if p.is_dir())
    rows = Rows(place)
    with random_state_kept(torch.device("cpu")):
        for x, target in blocks:
            x, signature = parse_signature(x, None)
            rows.layout = signature.layout
            if isinstance(y, Tensor | np.ndarray):
                target = y[len(rows) : len(rows) + len(x)]
            target = torch.empty(len(x), 0) if target is None else as_tensor(target)
            (rows.number if is_stream else rows.append)(x, target)
    return rows


def _slices(X: Any, parts: list[Any]) -> Iterator[tuple[Any, None]]:
    """Yield blocks of rows of arrays and tensors."""
    size = max(1, BLOCK_BYTES * len(parts[0]) // max(1, sum(part.nbytes for part in parts)))
    for start in range(0, len(parts[0]), size):
        values = [as_tensor(part[start : start + size]) for part in parts]
        several = dict(zip(X, values, strict=True)) if isinstance(X, Mapping) else values
        yield several if isinstance(X, Mapping | tuple | list) else values[0], None


def _dataset_of(X: Any) -> Any:
    """Return a map-style dataset, or a `DataLoader`'s, without the indices of `IndexedDataset`; otherwise None."""
    if isinstance(getattr(X, "dataset", X), IterableDataset):
        raise TypeError(
            "X must be a map-style dataset, with a length and items by index: got an iterable one. Pass "
            "epk.Stream(X, y) of a first batch, and recorder.batch(targets=y)."
        )
    dataset: Any = X.dataset if isinstance(X, DataLoader) else X
    while hasattr(dataset, "gives_indices"):
        dataset = dataset.dataset
    others = (Tensor, np.ndarray, Sequence, Mapping, Graph)
    is_dataset = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not isinstance(dataset, others)
    return dataset if is_dataset or dataset is not X else None


def _items(X: Any, dataset: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield blocks of items of a dataset, as inputs and targets."""
    options = {name: getattr(X, name) for name in _OF_LOADER} if isinstance(X, DataLoader) else {}
    collate = options.get("collate_fn", default_collate)
    try:
        size = len(dataset)
        for number in torch.linspace(0, size - 1, min(_READ_TWICE, size), dtype=torch.float64).long().tolist():
            first, again = (fingerprint_data(*tensors_of(collate([dataset[number]]))) for _ in range(2))
            if first != again:
                raise ValueError(
                    f"an item of X must be the same each time it is read: item {number} is another one when it is read "
                    "again (augmentation in __getitem__, noise). Pass the data set without augmentation as X, and "
                    "train on the augmented one: what the network sees is recorded."
                )
        # a separate generator, because a loader draws a seed
        for items in DataLoader(dataset, _ITEMS, generator=torch.Generator(), **options):
            yield _inputs_and_targets(items, y)
    except (RuntimeError, TypeError, LookupError) as error:
        raise TypeError(f"items of X must be tensors, arrays or numbers of one shape: {error}") from error


def _inputs_and_targets(items: Any, y: Any) -> tuple[Any, Any]:
    """Return inputs and targets of several collated items."""
    if isinstance(items, Mapping):
        key = y if isinstance(y, str) else next((key for key in _TARGETS if key in items and y is None), None)
        if key is not None and key not in items:
            raise ValueError(f"y must be a key of the dataset's items, {list(items)}: got {key!r}.")
        return {name: value for name, value in items.items() if name != key}, items.get(key)
    if isinstance(items, tuple | list) and (len(items) == 1 or (y is None and len(items) == 2)):
        return items[0], items[1] if len(items) == 2 else None
    return items, None
