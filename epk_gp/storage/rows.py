"""Training data that need not fit into memory: rows are read once, block by block, written to a file, and mapped.

What follows sees tensors whose pages are those of the file: they take no memory of the process, and the system drops
them where memory is short. Datasets are read in their own order, by the workers of a `DataLoader` if one was given.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from epk_gp.core.checks import as_tensor
from epk_gp.core.graphs import Graph, tensors_of
from epk_gp.core.inputs import InputLayout, Inputs, pack_inputs
from epk_gp.core.model import random_state_kept
from epk_gp.core.step import Step, fingerprint_data, tensor_bytes


@runtime_checkable
class Items(Protocol):
    """Items by index: an array, or a map-style dataset, also one of Hugging Face's `datasets`."""

    def __len__(self) -> int:
        """Count the items."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return an item."""


_ARRAY_ROWS, _ITEMS = 4096, 64  # rows of arrays, and items of a dataset, that are read at a time
_READ_TWICE = 16  # items that are read twice, to see whether they are the same each time
_TARGETS = ("labels", "label", "targets", "target", "y")  # where items that are dictionaries hold their target


class RowFile:
    """Rows of one shape and dtype in a temporary file, which goes with the object; more can be added at its end."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Make an empty file in a folder, or in the system's one for temporary files (TMPDIR)."""
        handle, self._path = tempfile.mkstemp(".rows", "epk_gp-", folder)
        self._file, self._rows = os.fdopen(handle, "wb"), torch.empty(0)
        self._num_rows = 0
        weakref.finalize(self, _remove, self._file, self._path)

    def __len__(self) -> int:
        """Count the rows."""
        return self._num_rows

    def validate(self, rows: Shaped[Tensor, "n ..."], name: str) -> None:
        """Raise if rows have another shape or dtype than those before; `name` is that of all rows.

        Raises:
            ValueError: They have.
        """
        kind, before = (tuple(rows.shape[1:]), rows.dtype), (tuple(self._rows.shape[1:]), self._rows.dtype)
        if self._num_rows and kind != before:
            raise ValueError(
                f"all rows of {name} must have one shape and dtype: row {self._num_rows} is {kind[0]}, {kind[1]}, "
                f"those before are {before[0]}, {before[1]}. Pad them to one shape."
            )

    def append(self, rows: Shaped[Tensor, "n ..."], name: str = "X") -> None:
        """Add rows; errors as of `validate`."""
        self.validate(rows, name)
        self._file.write(tensor_bytes(rows))
        self._num_rows += len(rows)
        self._rows = torch.empty_like(rows[:0], requires_grad=False)

    def mapped(self) -> Shaped[Tensor, "n ..."]:
        """Return all rows so far, mapped from the file."""
        self._file.flush()
        shape, dtype = self._rows.shape[1:], self._rows.dtype
        size = self._num_rows * shape.numel() * dtype.itemsize
        if not size:
            return self._rows.new_empty(self._num_rows, *shape)
        content = torch.from_file(self._path, shared=False, size=size, dtype=torch.uint8)
        return content.view(dtype).view(self._num_rows, *shape)


def _remove(file: BufferedWriter, path: str) -> None:
    file.close()
    with suppress(OSError):  # Windows keeps a mapped file
        os.unlink(path)


@dataclass(frozen=True, eq=False)
class Stream:
    """Training data that nobody knows before the training: rows are recorded as the network sees them.

        with epk.Recorder(net, optimizer, epk.Stream(inputs, labels)) as recorder:
            for inputs, labels in loader:
                ...
                recorder.batch(targets=labels)

    A row that was seen with one target is one training point, however often it comes, numbered in the order of the
    first time. The rows are kept in the run, each once.

    Attributes:
        X: A few inputs, as the network takes them, such as a first batch. They are the first points.
        y: Their targets; None where no loss is stated.
    """

    X: Inputs
    y: Shaped[Tensor, "n ..."] | None = None


# Items may hold their targets; a text is the key of an item that holds it.
TrainingInputs = Inputs | Items | DataLoader[Any] | Stream
Targets = Shaped[Tensor, "M ..."] | np.ndarray[Any, Any] | str | None


