"""Normalisation by moving statistics, written out: torch's own function has no derivative in them."""

from collections.abc import Iterable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

# Functions that normalise by statistics, with the names of their arguments.
_NORMALISATIONS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
_DEFAULTS = {"running_mean": None, "running_var": None, "weight": None, "bias": None, "eps": 1e-5}


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
    centred, scale = x - mean.reshape(*mean.shape, *places), scale.reshape(*scale.shape, *places)
    return centred * scale if bias is None else torch.addcmul(bias.reshape(*bias.shape, *places), centred, scale)


@final
class WrittenOutNormalisation(TorchFunctionMode):
    """Replace batch and instance normalisation in evaluation mode by `normalise_by_statistics`.

    Weight normalisation is written out too, because torch's second derivative of it (2.13) takes the norm as constant.

    Args:
        statistics: The tensors that are moving statistics; normalisation by others is left to torch.
    """

    def __init__(self, statistics: Iterable[Tensor]) -> None:
        super().__init__()
        self.statistics = {id(value) for value in statistics}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = kwargs or {}
        if func is torch._weight_norm:
            v, g, dim = (*args, *kwargs.values(), 0)[:3]
            return v * (g / torch.norm_except_dim(v, 2, dim))
        if func in _NORMALISATIONS:
            named = {**_DEFAULTS, **dict(zip(_NORMALISATIONS[func], args, strict=False)), **kwargs}
            mean, variance = named["running_mean"], named["running_var"]
            uses_batch = named.get("use_input_stats", func is F.instance_norm) or named.get("training", False)
            if not uses_batch and {id(mean), id(variance)} & self.statistics:
                return normalise_by_statistics(
                    named["input"], mean, variance, named["weight"], named["bias"], named["eps"]
                )
        return func(*args, **kwargs)
