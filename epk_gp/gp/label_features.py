"""Features of inputs for a process on labels: a power of the path kernel's cosine times an RBF kernel."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.sketches import rbf_features, tensor_sketch
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.class_data import float_inputs
from epk_gp.gp.label_kernel import require_direction
from epk_gp.gram.path_features import path_features


@dataclass(frozen=True, eq=False)
class InputFeatures:
    """Features of inputs, each row of length 1, in float32: their error is that of the sketch, not of rounding.

    Attributes:
        nodes: The nodes of the path, as a run.
        num_features: k.
        seed: Of the sketch.
        lengthscale: Of the RBF kernel on the inputs; None without one.
        options: How they are computed.
        power: Of the product of both kernels, a whole number from 1 on. Every further factor is another sketch, with
            its noise.
    """

    nodes: Trajectory
    num_features: int
    seed: int
    lengthscale: float | None
    options: ComputeOptions = ComputeOptions()
    power: int = 1

    def __call__(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n k"]:
        """Compute the features of n inputs.

        Raises:
            ValueError: An input's gradients are all zero: it has no direction, as for `LabelKernel`.
        """
        X = float_inputs(X, torch.float32)
        z = path_features(
            self.nodes,
            X,
            self.num_features,
            nodes=None,
            seed=self.seed,
            head="logits",
            num_probe=0,
            memory_budget=self.options.memory_budget,
            progress=self.options.progress,
            executor=self.options.executor,
        )
        require_direction(z.any(1))
        z = torch.nn.functional.normalize(z)
        if self.lengthscale is not None:
            z = self._product(z, rbf_features(X, self.lengthscale, seed=self.seed), 0)
        factor = z
        for number in range(1, self.power):
            z = self._product(z, factor, number)
        return z

    def _product(self, z: Tensor, other: Tensor, number: int) -> Tensor:
        return torch.nn.functional.normalize(tensor_sketch(z, other, self.num_features, seed=self.seed + number))