class StreamRows:
    """The points of a stream so far, in files that grow, numbered by their content."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        """Begin without any."""
        self._inputs, self._targets, self._number_of = RowFile(folder), RowFile(folder), dict[str, int]()

    def number(self, X: Shaped[Tensor, "n ..."], y: Shaped[Tensor, "n ..."]) -> Int64[Tensor, " n"]:
        """Return the numbers of rows, with their targets; those that are new get the next ones.

        Raises:
            ValueError: They have another shape or dtype than those before, or there is not one target a row.
        """
        X, y = X.detach().cpu(), y.detach().cpu()
        if len(X) != len(y):
            raise ValueError(f"there must be one target per row that the network saw: got {len(y)} for {len(X)} rows.")
        self._inputs.validate(X, "the stream")
        self._targets.validate(y, "its targets")
        keys = [fingerprint_data(*row) for row in zip(X, y, strict=True)]
        new = {key: row for row, key in reversed([*enumerate(keys)]) if key not in self._number_of}
        rows = sorted(new.values())
        if rows:
            self._inputs.append(X[rows])
            self._targets.append(y[rows])
        for row in rows:
            self._number_of[keys[row]] = len(self._number_of)
        return torch.tensor([self._number_of[key] for key in keys])

    def mapped(self) -> tuple[Shaped[Tensor, "M ..."], Shaped[Tensor, "M ..."]]:
        """Return inputs, packed, and targets of all points so far."""
        return self._inputs.mapped(), self._targets.mapped()


def num_seen(steps: Iterable[Step], least: int = 0) -> int:
    """Return how many points of a stream some steps and those before have seen; `least` where they have no batch."""
    return max([least, *(int(step.batch.max()) + 1 for step in steps if step.batch is not None)])


@dataclass(frozen=True, eq=False)
class MappedData:
    """Training data that lie in files.

    Attributes:
        X: The inputs, packed.
        y: Their targets; None if there are none.
        layout: Where the tensors of several inputs lie in X; None for one.
        stream: The points of a stream, which become more; None for other data.
    """

    X: Shaped[Tensor, "M ..."]
    y: Shaped[Tensor, "M ..."] | None
    layout: InputLayout | None
    stream: StreamRows | None = None


def num_rows(X: Any, y: Any) -> int:
    """Return the number of points of data that `map_data` or the recorder takes; 0 if they are something else."""
    sized = _dataset_of(X) if y is None or isinstance(y, str) else y
    is_scalar = isinstance(sized, Tensor | np.ndarray) and sized.ndim == 0
    return len(sized) if isinstance(sized, Sized) and not is_scalar else 0


def map_data(X: Any, y: Any, folder: str | os.PathLike[str] | None) -> MappedData | None:
    """Write training data to temporary files and map them; None where they are tensors in memory.

    Args:
        X: A NumPy array or memory map, or a tuple or dict of them; a map-style dataset, whose items are inputs, pairs
            (inputs, target), or dictionaries; or a `DataLoader`, whose dataset is read by its workers and `collate_fn`.
        y: The targets, a tensor or an array; None where the dataset's items hold them, or the key of an item that does.
        folder: The folder of the run, beside which the files are written; None for the system's temporary folder.

    Raises:
        TypeError: A dataset is an iterable one, or its items hold something else than numbers.
        ValueError: Rows differ in shape or dtype; an item is another one when it is read again.
    """
    place = None if folder is None else os.path.dirname(os.path.abspath(folder))
    if isinstance(X, Stream):
        rows, layout = (X.X, None) if isinstance(X.X, Tensor) else pack_inputs(X.X)
        stream = StreamRows(place)
        stream.number(rows, rows.new_empty(len(rows), 0) if X.y is None else X.y)
        mapped, targets = stream.mapped()
        return MappedData(mapped, None if X.y is None else targets, layout, stream)
    dataset, parts = _dataset_of(X), X.values() if isinstance(X, Mapping) else X if isinstance(X, tuple | list) else [X]
    if dataset is None and not any(isinstance(part, np.ndarray) for part in [*parts, y]):
        return None
    inputs, of_targets, layout = RowFile(place), RowFile(place), None
    blocks = _array_blocks(X, y) if dataset is None else _item_blocks(X, dataset, y)
    with random_state_kept(torch.device("cpu")):
        for x, target in blocks:
            x, layout = (x, None) if isinstance(x, Tensor) else pack_inputs(x)
            inputs.append(x)
            if target is not None:
                of_targets.append(as_tensor(target), "y")
    return MappedData(inputs.mapped(), of_targets.mapped() if len(of_targets) else None, layout)


def _array_blocks(X: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield rows of arrays and tensors, some at a time."""

    def rows(value: Any, start: int) -> Any:
        return as_tensor(value[start : start + _ARRAY_ROWS])

    parts = list(X.values()) if isinstance(X, Mapping) else [*X] if isinstance(X, tuple | list) else [X]
    for start in range(0, len(parts[0]), _ARRAY_ROWS):
        values = [rows(part, start) for part in parts]
        x = dict(zip(X, values, strict=True)) if isinstance(X, Mapping) else values[0] if parts == [X] else values
        yield x, None if y is None else rows(y, start)


