"""Scores of points, larger where they are less sure: of pytorch-ood, OpenOOD and torch-uncertainty."""

from collections.abc import Iterable
from typing import Any, TypeVar

from jaxtyping import Float, Shaped
from torch import Tensor
from torch.utils.data import TensorDataset

from epk_gp.adapters.batches import gathered
from epk_gp.gp.stacking import ClassUncertainty
from epk_gp.gp.uncertain_classifier import UncertainClassifier

S = TypeVar("S", bound="UncertaintyScorer")  # beartype takes no `Self`


class UncertaintyScorer:
    """One score of an `UncertainClassifier`, larger where a point is less sure.

    Attributes:
        classifier: The classifier, which `fit` fits.
        score: A field of `ClassUncertainty`.
    """

    def __init__(self, classifier: UncertainClassifier, score: str = "out_of_distribution") -> None:
        """Take a classifier.

        Raises:
            TypeError: It is none.
            ValueError: There is no such score.
        """
        if not isinstance(classifier, UncertainClassifier):
            raise TypeError(f"classifier must be an epk_gp.UncertainClassifier: got {type(classifier).__name__}.")
        if score not in (names := ClassUncertainty.__dataclass_fields__):
            raise ValueError(f"score must be one of {[*names]}: got {score!r}.")
        self.classifier, self.score = classifier, score

    def fit(self: S, data_loader: Iterable[Any]) -> S:
        """Fit the classifier to batches of unseen points, which are refused if seen; labels are numbers of outputs."""
        self.classifier.fit(TensorDataset(*gathered(data_loader)))  # type: ignore[arg-type]  # one tensor
        return self

    def predict(self, x: Shaped[Tensor, "n ..."]) -> Float[Tensor, " n"]:
        """Score points; raises as `UncertainClassifier.uncertainty`."""
        score: Tensor = getattr(self.classifier.uncertainty(x), self.score)
        return score
