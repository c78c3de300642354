"""Any GPyTorch kernel on the hidden features of a recorded network."""

import math
from typing import Any, final

import gpytorch
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Shaped
from linear_operator import to_linear_operator
from torch import Tensor, nn

from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory, validate_trajectory
from epk_gp.kernels.blocks import BlockCache
from epk_gp.kernels.tagging import as_points, requires_graph, tag_points

CACHE_BYTES = 64 * 2**20  # of features that a kernel keeps: 10,000 points of 800 numbers in float64


@final
class HiddenFeaturesKernel(Kernel):  # type: ignore[misc]  # gpytorch ships no types
    """A kernel between the hidden features of points in the trained network.

        k(x, x') = base(h(x) / s, h(x') / s)

    h(x) is what a layer of the trained network makes of x. It says how near two points are for the network, which the
    path kernel does not: their product or sum is made by GPyTorch's own operators,
    `EPKKernel(run, "trace") * HiddenFeaturesKernel(run, RBFKernel())`.

    Only the base kernel's hyperparameters are learned; the network's weights are no parameters. Values can be
    differentiated with respect to the points.

    Args:
        trajectory: The run, of which only the trained network counts.
        base_kernel: A kernel on vectors, as `gpytorch.kernels.RBFKernel()`.
        layer: Name of a module of the network, whose output is h(x), flattened; by default the input of the linear
            layer that is called last.
        normalize: Divide by s, the root of the mean squared distance between the features of two training points, so
            that a lengthscale of 1 is a typical distance; s = 1 without.
        cache_bytes: Limit for the features that are kept; 0 keeps none.

    Attributes:
        base_kernel: As given.
        features: The network up to the layer.

    Raises:
        TypeError: `trajectory` is no recorded run, `base_kernel` is no kernel, or the layer does not return a tensor.
        ValueError: The network has no such layer, none that is linear, or the layer does not return a row per input;
            or all training points have the same features.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        base_kernel: Kernel,
        layer: str | None = None,
        normalize: bool = True,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        validate_trajectory(trajectory)
        if not isinstance(base_kernel, Kernel):
            raise TypeError(
                f"base_kernel must be a gpytorch.kernels.Kernel: got {type(base_kernel).__name__}. Pass RBFKernel()."
            )
        super().__init__()
        self.base_kernel = base_kernel
        self.features = HiddenFeatures(trajectory, layer, cache_bytes)
        if normalize:
            self.features.scale = _typical_distance(self.features(trajectory.inputs))

    @property
    def batch_shape(self) -> torch.Size:
        """That of the base kernel, which alone has parameters."""
        shape: torch.Size = self.base_kernel.batch_shape
        return shape

    @batch_shape.setter
    def batch_shape(self, shape: torch.Size) -> None:
        """Change nothing: GPyTorch sets the base kernel's as well, when it expands a kernel or indexes it."""

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Count the rows per point, as the base kernel does."""
        return int(self.base_kernel.num_outputs_per_input(x1, x2))

    def forward(
        self,
        x1: Shaped[Tensor, "*b n columns"],
        x2: Shaped[Tensor, "*c m columns"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Any:
        """Evaluate the base kernel on the features.

        Args:
            x1: (*b, n, D), flattened inputs, or (*b, n, D + 1) with a copy column, which is ignored.
            x2: (*c, m, D) or (*c, m, D + 1).
            diag: Only the diagonal, for n = m.
            last_dim_is_batch: Must be False: a column of a point is no point.
            params: Handed on to the base kernel.

        Returns:
            A linear operator, or with `diag` a tensor (*d, n).

        Raises:
            TypeError, ValueError: The network cannot take the points.
        """
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch must be False: got True, but a single column of a point is no point.")
        left = self.features.of_rows(x1)
        right = left if x2 is x1 else self.features.of_rows(x2)
        values = self.base_kernel(left, right, diag=diag, **params)
        if diag:
            return values
        with gpytorch.settings.lazily_evaluate_kernels(False):
            return to_linear_operator(values).evaluate_kernel()


class HiddenFeatures:
    """The trained network up to one of its layers.

    Threads may share it. GPyTorch deep-copies a kernel whenever it is indexed; a deep copy of this is itself.

    Attributes:
        trajectory: The run.
        layer: Name of the layer whose output the features are; None for the input of the linear layer called last.
        scale: What features are divided by.
    """

    def __init__(self, trajectory: Trajectory, layer: str | None, cache_bytes: int) -> None:
        names = [name for name, _ in trajectory.model.module.named_modules() if name]
        if layer is not None and layer not in names:
            raise ValueError(f"layer must be None, or a module of the network, one of {names}: got {layer!r}.")
        self.trajectory, self.layer, self.scale = trajectory, layer, 1.0
        self._cache = BlockCache(cache_bytes)

    def __deepcopy__(self, memo: dict[int, object]) -> "HiddenFeatures":
        return self

    def of_rows(self, x: Shaped[Tensor, "*b n columns"]) -> Float[Tensor, "*b n F"]:
        """Evaluate the features of rows of flattened inputs, with or without a copy column, divided by the scale.

        Raises:
            TypeError, ValueError: The network cannot take the points.
        """
        x = tag_points(self.trajectory, x)
        features = self(as_points(self.trajectory, x.reshape(-1, x.shape[-1])).X)
        features = features.to(x.dtype) if x.is_floating_point() else features
        return torch.unflatten(features, 0, x.shape[:-1]) / self.scale

    def __call__(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n F"]:
        """Evaluate the features of inputs in the network's own shape, as they are: not divided by the scale."""
        if requires_graph(X):
            return self._evaluate(X)
        own = X.detach().clone()
        with torch.no_grad():
            return self._cache.computed(content_key(own), lambda: self._evaluate(own))

    def _evaluate(self, X: Tensor) -> Tensor:
        original, last = self.trajectory.model_for(X), list[object]()
        model = original.converted(original.spec)  # threads do not share its hooks

        def keep(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            last[:] = [inputs[0] if self.layer is None else output]

        for name, module in model.module.named_modules():
            if name == self.layer or (self.layer is None and isinstance(module, nn.Linear)):
                module.register_forward_hook(keep)
        weights = self.trajectory.weights(-1).items()
        model.returned({name: value.to(model.spec.device, model.spec.dtype) for name, value in weights}, X)
        where = "the input of the linear layer called last" if self.layer is None else f"the output of {self.layer!r}"
        if not last:
            raise ValueError(f"the network must have {where}: it calls none. Name a layer that it calls.")
        (features,) = last
        if not isinstance(features, Tensor):
            raise TypeError(f"{where} must be a tensor: got {type(features).__name__}. Name another layer.")
        if len(features) != len(X):
            raise ValueError(f"{where} must have one row for each of {len(X)} inputs: got {tuple(features.shape)}.")
        return features.flatten(1)


def _typical_distance(features: Tensor) -> float:
    """Return the root mean squared distance of two of the points: twice the sum of the variances."""
    squared = 2 * float(features.double().var(dim=0, unbiased=True).sum()) if len(features) > 1 else 0.0
    if not squared > 0:
        raise ValueError(
            "training points must have different features, which their typical distance scales: got one value for all. "
            "Pass normalize=False, or name another layer."
        )
    return math.sqrt(squared)
