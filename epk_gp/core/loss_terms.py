"""The terms of a batch's loss, one per sample, as a function of whatever the network returned."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.core.losses import (
    ELEMENTWISE,
    ClassLoss,
    Loss,
    PerSampleLoss,
    broadcast_hint,
    cast_targets,
    classes_second,
    fit_targets,
    per_sample_losses,
    sample_weights,
)
from epk_gp.core.inputs import select_rows, tensors_of
from epk_gp.core.signature import Signature


def loss_terms(
    signature: Signature, loss: Loss, returned: Any, targets: Shaped[Tensor, "n ..."]
) -> Float[Tensor, " n"]:
    """Return the losses of n samples, not reduced; the batch's loss is their sum, weighted by `losses.sample_weights`.

    Args:
        signature: The network's signature.
        loss: The loss.
        returned: What the network returned for n inputs.
        targets: Their targets.

    Raises:
        ValueError: A `PerSampleLoss` returns neither one value per sample nor a scalar.
    """
    return per_sample_losses(loss, loss_input(signature, loss, returned, targets), targets)


def takes_outputs(signature: Signature, loss: Loss, returned: Any, targets: Shaped[Tensor, "n ..."]) -> bool:
    """Return whether a loss depends on the network through its outputs f, (n, C), alone.

    Its derivative in them then gives the gradient of every sample's loss. Without `output=` every loss does.

    Args:
        signature: The network's signature.
        loss: The loss.
        returned: What the network returned for a few inputs.
        targets: Their targets.
    """
    return signature.output is None or _own_input(loss, returned, targets) is None


def loss_input(signature: Signature, loss: Loss, returned: Any, targets: Shaped[Tensor, "n ..."]) -> Any:
    """Return what a loss takes of that which a network returned.

    A `PerSampleLoss` around a function of the user takes all of it where `output=` is given, and the outputs (n, C)
    otherwise. The other losses take the tensor that the network returned, or the tensor `logits` in it, if its shape
    fits the targets; and else the outputs.
    """
    if signature.output is not None:
        value = _own_input(loss, returned, targets)
        if value is not None:
            return value
    return signature.outputs(returned)


def validate_loss_row_independence(
    loss: Loss, value: Any, targets: Shaped[Tensor, "n ..."], alone: Float[Tensor, " n"] | None = None
) -> None:
    """Raise if a loss mixes the rows of a batch, or reduces them by another reduction than it states.

    Args:
        loss: The loss.
        value: What it takes of that which the network returned for n inputs.
        targets: Their targets.
        alone: The loss of each sample where the network is evaluated on it alone; needed where the loss takes more than
            the outputs, whose rows are checked by themselves.

    Raises:
        ValueError: The loss cannot take the outputs and targets, or the losses of n samples evaluated together
            differ from those of each sample evaluated alone.
    """
    n, reduced = len(targets), None
    if isinstance(loss, PerSampleLoss):
        together = _call(loss, value, targets)
        reduced = together if isinstance(together, Tensor) and together.ndim == 0 else None
    elif alone is None:
        return
    batched = per_sample_losses(loss, value, targets)
    if alone is None:
        rows = ((select_rows(value, slice(i, i + 1), n), targets[i : i + 1]) for i in range(n))
        alone = torch.cat([per_sample_losses(loss, z, target) for z, target in rows])
    rounding = torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()
    if reduced is not None:
        expected = sample_weights(loss, targets).to(alone) @ alone
        if not (reduced - expected).abs() <= rounding:
            raise ValueError(
                f"the loss function must be the {loss.reduction} of the samples' losses, as "
                f"reduction={loss.reduction!r} states: it gives {float(reduced):.6g} for {n} samples, their "
                f"{loss.reduction} is {float(expected):.6g}.{broadcast_hint(value, targets)}"
            )
    if not (batched - alone).abs().max() <= rounding:
        raise ValueError(
            "a sample's loss must depend on its own row alone: the loss function gives other values for several "
            "samples together than for each alone. Leave sums, means and normalisation over the batch out of it."
        )


def _call(loss: PerSampleLoss, value: Any, targets: Tensor) -> Any:
    """Call the function of a loss on the samples together.

    Raises:
        ValueError: It cannot take the outputs and targets.
    """
    y = cast_targets(targets, value)
    if isinstance(value, Tensor) and isinstance(loss.function, ELEMENTWISE):
        y = fit_targets(y, value)
    is_torch_loss = type(loss.function).__module__ == nn.MSELoss.__module__
    if is_torch_loss and isinstance(value, Tensor) and y.is_floating_point() and y.shape != value.shape:
        raise ValueError(
            f"{loss.name} needs targets of the outputs' shape (M, {', '.join(map(str, value.shape[1:]))}): got "
            f"(M{''.join(f', {size}' for size in targets.shape[1:])})."
        )
    try:
        return loss.function(value, y)
    except (RuntimeError, TypeError, IndexError, AttributeError, KeyError, ValueError) as error:
        shapes = ", ".join(f"{tuple(z.shape)} of {z.dtype}" for z in tensors_of(value)) or type(value).__name__
        raise ValueError(
            f"the loss must accept the network's outputs and the targets: it fails on shapes {shapes} and "
            f"{tuple(targets.shape)} of {targets.dtype}: {error}"
        ) from error


def _own_input(loss: Loss, returned: Any, targets: Tensor) -> Any:
    """Return what a loss takes of that which a network returned, or None where it takes the outputs."""
    if isinstance(loss, PerSampleLoss) and not isinstance(loss.function, ELEMENTWISE):
        return returned
    z = returned if isinstance(returned, Tensor) else _logits(returned)
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return None
    if not isinstance(loss, ClassLoss):
        return z if fit_targets(targets, z).shape == z.shape else None
    if targets.is_floating_point():
        return z if targets.shape == z.shape else None
    return z if z.ndim > 1 and classes_second(z, targets)[:, 0].shape == targets.shape else None


def _logits(returned: Any) -> Any:
    return returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
