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
    """The training samples with the highest or lowest scores, as captum's `KMostInfluentialResults`.

    Attributes:
        indices: Samples, (n, k), the most extreme one first.
        influence_scores: Their scores, (n, k).
    """

    indices: Int64[Tensor, "n k"]
    influence_scores: Float[Tensor, "n k"]


class EPKInfluence(SampleScorer):
    """Scores of training samples by the names of captum's `TracInCPBase`, which asks for no subclass.

    As captum's, they are positive for proponents, the samples that lower the loss of an input. By default they are what
    TracIn approximates, by how much each sample lowered it along the run: TracInCP with a checkpoint of every step is
    `rule=epk_gp.QuadratureRule.left_endpoint()`.

    Args:
        trajectory: The recorded run.
        scores: "contributions" or "influence"; see `SampleScorer`.
        options: What else `epk_gp.attribute` or `epk_gp.influence` takes.
    """

    def __init__(self, trajectory: Trajectory, *, scores: Scores = "contributions", **options: Any) -> None:
        """Take a recorded run; raises as `SampleScorer`."""
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
            k: How many samples to return for each input; None returns the scores of all.
            proponents: Whether those with the highest scores are returned, or those with the lowest.
            aggregate: Whether the scores of all inputs are summed, to one row.
            show_progress: Not used: pass `progress=True` to the class.

        Raises:
            TypeError, ValueError: As `epk_gp.attribute`; or k is not in 1 .. M.
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
            show_progress: As for `influence`.

        Raises:
            ValueError: An input is no training sample.
        """
        every = torch.arange(self.trajectory.num_points, device=self.trajectory.device)
        return self.self_scores(every if inputs is None else self.rows_of(inputs, "inputs"))
