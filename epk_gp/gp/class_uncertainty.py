"""How unsure the classes of points are: one score for each question."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.show import SHOWN_POINTS, Displayed, Entry, Summary, Table, columns_note, count, kind_of, number


@dataclass(frozen=True, eq=False, repr=False)
class ClassUncertainty(Displayed):
    """How unsure the classes of n points are; larger is less sure, for every score.

    Attributes:
        error: Probability that the class which the network alone predicts is wrong: to abstain, or to pass a point to a
            person. It is at least (1 - 1/C) v / (N + n + 1) with v the next score, N training labels and the n labels
            that weigh network and process: no label supports less. It is a probability for points like the validation
            points only. It is no detector of points of another kind: these may look like a class.
        out_of_distribution: Posterior variance of the process, from 0 at a training point to 1 far from all of them: to
            detect points unlike the training data. It does not see labels of its neighbours, so it is no score of
            errors between classes.
        entropy: Of `predict_proba`, in nats: all uncertainty about the class, whatever its cause.
        mutual_information: The part of it that more training data would remove, in nats: to tell ignorance from
            classes that overlap. It is small wherever the class is sure, also far from the data if network and process
            agree.
        std: Error bar of the predicted class's probability p, not of the class: the root of a sum of two variances. One
            is that of p under the process, with the weight that the process has where it predicts training labels from
            each other, or its weight beside the network if that is larger. The other one is p (1 - p) / (n + 2), which
            the n labels that weigh the two leave in any probability. On made tables two of them cover the true
            probability at 90 to 96 % of the points (docs/deciding.md).
    """

    error: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    out_of_distribution: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    entropy: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    mutual_information: Float[Tensor, " n"] | Float[np.ndarray, " n"]
    std: Float[Tensor, " n"] | Float[np.ndarray, " n"]

    def _summary(self) -> Summary:
        scores = {f.name.replace("_", " "): torch.as_tensor(getattr(self, f.name)) for f in fields(self)}
        n = len(self.error)
        shown = min(n, SHOWN_POINTS)
        rows = tuple(
            (name, *map(number, [*score[:shown].tolist(), float(score.mean()), float(score.max())]))
            for name, score in (scores.items() if n else ())
        )
        columns = ("", *(f"point {i}" for i in range(shown)), "mean of all", "largest")
        return Summary(
            f"Uncertainty of the classes of {count(n, 'point')}; larger is less sure",
            (Entry("shape of each score", f"({n},)", kind_of(scores["error"])),),
            Table(columns, rows, columns_note(shown, n)) if n else None,
        )
