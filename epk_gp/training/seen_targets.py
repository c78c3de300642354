"""The targets and weights that a loop's loss used, where they are unlike the recorded ones.

A loop computes its loss outside of the network. What the loss did to a row shows in its gradient in the row's outputs,
delta_i = c_i d loss_i / d z_i: under cross entropy it is c_i (softmax(z_i) - q_i), so the target q_i (mixup, CutMix,
label noise) and the weight c_i of a row follow from it. What does not follow is left as stated, and the check of the
step's gradient decides.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from epk_gp.core.losses import (
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    classes_second,
    ignored_class,
    loss_derivatives,
    sample_weights,
    soft_targets,
)
from epk_gp.core.step import SeenRows
from epk_gp.core.checks import is_finite

# Relative differences of a gradient in the outputs that count as rounding, by the dtype of the outputs.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_LOW_PRECISION = 2e-2

# Share of the rows whose targets may be unlike the recorded ones while their inputs are as recorded: label noise. More
# of them are other targets than those that were stated.
_MOST_NOISY = 0.75
_FEW_ROWS = 4

# Weights of samples do not follow the outputs. Where the ranks of weights and losses agree by more than that, another
# loss is at work (focal loss: a cross entropy whose weights are a function of its value).
_FOLLOWS_LOSS = 0.9
_ENOUGH_ROWS = 6


@dataclass(frozen=True, eq=False)
class OutputGradient:
    """What the backward pass brought to the outputs of a forward pass.

    Attributes:
        outputs: z, (n, C); scores of several positions have further dimensions.
        gradient: delta, the gradient of the loop's loss in z, of z's shape.
        is_recorded_input: Which rows of the input are X[batch], (n,).
    """

    outputs: Float[Tensor, "n ..."]
    gradient: Float[Tensor, "n ..."]
    is_recorded_input: Shaped[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class SeenTargets:
    """What the loss of a forward pass used.

    Attributes:
        targets: Targets of rows that have others than the recorded ones; None if no row has.
        c: The weight of each row in the loss.
    """

    targets: SeenRows | None
    c: Float64[Tensor, " n"]


def seen_targets(loss: Loss, seen: OutputGradient, y: Shaped[Tensor, "n ..."], c: Float64[Tensor, " n"]) -> SeenTargets:
    """Find the targets and weights that explain the gradient in the outputs.

    Args:
        loss: The stated loss.
        seen: Outputs, and the gradient of the loop's loss in them.
        y: The recorded targets of the rows.
        c: The weights that the stated loss gives to the rows.
    """
    stated = SeenTargets(None, c)
    z, delta = seen.outputs, seen.gradient
    tolerance = _TOLERANCE.get(z.dtype, _LOW_PRECISION)
    z, delta, c = z.double(), delta.double(), c.to(device=z.device, dtype=torch.float64)
    if not torch.isfinite(delta).all() or not c.any():
        return stated
    derivative = loss_derivatives(loss, z, y)
    expected = c[:, None] * derivative
    scale = c.abs()[:, None] * (1 + derivative.abs().amax(dim=1, keepdim=True))
    is_like = _within(delta - expected, tolerance * scale)
    if is_like.all():
        return stated
    common = float((delta * expected).sum() / expected.square().sum().clamp(min=1e-300))
    if _within(delta - common * expected, tolerance * scale * max(1.0, abs(common))).all():
        return stated  # one factor for all rows: the scale of a mixed-precision loop, or another weight of the batch
    ratio = (delta * derivative).sum(dim=1) / derivative.square().sum(dim=1).clamp(min=1e-300)
    is_weighted = _within(delta - ratio[:, None] * derivative, tolerance * (scale + ratio.abs()[:, None]))
    if is_weighted.all() and _are_weights(ratio, derivative, seen.is_recorded_input):
        return SeenTargets(None, torch.where(is_like, c, ratio).cpu())
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood | MeanSquaredError):
        return stated
    if not isinstance(loss, MeanSquaredError) and loss.class_weights is not None:
        return stated
    values, is_valid = _targets(loss, z, delta, c, tolerance)
    other = ~is_like
    if not is_valid[other].all() or not _is_plausible(loss, values, y, other, seen.is_recorded_input):
        return stated
    index = other.nonzero().squeeze(1)
    return SeenTargets(SeenRows(index, values[index].to(seen.outputs.dtype)), c.cpu())


def seen_positions(
    loss: Loss, seen: OutputGradient, y: Shaped[Tensor, "n ..."], c: Float64[Tensor, " n"]
) -> SeenTargets:
    """Find the positions of the rows, tokens or pixels, that a loop's loss left out: they have no gradient.

    A masked language model is trained on other positions each time. Only such targets are found that are the recorded
    ones with more positions ignored.

    Args:
        loss: The stated loss.
        seen: Scores of each position, and the gradient of the loop's loss in them; (n, V, ...) or (n, ..., V).
        y: The recorded labels of the positions, (n, ...).
        c: The weights that the stated loss gives to the rows.
    """
    stated = SeenTargets(None, c)
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood) or y.is_floating_point():
        return stated
    z, delta = classes_second(seen.outputs, y).double(), classes_second(seen.gradient, y).double()
    if y.shape != (len(z), *z.shape[2:]) or not is_finite(delta):
        return stated
    tolerance = _TOLERANCE.get(seen.outputs.dtype, _LOW_PRECISION)
    factors = c.to(z) / sample_weights(loss, y).to(z)
    labels = y.masked_fill(~(delta != 0).any(dim=1), ignored_class(loss))
    if _explains(loss, z, delta, (y, c.to(z)), tolerance) or bool((labels == ignored_class(loss)).all()):
        return stated
    weights = sample_weights(loss, labels).to(z) * factors[0]
    if not torch.equal(factors, factors[:1].expand_as(factors)):
        return stated
    if not _explains(loss, z, delta, (labels, weights), tolerance):
        return stated
    index = (labels != y).flatten(1).any(dim=1).nonzero().squeeze(1)
    return SeenTargets(SeenRows(index, labels[index]), weights.cpu())


def _explains(loss: Loss, z: Tensor, delta: Tensor, targets: tuple[Tensor, Tensor], tolerance: float) -> bool:
    """Return whether labels of positions, and weights of rows, give a gradient."""
    labels, weights = targets
    expected = weights.view(-1, *[1] * (z.ndim - 1)) * loss_derivatives(loss, z, labels)
    return bool(((delta - expected).abs() <= tolerance * expected.abs().amax()).all())


def _within(difference: Tensor, bound: Tensor) -> Tensor:
    return (difference.abs() <= bound).all(dim=1)


def _are_weights(ratio: Tensor, derivative: Tensor, is_recorded_input: Tensor) -> bool:
    """Return whether factors of the rows' gradients are weights of samples, and not the sign of another loss.

    With two classes, or one output, the gradients of all losses are multiples of each other: only the ranks tell then.
    """
    num_outputs, rows = derivative.shape[1], len(ratio)
    if num_outputs == 1 or bool((ratio < 0).any()):
        return False
    if num_outputs == 2 and (rows < _ENOUGH_ROWS or not is_recorded_input.all()):
        return False
    if rows < _ENOUGH_ROWS:
        return True
    ranks = torch.stack([value.argsort().argsort().double() for value in (ratio, derivative.abs().amax(dim=1))])
    return abs(float(torch.corrcoef(ranks)[0, 1])) <= _FOLLOWS_LOSS


def _targets(
    loss: CrossEntropy | NegativeLogLikelihood | MeanSquaredError,
    z: Tensor,
    delta: Tensor,
    c: Tensor,
    tolerance: float,
) -> tuple[Float[Tensor, "n C"], Shaped[Tensor, " n"]]:
    """Return the targets that explain a gradient, and for which rows they are targets at all."""
    scaled = delta / c[:, None].clamp(min=1e-300)
    if isinstance(loss, MeanSquaredError):
        factor = z.shape[1] if loss.reduction == "mean" else 1
        return z - scaled * factor / 2, torch.ones_like(c, dtype=torch.bool)
    q = z.softmax(dim=1) - scaled if isinstance(loss, CrossEntropy) else -scaled
    room = 10 * tolerance
    floor = loss.label_smoothing / z.shape[1] if isinstance(loss, CrossEntropy) else 0.0
    is_valid = (q >= -room).all(dim=1) & ((q.sum(dim=1) - 1).abs() <= room)
    if z.shape[1] > 2:  # two mixed labels leave a class out; the gradient of another loss does not
        is_valid &= (q.amin(dim=1) - floor).abs() <= room
    hard = q.round()
    is_hard = ((q - hard).abs() <= room).all(dim=1)
    return torch.where(is_hard[:, None], hard, q), is_valid


def _is_plausible(
    loss: CrossEntropy | NegativeLogLikelihood | MeanSquaredError,
    values: Tensor,
    y: Tensor,
    other: Tensor,
    is_recorded_input: Tensor,
) -> bool:
    """Return whether other targets are those of a loop that changes targets, and not of one that was stated wrongly."""
    noisy = other & is_recorded_input
    if not noisy.any():
        return True  # mixed rows with mixed targets
    count, rows = int(noisy.sum()), len(noisy)
    if isinstance(loss, MeanSquaredError):
        return rows >= _FEW_ROWS and count <= rows / 2
    if not is_recorded_input.all():
        return True
    if not bool((values[other] == values[other].round()).all()):
        return values.shape[1] > 2  # mixed inside the network
    expected = soft_targets(loss, y, values)
    if count > 1 and torch.equal(values[other].sum(dim=0), expected[other].sum(dim=0).round()):
        return False  # the recorded targets in another order
    return count <= max(1, _MOST_NOISY * rows)
