"""Coefficients that a preconditioner scales, held as one number per parameter.

Under Adam and its relatives a coefficient of a parameter's weights is proportional to a scale that follows from the
gradients (`epk_gp.optimizers.preconditioners`). One of its values therefore says all of them, once the scale is computed
again:

    coefficient[i] = coefficient[r] * scale[i] / scale[r],    r the weight with the smallest coefficient

which is the weight with the largest gradients so far, whose scale suffers least from rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.preconditioners import COUPLED, PRECONDITIONERS, Part
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params

# Its coefficients are zero where the gradient is, which the scale does not say.
_MASKED = frozenset({"SparseAdam"})


@dataclass(frozen=True, eq=False)
class CompactUpdate:
    """The coefficients of a step, with one number per parameter where the others follow from a scale.

    Attributes:
        update: The coefficients; of a scaled one that of the weight r of each parameter.
        places: By the scaled coefficients' names the place of r among the weights of each of the L parameters; -1 where
            all weights of the parameter share the number.
    """

    update: UpdateCoefficients
    places: Mapping[str, Int64[Tensor, " L"]] = field(default_factory=dict)


def scaled_fields(groups: Sequence[OptimizerGroup], names: Sequence[str]) -> tuple[frozenset[str], ...]:
    """Return which coefficients of each parameter a preconditioner scales that can be computed again.

    Args:
        groups: The optimizers' parameter groups.
        names: Names of the L parameters.
    """
    found: dict[str, frozenset[str]] = {}
    for group in groups:
        known = PRECONDITIONERS.get(group.rule) or COUPLED.get(group.rule)
        if known is not None and known.replays and group.rule not in _MASKED:
            found |= {name: frozenset(known.fields(group.options)) for name in group.names}
    return tuple(found.get(name, frozenset()) for name in names)


def compact_update(update: UpdateCoefficients, fields: Sequence[frozenset[str]], sizes: Sequence[int]) -> CompactUpdate:
    """Replace coefficients per weight by one number per parameter where the others can be computed again.

    Args:
        update: The coefficients of a step.
        fields: Which of them a preconditioner scales, for each of the L parameters (`scaled_fields`).
        sizes: Number of weights of each parameter.
    """
    numbers: dict[str, Any] = {}
    places: dict[str, Tensor] = {}
    for name in FIELDS:
        value = getattr(update, name)
        if len(value) == len(sizes) or not any(name in own for own in fields):
            continue
        compact = [
            _representative(part, name in own) for part, own in zip(value.split(list(sizes)), fields, strict=True)
        ]
        if all(place is not None for place, _ in compact):
            places[name] = torch.tensor([place for place, _ in compact])
            numbers[name] = torch.tensor([number for _, number in compact], dtype=torch.float64)
    return CompactUpdate(replace(update, **numbers), places) if places else CompactUpdate(update)


def _representative(values: Tensor, is_scaled: bool) -> tuple[int | None, float]:
    """Return the place and the value of one weight's coefficient that says all others; no place if none does."""
    if not is_scaled or not len(values):
        is_shared = not len(values) or bool((values == values[0]).all())
        return (-1, float(values[0]) if len(values) else 0.0) if is_shared else (None, 0.0)
    sizes = values.abs()
    place = int(torch.where(sizes > 0, sizes, torch.inf).argmin())
    return place, float(values[place])


def restore_update(
    compact: CompactUpdate, parts: Sequence[Part], scales: Sequence[Tensor], sizes: Sequence[int]
) -> UpdateCoefficients:
    """Compute the coefficients of all weights from those of one weight of each parameter, in the dtype of the scales.

    Args:
        compact: What is held of the coefficients.
        parts: What preconditioners scale.
        scales: The scale of the weights of each part.
        sizes: Number of weights of each of the L parameters.
    """
    restored: dict[str, Any] = {}
    firsts = torch.tensor([0, *sizes]).cumsum(0)
    for name, places in compact.places.items():
        numbers = getattr(compact.update, name).to(scales[0])
        if len(numbers) != len(sizes):  # held per weight beside steps that need it
            numbers = numbers[firsts[:-1].clamp(max=len(numbers) - 1)]
        whole = broadcast_to_params(numbers, sizes, scales[0])
        for part, scale in zip(parts, scales, strict=True):
            at = places[part.parameters]
            if name not in part.fields or not bool((at >= 0).any()):
                continue
            full = scale.expand(part.columns.stop - part.columns.start)
            flat = firsts[:-1][part.parameters] + at.clamp(min=0) - part.columns.start
            flat = flat.clamp(max=len(full) - 1).to(scale.device)  # a parameter of no weights may be the last
            repeats = torch.tensor(sizes[part.parameters], device=scale.device)
            own = (numbers[part.parameters] / full[flat]).repeat_interleave(repeats) * full
            is_scaled = (at >= 0).to(scale.device).repeat_interleave(repeats)
            whole[part.columns] = torch.where(is_scaled, own, whole[part.columns])
        restored[name] = whole
    return replace(compact.update, **restored)
