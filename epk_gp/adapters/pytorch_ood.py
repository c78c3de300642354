"""pytorch-ood: a detector."""

from epk_gp.adapters.batches import library
from epk_gp.adapters.uncertainty import UncertaintyScorer

with library("pip install pytorch-ood"):
    from pytorch_ood.api import Detector


class EPKDetector(UncertaintyScorer, Detector):  # type: ignore[misc]  # the library need not be there
    """An `UncertainClassifier` as a detector: larger scores for points unlike the training data.

    `fit` takes a loader of held-out points, where other detectors take the training data.

    Args:
        classifier: Of a recorded run.
        score: Which score of `ClassUncertainty`.
    """

    requires_fit = True
