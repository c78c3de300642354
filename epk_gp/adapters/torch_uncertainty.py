"""torch-uncertainty: post-processing of its `ClassificationRoutine`, for probabilities and for detection."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.adapters.batches import library
from epk_gp.adapters.uncertainty import UncertaintyScorer
from epk_gp.gp.uncertain_classifier import UncertainClassifier

with library("pip install torch-uncertainty lightning timm"):
    from torch_uncertainty.post_processing import DEUP, PostProcessing


class EPKPostProcessing(UncertaintyScorer, PostProcessing):  # type: ignore[misc]  # the library need not be there
    """Logarithms of the probabilities of network and process together, of which the routine takes a softmax.

    Args:
        classifier: Of the recorded run of the routine's model.
    """

    def __init__(self, classifier: UncertainClassifier) -> None:
        """Take a classifier; raises as `UncertaintyScorer`."""
        PostProcessing.__init__(self)
        UncertaintyScorer.__init__(self, classifier)

    def forward(self, inputs: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n C"]:
        """Return log-probabilities."""
        return torch.as_tensor(self.classifier.predict_proba(inputs)).log()


class EPKScores(UncertaintyScorer, DEUP):  # type: ignore[misc]  # the routine takes raw scores of this class alone
    """A score of each point, larger where it is less sure, for `ood_criterion="deup"`; predictions stay the model's.

    Args:
        classifier: Of the recorded run of the routine's model.
        score: Which score of `ClassUncertainty`.
    """

    def __init__(self, classifier: UncertainClassifier, score: str = "out_of_distribution") -> None:
        """Take a classifier; raises as `UncertaintyScorer`."""
        DEUP.__init__(self, task="classification")
        UncertaintyScorer.__init__(self, classifier, score)

    forward = UncertaintyScorer.predict
