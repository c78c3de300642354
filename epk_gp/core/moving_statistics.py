"""Normalisation by moving statistics, written out: torch's own function has no derivative in them."""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function


def normalise_by_statistics(
    x: Float[Tensor, "E G ..."],
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "E G ..."]:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        x: E inputs of G channels.
        mean: One number per channel, (G,), or one per row and channel, (E, G); so are `variance`, `weight` and `bias`.
        variance: The variance.
        weight: The scale.
        bias: The shift.
        eps: Added to the variance.
    """
    tensors = tuple(value for value in (x, mean, variance, weight, bias) if value is not None)
    if has_torch_function(tensors):  # one call for those who intercept the functions of a forward pass
        result: Tensor = handle_torch_function(normalise_by_statistics, tensors, x, mean, variance, weight, bias, eps)
        return result
    places = [1] * (x.ndim - 2)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - mean.reshape(*mean.shape, *places)) * scale.reshape(*scale.shape, *places)
    return y if bias is None else y + bias.reshape(*bias.shape, *places)


@final
class WrittenOutNormalisation(TorchFunctionMode):
    """Replace batch and instance normalisation in evaluation mode by `normalise_by_statistics`.

    Args:
        statistics: The tensors that are moving statistics; normalisation by others is left to torch.
    """

    def __init__(self, statistics: Iterable[Tensor]) -> None:
        super().__init__()
        self.statistics = {id(value) for value in statistics}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = kwargs or {}
        parse = _PARSERS.get(func)
        if parse is not None:
            uses_batch, arguments = parse(*args, **kwargs)
            if not uses_batch and any(id(value) in self.statistics for value in arguments[1:3]):
                return normalise_by_statistics(*arguments)
        return func(*args, **kwargs)


def _batch_norm(
    input: Any,  # noqa: A002  # torch's argument names
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *rest: Any,
    **named: Any,
) -> tuple[bool, tuple[Any, ...]]:
    eps = rest[1] if len(rest) > 1 else named.get("eps", 1e-5)
    return training, (input, running_mean, running_var, weight, bias, eps)


def _instance_norm(
    input: Any,  # noqa: A002
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    *rest: Any,
    **named: Any,
) -> tuple[bool, tuple[Any, ...]]:
    return _batch_norm(input, running_mean, running_var, weight, bias, use_input_stats, *rest, **named)


def _torch_batch_norm(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *rest: Any,
    **named: Any,
) -> tuple[bool, tuple[Any, ...]]:
    return training, (input, running_mean, running_var, weight, bias, eps)


_PARSERS: dict[Any, Callable[..., tuple[bool, tuple[Any, ...]]]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch.batch_norm: _torch_batch_norm,
}
