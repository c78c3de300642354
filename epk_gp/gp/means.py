"""Prior means: the network at one state of its run, or a constant per class."""

from typing import Literal, final

import gpytorch
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.fingerprint import content_key
from epk_gp.core.head import apply_head
from epk_gp.core.trajectory import network_outputs
from epk_gp.kernels.config import KernelConfig, as_points, needs_graph, validate_points

PriorMean = Literal["initial", "constant", "zero", "network"]


@final
class NetworkMean(gpytorch.means.Mean):  # type: ignore[misc]  # gpytorch ships no types
    """The recorded network f_{w_s} as a prior mean; both copies of an input have the same mean.

    The network's weights are no parameters of it.

    Args:
        source: The kernel's source: the run, the head, and the cache for outputs at points seen before.
        state: s: 0 is f_{w_0}, the b of the kernel machine (Theorem 3.6, Bell et al. 2023); -1 the trained network.
    """

    def __init__(self, source: KernelConfig, state: int) -> None:
        super().__init__()
        self.source = source
        self.state = state

    def forward(self, x: Shaped[Tensor, "*b n columns"]) -> Float[Tensor, "*d n C"] | Float[Tensor, "*d n"]:
        """Evaluate the network.

        Args:
            x: (*b, n, D + 1).

        Returns:
            (*b, n, C), or for one GP per class (*d, n) with d = broadcast(b, [C]).
        """
        outputs = self._outputs(x)
        if self.source.reduction == "full":
            return outputs
        batch, C = x.shape[:-2], outputs.shape[-1]
        position = torch.arange(batch.numel(), device=x.device).view(batch)
        per_class = outputs.mT.reshape(-1, C, x.shape[-2])
        return per_class[position, torch.arange(C, device=x.device)]

    def _outputs(self, x: Tensor) -> Tensor:
        source = self.source
        validate_points(source.trajectory, x)
        if needs_graph(x):
            return self._with_graph(x)
        key = ("mean", source.trajectory.digest, source.head, self.state, content_key(x))
        found = source.cache.get(key)
        if found is None:
            points = as_points(source.trajectory, x.reshape(-1, x.shape[-1]))
            f = network_outputs(source.trajectory, points.X, state=self.state, head=source.head)
            found = f.to(x.dtype).reshape(*x.shape[:-1], -1)
            source.cache.put(key, found)
        return found

    def _with_graph(self, x: Tensor) -> Tensor:
        trajectory = self.source.trajectory
        X = x[..., :-1].reshape(-1, *trajectory.input_shape)
        weights = {name: value.to(X) for name, value in trajectory.weights(self.state).items()}
        z = trajectory.model_for(X)(weights, X)
        return apply_head(z, self.source.head).reshape(*x.shape[:-1], -1)


def make_mean(mean: PriorMean, source: KernelConfig) -> gpytorch.means.Mean:
    """Build a prior mean with one value per point and class.

    Args:
        mean: "initial" (f_{w_0}), "constant" (learned, one per class), "zero", or "network" (the trained network).
        source: The kernel's source; reduction "full" for one multi-output GP, "per_class" for one GP per class.

    Raises:
        ValueError: No such mean.
    """
    C = source.trajectory.num_outputs
    full = source.reduction == "full"
    batch = torch.Size([]) if full else torch.Size([C])
    if mean in ("initial", "network"):
        return NetworkMean(source, state=0 if mean == "initial" else -1)
    if mean == "constant":
        module = gpytorch.means.ConstantMean(batch_shape=batch)
    elif mean == "zero":
        module = gpytorch.means.ZeroMean(batch_shape=batch)
    else:
        raise ValueError(f"mean must be one of ['initial', 'constant', 'zero', 'network']: got {mean!r}.")
    return gpytorch.means.MultitaskMean([module], num_tasks=C) if full else module
