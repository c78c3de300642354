"""OpenOOD: a postprocessor."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from epk_gp.adapters.batches import library
from epk_gp.adapters.uncertainty import UncertaintyScorer

with library("pip install ./OpenOOD"):
    from openood.postprocessors import BasePostprocessor


class EPKPostprocessor(UncertaintyScorer, BasePostprocessor):  # type: ignore[misc]  # the library need not be there
    """An `UncertainClassifier` as a postprocessor: the network's class, and a confidence, the negative score.

    Args:
        classifier: Of the recorded run of the network that is evaluated.
        score: Which score of `ClassUncertainty`.
    """

    APS_mode = False  # there is nothing to search for

    def setup(self, net: nn.Module, id_loader_dict: Mapping[str, Iterable[Any]], ood_loader_dict: object) -> None:
        """Fit the classifier to the validation points of the known classes."""
        self.fit((batch["data"], batch["label"]) for batch in id_loader_dict["val"])

    def postprocess(
        self, net: nn.Module, data: Shaped[Tensor, "n ..."]
    ) -> tuple[Int64[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the network's classes and confidences; raises as `UncertainClassifier.uncertainty`."""
        return net(data).argmax(1), -self.predict(data)
