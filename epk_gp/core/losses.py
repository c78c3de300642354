"""Losses: the value of each sample, its derivative in the outputs, and the weight of a sample in its batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of softmax(outputs), as `torch.nn.CrossEntropyLoss`.

    Targets are class indices (M,) int64, or probabilities (M, C) that sum to one.

    Attributes:
        reduction: How the losses of a batch are reduced: "mean" (with class weights and class indices: the weighted
            mean) or "sum".
        class_weights: One weight >= 0 per class.
        label_smoothing: Share of the target that is spread evenly over the classes.
        ignore_index: Class index of the samples that are left out of the loss.
    """

    reduction: Reduction = "mean"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __str__(self) -> str:
        """Return the name of the loss with the options that differ from their defaults."""
        return _describe(self)


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Negative log-likelihood of networks that end in log-softmax, as `torch.nn.NLLLoss`.

    Targets are class indices (M,) int64.

    Attributes:
        reduction: How the losses of a batch are reduced: "mean" (with class weights: the weighted mean) or "sum".
        class_weights: One weight >= 0 per class.
        ignore_index: Class index of the samples that are left out of the loss.
    """

    reduction: Reduction = "mean"
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None

    def __str__(self) -> str:
        """Return the name of the loss with the options that differ from their defaults."""
        return _describe(self)


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, as `torch.nn.MSELoss`: "mean" averages over samples and outputs, "sum" adds both.

    Targets have the outputs' shape (M, C).
    """

    reduction: Reduction = "mean"


@dataclass(frozen=True)
class PerSampleLoss:
    """A loss given by a function.

    Attributes:
        function: Maps outputs (n, C) and targets (n, ...) to n losses, where the loss of sample i depends on row i
            alone; or to the reduced loss of the batch, a scalar, and is then called row by row.
        reduction: How the losses of a batch are reduced: "mean" or "sum".
        name: Name of the loss in the run's header. To load a stored run with such a loss, pass it again as `loss=`.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    reduction: Reduction = "mean"
    name: str = "custom"

    def __post_init__(self) -> None:
        """Raise if `function` is not callable.

        Raises:
            TypeError: `function` cannot be called.
        """
        if not callable(self.function):
            raise TypeError(f"the loss must be a function of outputs and targets: got {self.function!r}.")


Loss = CrossEntropy | NegativeLogLikelihood | MeanSquaredError | PerSampleLoss
_Classes = CrossEntropy | NegativeLogLikelihood
_TORCH_IGNORES = -100  # the default of torch's `ignore_index`: no class has this number


def as_loss(loss: object) -> Loss:
    """Return a loss of this package, converted from torch's loss module if one is given.

    Raises:
        TypeError: The object is neither a loss of this package nor a loss module of torch.
        ValueError: The reduction is unknown, or an option is out of its range.
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        weights, ignored = _options_of(loss)
        loss = CrossEntropy(loss.reduction, weights, loss.label_smoothing, ignored)  # type: ignore[arg-type]
    elif isinstance(loss, nn.NLLLoss):
        loss = NegativeLogLikelihood(loss.reduction, *_options_of(loss))  # type: ignore[arg-type]  # checked below
    elif isinstance(loss, nn.MSELoss):
        loss = MeanSquaredError(loss.reduction)  # type: ignore[arg-type]  # checked below
    elif isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        loss = PerSampleLoss(loss, loss.reduction, type(loss).__name__)  # type: ignore[arg-type]  # checked below
    if not isinstance(loss, Loss):
        raise TypeError(
            "loss must be epk_gp.CrossEntropy, NegativeLogLikelihood, MeanSquaredError, a torch loss module, or "
            f"epk_gp.PerSampleLoss(f, reduction=...) around a function: got {loss!r}."
        )
    if loss.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum': got {loss.reduction!r}.")
    if isinstance(loss, CrossEntropy) and not 0 <= loss.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1]: got {loss.label_smoothing}.")
    if isinstance(loss, _Classes) and loss.class_weights is not None:
        weights = tuple(float(weight) for weight in loss.class_weights)
        if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ValueError(f"class weights must be finite, not negative, and not all 0: got {weights}.")
        loss = replace(loss, class_weights=weights)
    return loss


def per_sample_losses(
    loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]
) -> Float[Tensor, " n"]:
    """Return the losses of n samples, not reduced.

    Raises:
        ValueError: A `PerSampleLoss` returns neither one value per sample nor a scalar.
    """
    y = _cast_targets(targets, outputs)
    if isinstance(loss, _Classes):
        options: dict[str, Any] = {"weight": _class_weights(loss, outputs), "ignore_index": _ignore_index(loss)}
        if isinstance(loss, NegativeLogLikelihood):
            return F.nll_loss(outputs, y, reduction="none", **options)
        return F.cross_entropy(outputs, y, reduction="none", label_smoothing=loss.label_smoothing, **options)
    if isinstance(loss, MeanSquaredError):
        squares = (outputs - y).square()
        return squares.mean(dim=1) if loss.reduction == "mean" else squares.sum(dim=1)
    values = loss.function(outputs, y)
    if isinstance(values, Tensor) and values.ndim == 0:
        return _row_by_row(loss, outputs, y)
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the loss function must return one value per sample, shape ({outputs.shape[0]},), or the batch's reduced "
            f"loss, a scalar: got {got}."
        )
    return values


