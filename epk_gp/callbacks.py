"""Callbacks that record the training loops of PyTorch Lightning and Hugging Face.

`RecorderCallback` (also `LightningRecorderCallback`) is for `pytorch_lightning.Trainer`, and needs the extra
`lightning`. `HuggingFaceRecorderCallback` is for `transformers.Trainer`, and needs the extra `huggingface`.
`IndexedDataset` gives both of them the indices of a batch's rows.
"""

from collections.abc import Mapping, Sequence, Sized
from importlib import import_module
from typing import Any, cast

from torch.utils.data import Dataset, Subset


class IndexedDataset(Dataset[Any]):
    """A dataset whose items come with their index, so that a `DataLoader`'s batches can be announced to a recorder.

        for indices, (inputs, labels) in DataLoader(IndexedDataset(dataset), batch_size=100, shuffle=True):
            ...
            recorder.batch(indices)

    Item i must be row i of the recorder's X and y, unchanged or augmented. In a `Subset`, as `random_split` returns it,
    an item has its number in the whole data set, also through nested subsets: X and y are then the whole data set's. To
    record only the subset, make it a separate data set, such as `TensorDataset(X[indices], y[indices])`. With `key` the
    items must be dictionaries, as Hugging Face's trainer takes them, and contain their index under that key.
    """

    gives_indices = True  # the recorder reads the dataset inside

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], *, key: str | None = None) -> None:
        """Wrap a dataset.

        Args:
            dataset: A map-style dataset, which has a length and items by index.
            key: Key of the index in a dictionary; None for pairs (index, item).

        Raises:
            TypeError: The dataset has no length or no items by index.
        """
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must have a length and items by index: got {type(dataset).__name__}. "
                "Put what it yields into tensors, and use torch.utils.data.TensorDataset."
            )
        self.dataset: Any = dataset
        self.key = key

    def __len__(self) -> int:
        """Return the number of items, M."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return (index, item), or the item with its index under `key`; a negative index counts from the end.

        Raises:
            TypeError: There is a `key`, and the item is not a dictionary.
            ValueError: The item already has an entry with this name.
        """
        row, item, dataset = index % len(self), self.dataset[index], self.dataset
        while isinstance(dataset, Subset):
            row, dataset = int(dataset.indices[row]), cast("Any", dataset.dataset)
            row %= len(dataset)
        if self.key is None:
            return row, item
        if not isinstance(item, Mapping):
            raise TypeError(
                f"items must be dictionaries if there is a key: got {type(item).__name__}. Leave key= out for pairs "
                "(index, item)."
            )
        if self.key in item:
            raise ValueError(f"items must not have an entry {self.key!r} of their own: give key= another name.")
        return {**item, self.key: row}


# name of the callback: its module, its name there, and the required package and extra
_CALLBACKS = {
    "RecorderCallback": ("lightning", "RecorderCallback", "pytorch_lightning"),
    "LightningRecorderCallback": ("lightning", "RecorderCallback", "pytorch_lightning"),
    "HuggingFaceRecorderCallback": ("huggingface", "HuggingFaceRecorderCallback", "transformers"),
}
__all__ = ["IndexedDataset", *_CALLBACKS]


def __getattr__(name: str) -> object:
    """Import a callback at its first use (PEP 562): nobody needs the packages of all of them."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, package = _CALLBACKS[name]
    try:
        callback: object = getattr(import_module(f"epk_gp.recording.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{name} needs the package {package}: it is not installed. Run pip install 'epk-gp[{module}]'.",
            name=error.name,
        ) from error
    return callback


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)
