"""The network as a function of its weights, and the head that turns logits into outputs."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call

Head = Literal["logits", "log_softmax"]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A network's structure; the trained weights come with every call.

    Attributes:
        module: Copy of the network in evaluation mode. Frozen parameters and buffers keep their values in it.
        names: Names of the trained weights, in the optimizer-independent order of `named_parameters`.
        shapes: Their shapes.
    """

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def num_weights(self) -> int:
        """Number P of trained weights."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)


def functionalize(net: nn.Module, names: tuple[str, ...] | None = None) -> Skeleton:
    """Copy a network's structure.

    Args:
        net: The network; it is not changed and not kept.
        names: The trained weights; all parameters that require a gradient by default.

    Raises:
        TypeError: `net` is no module, or it cannot be copied.
        ValueError: There is nothing to train, or two names stand for weights of different dtype or device.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    parameters = dict(net.named_parameters())
    if names is None:
        names = tuple(name for name, p in parameters.items() if p.requires_grad)
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"the network must have the recorded weights: {missing[0]!r} is missing (it has {sorted(parameters)}). "
            "Pass the network that was trained."
        )
    if not names:
        raise ValueError("the network must have weights to train: no parameter requires a gradient.")
    kinds = {(parameters[name].dtype, parameters[name].device) for name in names}
    if len(kinds) > 1 or not next(iter(kinds))[0].is_floating_point:
        raise ValueError(
            f"all trained weights must share one floating dtype and one device: got {sorted(map(str, kinds))}."
        )
    try:
        module = copy.deepcopy(net)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise TypeError(f"the network must be copyable by copy.deepcopy: {error}") from error
    module.requires_grad_(False).eval()
    return Skeleton(module, names, tuple(parameters[name].shape for name in names))


def call(skeleton: Skeleton, weights: Mapping[str, Tensor], X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n C"]:
    """Evaluate the network at the given weights."""
    outputs = functional_call(skeleton.module, dict(weights), (X,))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != X.shape[0]:
        got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the network must map n inputs to a tensor of shape (n, C): got {got} for {X.shape[0]} inputs. "
            "Wrap it in a module that returns one row of outputs per input."
        )
    return outputs


def flatten(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> Float[Tensor, " P"]:
    """Concatenate the trained weights in the skeleton's order."""
    return torch.cat([weights[name].detach().reshape(-1) for name in skeleton.names])


def unflatten(skeleton: Skeleton, flat: Float[Tensor, " P"]) -> dict[str, Tensor]:
    """View a flat weight vector as named weights."""
    pieces = flat.split([shape.numel() for shape in skeleton.shapes])
    return {name: piece.view(shape) for name, piece, shape in zip(skeleton.names, pieces, skeleton.shapes, strict=True)}


def unflatten_rows(skeleton: Skeleton, rows: Float[Tensor, "G P"]) -> dict[str, Tensor]:
    """View G flat weight vectors as named weights, each with a first dimension of G."""
    pieces = rows.split([shape.numel() for shape in skeleton.shapes], dim=1)
    named = zip(skeleton.names, pieces, skeleton.shapes, strict=True)
    return {name: piece.unflatten(1, shape) if shape else piece.squeeze(1) for name, piece, shape in named}


def frozen_state(skeleton: Skeleton) -> dict[str, Tensor]:
    """Name the network's buffers and frozen parameters: what `f` depends on beside the trained weights."""
    parameters = {name: p for name, p in skeleton.module.named_parameters() if name not in skeleton.names}
    return {name: value.detach() for name, value in (*parameters.items(), *skeleton.module.named_buffers())}


def validate_head(head: str, num_outputs: int) -> None:
    """Refuse a head that does not exist or says nothing.

    Raises:
        ValueError: Unknown head, or the log-softmax of a single output (which is the constant 0).
    """
    if head not in get_args(Head):
        raise ValueError(f"head must be one of {list(get_args(Head))}: got {head!r}.")
    if head == "log_softmax" and num_outputs == 1:
        raise ValueError('head="log_softmax" needs at least 2 outputs: got a network with 1. Use head="logits".')


def apply_head(z: Float[Tensor, "*n C"], head: Head) -> Float[Tensor, "*n C"]:
    """Turn logits into outputs f."""
    return z if head == "logits" else torch.log_softmax(z, dim=-1)


def zero_final_layer(net: nn.Module) -> nn.Module:
    """Set the last linear layer to zero, in place, so that the initial output is constant (Remark 1, Bell et al. 2023).

    Args:
        net: Network whose last module with parameters, in order of registration, is a `torch.nn.Linear`.

    Returns:
        The same network.

    Raises:
        TypeError: No network.
        ValueError: The last module with parameters is not a linear layer.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    holders = [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))]
    if not holders or not isinstance(holders[-1], nn.Linear):
        got = type(holders[-1]).__name__ if holders else "a network without parameters"
        raise ValueError(
            f"the network's last module with parameters must be a torch.nn.Linear: got {got}. "
            "Zero its last layer by hand."
        )
    with torch.no_grad():
        for p in holders[-1].parameters(recurse=False):
            p.zero_()
    return net
