"""Losses: values and derivatives for each sample, the output head, and the terms of a batch's loss."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from epk_gp.core.graphs import select_rows, tensors_of
from epk_gp.core.inputs import Signature

Reduction = Literal["mean", "sum"]


def _described(loss: Any) -> str:
    """Return the name of a loss with its non-default options."""
    options = {f.name: getattr(loss, f.name) for f in fields(loss) if getattr(loss, f.name) != f.default}
    options = {"reduction": loss.reduction, **options}
    return f"{type(loss).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of softmax(outputs), as `torch.nn.CrossEntropyLoss`.

    Targets are class indices (M,) int64, or probabilities (M, C) that sum to one. If the network returns several
    positions per sample (tokens or pixels), targets are one class index per position, (M, T) or (M, H, W). The
    network's tensor is then (n, V, T), classes second as in torch, or (n, T, V), classes last. A sample's loss is the
    sum over its positions. The reduction "mean" is the mean over all positions of the batch that count, so that padding
    (`ignore_index`) has no weight.

    Attributes:
        reduction: The reduction of a batch's losses: "mean" (with class weights and class indices: the weighted
            mean) or "sum".
        class_weights: One weight >= 0 per class.
        label_smoothing: Share of the target that is spread evenly over the classes.
        ignore_index: Class index of samples or positions that the loss leaves out; -100 by default, as in
            torch.
        dim: Dimension of the classes in the scores of several positions, 1 or -1. None takes the dimension that class
            indices lack, and 1 if both fit (T = V); the recorder checks this with the steps.
    """

    reduction: Reduction = "mean"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    dim: int | None = None

    __str__ = _described


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Negative log-likelihood of networks that end in log-softmax, as `torch.nn.NLLLoss`.

    Targets are class indices (M,) int64, or one class index per position, as for `CrossEntropy`.

    Attributes:
        reduction: The reduction of a batch's losses: "mean" (with class weights: the weighted mean) or "sum".
        class_weights: One weight >= 0 per class.
        ignore_index: Class index of samples or positions that the loss leaves out; -100 by default.
        dim: The dimension of the classes, as in `CrossEntropy`.
    """

    reduction: Reduction = "mean"
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    dim: int | None = None

    __str__ = _described


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, as `torch.nn.MSELoss`: "mean" averages over samples and outputs, "sum" adds over both.

    Targets have the outputs' shape (M, C), or (M,) if C is 1; or the shape of the tensor that the network returns.
    """

    reduction: Reduction = "mean"