def _dataset_of(X: Any) -> Any:
    """Return a map-style dataset, or that of a `DataLoader`, without the indices of `IndexedDataset`; else None."""
    if isinstance(X, IterableDataset) or isinstance(getattr(X, "dataset", None), IterableDataset):
        raise TypeError(
            "X must be a map-style dataset, with a length and items by index: got an iterable one. Pass "
            "epk.Stream(X, y) of a first batch, and recorder.batch(targets=y)."
        )
    dataset: Any = X.dataset if isinstance(X, DataLoader) else X
    while hasattr(dataset, "gives_indices"):
        dataset = dataset.dataset
    others = (Tensor, np.ndarray, Sequence, Mapping, Graph)
    is_dataset = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not isinstance(dataset, others)
    return dataset if is_dataset else None


def _item_blocks(X: Any, dataset: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield items of a dataset, some at a time, as inputs and targets."""
    names = ("num_workers", "collate_fn", "worker_init_fn", "multiprocessing_context", "timeout")
    options = {name: getattr(X, name) for name in names} if isinstance(X, DataLoader) else {}
    collate = options.get("collate_fn", default_collate)
    start, M = 0, len(dataset)
    try:
        _require_repeatable(dataset, collate)
        # a generator of its own: a loader draws a seed
        for items in DataLoader(dataset, _ITEMS, generator=torch.Generator(), **options):
            x, target = _inputs_and_targets(items, y)
            stop = min(start + _ITEMS, M)
            yield x, target if y is None or isinstance(y, str) else y[start:stop]
            start = stop
    except (RuntimeError, TypeError) as error:
        name = getattr(collate, "__name__", collate)
        raise TypeError(
            f"items of X must be tensors, arrays or numbers of one shape, which {name} puts together: {error}"
        ) from error


def _require_repeatable(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Raise if some items are others when they are read again."""
    numbers = torch.linspace(0, len(dataset) - 1, min(_READ_TWICE, len(dataset))).long().tolist()
    for number in numbers:
        first, again = (list(tensors_of(collate([dataset[number]]))) for _ in range(2))
        pairs = zip(first, again, strict=True)
        if not all(a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs):
            raise ValueError(
                f"an item of X must be the same each time it is read: item {number} is another one when it is read "
                "again (augmentation in __getitem__, noise). Pass the data set without augmentation as X, and train on "
                "the augmented one: what the network sees is recorded."
            )


def _inputs_and_targets(items: Any, y: Any) -> tuple[Any, Any]:
    """Return inputs and targets of some items that were put together."""
    if isinstance(items, Mapping):
        key = y if isinstance(y, str) else next((key for key in _TARGETS if key in items and y is None), None)
        if key is not None and key not in items:
            raise ValueError(f"y must be a key of the dataset's items, {list(items)}: got {key!r}.")
        return {name: value for name, value in items.items() if name != key}, items.get(key)
    if isinstance(items, tuple | list) and y is None and len(items) == 2:
        return items[0], items[1]
    return (items[0] if isinstance(items, tuple | list) and len(items) == 1 else items), None
