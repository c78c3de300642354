"""Whether training points near the decision boundary weigh more than others of their class."""

from dataclasses import dataclass
from statistics import fmean

from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.analysis.measures import rank_correlation
from epk_gp.core.checks import validate_labels, validate_number, validate_tensor


@dataclass(frozen=True)
class BoundaryWeightRatio:
    """Sizes of weights near the decision boundary relative to those elsewhere in the same class.

    Attributes:
        ratio: Mean size near the boundary divided by the mean size elsewhere, averaged over classes; 1 for no effect.
        rank_correlation: Rank correlation of the size with the margin, averaged over classes; negative if points near
            the boundary weigh more. None if the sizes do not differ within any class.
    """

    ratio: float
    rank_correlation: float | None


def margins(outputs: Float[Tensor, "M C"], labels: Int64[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Return the output of each point's class minus the largest other output: 0 on the boundary, negative beyond it.

    Raises:
        TypeError: The outputs are not a tensor of float32 or float64, or the labels are not integers.
        ValueError: There is not one label in 0 .. C - 1 per point.
    """
    validate_tensor(outputs, "outputs", ndim=2, floating=True)
    validate_labels(labels, *outputs.shape)
    labels = labels.long()
    of_label = outputs.gather(1, labels[:, None])[:, 0]
    largest_other = outputs.scatter(1, labels[:, None], float("-inf")).amax(dim=1)
    return of_label - largest_other


def boundary_weight_ratio(
    weights: Float[Tensor, " M"], margin: Float[Tensor, " M"], labels: Int64[Tensor, " M"], *, share: float = 0.1
) -> BoundaryWeightRatio:
    """Compare the sizes of weights near the boundary with those elsewhere, class by class.

    Args:
        weights: A kernel value or a contribution per training point.
        margin: Margin of each point, see `margins`.
        labels: Class of each point.
        share: Share of each class that counts as near the boundary: its points with the smallest |margin|.

    Raises:
        TypeError: A tensor or the share is of the wrong kind.
        ValueError: There are no points or not one label and margin per point, the share lies outside (0, 1), or all
            points or none of a class would count as near the boundary, or all weights elsewhere in a class are zero.
    """
    validate_number(share, "share")
    validate_tensor(weights, "weights", ndim=1)
    validate_tensor(margin, "margin", ndim=1)
    validate_labels(labels, len(weights))
    if margin.shape != weights.shape or not len(weights):
        raise ValueError(
            f"weights and margin must have one entry per point, at least one: got {len(weights)} and {len(margin)}."
        )
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1: got {share}.")
    ratios, correlations = [], []
    for c in labels.unique():
        in_class = labels == c
        size, distance = weights[in_class].abs(), margin[in_class].abs()
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
    defined = [r for r in correlations if r is not None]
    return BoundaryWeightRatio(ratio=fmean(ratios), rank_correlation=fmean(defined) if defined else None)
