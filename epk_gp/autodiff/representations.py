"""The representations that any layer's Jacobian can take: dense, or sums of outer products."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.representations import (
    LayerJacobian,
    LeftFactor,
    NodeWeights,
    ProductSum,
    append_bias_column,
    concat_scaled,
    expect_representation,
    is_short,
    same_representation,
    sum_outer_products,
)
from epk_gp.autodiff.sketches import FeatureSum


@final
@dataclass(frozen=True, eq=False)
class DenseJacobian(LayerJacobian):
    """A layer's gradients, or those of several parameters, written out: (K, E, P_layer)."""

    values: Float[Tensor, "K E P_layer"]

    commutes_with_average = True

    @property
    def multiplications_per_pair(self) -> int:
        """One for each parameter."""
        return self.values.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the representation takes."""
        return self.values.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the inner dimension is short."""
        return is_short(self.values.shape[2])

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Return the values."""
        return self.values

    def rows(self, rows: slice) -> "DenseJacobian":
        """Return some of the points."""
        return replace(self, values=self.values[:, rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "DenseJacobian":
        """Append other points."""
        return replace(
            self, values=torch.cat([self.values, *(same_representation(self, other).values for other in others)], dim=1)
        )

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "DenseJacobian":
        """Concatenate steps along the parameters."""
        return DenseJacobian(
            concat_scaled([same_representation(self, step).values for step in (self, *others)], weights, 2)
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "DenseJacobian":
        """Average the values."""
        return DenseJacobian(
            nodes.add(None if before is None else same_representation(self, before).values, self.values, 1)
        )

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one matrix product."""
        total.add_products(self.values, same_representation(self, other).values, weight)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row."""
        return self.values.transpose(0, 1) @ other.to_dense().transpose(0, 1).mT


@final
@dataclass(frozen=True, eq=False)
class OuterProductJacobian(LayerJacobian):
    """A layer's gradients as sums of outer products over positions: output_grads[k, e, l] (x) inputs[e, l].

    Attributes:
        inputs: Layer inputs, (E, L, n_in).
        output_grads: Gradients with respect to the layer's outputs, (K, E, L, n_out).
        has_bias: A trained bias belongs to the layer: the inputs have one more entry, 1, which is not stored.
        input_is_constant: The inputs depend neither on weights nor on the step.
        cotangent_is_constant: The output gradients do not depend on the weights.
    """

    inputs: Float[Tensor, "E L n_in"]
    output_grads: Float[Tensor, "K E L n_out"]
    has_bias: bool
    input_is_constant: bool
    cotangent_is_constant: bool

    @property
    def commutes_with_average(self) -> bool:
        """Whether one of the two factors does not depend on t."""
        return self.input_is_constant or self.cotangent_is_constant

    @property
    def multiplications_per_pair(self) -> int:
        """Of inputs and output gradients at every pair of positions."""
        return self.inputs.shape[1] ** 2 * (self.inputs.shape[2] + self.output_grads.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.inputs.nbytes + self.output_grads.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the output gradients alone change from step to step, and are short."""
        return self.inputs.shape[1] == 1 and self.input_is_constant and is_short(self.output_grads.shape[3])

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Sum the outer products over positions."""
        return sum_outer_products(self._biased().unsqueeze(2), self.output_grads.unsqueeze(3))

    def _biased(self) -> Tensor:
        """Return the inputs with the 1 of a bias."""
        return append_bias_column(self.inputs) if self.has_bias else self.inputs

    def rows(self, rows: slice) -> "OuterProductJacobian":
        """Return some of the points."""
        return replace(self, inputs=self.inputs[rows], output_grads=self.output_grads[:, rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "OuterProductJacobian":
        """Append other points."""
        parts = [self, *(same_representation(self, other) for other in others)]
        inputs = torch.cat([part.inputs for part in parts])
        return replace(self, inputs=inputs, output_grads=torch.cat([part.output_grads for part in parts], dim=1))

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "OuterProductJacobian":
        """Concatenate the output gradients; the inputs are the same at every step."""
        steps = [same_representation(self, step).output_grads for step in (self, *others)]
        return replace(self, output_grads=concat_scaled(steps, weights, 3))

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "OuterProductJacobian":
        """Average the factor that depends on t."""
        last = None if before is None else same_representation(self, before)
        inputs, output_grads = (None, None) if last is None else (last.inputs, last.output_grads)
        if self.input_is_constant:
            output_grads = nodes.add(output_grads, self.output_grads, 1)
            return replace(self, inputs=nodes.place(inputs, self.inputs, 0), output_grads=output_grads)
        # constant along the step, but each point has its own where each is asked about another output
        output_grads = nodes.place(output_grads, self.output_grads, 1)
        return replace(self, inputs=nodes.add(inputs, self.inputs, 0), output_grads=output_grads)

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Multiply the products of both factors: at the end of the run where the inputs are constant."""
        b = same_representation(self, other)
        if self.inputs.shape[1] > 1:
            total.add_positionwise((self._biased(), b._biased()), (self.output_grads, b.output_grads), weight)
            return
        x, y = self.output_grads[:, :, 0], b.output_grads[:, :, 0]
        if self.input_is_constant and same_points:
            total.add_deferred_products(layer, x, y, weight, lambda: self.input_products(b))
        else:
            total.add_scaled_products(x, y, self.input_products(b).mul_(weight))

    def multiplies_nodes(self, cost: ContractionCost) -> bool:
        """Whether both factors change from node to node, and products of them cost less than dense ones."""
        if self.commutes_with_average:
            return False
        n_in, n_out = self.inputs.shape[2] + self.has_bias, self.output_grads.shape[3]
        return cost.factored_is_cheaper(self.inputs.shape[1], n_in, n_out, is_averaged=False)

    def add_states(
        self, total: LeftFactor | None, others: Sequence[LayerJacobian], weights: Sequence[float]
    ) -> LeftFactor:
        """Add states: written out in one product, with states as positions, where both factors change."""
        if self.commutes_with_average:
            return super().add_states(total, others, weights)
        parts = [self, *(same_representation(self, other) for other in others)]
        inputs = torch.cat([part._biased() for part in parts], dim=1)
        grads = concat_scaled([part.output_grads for part in parts], weights, 2)
        values = sum_outer_products(inputs.unsqueeze(2), grads.unsqueeze(3))
        return DenseJacobian(
            values if total is None else expect_representation(DenseJacobian, total).values.add_(values)
        )

    def input_products(self, other: "OuterProductJacobian") -> Float[Tensor, "N M"]:
        """Compute the inner products of the inputs of layers with one position, the bias's 1 included."""
        products = self.inputs[:, 0] @ other.inputs[:, 0].T
        return products.add_(1) if self.has_bias else products

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row, summed over pairs of positions."""
        b = same_representation(self, other)
        inputs = self.inputs @ b.inputs.mT + float(self.has_bias)  # E L L
        x, y = self.output_grads.transpose(0, 1), b.output_grads.transpose(0, 1)  # E K L n_out
        weighted = torch.einsum("elr,ekro->eklo", inputs, y)
        return x.flatten(2) @ weighted.flatten(2).mT

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the factors of one position; products of several positions are summed first."""
        if self.inputs.shape[1] > 1:
            super().sketch(total, weight, generator)
        else:
            total.add_outer_products(self._biased()[:, 0], self.output_grads[:, :, 0], weight, generator)
