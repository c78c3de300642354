"""What a recorder accepts: network, optimizer, data and batches, checked before they are used."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.recording.networks import Skeleton, refuse_random_or_coupled_outputs, unflatten
from epk_gp.recording.trajectory import check_finite, off_initial, probe_outputs


def trained_names(net: nn.Module, optimizer: Optimizer) -> tuple[str, ...]:
    """Name the weights that an optimizer trains.

    Raises:
        TypeError: No network.
        ValueError: The optimizer trains something else.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    names = {id(p): name for name, p in net.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(p) not in names for p in trained):
        raise ValueError(
            "the optimizer must train the network's parameters only: it holds a tensor that is not one of them."
        )
    held = {id(p) for p in trained}
    return tuple(name for name, p in net.named_parameters() if id(p) in held)


def checked_data(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the training data.

    Raises:
        TypeError: No tensors.
        ValueError: Not one row per point, on two devices, NaN or infinity.
    """
    for name, value in (("X", X), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor."
            )
    if X.ndim < 2 or len(X) == 0:
        raise ValueError(f"X must have shape (M, ...) with at least one point: got {tuple(X.shape)}.")
    if X.device != y.device:
        raise ValueError(f"X and y must be on one device: got {X.device} and {y.device}.")
    check_finite(X, "X")
    return X.detach().clone(), y.detach().clone()


def first_outputs(skeleton: Skeleton, start: Tensor, X: Tensor) -> Tensor:
    """Evaluate a few inputs near the initial weights, and refuse what is no function of one input at a time.

    Raises:
        TypeError: Inputs of another dtype than the weights.
        ValueError: Inputs that the network cannot take, or on another device; a network of random or coupled outputs.
    """
    if X.is_floating_point() and X.dtype != start.dtype:
        raise TypeError(f"X must have the weights' dtype {start.dtype}: got {X.dtype}. Convert one of them.")
    if X.device != start.device:
        raise ValueError(f"X must be on the network's device {start.device}: got {X.device}.")
    try:
        probe = probe_outputs(skeleton, start, X)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network must accept X: it fails on inputs of shape {tuple(X.shape[1:])} and {X.dtype}: {error}"
        ) from error
    refuse_random_or_coupled_outputs(skeleton, unflatten(skeleton, off_initial(start)), X)
    return probe


def checked_batch(indices: Tensor | Sequence[int], num_points: int, index: int) -> Tensor:
    """Read a step's batch as indices.

    Raises:
        TypeError: No integers.
        ValueError: An empty batch, or indices out of range.
    """
    try:
        batch = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {indices!r}.") from error
    if batch.ndim != 1 or batch.numel() == 0:
        raise ValueError(
            f"step {index}: a batch must be a non-empty list of indices into X: got shape {tuple(batch.shape)}."
        )
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {batch.dtype}.")
    low, high = int(batch.min()), int(batch.max())
    if low < 0 or high >= num_points:
        raise ValueError(f"step {index}: batch indices must lie in 0..{num_points - 1}: got {low}..{high}.")
    return batch.detach().to(torch.int64).clone()