@dataclass(frozen=True)
class PerSampleLoss:
    """A loss that is given by a function.

    Attributes:
        function: Maps outputs (n, C) and targets (n, ...) to n losses, where the loss of sample i depends on row i
            alone. It may also return the reduced loss of the batch, a scalar; it is then called row by row. If the run
            is recorded with `output=`, the function gets the network's full result in place of the outputs.
        reduction: The reduction of a batch's losses: "mean" or "sum".
        name: Name of the loss in the run's header. To load a stored run with such a loss, pass it again as `loss=`.
        counts: Maps targets (n, ...) to the count of each sample, (n,): its number of tokens without padding, or its
            weight. "mean" then divides the sum of the losses by the sum of the counts over the batch, and the function
            returns each sample's sum (or, if scalar, the mean over all counts). None: each sample counts as 1.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    reduction: Reduction = "mean"
    name: str = "custom"
    counts: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        """Raise if `function` or `counts` is not callable.

        Raises:
            TypeError: One of them cannot be called.
        """
        if self.counts is not None and not callable(self.counts):
            raise TypeError(f"counts must be a function of the targets, or None: got {self.counts!r}.")
        if not callable(self.function):
            raise TypeError(f"the loss must be a function of outputs and targets: got {self.function!r}.")


@dataclass(frozen=True)
class UnstatedLoss:
    """A loss without a formula: for each row of the outputs, the gradient of the loop's own backward pass is recorded.

    With delta_i the gradient of the loop's loss in all numbers z_i that the network returned for row i, the loss of the
    row is <delta_i, z_i>: its gradient in the weights is row i's share of the batch's gradient. Derivatives in the
    samples' weights, and other trainings, need the loss as a function.
    """

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        """Return a text in place of the name."""
        return "the loop's own loss"


# Loss modules of torch that compare outputs and targets entry by entry.
ELEMENTWISE = (
    *(nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.PoissonNLLLoss, nn.SoftMarginLoss),
)
Loss = CrossEntropy | NegativeLogLikelihood | MeanSquaredError | PerSampleLoss | UnstatedLoss
ClassLoss = CrossEntropy | NegativeLogLikelihood
IGNORED = -100  # the default of torch's `ignore_index`: no class has this number


def as_loss(loss: object) -> Loss:
    """Return a loss of this package, converted from torch's loss module if necessary; None is an unstated loss.

    Raises:
        TypeError: The object is neither a loss of this package nor a loss module of torch.
        ValueError: The reduction is unknown, or an option is out of its range.
    """
    if loss is None:
        return UnstatedLoss()
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        reduction: Any = loss.reduction  # checked below
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            weights = None if loss.weight is None else tuple(loss.weight.tolist())
            ignored = None if loss.ignore_index == IGNORED else loss.ignore_index
            if isinstance(loss, nn.NLLLoss):
                loss = NegativeLogLikelihood(reduction, weights, ignored)
            else:
                loss = CrossEntropy(reduction, weights, loss.label_smoothing, ignored)
        elif isinstance(loss, nn.MSELoss):
            loss = MeanSquaredError(reduction)
        else:
            loss = PerSampleLoss(loss, reduction, type(loss).__name__)
    if not isinstance(loss, Loss):
        raise TypeError(
            "loss must be epk_gp.CrossEntropy, NegativeLogLikelihood, MeanSquaredError, a torch loss module, "
            "epk_gp.PerSampleLoss(f, reduction=...) around a function, or None for a loss that is not stated: got "
            f"{loss!r}."
        )
    if loss.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum': got {loss.reduction!r}.")
    if isinstance(loss, CrossEntropy) and not 0 <= loss.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1]: got {loss.label_smoothing}.")
    if not isinstance(loss, ClassLoss):
        return loss
    if loss.ignore_index is not None and (type(loss.ignore_index) is not int or abs(loss.ignore_index) >= 1 << 62):
        raise ValueError(f"ignore_index must be a whole number, or None: got {loss.ignore_index!r}.")
    if loss.dim not in (None, 1, -1):
        raise ValueError(f"dim must be 1 for classes second, -1 for classes last, or None: got {loss.dim!r}.")
    if loss.class_weights is not None:
        weights = tuple(map(float, loss.class_weights))
        if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ValueError(f"class weights must be finite, not negative, and not all 0: got {weights}.")
        loss = replace(loss, class_weights=weights)
    return loss


def per_sample_losses(loss: Loss, outputs: Any, targets: Shaped[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Return the losses of n samples, not reduced.

    Args:
        loss: The loss.
        outputs: The loss's input: outputs (n, C), or the network's result (`loss_input`).
        targets: Their targets.

    Raises:
        ValueError: A `PerSampleLoss` returns neither one value per sample nor a scalar, or the loss is not stated.
    """
    if isinstance(loss, UnstatedLoss):
        raise ValueError("the loss must be stated to be computed: the run was recorded with loss=None.")
    y = cast_targets(targets, outputs)
    if isinstance(loss, ClassLoss):
        return _over_positions(loss_of_targets(loss, outputs, y), "sum")
    if isinstance(loss, MeanSquaredError):
        return _over_positions((outputs - fit_targets(y, outputs)).square(), loss.reduction)
    if isinstance(loss.function, ELEMENTWISE) and loss.counts is None:
        function = copy.copy(loss.function)
        function.reduction = "none"
        return _over_positions(function(outputs, fit_targets(y, outputs)), loss.reduction)
    values = loss.function(outputs, y)
    if isinstance(values, Tensor) and values.ndim == 0:
        counts = torch.ones(len(y)) if loss.counts is None or loss.reduction == "sum" else _counts(loss, y)
        rows = zip(counts.tolist(), _rows(outputs, y), strict=True)
        # the mean over a sample with count 0 is NaN
        losses = [count * loss.function(*row) if count else torch.zeros_like(values) for count, row in rows]
        return torch.stack(losses)
    if not isinstance(values, Tensor) or values.shape != targets.shape[:1]:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the loss function must return one value per sample, shape ({len(targets)},), or the batch's reduced "
            f"loss, a scalar: got {got}.{_broadcast_hint(outputs, targets)}"
        )
    return values


