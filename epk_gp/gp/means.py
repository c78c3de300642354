"""Prior means: the network at one state of its run, or a constant per output."""

from typing import Literal, final

from gpytorch.means import ConstantMean, Mean, ZeroMean
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.losses import apply_head
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.output_coupling import OutputCoupling
from epk_gp.kernels.config import KernelConfig
from epk_gp.kernels.tagged_points import as_points, requires_graph, tag_points

PriorMean = Literal["initial", "constant", "zero", "network"]


@final
class NetworkMean(Mean):  # type: ignore[misc]  # gpytorch ships no types
    """The recorded network f_{w_s} as a prior mean; both copies of an input have the same mean.

    The network's weights are not parameters of it.

    Args:
        config: The kernel's: the run, the head, and the cache, which also holds outputs.
        coupling: How the process over C outputs is put together.
        state: s: 0 is f_{w_0}, the b of the kernel machine (Theorem 3.6, Bell et al. 2023); -1 is the trained network.
        trajectory: The run; by default that of the kernel.
    """

    def __init__(
        self, config: KernelConfig, coupling: OutputCoupling, state: int, trajectory: Trajectory | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.trajectory = config.trajectory if trajectory is None else trajectory
        self.coupling = coupling
        self.state = state

    def forward(self, x: Shaped[Tensor, "*b n columns"]) -> Float[Tensor, "*d n C"] | Float[Tensor, "*d n"]:
        """Evaluate the network.

        Args:
            x: (*b, n, D + 1), or (*b, n, D) for test copies.

        Returns:
            (*b, n, C), or for one process per output (*d, n) with d = broadcast(b, [C]).
        """
        return self.coupling.to_gpytorch(self._outputs(x))

    def _outputs(self, x: Tensor) -> Tensor:
        config, trajectory, head = self.config, self.trajectory, self.config.path_kernel.head
        x = tag_points(trajectory, x)
        if requires_graph(x):
            return self._outputs_with_graph(x)
        key = ("mean", trajectory.digest, head, self.state, content_key(x))
        cached = config.cache.get(key)
        if cached is not None:
            return cached
        points = as_points(trajectory, x.reshape(-1, x.shape[-1]))
        f = network_outputs(trajectory, points.X, state=self.state, head=head)
        outputs = f.to(x.dtype).reshape(*x.shape[:-1], -1)
        config.cache.put(key, outputs)
        return outputs

    def _outputs_with_graph(self, x: Tensor) -> Tensor:
        trajectory = self.trajectory
        X = x[..., :-1].reshape(-1, *trajectory.input_shape)
        weights = {name: value.to(X) for name, value in trajectory.weights(self.state).items()}
        z = trajectory.model_for(X)(weights, X)
        return apply_head(z, self.config.path_kernel.head).reshape(*x.shape[:-1], -1)


def make_mean(mean: PriorMean, config: KernelConfig, coupling: OutputCoupling, trajectory: Trajectory) -> Mean:
    """Build a prior mean with one value per point and output.

    Args:
        mean: "initial" (f_{w_0}), "constant" (learned, one per output), "zero", or "network" (the trained network).
        config: The kernel's.
        coupling: How the process over C outputs is put together.
        trajectory: The run, whose nodes the kernel's may be.

    Raises:
        ValueError: `mean` is none of these.
    """
    if mean == "initial":
        return NetworkMean(config, coupling, 0, trajectory)
    if mean == "network":
        return NetworkMean(config, coupling, -1, trajectory)
    if mean == "constant":
        return coupling.mean_module(ConstantMean(batch_shape=coupling.batch_shape))
    if mean == "zero":
        return coupling.mean_module(ZeroMean(batch_shape=coupling.batch_shape))
    raise ValueError(f"mean must be one of ['initial', 'constant', 'zero', 'network']: got {mean!r}.")
