"""Datasets whose batches hold the indices of their items."""

from collections.abc import Sized
from typing import Any, TypeVar

from torch.utils.data import Dataset

Item = TypeVar("Item")


class IndexedDataset(Dataset[tuple[int, Item]]):
    """Pair every item of a dataset with its index, so that a `DataLoader`'s batches can be announced to a recorder.

        for indices, (inputs, labels) in DataLoader(IndexedDataset(dataset), batch_size=100, shuffle=True):
            ...
            recorder.batch(indices)

    Item i must be row i of the recorder's X and y. With random augmentation it is not, and the recorder's check of the
    step raises `StepMismatchError`.
    """

    def __init__(self, dataset: Dataset[Item]) -> None:
        """Wrap a dataset.

        Args:
            dataset: A map-style dataset, which has a length and items by index.

        Raises:
            TypeError: The dataset has no length or no items by index.
        """
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset must have a length and items by index: got {type(dataset).__name__}. "
                "Put what it yields into tensors, and use torch.utils.data.TensorDataset."
            )
        self.dataset: Any = dataset

    def __len__(self) -> int:
        """Return the number of items, M."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Item]:
        """Return (index, item); a negative index counts from the end."""
        return index % len(self), self.dataset[index]
