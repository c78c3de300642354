"""dattri: an attributor."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.adapters.batches import ordered
from epk_gp.adapters.scores import SampleScorer


class EPKAttributor(SampleScorer):
    """Scores of training samples in the interface of `dattri.algorithm.base.BaseAttributor`, without subclassing it.

    Like dattri's own scores for a task whose target is the loss, they are larger for samples that lower the test loss:
    `dattri.metric.lds` compares their sums with the negative loss, and `loo_corr` compares them with the loss without a
    sample. They are in units of the loss, not multiplied by the number of samples.

    Args:
        trajectory: The recorded run.
        scores: "influence" or "contributions"; see `SampleScorer`.
        options: Further arguments of `epk_gp.influence` or `epk_gp.attribute`.
    """

    def cache(self, full_train_dataloader: Iterable[Any]) -> None:
        """Check that a loader contains the run's training samples in order; nothing needs to be computed.

        Raises:
            ValueError: It contains other samples.
        """
        rows = self.rows_of(full_train_dataloader, "full_train_dataloader")
        if not torch.equal(rows.cpu(), torch.arange(self.trajectory.num_points)):
            raise ValueError("full_train_dataloader must hold all samples of the run in their order: got another one.")

    def attribute(self, train_dataloader: Iterable[Any], test_dataloader: Iterable[Any]) -> Float[Tensor, "m n"]:
        """Score m training samples for the losses of n test points.

        Args:
            train_dataloader: Training samples of the run, all or some, in any order, with their targets.
            test_dataloader: Test points with their targets.

        Raises:
            TypeError, ValueError: As in `epk_gp.influence`; or a row is not a training sample, or a loader shuffles.
        """
        rows = self.rows_of(train_dataloader, "train_dataloader")
        return self.scores_of(*ordered(test_dataloader, "test_dataloader")).T[rows]

    def self_attribute(self, train_dataloader: Iterable[Any]) -> Float[Tensor, " m"]:
        """Score training samples for their own losses, for `dattri.metric.mislabel_detection_auc`.

        Raises:
            ValueError: A row is not a training sample.
        """
        return self.self_scores(self.rows_of(train_dataloader, "train_dataloader"))