def loss_of_targets(loss: ClassLoss, outputs: Any, targets: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
    """Return the loss of each target of n samples, (n,), or of each position, (n, T), if there are several."""
    z = classes_second(loss, outputs, targets)
    options: dict[str, Any] = {"weight": _class_weights(loss, z), "ignore_index": ignored_class(loss)}
    if isinstance(loss, NegativeLogLikelihood):
        return F.nll_loss(z, targets, reduction="none", **options)
    return F.cross_entropy(z, targets, reduction="none", label_smoothing=loss.label_smoothing, **options)


def _rows(outputs: Any, targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the loss's input and target of each row alone."""
    n = len(targets)
    return ((select_rows(outputs, slice(i, i + 1), n), targets[i : i + 1]) for i in range(n))


def _broadcast_hint(outputs: Any, targets: Shaped[Tensor, "n ..."]) -> str:
    """Return advice for functions that compare outputs (n, 1) with targets (n,), which torch broadcasts to (n, n)."""
    if not isinstance(outputs, Tensor) or outputs.shape[1:] != (1,) or targets.ndim != 1:
        return ""
    return " It gets outputs (n, 1) and targets (n,): let it compare outputs[:, 0] with them."


def classes_second(loss: ClassLoss, z: Float[Tensor, "n ..."], targets: Tensor) -> Float[Tensor, "n ..."]:
    """Return class scores in torch's order, (n, V, ...), also if they are (n, ..., V)."""
    if z.ndim <= 2 or targets.is_floating_point():
        return z
    return z.movedim(loss.dim or (1 if targets.shape == (len(z), *z.shape[2:]) else -1), 1)


def fit_targets(targets: Shaped[Tensor, "n ..."], outputs: Float[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
    """Return targets (n,) as (n, 1) if the outputs have this shape, and the reverse; otherwise unchanged."""
    if outputs.shape == (*targets.shape, 1):
        return targets.unsqueeze(-1)
    return targets.squeeze(-1) if (*outputs.shape, 1) == targets.shape else targets


def cast_targets(targets: Tensor, outputs: Any) -> Tensor:
    """Return floating-point targets in the dtype of the outputs."""
    if not targets.is_floating_point():
        return targets
    reference = next((z for z in tensors_of(outputs) if z.is_floating_point()), targets)
    return targets.to(reference.dtype)


def sample_weights(loss: Loss, targets: Shaped[Tensor, "n ..."]) -> Float64[Tensor, " n"]:
    """Return the weights c of the samples in the loss of their batch (docs/theory.md, section 1).

    Raises:
        ValueError: All samples of the batch are ignored or have class weight 0.
    """
    n = len(targets)
    c = torch.ones(n, dtype=torch.float64, device=targets.device)
    if loss.reduction == "sum":
        return c
    if isinstance(loss, PerSampleLoss) and loss.counts is not None:
        total = float(_counts(loss, targets).sum())
        if not total > 0:
            raise ValueError(f"a batch must hold a sample that counts: the counts of its {n} samples sum to {total}.")
        return c / total
    if not isinstance(loss, ClassLoss):
        return c / n
    if targets.is_floating_point():
        return c / (n * targets.shape[2:].numel())  # probabilities (n, V, ...): all positions count
    counted = (targets != ignored_class(loss)).double()
    if loss.class_weights is not None:
        counted = counted * c.new_tensor(loss.class_weights)[targets.clamp(0, len(loss.class_weights) - 1)]
    total = float(counted.sum())
    if total == 0:
        raise ValueError(f"a batch must hold a sample that counts: all {n} are ignored or of a class of weight 0.")
    return c / total


def loss_derivatives(loss: Loss, z: Float[Tensor, "n ..."], targets: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
    """Return the derivative of each sample's loss in its own outputs z, (n, C) or the scores of several positions."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(per_sample_losses(loss, z, targets).sum(), z)
    return derivative


def soft_targets(loss: ClassLoss, targets: Shaped[Tensor, "n ..."], like: Float[Tensor, "_ C"]) -> Float[Tensor, "n C"]:
    """Return class targets as vectors q such that the loss of a sample is -<q, log softmax(outputs)>.

    The vectors q include class weights, label smoothing and ignored samples (docs/theory.md, section 5).

    Args:
        loss: The loss.
        targets: Class indices, or probabilities.
        like: A tensor with C columns that sets the result's dtype and device.

    Raises:
        ValueError: There are several positions per sample.
    """
    if targets.ndim > (2 if targets.is_floating_point() else 1):
        raise ValueError(f"there must be one target per sample: got targets of shape {tuple(targets.shape)}.")
    C = like.shape[1]
    ignored = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    if targets.is_floating_point():
        q = targets.to(like.dtype)
    else:
        ignored = targets == ignored_class(loss)
        q = F.one_hot(targets.masked_fill(ignored, 0), C).to(like.dtype)
    if isinstance(loss, CrossEntropy):
        q = (1 - loss.label_smoothing) * q + loss.label_smoothing / C
    weights = _class_weights(loss, like)
    q = q if weights is None else q * weights
    return q.masked_fill(ignored[:, None], 0)


def _class_weights(loss: ClassLoss, outputs: Tensor) -> Tensor | None:
    return None if loss.class_weights is None else outputs.new_tensor(loss.class_weights)


def ignored_class(loss: ClassLoss) -> int:
    """Return the class index of samples that a loss leaves out."""
    return IGNORED if loss.ignore_index is None else loss.ignore_index


def next_words(
    tokens: Int64[Tensor, "n T"], mask: Shaped[Tensor, "n T"] | None = None, *, ignore_index: int = IGNORED
) -> Int64[Tensor, "n T"]:
    """Return the targets of causal language models: for each position of a text, the next word.

    The loss leaves out the last position, and positions whose next word is padding.

    Args:
        tokens: The words of n texts; or the labels in the form of `transformers`, whose models shift them themselves.
        mask: The attention mask, 0 at padding; None if there is no padding, or if its labels are `ignore_index`.
        ignore_index: Target of the positions that are left out.
    """
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, ignore_index)
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)


def _over_positions(values: Tensor, reduction: Reduction) -> Tensor:
    """Reduce all dimensions but the first."""
    if values.ndim == 1:
        return values
    flat = values.flatten(1)
    return flat.mean(dim=1) if reduction == "mean" else flat.sum(dim=1)


def _counts(loss: PerSampleLoss, targets: Tensor) -> Tensor:
    """Return the count of each sample in a "mean" reduction.

    Raises:
        ValueError: The function of the loss does not return one finite number >= 0 per sample.
    """
    counts = None if loss.counts is None else loss.counts(targets)
    if not isinstance(counts, Tensor) or counts.shape != targets.shape[:1]:
        got = f"shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        raise ValueError(f"counts must return one number per sample, shape ({len(targets)},): got {got}.")
    counts = counts.detach().double()
    if not bool((torch.isfinite(counts) & (counts >= 0)).all()):
        raise ValueError("counts must return finite numbers >= 0: got others.")
    return counts


Head = Literal["logits", "log_softmax"]


def resolve_head(head: Head | None, loss: Loss, num_outputs: int) -> Head:
    """Return the given head, or, for None, the head that follows from the run's loss.

    The outputs of a network trained with cross entropy are logits, and the loss depends on their log-softmax. For any
    other loss the outputs are the predictions: values for squared error, log-probabilities for `NegativeLogLikelihood`.
    The same holds for a single output, whose log-softmax is the constant 0.

    Args:
        head: "logits", "log_softmax", or None.
        loss: The run's loss.
        num_outputs: C.

    Returns:
        The given head; for None, "log_softmax" for cross entropy with C >= 2, and "logits" otherwise.

    Raises:
        ValueError: The head is unknown, or it is the log-softmax of a single output, which is the constant 0.
    """
    if head is None:
        return "log_softmax" if isinstance(loss, CrossEntropy) and num_outputs > 1 else "logits"
    if head not in get_args(Head):
        raise ValueError(f"head must be one of {list(get_args(Head))}: got {head!r}.")
    if head == "log_softmax" and num_outputs == 1:
        raise ValueError('head="log_softmax" needs at least 2 outputs: got a network with 1. Use head="logits".')
    return head


def apply_head(z: Float[Tensor, "*n C"], head: Head) -> Float[Tensor, "*n C"]:
    """Return the outputs f for the logits z."""
    return z if head == "logits" else torch.log_softmax(z, dim=-1)


def loss_terms(signature: Signature, loss: Loss, returned: Any, y: Shaped[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Return the losses of n samples, not reduced; the batch's loss is their sum, weighted by `losses.sample_weights`.

    Args:
        signature: The network's signature.
        loss: The loss.
        returned: The network's result for n inputs.
        y: Their targets.

    Raises:
        ValueError: A `PerSampleLoss` returns neither one value per sample nor a scalar.
    """
    return per_sample_losses(loss, loss_input(signature, loss, returned, y), y)


def loss_input(signature: Signature, loss: Loss, returned: Any, targets: Shaped[Tensor, "n ..."]) -> Any:
    """Return the loss's input, taken from a network's result.

    A `PerSampleLoss` around a user's function takes the whole result if `output=` is given, and otherwise the outputs
    (n, C). The other losses take the tensor that the network returned, or its tensor `logits`, if the shape fits the
    targets; and otherwise the outputs.
    """
    value = None if signature.output is None else own_input(loss, returned, targets)
    return signature.outputs(returned) if value is None else value


def targets_like(
    signature: Signature, loss: Loss, X: Shaped[Tensor, "M ..."], rows: Shaped[Tensor, "n ..."], y: Tensor
) -> list[Shaped[Tensor, "n ..."]]:
    """Return targets y of rows in the shape of a pass: position labels are cut to the start or end of its inputs."""
    length, own = signature.length(X), signature.length(rows)
    if not isinstance(loss, ClassLoss) or y.is_floating_point() or y.shape[1:] != (length,) or own == length:
        return [y]
    return [F.pad(y, ends, value=ignored_class(loss)) for ends in ((0, own - length), (own - length, 0))]


def validate_stated(loss: Loss, what: str) -> None:
    """Raise if a computation needs the loss as a function, and the run was recorded without one.

    Raises:
        ValueError: The loss is not stated.
    """
    if isinstance(loss, UnstatedLoss):
        raise ValueError(
            f"{what} needs the loss as a function of the outputs, which a run recorded with loss=None does not have: "
            "record again with the loop's loss stated. epk_gp.attribute needs none."
        )


def validate_loss_row_independence(
    loss: Loss, value: Any, targets: Shaped[Tensor, "n ..."], alone: Float[Tensor, " n"] | None = None
) -> None:
    """Raise if a loss mixes the rows of a batch, or uses another reduction than it states.

    Args:
        loss: The loss.
        value: The loss's input, taken from the network's result for n inputs.
        targets: Their targets.
        alone: The loss of each sample, with the network evaluated on it alone. It is needed if the loss takes more than
            the outputs, whose rows are checked separately.

    Raises:
        ValueError: The loss cannot take the outputs and targets, or the losses of n samples evaluated together differ
            from those of each sample evaluated alone.
    """
    n, reduced = len(targets), None
    if isinstance(loss, PerSampleLoss):
        together = _loss_together(loss, value, targets)
        reduced = together if isinstance(together, Tensor) and together.ndim == 0 else None
    elif alone is None:
        return
    batched = per_sample_losses(loss, value, targets)
    if alone is None:
        alone = torch.cat([per_sample_losses(loss, *row) for row in _rows(value, targets)])
    rounding = torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()
    if reduced is not None:
        expected = sample_weights(loss, targets).to(alone) @ alone
        if not (reduced - expected).abs() <= rounding:
            raise ValueError(
                f"the loss function must be the {loss.reduction} of the samples' losses, as "
                f"reduction={loss.reduction!r} states: it gives {float(reduced):.6g} for {n} samples, their "
                f"{loss.reduction} is {float(expected):.6g}.{_broadcast_hint(value, targets)}"
            )
    if not (batched - alone).abs().max() <= rounding:
        raise ValueError(
            "a sample's loss must depend on its own row alone: the loss function gives other values for several "
            "samples together than for each alone. Leave sums, means and normalisation over the batch out of it."
        )


def _loss_together(loss: PerSampleLoss, value: Any, targets: Tensor) -> Any:
    """Call a loss's function on all samples together.

    Raises:
        ValueError: It cannot take the outputs and targets.
    """
    y = cast_targets(targets, value)
    if isinstance(value, Tensor) and isinstance(loss.function, ELEMENTWISE):
        y = fit_targets(y, value)
    is_torch_loss = type(loss.function).__module__ == nn.MSELoss.__module__
    try:
        if is_torch_loss and isinstance(value, Tensor) and y.is_floating_point() and y.shape != value.shape:
            raise ValueError(f"{loss.name} needs targets of the outputs' shape")
        return loss.function(value, y)
    except (RuntimeError, TypeError, IndexError, AttributeError, KeyError, ValueError) as error:
        shapes = ", ".join(f"{tuple(z.shape)} of {z.dtype}" for z in tensors_of(value)) or type(value).__name__
        raise ValueError(
            f"the loss must accept the network's outputs and the targets: it fails on shapes {shapes} and "
            f"{tuple(targets.shape)} of {targets.dtype}: {error}"
        ) from error


def loop_losses(
    loss: Loss, returned: Any, value: Any, targets: Shaped[Tensor, "n ..."], c: Float[Tensor, " n"]
) -> list[tuple[float, Callable[[], Tensor]]]:
    """Return functions by which a loop may have computed the loss of a pass from the network's result.

    Each comes with a factor. They are equal up to rounding: the loss in the network's own result; torch's function on
    all positions in one dimension, or with classes second; the mean or the sum of the rows' losses.

    Args:
        loss: The stated loss.
        returned: The network's result.
        value: The loss's input, taken from it.
        targets: The targets.
        c: The weight of each row's loss.
    """
    y, ways, number = cast_targets(targets, value), list[tuple[float, Any]](), torch.ones(len(c), dtype=torch.float64)
    own = [z for z in tensors_of(returned) if z.ndim == 0 and z.requires_grad]
    for reduction, expected in {loss.reduction: sample_weights(loss, y), "sum": number}.items():
        if (factor := _common_factor(c, expected.to(c))) is None:
            continue  # rows with unequal weights
        functions: list[Any] = [lambda: own[0]] * bool(own and reduction == loss.reduction)
        if isinstance(loss, ClassLoss):
            options: dict[str, Any] = {"weight": _class_weights(loss, value), "ignore_index": ignored_class(loss)}
            options |= {"reduction": reduction}
            options |= {"label_smoothing": loss.label_smoothing} if isinstance(loss, CrossEntropy) else {}
            call: Any = F.cross_entropy if isinstance(loss, CrossEntropy) else F.nll_loss
            z = classes_second(loss, value, y)
            if z.ndim > 2 and not y.is_floating_point():
                functions.append(partial(call, z.movedim(1, -1).reshape(-1, z.shape[1]), y.reshape(-1), **options))
            functions.append(partial(call, z, y, **options))
        elif isinstance(loss, MeanSquaredError):
            functions.append(partial(F.mse_loss, value, fit_targets(y, value), reduction=reduction))
        elif isinstance(loss, PerSampleLoss):
            fitted = fit_targets(y, value) if isinstance(value, Tensor) else y
            functions.append(partial(_reduced, loss, value, fitted, reduction))
        ways += [(factor, function) for function in functions]
    return ways


def _reduced(loss: PerSampleLoss, value: Any, y: Tensor, reduction: str) -> Tensor:
    result: Tensor = getattr(loss.function(value, y), reduction)()
    return result


def _common_factor(c: Float[Tensor, " n"], expected: Float[Tensor, " n"]) -> float | None:
    """Return the factor between expected weights and c, up to the rounding of a weight that was read as 1/k."""
    factors = (c / expected)[expected != 0]
    if not len(factors) or bool((factors - factors[0]).abs().max() > 1e-9 * factors[0].abs()):
        return None
    factor = float(factors[0])
    count = round(1 / factor) if factor else 0
    return 1 / count if count and abs(factor * count - 1) < 1e-6 else factor


def own_input(loss: Loss, returned: Any, targets: Tensor) -> Any:
    """Return the loss's input from a network's result, or None if the loss takes the outputs."""
    if isinstance(loss, PerSampleLoss | UnstatedLoss) and not isinstance(getattr(loss, "function", None), ELEMENTWISE):
        return returned
    z = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return None
    if not isinstance(loss, ClassLoss):
        return z if fit_targets(targets, z).shape == z.shape else None
    if targets.is_floating_point():
        return z if targets.shape == z.shape else None
    return z if z.ndim > 1 and classes_second(loss, z, targets)[:, 0].shape == targets.shape else None