def validate_loss_row_independence(loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]) -> None:
    """Raise if a `PerSampleLoss` mixes the rows of a batch, or reduces them by another reduction than it states.

    Raises:
        ValueError: The loss cannot take the outputs and targets, or the losses of n samples evaluated together
            differ from those of each sample evaluated alone.
    """
    if not isinstance(loss, PerSampleLoss):
        return
    is_torch_loss = type(loss.function).__module__ == nn.MSELoss.__module__
    if is_torch_loss and targets.is_floating_point() and targets.shape != outputs.shape:
        advice = " Give y a last dimension: y[:, None]." if (*targets.shape, 1) == tuple(outputs.shape) else ""
        raise ValueError(
            f"{loss.name} needs targets of the outputs' shape (M, {', '.join(map(str, outputs.shape[1:]))}): got "
            f"(M{''.join(f', {size}' for size in targets.shape[1:])}).{advice}"
        )
    try:
        together = loss.function(outputs, _cast_targets(targets, outputs))
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the loss must accept the network's outputs and the targets: it fails on shapes {tuple(outputs.shape)} "
            f"and {tuple(targets.shape)} of {outputs.dtype} and {targets.dtype}: {error}"
        ) from error
    is_reduced = isinstance(together, Tensor) and together.ndim == 0
    batched = together if is_reduced else per_sample_losses(loss, outputs, targets)
    rows = zip(outputs.split(1), targets.split(1), strict=True)
    alone = torch.cat([per_sample_losses(loss, z, target) for z, target in rows])
    expected = (alone.mean() if loss.reduction == "mean" else alone.sum()) if is_reduced else alone
    if (batched - expected).abs().max() <= torch.finfo(outputs.dtype).eps ** 0.5 * alone.abs().max():
        return
    if is_reduced:
        raise ValueError(
            f"the loss function must be the {loss.reduction} of the samples' losses, as reduction={loss.reduction!r} "
            f"states: it gives {float(batched):.6g} for {len(outputs)} samples, their {loss.reduction} is "
            f"{float(expected):.6g}."
        )
    raise ValueError(
        "a sample's loss must depend on its own row alone: the loss function gives other values for several "
        "samples together than for each alone. Leave sums, means and normalisation over the batch out of it."
    )


def sample_weights(loss: Loss, targets: Shaped[Tensor, "n ..."]) -> Float64[Tensor, " n"]:
    """Return the weights c of the samples in the loss of their batch (docs/theory.md, section 1).

    Raises:
        ValueError: All samples of the batch are ignored or have a class weight of 0.
    """
    n = len(targets)
    c = torch.ones(n, dtype=torch.float64, device=targets.device)
    if loss.reduction == "sum":
        return c
    if not isinstance(loss, _Classes) or targets.is_floating_point():
        return c / n
    counted = c if loss.ignore_index is None else (targets != loss.ignore_index).double()
    if loss.class_weights is not None:
        counted = counted * c.new_tensor(loss.class_weights)[targets.clamp(0, len(loss.class_weights) - 1)]
    total = float(counted.sum())
    if total == 0:
        raise ValueError(
            f"a batch must hold a sample that counts: all {n} are ignored or of a class with weight 0. Leave the batch "
            "out."
        )
    return c / total


def loss_derivatives(
    loss: Loss, outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, "n ..."]
) -> Float[Tensor, "n C"]:
    """Return the derivative of each sample's loss in its own outputs."""
    with torch.enable_grad():
        z = outputs.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(per_sample_losses(loss, z, targets).sum(), z)
    return derivative


def soft_targets(
    loss: CrossEntropy | NegativeLogLikelihood, targets: Shaped[Tensor, "n ..."], reference: Float[Tensor, "_ C"]
) -> Float[Tensor, "n C"]:
    """Return class targets as vectors q such that the loss of a sample is -<q, log softmax(outputs)>.

    Class weights, label smoothing and ignored samples are contained in q (docs/theory.md, section 5).

    Args:
        loss: The loss.
        targets: Class indices, or probabilities.
        reference: Tensor with C columns, whose dtype and device the result has.
    """
    C = reference.shape[1]
    ignored = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    if targets.is_floating_point():
        q = targets.to(reference.dtype)
    else:
        ignored = targets == _ignore_index(loss)
        q = F.one_hot(targets.masked_fill(ignored, 0), C).to(reference.dtype)
    if isinstance(loss, CrossEntropy):
        q = (1 - loss.label_smoothing) * q + loss.label_smoothing / C
    weights = _class_weights(loss, reference)
    q = q if weights is None else q * weights
    return q.masked_fill(ignored[:, None], 0)


