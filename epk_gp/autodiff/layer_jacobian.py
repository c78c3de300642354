"""Representations of a layer's Jacobian, and what can be done with each (docs/engine.md, section 3).

A layer Jacobian holds the gradients of K outputs at E points with respect to one layer's parameters. Every
representation can be multiplied with another of its kind, averaged over nodes, written out, and split into rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

LONG_INNER_DIM = 256  # MEASURE

J = TypeVar("J", bound="LeftFactor")
InputProducts = Callable[[], Tensor]  # the inner products of a layer's inputs, (N, M), computed when they are needed


@runtime_checkable
class ProductSum(Protocol):
    """A sum of inner products of N points with M points; `gram.accumulator.GramAccumulator` is one."""

    def add_products(self, x: Tensor, y: Tensor, weight: float) -> None:
        """Add weight * <x[k, n], y[l, m]>, from (K, N, P) and (L, M, P)."""

    def add_scaled_products(self, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """Add <x[k, n], y[l, m]> * scale[n, m]."""

    def add_deferred_products(self, layer: int, x: Tensor, y: Tensor, weight: float, scale: InputProducts) -> None:
        """Add weight * <x[k, n], y[l, m]> to a sum of the layer's own, which is multiplied by its scale at the end."""

    def add_same_class(self, products: Tensor) -> None:
        """Add products[n, m] to every pair of equal outputs."""

    def add_positionwise(self, a: "OuterProductJacobian", b: "OuterProductJacobian", weight: float) -> None:
        """Add the inner products of layers with several positions."""

    def add_softmax_last_layer(self, averages: Tensor, b: "SoftmaxLastLayer", weight: float) -> None:
        """Add the inner products of a last layer under the softmax from its averages, (1 + C, N, n)."""


@dataclass(frozen=True, eq=False)
class NodeWeights:
    """The quadrature weights of E evaluations of N points.

    Attributes:
        weights: One weight for all rows, and then row n is point n; or (E,).
        points: Which point each row is an evaluation of, (E,); None with one weight for all rows.
        num_points: N.
    """

    weights: Float[Tensor, " E"] | float
    points: Int64[Tensor, " E"] | None
    num_points: int

    def add(self, total: Tensor | None, values: Tensor, dim: int) -> Tensor:
        """Add weighted rows of `values` (dimension `dim`) to their points' rows of the total."""
        if isinstance(self.weights, float):
            return values * self.weights if total is None else total.add_(values, alpha=self.weights)
        scaled = values * self.weights.view(-1, *[1] * (values.ndim - dim - 1))
        return self._zeros_unless(total, values, dim).index_add_(dim, self.row_points(), scaled)

    def place(self, total: Tensor | None, values: Tensor, dim: int) -> Tensor:
        """Write rows that do not depend on the node into their points' rows."""
        if isinstance(self.weights, float):
            return values
        return self._zeros_unless(total, values, dim).index_copy_(dim, self.row_points(), values)

    def _zeros_unless(self, total: Tensor | None, values: Tensor, dim: int) -> Tensor:
        if total is not None:
            return total
        return values.new_zeros(*values.shape[:dim], self.num_points, *values.shape[dim + 1 :])

    def row_points(self) -> Int64[Tensor, " E"]:
        """Return whose each row is, where rows have weights of their own."""
        if self.points is None:
            raise TypeError("rows with weights of their own must name their points: this is a bug in epk_gp.")
        return self.points


