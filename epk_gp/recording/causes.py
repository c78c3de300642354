"""Targets that do not fit a loss, and settings of a network that change during a recording."""

import math
import reprlib
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.core.checks import blocks_of, is_finite, validate_tensor
from epk_gp.core.losses import (
    ELEMENTWISE,
    ClassLoss,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    PerSampleLoss,
    UnstatedLoss,
    classes_second,
    ignored_class,
)
from epk_gp.core.model import FunctionalModel
from epk_gp.core.show import count

_REGRESSION = "For other targets, state loss=nn.MSELoss(), loss=nn.BCEWithLogitsLoss() or the loss of your loop."


def validate_targets(
    loss: Loss, targets: Shaped[Tensor, "..."], num_points: int, num_outputs: int, sample_shape: tuple[int, ...] | None
) -> None:
    """Raise if targets do not fit the data, the network or the loss.

    Args:
        loss: The loss.
        targets: The targets of all samples.
        num_points: Number M of samples.
        num_outputs: Number C of outputs.
        sample_shape: Shape of the loss's input for one sample; (C,) by default.

    Raises:
        TypeError: The targets have a dtype that the loss cannot take.
        ValueError: The targets have another shape, labels out of range, entries that are not finite, or rows that are
            not probability distributions.
    """
    if targets.ndim == 0 or targets.shape[0] != num_points:
        got = targets.shape[0] if targets.ndim else "a scalar"
        raise ValueError(f"targets must have one entry per point: got {got} for {num_points} points.")
    if targets.is_floating_point() and not is_finite(targets):
        row = int((~torch.isfinite(targets.reshape(num_points, -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"targets must be finite: row {row} holds NaN or infinity.")
    sample_shape = (num_outputs,) if sample_shape is None else sample_shape
    is_elementwise = isinstance(loss, PerSampleLoss) and isinstance(loss.function, ELEMENTWISE)
    if isinstance(loss, MeanSquaredError) or is_elementwise:
        name, expected = getattr(loss, "name", type(loss).__name__), (num_points, *sample_shape)
        if expected not in (targets.shape, (*targets.shape, 1)) and (*expected, 1) != targets.shape:
            raise ValueError(f"{name} needs targets of the outputs' shape {expected}: got {tuple(targets.shape)}.")
    if isinstance(loss, MeanSquaredError) and not targets.is_floating_point():
        raise TypeError(f"MeanSquaredError needs floating-point targets: got {targets.dtype}.")
    if isinstance(loss, ClassLoss):
        _validate_classes(loss, targets, sample_shape)


def parse_batch_targets(
    loss: Loss, targets: Any, y: Shaped[Tensor, "M ..."], num_rows: int, num_outputs: int
) -> Shaped[Tensor, "n ..."]:
    """Return the targets that a loop passes for the rows of a batch.

    Raises:
        TypeError: They are not a tensor.
        ValueError: They have another form than y, and are not probabilities for its labels, with one row per batch row.
    """
    validate_tensor(targets, "targets")
    is_mixed = isinstance(loss, CrossEntropy) and y.ndim == 1 and targets.is_floating_point()
    expected = (num_rows, num_outputs) if is_mixed else (num_rows, *y.shape[1:])
    is_same_kind = is_mixed or targets.is_floating_point() == y.is_floating_point()
    if targets.shape != expected or not is_same_kind or isinstance(loss, UnstatedLoss):
        raise ValueError(
            f"targets must be what the stated loss takes of the rows, of shape {expected} and the kind of y "
            f"({y.dtype}): got {tuple(targets.shape)} of {targets.dtype} for {loss}."
        )
    parsed: Tensor = targets.detach().to(y.device)
    return parsed


def _validate_classes(loss: ClassLoss, targets: Tensor, sample_shape: tuple[int, ...]) -> None:
    """Raise if targets are neither labels of classes nor, for `CrossEntropy`, their probabilities."""
    num_points = len(targets)
    positions = sample_shape[1:] if targets.is_floating_point() or targets.shape[1:] == sample_shape[1:] else None
    num_classes = sample_shape[0] if positions is not None or len(sample_shape) == 1 else sample_shape[-1]
    if loss.class_weights is not None and len(loss.class_weights) != num_classes:
        raise ValueError(
            f"there must be one class weight per output: got {len(loss.class_weights)} for {num_classes} outputs."
        )
    if targets.is_floating_point() and isinstance(loss, CrossEntropy):
        if targets.shape != (num_points, *sample_shape):
            raise ValueError(
                f"class probabilities must have shape {(num_points, *sample_shape)}: got {tuple(targets.shape)}. "
                f"Class labels must be int64. {_REGRESSION}"
            )
        if (targets < 0).any() or (targets.sum(dim=1) - 1).abs().max() > 1e-4:
            raise ValueError(f"class probabilities must be non-negative and sum to 1 in every row. {_REGRESSION}")
        return
    if targets.dtype != torch.int64:
        raise TypeError(f"class labels must be int64: got {targets.dtype}. Convert them with .long().")
    if positions is None and targets.shape[1:] != sample_shape[:-1]:
        first, last = (num_points, *sample_shape[1:]), (num_points, *sample_shape[:-1])
        either = f"{first}" if first == last else f"{first}, or {last} where classes are last"
        hint = " Several need scores (n, T, V), not (T, n, V), or as `logits`; or a PerSampleLoss." * (targets.ndim > 1)
        raise ValueError(f"class labels must have shape {either}: got {tuple(targets.shape)}.{hint}")
    counted = (block[block != ignored_class(loss)] for (block,) in blocks_of(targets))
    ends = [torch.stack(labels.aminmax()) for labels in counted if len(labels)]
    if not ends:
        raise ValueError("at least one sample must not be ignored: all class labels are ignore_index.")
    low, high = (int(label) for label in torch.stack(torch.cat(ends).aminmax()))
    if low < 0 or high >= num_classes:
        of_one = " For one logit of class 1 pass loss=torch.nn.BCEWithLogitsLoss() and y.double()." * (num_classes == 1)
        raise ValueError(
            f"class labels must lie in 0..{num_classes - 1} (the network has {count(num_classes, 'output')}): "
            f"got {low}..{high}.{of_one}"
        )


def validate_output_scale(loss: Loss, outputs: Float[Tensor, "n ..."], targets: Shaped[Tensor, "n ..."]) -> None:
    """Raise if the loss takes log-probabilities and the outputs are not log-probabilities.

    Args:
        loss: The loss.
        outputs: The loss's input, (n, C) or with several positions per sample.
        targets: Their targets, which determine the dimension of the classes if there are positions.

    Raises:
        ValueError: The exponentials of a row of outputs do not sum to 1.
    """
    if not isinstance(loss, NegativeLogLikelihood):
        return
    totals = classes_second(loss, outputs.detach(), targets).logsumexp(dim=1).flatten()
    worst = float(totals[totals.abs().argmax()])
    if abs(worst) > torch.finfo(outputs.dtype).eps ** 0.5:
        raise ValueError(
            "NegativeLogLikelihood needs outputs that are log-probabilities: the exponentials of a row sum to "
            f"{math.exp(min(worst, 700.0)):.6g}, not to 1. End the network in LogSoftmax(dim=1), or use CrossEntropy."
        )


_SETTINGS = (bool, int, float, str)  # types of module attributes that are compared


class StepMismatchError(ValueError):
    """A recorded step is not the stated optimizer's step on the stated loss, data and network.

    Attributes:
        step: Number of the step, which the message names; None before it is known.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        """Store the number of the step with the message."""
        super().__init__(message)
        self.step = step


def changed_setting(net: nn.Module, model: FunctionalModel) -> str | None:
    """Describe a changed setting of a network, other than weights and moving statistics, as a clause."""
    recorded = dict(model.module.named_modules())
    for place, part in net.named_modules():
        before, now = _settings(recorded[place]) if place in recorded else {}, _settings(part)
        name = f"module {place!r} ({type(part).__name__})"
        if any(isinstance(value, torch.Generator) for value in vars(part).values()):
            return f"{name} draws from a torch.Generator of its own: let it draw from torch's default one"
        for key in before.keys() & now.keys():
            if before[key] != now[key]:
                present, past = reprlib.repr(now[key]), reprlib.repr(before[key])
                return (
                    f"{name} has {key}={present} and had {key}={past} when recording began: such a setting must stay "
                    "as it is; a number that moves must be a floating-point buffer"
                )
    return None


def _settings(module: nn.Module) -> dict[str, object]:
    """Return the numbers and texts of a module that are neither weights nor moving statistics."""
    settings = {key: value for key, value in vars(module).items() if type(value) in _SETTINGS and key != "training"}
    buffers = {k: v for k, v in module.named_buffers(recurse=False) if not v.is_floating_point()}
    return settings | {key: value.tolist() for key, value in buffers.items() if key != "num_batches_tracked"}
