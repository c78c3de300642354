"""Moving statistics after a training forward pass, as a differentiable function of what the normalisation saw.

torch moves the running means and variances of BatchNorm outside of the graph. A layer in training mode moves them by
b' - b = a (stat - b), where stat is the mean or the unbiased variance of its batch; the share a is read from the
recorded statistics before and after the pass, so that cumulative averages need no count of batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.model import FunctionalModel

_KINDS = ("running_mean", "running_var")

# Relative difference between recorded statistics and those that a share of the batch's statistics gives.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(eq=False)
class SeenBatches:
    """The statistics of the batches that normalisations in training mode saw, in the graph of a forward pass.

    Attributes:
        of_layer: By the layer's name mean and unbiased variance of its batch, (channels,) each.
    """

    of_layer: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Look at the inputs of all normalisations with moving statistics during a forward pass."""
        layers = [
            (name, part)
            for name, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
        ]
        handles = [part.register_forward_pre_hook(self._hook(name)) for name, part in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            a = args[0]
            if not module.training or a.numel() // a.shape[1] < 2:
                return
            if isinstance(module, nn.modules.instancenorm._InstanceNorm):  # those of each row, averaged
                rows = a.reshape(-1, module.num_features, *a.shape[2:] if a.ndim > 2 else a.shape[1:]).flatten(2)
                self.of_layer[name] = (rows.mean(dim=2).mean(dim=0), rows.var(dim=2).mean(dim=0))
                return
            others = [dimension for dimension in range(a.ndim) if dimension != 1]
            self.of_layer[name] = (a.mean(dim=others), a.var(dim=others))

        return look

    def after(
        self, model: FunctionalModel, shares: dict[str, float], before: Float[Tensor, " Q"]
    ) -> Float[Tensor, " Q"]:
        """Return the moving statistics after the pass.

        Args:
            model: The network.
            shares: The share of a batch's statistics, by layer; a layer without one keeps its statistics.
            before: The statistics before it.
        """
        parts, first = [], 0
        for name, shape in zip(model.statistics, model.statistic_shapes, strict=True):
            own = before[first : first + shape.numel()]
            first += shape.numel()
            layer, _, kind = name.rpartition(".")
            share = shares.get(layer)
            if share is None or layer not in self.of_layer or kind not in _KINDS:
                parts.append(own)  # a count of batches does not depend on weights
                continue
            value = self.of_layer[layer][_KINDS.index(kind)].reshape(-1).to(own)
            parts.append(own + share * (value - own))
        return torch.cat(parts) if parts else before


def fixed_statistics(module: nn.Module) -> set[str]:
    """Return the names of the moving statistics by which normalisations in evaluation mode normalise."""
    return {
        f"{name}.{kind}".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and not part.training
        for kind in _KINDS
    }


def shares_of_batches(
    model: FunctionalModel,
    seen: SeenBatches,
    before: Float[Tensor, " Q"],
    after: Float[Tensor, " Q"],
    tolerance: float | None = None,
) -> tuple[dict[str, float], bool]:
    """Return the share of its batch's statistics that each layer took, and whether they explain what was recorded.

    Args:
        model: The network.
        seen: The batches' statistics at the recorded weights.
        before: The recorded moving statistics before the pass.
        after: Those after it.
        tolerance: Relative difference of the recorded statistics that is accepted; None for rounding.
    """
    shares: dict[str, float] = {}
    for layer in seen.of_layer:
        names = [name for name in model.statistics if name.rpartition(".")[0] == layer]
        if not names:
            continue
        whole = SeenBatches({layer: seen.of_layer[layer]}).after(model, {layer: 1.0}, before)
        distance = (whole - before).detach()
        norm = float(distance.square().sum())
        shares[layer] = float((after - before) @ distance) / norm if norm > 0 else 0.0
    found = seen.after(model, shares, before).detach()
    kinds = [name.rpartition(".")[2] for name in model.statistics]
    sizes = [shape.numel() for shape in model.statistic_shapes]
    pairs = zip(kinds, found.split(sizes), after.split(sizes), strict=True)
    allowed = _TOLERANCE.get(found.dtype, 1e-2) if tolerance is None else tolerance
    return shares, all(
        float((a - b).abs().max()) <= allowed * max(1.0, float(b.abs().max()))
        for kind, a, b in pairs
        if kind != "num_batches_tracked" and len(b)
    )
