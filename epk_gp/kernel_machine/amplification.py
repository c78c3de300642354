"""Amplification: by how much single contributions are larger than what they sum to."""

from jaxtyping import Float
from torch import Tensor

from epk_gp.kernel_machine.attribute import GroupedAttribution


def amplification(parts: GroupedAttribution) -> Float[Tensor, "n C *groups"]:
    """Return the contributions' absolute values, summed, over the absolute value of their sum.

        sum_i |share_i| / |sum_i share_i|

    It is 1 where all training samples pull in one direction, and large where they nearly cancel: in a step, or by a
    preconditioner that blows small gradients up. Single contributions are then to be read with care.

    Args:
        parts: An attribution along axes of training samples, and others such as `by_step`.

    Returns:
        One ratio per point, output and group of the other axes, in their order. Weight decay counts as one more
        contribution. NaN where nothing was added, infinity where contributions cancel to zero.

    Raises:
        ValueError: The attribution is not split along the training samples.
    """
    places = [2 + number for number, axis in enumerate(parts.axes) if axis.kind == "sample"]
    if not places:
        raise ValueError(
            "parts must be split along the training samples: its axes are "
            f"{', '.join(axis.kind for axis in parts.axes) or 'none'}. Add by_sample(trajectory)."
        )
    sizes = parts.values.abs().sum(dim=places) + parts.decay.abs().sum(dim=places)
    return sizes / (parts.values.sum(dim=places) + parts.decay.sum(dim=places)).abs()
