"""OpenDataVal: a data evaluator."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.adapters.batches import library
from epk_gp.adapters.scores import SampleScorer
from epk_gp.analysis.labels import label_errors
from epk_gp.core.trajectory import Trajectory

with library("pip install opendataval"):
    from opendataval.dataval import DataEvaluator


class EPKEvaluator(DataEvaluator):  # type: ignore[misc]  # the library need not be there
    """Values of training points, larger for better ones, of a run that the evaluator records.

    Args:
        record: Trains on inputs and targets, and returns the recorded run. One-hot targets, as OpenDataVal has them,
            come as class numbers.
        values: "labels" - 1 minus the suspicion of each point's label (`epk_gp.label_errors`); "influence" - by how
            much the mean loss of the validation points would rise without the point; or "contributions" - by how much
            it lowered this loss along the run.
        options: What else the function behind the values takes.
    """

    def __init__(
        self,
        record: Callable[[Tensor, Tensor], Trajectory],
        values: Literal["labels", "influence", "contributions"] = "labels",
        **options: Any,
    ) -> None:
        """Take a function that records."""
        super().__init__()
        self.record, self.values, self.options = record, values, options

    def train_data_values(self, *args: Any, **kwargs: Any) -> "EPKEvaluator":
        """Record a run; arguments for OpenDataVal's own models are not used."""
        self.trajectory = self.record(self.x_train, _classes(self.y_train))
        return self

    def evaluate_data_values(self) -> Float[np.ndarray, " M"]:
        """Return the value of each training point.

        Raises:
            TypeError, ValueError: As the function behind the values.
        """
        if self.values == "labels":
            return 1 - label_errors(self.trajectory, **self.options).scores.cpu().numpy()
        scorer = SampleScorer(self.trajectory, scores=self.values, **self.options)
        return scorer.scores_of(self.x_valid, _classes(self.y_valid)).mean(0).cpu().numpy()


def _classes(y: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
    """Return the classes of one-hot targets, and others as they are."""
    is_one_hot = y.ndim == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())
    return torch.as_tensor(y.argmax(1) if is_one_hot else y)
