"""The terms that a pass over the run emits, and the products that make them."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampleContributions:
    """What some samples of one step add to some predictions.

    Attributes:
        step: s.
        rows: Which N of the points.
        samples: Indices of B training samples, a sample as often as it occurs.
        values: Their contributions, (N, K, B, G) over G parts of the network.
    """

    step: int
    rows: Int64[Tensor, " N"]
    samples: Int64[Tensor, " B"]
    values: Float[Tensor, "N K B G"]


@dataclass(frozen=True, eq=False)
class WeightDecayContribution:
    """What weight decay adds to some predictions in one step, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


@dataclass(frozen=True, eq=False)
class StatisticsContribution:
    """What the moving statistics add to some predictions in one step.

    Attributes:
        step: s.
        rows: Which N of the points.
        total: All of it, (N, K).
        samples: Indices of B training samples, a sample as often as it occurs; None if it is not split.
        values: What these add, (N, K, B).
    """

    step: int
    rows: Int64[Tensor, " N"]
    total: Float[Tensor, "N K"]
    samples: Int64[Tensor, " B"] | None = None
    values: Float[Tensor, "N K B"] | None = None


@dataclass(frozen=True, eq=False)
class UnexplainedContribution:
    """What the part of a step that update rule and gradients do not explain adds to some predictions, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


@dataclass(frozen=True, eq=False)
class WeightsContribution:
    """What a whole step of the weights adds to some predictions, (N, K): the sum of all terms but the statistics."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K"]


Contribution = (
    SampleContributions
    | WeightDecayContribution
    | StatisticsContribution
    | UnexplainedContribution
    | WeightsContribution
)
Emit = Callable[[Contribution], None]


def grouped_products(
    H: Float[Tensor, "K N P"], vectors: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Compute inner products, summed over each group of parameters separately."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ vectors.T).view(K, N, len(vectors)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(vectors), count)
    first = 0
    for group, size in zip(groups.tolist(), sizes, strict=True):
        part = slice(first, first + size)
        out[..., group] += (H[..., part].flatten(0, 1) @ vectors[:, part].T).view(K, N, len(vectors)).transpose(0, 1)
        first += size
    return out
