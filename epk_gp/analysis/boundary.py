"""Whether training points near the decision boundary weigh more than others of their class."""

from dataclasses import dataclass
from statistics import fmean

from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.analysis.ranks import rank_correlation


@dataclass(frozen=True)
class BoundaryWeightRatio:
    """What nearness to the boundary does to the sizes of weights, within classes.

    Attributes:
        ratio: Mean size near the boundary over mean size elsewhere, averaged over classes; 1 for no effect.
        rank_correlation: Of the size with the margin, averaged over classes; negative if points near the boundary weigh
            more. None where no class has sizes that differ.
    """

    ratio: float
    rank_correlation: float | None


def margins(outputs: Float[Tensor, "M C"], labels: Int64[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Measure how far each point is on its side: its class's output less the largest other (0 on the boundary)."""
    own = outputs.gather(1, labels[:, None])[:, 0]
    others = outputs.scatter(1, labels[:, None], float("-inf")).amax(dim=1)
    return own - others


def boundary_weight_ratio(
    weights: Float[Tensor, " M"], margin: Float[Tensor, " M"], labels: Int64[Tensor, " M"], *, share: float = 0.1
) -> BoundaryWeightRatio:
    """Compare the sizes of weights near the boundary with those elsewhere, class by class.

    Args:
        weights: A kernel value or a contribution per training point.
        margin: Of each point, see `margins`.
        labels: Class of each point.
        share: Part of each class, with the smallest |margin|, that counts as near the boundary.

    Raises:
        ValueError: A share outside (0, 1), or a class of which all points or none would be near, or whose other weights
            are all zero.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1: got {share}.")
    ratios, correlations = [], []
    for c in labels.unique():
        rows = labels == c
        size, distance = weights[rows].abs(), margin[rows].abs()
        count = round(share * len(size))
        order = distance.argsort()
        near, rest = size[order[:count]], size[order[count:]]
        if not 0 < count < len(size) or not rest.mean() > 0:
            raise ValueError(
                f"class {int(c)} must have points near and off the boundary, and weights that are not zero: got "
                f"{count} near of {len(size)}. Change the share."
            )
        ratios.append(float(near.mean() / rest.mean()))
        correlations.append(rank_correlation(size, distance))
    known = [r for r in correlations if r is not None]
    return BoundaryWeightRatio(
        ratio=fmean(ratios),
        rank_correlation=fmean(known) if known else None,
    )
