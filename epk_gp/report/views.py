"""Views of one explained output: the terms of all layers and steps, of one layer, of one range of steps, or of both.

All numbers are multiples of the report's quantum. Rounded are the contributions of each sample, layer and range; every
other number of a view is a sum of these, so that views agree with each other exactly. What they miss of the output is
"rounding": a few quanta, or, where the certificate does not hold, also what the sum misses, in the last range of steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.report.fixed_point import choose_quantum, significant, to_units, unit

ALL = "*"


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of one output of one point as multiples of a quantum, over M samples, L layers and R ranges of steps.

    Attributes:
        samples: (M, L, R).
        decay: (L, R).
        statistics: (R,); they belong to no layer.
        unexplained: (L, R).
        running: The output before training, and with the terms of each range added, (R + 1,): under momentum a batch
            acts in later steps too, and its terms count to its own range. The last one is the trained network's output.
    """

    samples: Int64[Tensor, "M L R"]
    decay: Int64[Tensor, "L R"]
    statistics: Int64[Tensor, " R"]
    unexplained: Int64[Tensor, "L R"]
    running: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RealTerms:
    """The same in the numbers of the computation.

    Attributes:
        samples: (M, L, R).
        decay: (L, R).
        statistics: (R,).
        unexplained: (L, R).
        initial: The output before training.
        network: The output of the trained network.
    """

    samples: Float[Tensor, "M L R"]
    decay: Float[Tensor, "L R"]
    statistics: Float[Tensor, " R"]
    unexplained: Float[Tensor, "L R"]
    initial: float
    network: float

    @property
    def quantum(self) -> float:
        """The quantum for terms of this size."""
        parts = (self.samples, self.decay, self.statistics, self.unexplained)
        size = sum(float(part.double().abs().sum()) for part in parts)
        return choose_quantum(size + abs(self.initial) + abs(self.network))

    @property
    def running(self) -> list[float]:
        """The output before training and with the terms of each range added; the last one is the trained network's."""
        parts = (self.samples.sum(dim=(0, 1)), self.decay.sum(dim=0), self.statistics, self.unexplained.sum(dim=0))
        added = torch.stack([part.double() for part in parts]).sum(dim=0).cumsum(dim=0) + self.initial
        return [self.initial, *added[:-1].tolist(), self.network]

    def rounded(self, quantum: float) -> Terms:
        """Round to multiples of a quantum.

        Raises:
            ValueError: The terms are too large for it.
        """
        return Terms(
            samples=to_units(self.samples, quantum),
            decay=to_units(self.decay, quantum),
            statistics=to_units(self.statistics, quantum),
            unexplained=to_units(self.unexplained, quantum),
            running=tuple(unit(value, quantum) for value in self.running),
        )


@dataclass(frozen=True, eq=False)
class SampleFacts:
    """What views say of the training samples beside their contributions.

    Attributes:
        labels: Their classes; None where they have none.
        num_classes: C.
        influence: Derivatives of the output in their weights; None where they were not computed.
    """

    labels: Int64[Tensor, " M"] | None
    num_classes: int
    influence: Float[Tensor, " M"] | None = None


def all_views(terms: Terms, facts: SampleFacts, top: int) -> dict[str, dict[str, Any]]:
    """Return all views by their keys, "layer|range"; "*" stands for all layers or all ranges."""
    L, R = terms.decay.shape
    keys = [(layer, r) for layer in (None, *range(L)) for r in (None, *range(R))]
    return {_key(layer, r): make_view(terms, facts, layer, r, top) for layer, r in keys}


def is_margin(key: str) -> bool:
    """Whether a view is one of all layers or of all ranges of steps."""
    return ALL in key.split("|")


def shorten(view: dict[str, Any], top: int) -> dict[str, Any]:
    """Return a view that names at most so many samples of either sign: the others are in the sums of the rest."""
    shortened = dict(view)
    for side in ("raised", "lowered"):
        kept, moved = view[side][:top], view[side][top:]
        count, total = view[f"rest_{side}"]
        shortened |= {side: kept, f"rest_{side}": [count + len(moved), total + sum(value for _, value, _ in moved)]}
    return shortened


def make_view(terms: Terms, facts: SampleFacts, layer: int | None, r: int | None, top: int) -> dict[str, Any]:
    """Return one view.

    Args:
        terms: The terms.
        facts: Classes and influence of the samples.
        layer: One layer; None for all of them.
        r: One range of steps; None for all of them.
        top: Number of samples named of either sign.
    """
    layers, ranges = (slice(None) if i is None else slice(i, i + 1) for i in (layer, r))
    cells = terms.samples[:, layers, ranges]
    samples = cells.sum(dim=(1, 2))
    influence = facts.influence if layer is None and r is None else None  # a derivative of the whole training
    raised, rest_raised = _ranked(samples, top, influence)
    lowered, rest_lowered = _ranked(-samples, top, influence)
    decay, unexplained = int(terms.decay[layers, ranges].sum()), int(terms.unexplained[layers, ranges].sum())
    statistics = int(terms.statistics[ranges].sum()) if layer is None else 0
    terms_sum = int(samples.sum()) + decay + unexplained + statistics
    if layer is None:  # the change of the output, against which the terms are held
        first, last = (0, -1) if r is None else (r, r + 1)
        total = terms.running[last] - terms.running[first]
    else:  # no output of the network is that of one layer
        total = terms_sum
    return {
        "raised": raised,
        "lowered": [[index, -value, effect] for index, value, effect in lowered],
        "rest_raised": rest_raised,
        "rest_lowered": [rest_lowered[0], -rest_lowered[1]],
        "labels": None if facts.labels is None else _by_label(samples, facts.labels, facts.num_classes),
        "layers": cells.sum(dim=(0, 2)).tolist() if layer is None else None,
        "ranges": cells.sum(dim=(0, 1)).tolist() if r is None else None,
        "decay": decay,
        "statistics": statistics,
        "unexplained": unexplained,
        "rounding": total - terms_sum,
        "total": total,
    }


def _ranked(samples: Tensor, top: int, influence: Tensor | None) -> tuple[list[list[Any]], list[int]]:
    """Return the largest positive entries, with their index and influence, and number and sum of the other ones."""
    positive = samples.clamp(min=0)
    values, order = positive.topk(min(top, len(samples)))
    named = [
        [index, value, None if influence is None else significant(float(influence[index]))]
        for index, value in zip(order.tolist(), values.tolist(), strict=True)
        if value > 0
    ]
    count, total = int((positive > 0).sum()), int(positive.sum())
    return named, [count - len(named), total - sum(value for _, value, _ in named)]


def _by_label(samples: Tensor, labels: Tensor, num_classes: int) -> list[int]:
    """Sum by class. Labels that the loss leaves out, as -100, are no classes, and their samples have no terms."""
    known = (labels >= 0) & (labels < num_classes)
    total = torch.zeros(num_classes, dtype=torch.int64)
    sums: list[int] = total.index_add_(0, labels[known], samples[known]).tolist()
    return sums


def _key(layer: int | None, r: int | None) -> str:
    return "|".join(ALL if i is None else str(i) for i in (layer, r))
