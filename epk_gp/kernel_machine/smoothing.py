"""Random weights of training samples, over which a derivative is averaged."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_integer

_SMALLEST = 1e-6  # of drawn weights, relative to the range: the derivative in a weight needs its sample


@dataclass(frozen=True)
class Smoothing:
    """Averaging of the derivative over runs whose samples have random weights.

    The derivative at the recorded weights is that of one point: where ReLUs switch, or training amplifies small
    changes, it says little of larger ones. The average of the derivatives of runs with other weights is that of a
    smooth function, the mean over the weights. Every second run has the weights mirrored, low + high - weights. Of
    three runs and more the mean is trimmed, entry by entry: an eighth of the runs, and one at least, is left out on
    either side, for the derivative under Adam is huge where a small gradient is about to change its sign.

    Gradients are clipped to the bound that the recorder was told (`clip=`), or that a recorded step reached. One that
    is neither stated nor reached is not known, and runs with large weights may go beyond it.

    Attributes:
        num_runs: Number of runs, each of which is trained again and costs what `influence` costs.
        low: Smallest weight.
        high: Largest weight. Weights from 0 to 2 predict small changes, those from 0 to 1 leaving out half.
        seed: Seed of the weights.
    """

    num_runs: int = 8
    low: float = 0.0
    high: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise if no weights can be drawn.

        Raises:
            TypeError: A number is of another kind.
            ValueError: There is no run, or the range of the weights is empty or holds negative ones.
        """
        validate_count(self.num_runs, "num_runs")
        validate_integer(self.seed, "seed")
        if not 0 <= self.low < self.high < float("inf"):
            raise ValueError(f"weights must be drawn between 0 <= low < high: got {self.low} and {self.high}.")

    def weights(self, num_samples: int) -> Iterator[Float64[Tensor, " M"]]:
        """Yield the weights of the samples of each run."""
        generator = torch.Generator().manual_seed(self.seed)
        share = torch.ones(num_samples, dtype=torch.float64)
        for number in range(self.num_runs):
            is_mirrored = number % 2 == 1
            share = 1 - share if is_mirrored else torch.rand(num_samples, generator=generator, dtype=torch.float64)
            yield self.low + (self.high - self.low) * share.clamp(min=_SMALLEST)

    def average(self, values: Float[Tensor, "runs *rest"]) -> Float[Tensor, "*rest"]:
        """Return the trimmed mean over runs."""
        count = len(values)
        trimmed = max(1, count // 8) if count > 2 else 0
        return values.sort(dim=0).values[trimmed : count - trimmed].mean(dim=0)
