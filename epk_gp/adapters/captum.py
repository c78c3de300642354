"""captum: a `DataInfluence` with the methods of `TracInCP`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.adapters.batches import ordered
from epk_gp.adapters.scores import SampleScorer, Scores
from epk_gp.core.checks import validate_count
from epk_gp.core.trajectory import Trajectory


class MostInfluential(NamedTuple):
    """The training samples with the highest or lowest scores, like captum's `KMostInfluentialResults`.

    Attributes:
        indices: Samples, (n, k), the most extreme one first.
        influence_scores: Their scores, (n, k).
    """

    indices: Int64[Tensor, "n k"]
    influence_scores: Float[Tensor, "n k"]


class EPKInfluence(SampleScorer):
    """Scores of training samples in the interface of captum's `TracInCPBase`, without subclassing it.

    Like captum's scores, they are positive for proponents, the samples that lower the loss of an input. By default they
    are the exact values that TracIn approximates, the decrease of the loss by each sample along the run: TracInCP with
    a checkpoint of every step is `rule=epk_gp.QuadratureRule.left_endpoint()`.

    Args:
        trajectory: The recorded run.
        scores: "contributions" or "influence"; see `SampleScorer`.
        options: Further arguments of `epk_gp.attribute` or `epk_gp.influence`.
    """

    def __init__(self, trajectory: Trajectory, *, scores: Scores = "contributions", **options: Any) -> None:
        """Take a recorded run; errors as in `SampleScorer`."""
        super().__init__(trajectory, scores=scores, **options)

    def influence(
        self,
        inputs: Iterable[Any],
        k: int | None = None,
        proponents: bool = True,
        aggregate: bool = False,
        show_progress: bool = False,
    ) -> Float[Tensor, "n M"] | MostInfluential:
        """Score all training samples for n inputs.

        Args:
            inputs: A tuple (input, ..., targets), or a loader or list of such tuples.
            k: Number of samples to return for each input; None returns the scores of all samples.
            proponents: Whether to return the samples with the highest scores, or those with the lowest.
            aggregate: Whether to sum the scores of all inputs to one row.
            show_progress: Not used: pass `progress=True` to the class.

        Raises:
            TypeError, ValueError: As in `epk_gp.attribute`; or k is not in 1 .. M.
        """
        scores = self.scores_of(*ordered(inputs, "inputs"))
        scores = scores.sum(dim=0, keepdim=True) if aggregate else scores
        if k is None:
            return scores
        validate_count(k, "k")
        if k > scores.shape[1]:
            raise ValueError(f"k must be at most {scores.shape[1]}, the number of training samples: got {k}.")
        found = scores.topk(k, dim=1, largest=proponents)
        return MostInfluential(found.indices, found.values)

    def self_influence(self, inputs: Iterable[Any] | None = None, show_progress: bool = False) -> Float[Tensor, " m"]:
        """Score training samples for their own losses.

        Args:
            inputs: A tuple or loader of training samples with their targets; all by default.
            show_progress: Not used, as in `influence`.

        Raises:
            ValueError: An input is not a training sample.
        """
        every = torch.arange(self.trajectory.num_points, device=self.trajectory.device)
        return self.self_scores(every if inputs is None else self.rows_of(inputs, "inputs"))
