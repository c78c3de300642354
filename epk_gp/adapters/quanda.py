"""quanda: an explainer."""

from collections.abc import Sequence, Sized
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.adapters.scores import SampleScorer, Scores
from epk_gp.core.checks import as_tensor
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import next_words
from epk_gp.core.trajectory import Trajectory


class EPKExplainer(SampleScorer):
    """Scores of training samples by the names of `quanda.explainers.Explainer`, which asks for no subclass.

    quanda makes explainers itself: the run comes in `expl_kwargs={"trajectory": run}`, and what else quanda passes is
    in the run already. As its other explainers' scores, they are larger where a sample lowers the loss of a target;
    those of samples for themselves are largest for wrong labels.

    Attributes:
        model: The network that quanda handed over, if any. It is not used.
        train_dataset: Its training data, if any. They are not used.
        task: Of a "causal_lm" labels are words in their places, as `transformers` takes them.
    """

    accepted_tasks = ("image_classification", "text_classification", "causal_lm")

    def __init__(
        self,
        model: object = None,
        train_dataset: Sized | None = None,
        *,
        trajectory: Trajectory,
        scores: Scores = "influence",
        task: str = "image_classification",
        checkpoints: object = None,
        checkpoints_load_func: object = None,
        **options: Any,
    ) -> None:
        """Take a recorded run.

        Args:
            model: Not used: the run has the network.
            train_dataset: The run's training samples in their order. Only their number is checked.
            trajectory: The recorded run with M training samples.
            scores: "influence" or "contributions"; see `SampleScorer`.
            task: One of `accepted_tasks`.
            checkpoints: Not used: the run has all weights.
            checkpoints_load_func: Not used.
            options: What else `epk_gp.influence` or `epk_gp.attribute` takes.

        Raises:
            TypeError: There is no run.
            ValueError: The data set has another number of samples than the run, or scores or task are others.
        """
        super().__init__(trajectory, scores=scores, **options)
        if task not in self.accepted_tasks:
            raise ValueError(f"task must be one of {list(self.accepted_tasks)}: got {task!r}.")
        if train_dataset is not None and len(train_dataset) != trajectory.num_points:
            raise ValueError(
                f"train_dataset must be the run's {trajectory.num_points} training samples in their order: got "
                f"{len(train_dataset)}. Scores are numbered as in the run."
            )
        self.model, self.train_dataset, self.task = model, train_dataset, task

    def explain(self, test_data: Inputs, targets: Sequence[int] | Shaped[Tensor, "n ..."]) -> Float[Tensor, "n M"]:
        """Score all training samples for the losses of n inputs with their targets.

        Raises:
            TypeError, ValueError: As `epk_gp.influence`.
        """
        y = as_tensor(targets, device=self.trajectory.device)
        return self.scores_of(test_data, next_words(y) if self.task == "causal_lm" else y)

    def self_influence(self, batch_size: int = 32) -> Float[Tensor, " M"]:
        """Score every training sample for its own loss; `batch_size` is not used."""
        return self.self_scores(torch.arange(self.trajectory.num_points, device=self.trajectory.device))
