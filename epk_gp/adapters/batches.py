"""What adapters share: a message where a library is missing, and batches of its loaders as inputs and targets."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.inputs import Inputs


@contextmanager
def library(install: str) -> Iterator[None]:
    """Say how to install the library of an adapter where its import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"this adapter must find its library: {error}. Run `{install}`.") from error


def gathered(batches: Iterable[Any]) -> tuple[Inputs, Shaped[Tensor, "n ..."]]:
    """Return inputs and targets of all batches, each (inputs, ..., targets) or a dict with "labels".

    Raises:
        ValueError: There is no batch.
    """
    X, y = list[Any](), list[Tensor]()
    for batch in batches:
        if isinstance(batch, Mapping):
            X.append({name: value for name, value in batch.items() if name != "labels"})
            y.append(batch["labels"])
        else:
            X.append(tuple(batch[:-1]))
            y.append(batch[-1])
    if not X:
        raise ValueError("there must be a batch of inputs and targets: got none.")
    if isinstance(X[0], dict):
        return {name: torch.cat([x[name] for x in X]) for name in X[0]}, torch.cat(y)
    inputs = tuple(torch.cat(values) for values in zip(*X, strict=True))
    return inputs[0] if len(inputs) == 1 else inputs, torch.cat(y)
