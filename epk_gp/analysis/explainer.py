"""An explainer as other packages of data attribution have it: quanda's protocol, and captum's names."""

from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import as_tensor, validate_count
from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import attribute
from epk_gp.kernel_machine.influence import influence

# What every training sample means for one output of every input: run, inputs, outputs (n,) -> (n, M).
SampleScores = Callable[[Trajectory, Inputs, Int64[Tensor, " n"]], Float[Tensor, "n M"]]


class MostInfluential(NamedTuple):
    """The training samples with the highest or lowest scores, under captum's names.

    Attributes:
        indices: Samples, (n, k), the most extreme one first.
        influence_scores: Their scores, (n, k).
    """

    indices: Int64[Tensor, "n k"]
    influence_scores: Float[Tensor, "n k"]


def influence_scores(trajectory: Trajectory, X: Inputs, classes: Int64[Tensor, " n"]) -> Float[Tensor, "n M"]:
    """Return what would change: derivatives of the outputs in the samples' weights, `epk_gp.influence`.

    Positive where the sample raises the output; the negative predicts the change if the sample is left out.
    """
    return influence(trajectory, X, classes=classes).values[:, 0]


def contribution_scores(trajectory: Trajectory, X: Inputs, classes: Int64[Tensor, " n"]) -> Float[Tensor, "n M"]:
    """Return what was added: exact contributions of the samples to the outputs, `epk_gp.attribute`."""
    return attribute(trajectory, X, classes=classes).samples[:, 0]


class Explainer:
    """Scores of training samples, as quanda's metrics and benchmarks and captum's users call them.

    It has the methods of `quanda.explainers.Explainer` and needs no quanda. quanda's benchmarks make explainers
    themselves; they get the run in `expl_kwargs={"trajectory": run}`, and what else they pass is in the run already.

    Attributes:
        trajectory: The recorded run.
        scores: What is computed.
        model: The network that quanda handed over, if any. It is not used.
        train_dataset: Its training data, if any. They are not used.
    """

    accepted_tasks = ("image_classification", "text_classification")

    def __init__(
        self,
        model: object = None,
        train_dataset: Sized | None = None,
        *,
        trajectory: Trajectory,
        scores: SampleScores = influence_scores,
        task: str = "image_classification",
        checkpoints: object = None,
        checkpoints_load_func: object = None,
    ) -> None:
        """Take a recorded run.

        Args:
            model: Not used: the run has the network.
            train_dataset: The run's training samples in their order. Only their number is checked.
            trajectory: The recorded run with M training samples.
            scores: `influence_scores`, `contribution_scores`, or a function of one's own.
            task: One of `accepted_tasks`; both mean the same.
            checkpoints: Not used: the run has all weights.
            checkpoints_load_func: Not used.

        Raises:
            ValueError: The data set has another number of samples than the run, or the task is another one.
        """
        if task not in self.accepted_tasks:
            raise ValueError(f"task must be one of {list(self.accepted_tasks)}: got {task!r}.")
        if train_dataset is not None and len(train_dataset) != trajectory.num_points:
            raise ValueError(
                f"train_dataset must be the run's {trajectory.num_points} training samples in their order: got "
                f"{len(train_dataset)}. Scores are numbered as in the run."
            )
        self.trajectory, self.scores = trajectory, scores
        self.model, self.train_dataset = model, train_dataset

    def explain(self, test_data: Inputs, targets: Sequence[int] | Shaped[Tensor, " n"]) -> Float[Tensor, "n M"]:
        """Score all training samples for each input.

        Args:
            test_data: n inputs, as the network takes them.
            targets: The class of each input whose output is explained.

        Returns:
            Scores, larger where a sample raises the output.

        Raises:
            TypeError, ValueError: As `epk_gp.attribute`.
        """
        classes = as_tensor(targets, dtype=torch.int64, device=self.trajectory.device)
        return self.scores(self.trajectory, test_data, classes)

    def self_influence(self, batch_size: int = 32) -> Float[Tensor, " M"]:
        """Score every training sample for its own target.

        Args:
            batch_size: Samples that are explained at a time.

        Raises:
            TypeError: `batch_size` is not a whole number.
            ValueError: `batch_size` < 1, or the targets are not classes.
        """
        validate_count(batch_size, "batch_size")
        targets = self.trajectory.targets
        if targets.ndim != 1 or targets.is_floating_point():
            raise ValueError(
                "self_influence needs a run on classes, targets of shape (M,) and dtype int64: got targets of shape "
                f"{tuple(targets.shape)} and dtype {targets.dtype}. Call `explain` with outputs of your choice."
            )
        parts = []
        for rows in torch.arange(len(targets), device=targets.device).split(batch_size):
            scores = self.scores(self.trajectory, self.trajectory.inputs[rows], targets[rows])
            parts.append(scores.gather(1, rows.to(scores.device)[:, None]).squeeze(1))
        return torch.cat(parts)

    def influence(
        self, inputs: tuple[Inputs, Shaped[Tensor, " n"]], k: int | None = None, proponents: bool = True
    ) -> Float[Tensor, "n M"] | MostInfluential:
        """Score training samples under captum's name.

        Args:
            inputs: Pair of n inputs and their classes.
            k: How many samples to return for each input; None returns the scores of all.
            proponents: Whether those with the highest scores are returned, or those with the lowest.

        Raises:
            TypeError, ValueError: As `explain`; k is not in 1 .. M.
        """
        test_data, targets = inputs
        scores = self.explain(test_data, targets)
        if k is None:
            return scores
        validate_count(k, "k")
        if k > scores.shape[1]:
            raise ValueError(f"k must be at most {scores.shape[1]}, the number of training samples: got {k}.")
        found = scores.topk(k, dim=1, largest=proponents)
        return MostInfluential(found.indices, found.values)
