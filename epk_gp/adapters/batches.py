"""Batches of loaders as inputs and targets."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from epk_gp.core.graphs import tensors_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.step import fingerprint_data

_SHUFFLING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def ordered(batches: Iterable[Any], name: str) -> tuple[Inputs, Shaped[Tensor, "n ..."]]:
    """Return the result of `gathered` for batches with a fixed order.

    Raises:
        TypeError, ValueError: As in `gathered`; or the order of the batches is unknown.
    """
    found, places = gathered(batches), (batches, getattr(batches, "batch_sampler", None))
    is_shuffled = any(isinstance(getattr(place, "sampler", None), _SHUFFLING) for place in places)
    again = found if isinstance(batches, Iterator) else gathered(batches)
    if is_shuffled or fingerprint_data(*tensors_of(found)) != fingerprint_data(*tensors_of(again)):
        raise ValueError(
            f"{name} must give its rows in one order: it shuffles them, so that scores cannot be assigned to rows. "
            "Pass a loader with shuffle=False."
        )
    return found


def gathered(batches: Iterable[Any]) -> tuple[Inputs, Shaped[Tensor, "n ..."]]:
    """Return inputs and targets of all batches, or of a single one: (inputs, ..., targets), or a dict with "labels".

    Raises:
        TypeError: A batch has another form.
        ValueError: There is no batch.
    """
    is_single = isinstance(batches, tuple | list) and any(isinstance(part, Tensor) for part in batches)
    found = list[dict[Any, Tensor]]()
    for i, batch in enumerate([batches] if is_single else batches):
        form = batch if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else {}
        found.append(dict(form))
        target = "labels" if form is batch else len(found[0]) - 1
        are_tensors = all(isinstance(part, Tensor) for part in found[i].values())
        if not are_tensors or not {target} < found[i].keys() == found[0].keys():
            kinds = {name: type(part).__name__ for name, part in found[i].items()}
            raise TypeError(f"batches must be alike, (inputs, ..., targets) or dicts with 'labels': {i} holds {kinds}.")
    if not found:
        raise ValueError("there must be a batch of inputs and targets: got none.")
    joined = {name: torch.cat([parts[name] for parts in found]) for name in found[0]}
    y = joined.pop(target)
    return joined if target == "labels" else joined[0] if target == 1 else tuple(joined.values()), y