class LeftFactor(ABC):
    """What can stand on the left of an inner product: a layer Jacobian, or an average of some."""

    @abstractmethod
    def add_inner(
        self, other: "LayerJacobian", total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add weight times the inner products with the other side's points to a sum.

        Args:
            other: The same layer's Jacobian at M points.
            total: The sum.
            weight: Factor eta_s omega_q.
            layer: Number of the layer, which names its deferred sum.
            same_points: The same points come at every step, so that constant inputs may be multiplied at the end.
        """

    @property
    @abstractmethod
    def fits_concatenation(self) -> bool:
        """Whether several steps of these points can be summed in one matrix product, and gain by it."""

    def concat_steps(self, others: Sequence["LeftFactor"], weights: Sequence[float]) -> "LayerJacobian":
        """Concatenate what changes from step to step along the inner dimension, each step times its weight."""
        raise TypeError(f"{type(self).__name__} has no common inner dimension: this is a bug in epk_gp.")


class LayerJacobian(LeftFactor):
    """One layer's gradients of K outputs at E points."""

    @property
    @abstractmethod
    def commutes_with_average(self) -> bool:
        """Whether the average over t of inner products is the inner product of one average."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the representation takes."""

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Write the gradients out: row by row of the weight, each followed by its bias if the layer has one."""

    @abstractmethod
    def rows(self, rows: slice) -> "LayerJacobian":
        """Return some of the points."""

    @abstractmethod
    def concat_rows(self, others: Sequence["LayerJacobian"]) -> "LayerJacobian":
        """Append other points' Jacobians of the same layer."""

    @abstractmethod
    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> LeftFactor:
        """Add these evaluations to the average of the nodes before; only if `commutes_with_average`."""

    @abstractmethod
    def pointwise_products(self, other: "LayerJacobian") -> Float[Tensor, "E K K"]:
        """Compute the inner products of each point with the same row of another Jacobian."""

    @abstractmethod
    def products(self, other: "LayerJacobian", *, per_class: bool) -> Tensor:
        """Compute all inner products as a new, differentiable tensor: (K, E, K', M), or (K, E, M) per class."""

    @abstractmethod
    def detach(self) -> "LayerJacobian":
        """Return the Jacobian without its graph."""


@final
@dataclass(frozen=True, eq=False)
class DenseJacobian(LayerJacobian):
    """A layer's gradients, or those of several parameters, written out: (K, E, P_layer)."""

    values: Float[Tensor, "K E P_layer"]

    commutes_with_average = True

    @property
    def nbytes(self) -> int:
        """Bytes that the representation takes."""
        return self.values.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the inner dimension is short."""
        return self.values.shape[2] < LONG_INNER_DIM

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Return the values."""
        return self.values

    def rows(self, rows: slice) -> "DenseJacobian":
        """Return some of the points."""
        return replace(self, values=self.values[:, rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "DenseJacobian":
        """Append other points."""
        return replace(self, values=torch.cat([self.values, *(_as(self, other).values for other in others)], dim=1))

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "DenseJacobian":
        """Concatenate steps along the parameters."""
        return DenseJacobian(_concat_scaled([_as(self, step).values for step in (self, *others)], weights, 2))

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "DenseJacobian":
        """Average the values."""
        return DenseJacobian(nodes.add(None if before is None else _as(self, before).values, self.values, 1))

    def add_inner(
        self, other: LayerJacobian, total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add one matrix product."""
        total.add_products(self.values, _as(self, other).values, weight)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row."""
        return self.values.transpose(0, 1) @ other.to_dense().transpose(0, 1).mT

    def products(self, other: LayerJacobian, *, per_class: bool) -> Tensor:
        """Multiply all pairs."""
        return torch.einsum(_products_of(per_class), self.values, other.to_dense())

    def detach(self) -> "DenseJacobian":
        """Return the values without their graph."""
        return replace(self, values=self.values.detach())


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
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.inputs.nbytes + self.output_grads.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the output gradients alone change from step to step, and are short."""
        return self.inputs.shape[1] == 1 and self.input_is_constant and self.output_grads.shape[3] < LONG_INNER_DIM

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Sum the outer products over positions."""
        a = append_bias_column(self.inputs) if self.has_bias else self.inputs
        return sum_outer_products(a.unsqueeze(2), self.output_grads.unsqueeze(3))

    def rows(self, rows: slice) -> "OuterProductJacobian":
        """Return some of the points."""
        return replace(self, inputs=self.inputs[rows], output_grads=self.output_grads[:, rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "OuterProductJacobian":
        """Append other points."""
        parts = [self, *(_as(self, other) for other in others)]
        inputs = torch.cat([part.inputs for part in parts])
        return replace(self, inputs=inputs, output_grads=torch.cat([part.output_grads for part in parts], dim=1))

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "OuterProductJacobian":
        """Concatenate the output gradients; the inputs are the same at every step."""
        steps = [_as(self, step).output_grads for step in (self, *others)]
        return replace(self, output_grads=_concat_scaled(steps, weights, 3))

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "OuterProductJacobian":
        """Average the factor that depends on t."""
        last = None if before is None else _as(self, before)
        inputs, output_grads = (None, None) if last is None else (last.inputs, last.output_grads)
        if self.input_is_constant:
            output_grads = nodes.add(output_grads, self.output_grads, 1)
            return replace(self, inputs=nodes.place(inputs, self.inputs, 0), output_grads=output_grads)
        # constant along the step, but each point has its own where each is asked about another output
        output_grads = nodes.place(output_grads, self.output_grads, 1)
        return replace(self, inputs=nodes.add(inputs, self.inputs, 0), output_grads=output_grads)

    def add_inner(
        self, other: LayerJacobian, total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Multiply the products of both factors: at the end of the run where the inputs are constant."""
        b = _as(self, other)
        if self.inputs.shape[1] > 1:
            total.add_positionwise(self, b, weight)
            return
        x, y = self.output_grads[:, :, 0], b.output_grads[:, :, 0]
        if self.input_is_constant and same_points:
            total.add_deferred_products(layer, x, y, weight, lambda: self.input_products(b))
        else:
            total.add_scaled_products(x, y, self.input_products(b).mul_(weight))

    def input_products(self, other: "OuterProductJacobian") -> Float[Tensor, "N M"]:
        """Compute the inner products of the inputs of layers with one position, the bias's 1 included."""
        products = self.inputs[:, 0] @ other.inputs[:, 0].T
        return products.add_(1) if self.has_bias else products

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row, summed over pairs of positions."""
        b = _as(self, other)
        inputs = self.inputs @ b.inputs.mT + float(self.has_bias)  # E L L
        x, y = self.output_grads.transpose(0, 1), b.output_grads.transpose(0, 1)  # E K L n_out
        weighted = torch.einsum("elr,ekro->eklo", inputs, y)
        return x.flatten(2) @ weighted.flatten(2).mT

    def products(self, other: LayerJacobian, *, per_class: bool) -> Tensor:
        """Multiply all pairs of points with one position."""
        b = _as(self, other)
        inputs = self.inputs[:, 0] @ b.inputs[:, 0].T + float(self.has_bias)
        grads = torch.einsum(_products_of(per_class), self.output_grads[:, :, 0], b.output_grads[:, :, 0])
        return grads * (inputs if per_class else inputs[:, None, :])

    def detach(self) -> "OuterProductJacobian":
        """Return both factors without their graph."""
        return replace(self, inputs=self.inputs.detach(), output_grads=self.output_grads.detach())


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
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.inputs.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the inner dimension is short."""
        return self.inputs.shape[1] < LONG_INNER_DIM

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Put each output's inputs into the place of its row of the weight."""
        eye = torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        return (eye[:, None, :, None] * self.inputs[None, :, None, :]).flatten(2)

    def rows(self, rows: slice) -> "LogitsLastLayer":
        """Return some of the points."""
        return replace(self, inputs=self.inputs[rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "LogitsLastLayer":
        """Append other points."""
        return replace(self, inputs=torch.cat([self.inputs, *(_as(self, other).inputs for other in others)]))

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "LogitsLastLayer":
        """Concatenate the inputs."""
        return replace(self, inputs=_concat_scaled([_as(self, step).inputs for step in (self, *others)], weights, 1))

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "LogitsLastLayer":
        """Average the inputs."""
        return replace(self, inputs=nodes.add(None if before is None else _as(self, before).inputs, self.inputs, 0))

    def add_inner(
        self, other: LayerJacobian, total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add one product of the inputs for all outputs."""
        total.add_same_class((self.inputs @ _as(self, other).inputs.T).mul_(weight))

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        products = (self.inputs * _as(self, other).inputs).sum(1)
        return torch.diag_embed(products[:, None].expand(-1, self.num_outputs))

    def products(self, other: LayerJacobian, *, per_class: bool) -> Tensor:
        """Multiply all pairs."""
        return DenseJacobian(self.to_dense()).products(other, per_class=per_class)

    def detach(self) -> "LogitsLastLayer":
        """Return the inputs without their graph."""
        return replace(self, inputs=self.inputs.detach())


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
        parts = [self, *(_as(self, other) for other in others)]
        return replace(
            self,
            inputs=torch.cat([part.inputs for part in parts]),
            output_grads=torch.cat([part.output_grads for part in parts], dim=1),
            probabilities=torch.cat([part.probabilities for part in parts]),
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "SoftmaxLastLayerAverage":
        """Average the inputs, and their products with each probability."""
        values = torch.cat([self.inputs[None], self.probabilities.T[:, :, None] * self.inputs])
        last = None if before is None else _expect(SoftmaxLastLayerAverage, before).values
        return SoftmaxLastLayerAverage(nodes.add(last, values, 1))

    def add_inner(
        self, other: LayerJacobian, total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add the inner products of the outer products."""
        b = _as(self, other).as_outer_product()
        self.as_outer_product().add_inner(b, total, weight, layer=layer, same_points=same_points)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        return self.as_outer_product().pointwise_products(_as(self, other).as_outer_product())

    def products(self, other: LayerJacobian, *, per_class: bool) -> Tensor:
        """Multiply all pairs."""
        return self.as_outer_product().products(_as(self, other).as_outer_product(), per_class=per_class)

    def detach(self) -> "SoftmaxLastLayer":
        """Return all factors without their graph."""
        inputs, grads = self.inputs.detach(), self.output_grads.detach()
        return replace(self, inputs=inputs, output_grads=grads, probabilities=self.probabilities.detach())


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayerAverage(LeftFactor):
    """Averages over t of a `SoftmaxLastLayer`: of its inputs a, and of p_c a for every output c; (1 + C, N, n)."""

    values: Float[Tensor, "rows N n"]

    fits_concatenation = False

    def add_inner(
        self, other: LayerJacobian, total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add the inner products with the other side's factors (docs/theory.md, section 5)."""
        total.add_softmax_last_layer(self.values, _expect(SoftmaxLastLayer, other), weight)


def append_bias_column(a: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n_and_1"]:
    """Append the 1 that a bias is multiplied by."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def sum_outer_products(a: Float[Tensor, "E L G n_in"], delta: Float[Tensor, "K E L G n_out"]) -> Float[Tensor, "K E P"]:
    """Write a layer call's gradients out, summed over its L positions, for G groups that do not mix."""
    if a.shape[1] == 1:
        return (delta[:, :, 0, :, :, None] * a[:, 0, :, None]).flatten(2)
    # one batched product per point and group: (K n_out, L) x (L, n_in)
    left = delta.permute(1, 3, 0, 4, 2).flatten(2, 3)  # E G (K n_out) L
    product = left @ a.transpose(1, 2)  # E G (K n_out) n_in
    rows: Tensor = product.unflatten(2, (len(delta), -1)).permute(2, 0, 1, 3, 4)  # K E G n_out n_in
    return rows.flatten(2)


def concat_rows(parts: Sequence[Sequence[LayerJacobian]]) -> list[LayerJacobian]:
    """Join the layer Jacobians of several blocks of points, layer by layer."""
    if len(parts) == 1:
        return list(parts[0])
    return [layer[0].concat_rows(layer[1:]) for layer in zip(*parts, strict=True)]


def to_flat_order(jacobians: Sequence[LayerJacobian], columns: Int64[Tensor, " P"]) -> Float[Tensor, "K E P"]:
    """Write layer Jacobians out in the order of the flat weights.

    Args:
        jacobians: One per layer.
        columns: Place in the flat weights of each entry (`autodiff.jacobians.flat_columns`).
    """
    rows = [jacobian.to_dense() for jacobian in jacobians]
    out = rows[0].new_empty(*rows[0].shape[:2], len(columns))
    first = 0
    for row in rows:
        out[:, :, columns[first : first + row.shape[2]]] = row
        first += row.shape[2]
    return out


def _concat_scaled(parts: Sequence[Tensor], weights: Sequence[float], dim: int) -> Tensor:
    """Concatenate parts of one shape, each times its weight."""
    if all(weight == 1 for weight in weights):
        return torch.cat(list(parts), dim=dim)
    width = parts[0].shape[dim]
    out = parts[0].new_empty(*parts[0].shape[:dim], width * len(parts), *parts[0].shape[dim + 1 :])
    for target, part, weight in zip(out.split(width, dim=dim), parts, weights, strict=True):
        torch.mul(part, weight, out=target)
    return out


def _products_of(per_class: bool) -> str:
    return "knp,kmp->knm" if per_class else "knp,lmp->knlm"


def _as(own: J, other: LeftFactor) -> J:
    return _expect(type(own), other)


def _expect(kind: type[J], other: LeftFactor) -> J:
    if not isinstance(other, kind):
        raise TypeError(
            f"a layer must keep its representation on both sides and from node to node: {kind.__name__} met "
            f"{type(other).__name__}. This is a bug in epk_gp."
        )
    return other
