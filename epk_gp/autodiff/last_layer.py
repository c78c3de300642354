"""The representations of the last, linear layer's Jacobian of all outputs (docs/theory.md, section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.representations import (
    LayerJacobian,
    LeftFactor,
    NodeWeights,
    ProductSum,
    concat_scaled,
    expect_representation,
    is_short,
    same_representation,
)
from epk_gp.autodiff.representations import OuterProductJacobian
from epk_gp.autodiff.sketches import FeatureSum


@final
@dataclass(frozen=True, eq=False)
class LogitsLastLayer(LayerJacobian):
    """The last, linear layer's gradients of all C logits: output_grads[k, e] is the unit vector e_k.

    Inner products are zero for different outputs, and the same for all pairs of equal ones.

    Attributes:
        inputs: The layer's inputs, (E, n), with the 1 of a bias.
        num_outputs: C.
    """

    inputs: Float[Tensor, "E n"]
    num_outputs: int

    commutes_with_average = True

    @property
    def multiplications_per_pair(self) -> int:
        """Of the inputs."""
        return self.inputs.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.inputs.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the inner dimension is short."""
        return is_short(self.inputs.shape[1])

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Put each output's inputs into the place of its row of the weight."""
        eye = torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        return (eye[:, None, :, None] * self.inputs[None, :, None, :]).flatten(2)

    def rows(self, rows: slice) -> "LogitsLastLayer":
        """Return some of the points."""
        return replace(self, inputs=self.inputs[rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "LogitsLastLayer":
        """Append other points."""
        return replace(
            self, inputs=torch.cat([self.inputs, *(same_representation(self, other).inputs for other in others)])
        )

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "LogitsLastLayer":
        """Concatenate the inputs."""
        return replace(
            self, inputs=concat_scaled([same_representation(self, step).inputs for step in (self, *others)], weights, 1)
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "LogitsLastLayer":
        """Average the inputs."""
        return replace(
            self, inputs=nodes.add(None if before is None else same_representation(self, before).inputs, self.inputs, 0)
        )

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one product of the inputs for all outputs."""
        total.add_same_class((self.inputs @ same_representation(self, other).inputs.T).mul_(weight))

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        products = (self.inputs * same_representation(self, other).inputs).sum(1)
        return torch.diag_embed(products[:, None].expand(-1, self.num_outputs))

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the inputs with each unit vector."""
        eye = torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        total.add_outer_products(self.inputs, eye[:, None].expand(-1, len(self.inputs), -1), weight, generator)


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayer(LayerJacobian):
    """The last, linear layer's gradients of all C log-softmax outputs: output_grads[k, e] = e_k - p_e.

    Attributes:
        inputs: The layer's inputs, (E, n), with the 1 of a bias.
        output_grads: (C, E, C).
        probabilities: Softmax probabilities p, (E, C).
        input_is_constant: The inputs depend neither on weights nor on the step.
    """

    inputs: Float[Tensor, "E n"]
    output_grads: Float[Tensor, "C E C"]
    probabilities: Float[Tensor, "E C"]
    input_is_constant: bool

    commutes_with_average = True
    fits_concatenation = False

    @property
    def multiplications_per_pair(self) -> int:
        """Of inputs and output gradients."""
        return self.inputs.shape[1] + self.output_grads.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and output gradients."""
        return self.inputs.nbytes + self.output_grads.nbytes

    def as_outer_product(self) -> OuterProductJacobian:
        """Return the same gradients as any other layer's."""
        grads = self.output_grads.unsqueeze(2)
        return OuterProductJacobian(self.inputs[:, None], grads, False, self.input_is_constant, False)

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Write the outer products out."""
        return self.as_outer_product().to_dense()

    def rows(self, rows: slice) -> "SoftmaxLastLayer":
        """Return some of the points."""
        grads, p = self.output_grads[:, rows], self.probabilities[rows]
        return replace(self, inputs=self.inputs[rows], output_grads=grads, probabilities=p)

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "SoftmaxLastLayer":
        """Append other points."""
        parts = [self, *(same_representation(self, other) for other in others)]
        return replace(
            self,
            inputs=torch.cat([part.inputs for part in parts]),
            output_grads=torch.cat([part.output_grads for part in parts], dim=1),
            probabilities=torch.cat([part.probabilities for part in parts]),
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "SoftmaxLastLayerAverage":
        """Average the inputs, and their products with each probability."""
        values = torch.cat([self.inputs[None], self.probabilities.T[:, :, None] * self.inputs])
        last = None if before is None else expect_representation(SoftmaxLastLayerAverage, before).values
        return SoftmaxLastLayerAverage(nodes.add(last, values, 1))

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add the inner products of the outer products."""
        b = same_representation(self, other).as_outer_product()
        self.as_outer_product().add_inner(b, total, weight, layer=layer, same_points=same_points)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        return self.as_outer_product().pointwise_products(same_representation(self, other).as_outer_product())

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the outer products."""
        self.as_outer_product().sketch(total, weight, generator)


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayerAverage(LeftFactor):
    """Averages over t of a `SoftmaxLastLayer`: of its inputs a, and of p_c a for every output c; (1 + C, N, n)."""

    values: Float[Tensor, "rows N n"]

    fits_concatenation = False

    @property
    def nbytes(self) -> int:
        """Bytes of the averages."""
        return self.values.nbytes

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add the inner products with the other side's factors, or averages (docs/theory.md, section 5)."""
        if isinstance(other, SoftmaxLastLayerAverage):
            total.add_softmax_averages(self.values, other.values, weight)
            return
        b = expect_representation(SoftmaxLastLayer, other)
        total.add_softmax_last_layer(self.values, b.inputs, b.probabilities, weight)