def validate_targets(loss: Loss, targets: Shaped[Tensor, "..."], num_points: int, num_outputs: int) -> None:
    """Raise if targets do not fit the data, the network or the loss.

    Raises:
        TypeError: The targets have a dtype that the loss cannot take.
        ValueError: The targets have another shape, labels out of range, entries that are not finite, or rows that are
            not probability distributions.
    """
    if targets.ndim == 0 or targets.shape[0] != num_points:
        got = targets.shape[0] if targets.ndim else "a scalar"
        raise ValueError(f"targets must have one entry per point: got {got} for {num_points} points.")
    if targets.is_floating_point() and not torch.isfinite(targets).all():
        row = int((~torch.isfinite(targets.reshape(num_points, -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"targets must be finite: row {row} holds NaN or infinity.")
    if isinstance(loss, MeanSquaredError) and targets.shape != (num_points, num_outputs):
        raise ValueError(
            f"MeanSquaredError needs targets of the outputs' shape {(num_points, num_outputs)}: "
            f"got {tuple(targets.shape)}."
        )
    if isinstance(loss, MeanSquaredError) and not targets.is_floating_point():
        raise TypeError(f"MeanSquaredError needs floating-point targets: got {targets.dtype}.")
    if not isinstance(loss, _Classes):
        return
    if loss.class_weights is not None and len(loss.class_weights) != num_outputs:
        raise ValueError(
            f"there must be one class weight per output: got {len(loss.class_weights)} for {num_outputs} outputs."
        )
    if targets.is_floating_point() and isinstance(loss, CrossEntropy):
        if targets.shape != (num_points, num_outputs):
            raise ValueError(
                f"class probabilities must have shape {(num_points, num_outputs)}: got {tuple(targets.shape)}. "
                "Class labels must be int64."
            )
        if (targets < 0).any() or (targets.sum(dim=1) - 1).abs().max() > 1e-4:
            raise ValueError("class probabilities must be non-negative and sum to 1 in every row.")
        return
    if targets.dtype != torch.int64:
        raise TypeError(f"class labels must be int64: got {targets.dtype}. Convert them with .long().")
    if targets.ndim != 1:
        raise ValueError(f"class labels must have shape ({num_points},): got {tuple(targets.shape)}.")
    counted = targets if loss.ignore_index is None else targets[targets != loss.ignore_index]
    if not len(counted):
        raise ValueError("at least one sample must not be ignored: all class labels are ignore_index.")
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or high >= num_outputs:
        raise ValueError(
            f"class labels must lie in 0..{num_outputs - 1} (the network has {num_outputs} outputs): got {low}..{high}."
        )


def validate_output_scale(loss: Loss, outputs: Float[Tensor, "n C"]) -> None:
    """Raise if the loss takes log-probabilities and the outputs are not log-probabilities.

    Raises:
        ValueError: The exponentials of a row of outputs do not sum to 1.
    """
    if not isinstance(loss, NegativeLogLikelihood):
        return
    totals = outputs.detach().logsumexp(dim=1)
    worst = float(totals[totals.abs().argmax()])
    if abs(worst) > torch.finfo(outputs.dtype).eps ** 0.5:
        raise ValueError(
            "NegativeLogLikelihood needs outputs that are log-probabilities: the exponentials of a row sum to "
            f"{math.exp(min(worst, 700.0)):.6g}, not to 1. End the network in LogSoftmax(dim=1), or use CrossEntropy."
        )


def _describe(loss: CrossEntropy | NegativeLogLikelihood) -> str:
    options = {f.name: getattr(loss, f.name) for f in fields(loss) if getattr(loss, f.name) != f.default}
    options = {"reduction": loss.reduction, **options}
    return f"{type(loss).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _options_of(loss: nn.CrossEntropyLoss | nn.NLLLoss) -> tuple[tuple[float, ...] | None, int | None]:
    weights = None if loss.weight is None else tuple(loss.weight.tolist())
    return weights, None if loss.ignore_index == _TORCH_IGNORES else loss.ignore_index


def _class_weights(loss: CrossEntropy | NegativeLogLikelihood, outputs: Tensor) -> Tensor | None:
    return None if loss.class_weights is None else outputs.new_tensor(loss.class_weights)


def _ignore_index(loss: CrossEntropy | NegativeLogLikelihood) -> int:
    return _TORCH_IGNORES if loss.ignore_index is None else loss.ignore_index


def _row_by_row(loss: PerSampleLoss, outputs: Tensor, y: Tensor) -> Tensor:
    rows = [loss.function(z, target) for z, target in zip(outputs.split(1), y.split(1), strict=True)]
    return torch.stack(rows)


def _cast_targets(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets.to(outputs.dtype) if targets.is_floating_point() else targets
