"""Representations of a layer's Jacobian, dense or as sums of outer products: their operations and costs.

A layer Jacobian holds the gradients of K outputs at E points with respect to one layer's parameters. Every
representation can be multiplied by another of its kind, averaged over nodes, made dense, and split into rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.moved_weights import equal_groups
from epk_gp.autodiff.sketches import FeatureSum
from epk_gp.core.losses import Head
from epk_gp.core.plans import empty_huge_pages

# Cost of an entry of the block in addition to the multiply-adds of its matrix products, in multiply-adds. Rates
# measured on two cores with AVX-512, float32: matrix products 265 to 295 GFLOP/s, elementwise passes over 36 MB 42 to
# 57 GB/s. A product that adds to the block (`addmm_`, beta = 1) reads and writes its entry: 8 bytes, the time of 20 to
# 28 multiply-adds. A product into a scratch block, which is then scaled and added (`addcmul_`), moves 20 bytes: 46 to
# 70. Both are rounded to powers of two.
_SCALE_AND_ADD = 64
_ADD = 32

# Gradients with more than this many times k numbers are sketched by their factors. Measured, k = 1024 and 4096: dense,
# 4 k numbers take 5 and 33 microseconds per point; by their factors, 1.7 and 7.2.
_SKETCHED_FACTORS = 2


@dataclass(frozen=True)
class ContractionCost:
    """The cost model that picks a layer's representation, given the layer's shape.

    Attributes:
        num_output_pairs: K K', pairs of outputs in the block.
        num_contractions: Inner products per step if the layer is factored and its factors cannot be averaged over t: Q
            for a fixed rule, the order of an adaptive one, or 1.
        cotangents_are_constant: Whether the test side's cotangents do not depend on the weights (the logits head).
        all_dense: Whether every parameter is dense: if the plan does not support interpolation, in Gram blocks with an
            adaptive rule, and in attributions with any rule.
        num_features: k, if gradients are not multiplied but sketched (`autodiff.sketches`).
        tries_pool_windows: Whether gradients of convolutions end at a max-pool if that costs less for all outputs, even
            if few are requested; used for verification.
        joins_states: Whether products of several states are taken together: those of constant inputs wait until the
            end.
        keeps_factors: Whether layers are not multiplied but made dense later, some rows of a weight at a time
            (`autodiff.uses`): every layer is then factored if possible.
    """

    num_output_pairs: int
    num_contractions: int
    cotangents_are_constant: bool = False
    all_dense: bool = False
    num_features: int | None = None
    tries_pool_windows: bool = False
    joins_states: bool = False
    keeps_factors: bool = False

    def factored_is_cheaper(
        self, num_positions: int, n_in: int, n_out: int, *, is_averaged: bool, is_constant: bool = False
    ) -> bool:
        """Compare factored and dense inner products, per pair of points and outputs.

        Args:
            num_positions: L, positions at which the layer's weight is used for one sample.
            n_in: Inputs of the layer at a position.
            n_out: Outputs of the layer at a position.
            is_averaged: Whether one factor does not depend on t, so that averages over t cost no product per node.
            is_constant: Whether the inputs depend neither on t nor on the step.
        """
        if self.num_features is not None:
            return num_positions == 1 and n_in * n_out > _SKETCHED_FACTORS * self.num_features
        if self.joins_states and is_constant and num_positions == 1:
            return True
        contractions = 1 if is_averaged else self.num_contractions
        factored = contractions * num_positions**2 * (n_in / self.num_output_pairs + n_out + _SCALE_AND_ADD)
        return factored < n_in * n_out + _ADD

    def factored_last_layer_is_cheaper(self, shape: torch.Size, head: Head) -> bool:
        """Compare the last layer's factors with its dense Jacobian, as in `factored_is_cheaper`.

        Args:
            shape: Shape of the last layer's weight, (C, n_in).
            head: For logits, one product of the inputs serves all pairs of outputs. For the softmax, C + 1 products of
                averages do, with two passes over the block.
        """
        n_out, n_in = shape[0], shape[1:].numel()
        dense = n_in * n_out + _ADD
        if head == "logits":
            return n_in / self.num_output_pairs < dense
        return (n_out + 1) * n_in / self.num_output_pairs + 2 * _SCALE_AND_ADD < dense


# Inner dimension from which products of several steps are not joined. Measured: joined, layers of 32 and 64 outputs
# take 0.94 to 1.03 of the time; layers of 200 to 300 outputs 0.99 to 1.07.
LONG_INNER_DIM = 256

# Positions up to which dense gradients are written output by output, into the memory of the result. Measured, float64:
# a layer of 64 x 65 with 1 to 8 positions 13 to 19 ms instead of 34 to 55; 16 x 72 with 196 positions 28 instead of 19.
_FEW_POSITIONS = 64

J = TypeVar("J", bound="LeftFactor")
L = TypeVar("L", bound="LayerJacobian")  # beartype takes no `Self`
InputProducts = Callable[[], Tensor]  # the inner products of a layer's inputs, (N, M), computed when they are needed


@runtime_checkable
class ProductSum(Protocol):
    """A sum of inner products of N points with M points, such as `gram.accumulator.GramAccumulator`."""

    def add_products(self, x: Tensor, y: Tensor, weight: float) -> None:
        """Add weight * <x[k, n], y[j, m]>, from (K, N, P) and (J, M, P)."""

    def add_scaled_products(self, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """Add <x[k, n], y[j, m]> * scale[n, m]."""

    def add_deferred_products(self, layer: int, x: Tensor, y: Tensor, weight: float, scale: InputProducts) -> None:
        """Add weight * <x[k, n], y[j, m]> to the layer's own sum, which is multiplied by its scale at the end."""

    def add_same_class(self, products: Tensor) -> None:
        """Add products[n, m] to every pair of equal outputs."""

    def add_positionwise(self, inputs: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], weight: float) -> None:
        """Add the inner products of layers with several positions, from (N, L, n_in), (M, R, n_in) and their grads."""

    def add_softmax_last_layer(self, averages: Tensor, inputs: Tensor, probabilities: Tensor, weight: float) -> None:
        """Add the inner products of a last layer under the softmax: its averages, (1 + C, N, n), with a and p."""

    def add_softmax_averages(self, left: Tensor, right: Tensor, weight: float) -> None:
        """Add the inner products of averages of such a layer with others, (1 + C, N, n) and (1 + C, M, n)."""


@dataclass(frozen=True, eq=False)
class NodeWeights:
    """The quadrature weights of E evaluations of N points.

    Attributes:
        weights: One weight for all rows, so that row n is point n; or (E,).
        points: The point that each row evaluates, (E,); None with one weight for all rows.
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
        """Copy rows that do not depend on the node into their points' rows."""
        if isinstance(self.weights, float):
            return values
        return self._zeros_unless(total, values, dim).index_copy_(dim, self.row_points(), values)

    def _zeros_unless(self, total: Tensor | None, values: Tensor, dim: int) -> Tensor:
        if total is not None:
            return total
        return values.new_zeros(*values.shape[:dim], self.num_points, *values.shape[dim + 1 :])

    @cached_property
    def by_point(self) -> list[tuple[Int64[Tensor, " n"], Int64[Tensor, "n Q"], Float[Tensor, "n Q"]]]:
        """Points with similar numbers of rows, these rows, and their weights, padded with 0."""
        points, weights, found = self.row_points(), torch.as_tensor(self.weights), []
        counts = points.bincount(minlength=self.num_points)
        size = counts.double().log2().ceil().long()  # at most twice as many rows as the point with the fewest
        for own in ((size == k).nonzero().squeeze(1) for k in size[counts > 0].unique().tolist()):
            rows, is_first = equal_groups(points, own)
            found.append((own, rows, weights[rows] * is_first))
        return found

    def row_points(self) -> Int64[Tensor, " E"]:
        """Return the point of each row, if rows have separate weights."""
        if self.points is None:
            raise TypeError("rows with weights of their own must name their points: this is a bug in epk_gp.")
        return self.points


@dataclass(frozen=True, eq=False)
class LeftFactor(ABC):
    """A possible left side of an inner product: a layer Jacobian, or an average of several.

    Attributes:
        point_dims: The dimension of the points in each of its tensors.
        inner_dim: The tensor that changes from step to step, and its inner dimension; "" if several change.
    """

    point_dims: ClassVar[dict[str, int]]
    inner_dim: ClassVar[tuple[str, int]] = ("", 0)

    @abstractmethod
    def add_inner(
        self, other: "LeftFactor", total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add weight times the inner products with the other side's points to a sum.

        Args:
            other: The same layer's Jacobian at M points, or an average of several.
            total: The sum.
            weight: Factor eta_s omega_q.
            layer: Number of the layer, which names its deferred sum.
            same_points: Whether the same points occur at every step, so that constant inputs may be multiplied at the
                end.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that the representation takes."""
        return sum(getattr(self, name).nbytes for name in self.point_dims)

    @property
    def fits_concatenation(self) -> bool:
        """Whether several steps of these points can be summed in one matrix product, and this is faster."""
        name, dim = self.inner_dim
        return bool(name) and is_short(getattr(self, name).shape[dim])

    @property
    def joins_states(self) -> bool:
        """Whether only one tensor changes from state to state of the same points."""
        return bool(self.inner_dim[0])

    def join_states(self: J, count: int, weights: Float[Tensor, " T"] | None = None) -> J:
        """Join rows of the same points at T states along the inner dimension, each times the weight of its state."""
        name, inner = self.inner_dim
        kept = {n: getattr(self, n).unflatten(d, (count, -1)).select(d, 0) for n, d in self.point_dims.items()}
        rows = self.point_dims[name]
        values = getattr(self, name).unflatten(rows, (count, -1))
        if weights is not None:
            values = values * weights.view(-1, *[1] * (values.ndim - rows - 1))
        return replace(self, **kept | {name: values.movedim(rows, inner).flatten(inner, inner + 1)})

    def rows(self: J, rows: slice | Int64[Tensor, " n"]) -> J:
        """Return some of the points."""
        some = {n: getattr(self, n)[(slice(None),) * dim + (rows,)] for n, dim in self.point_dims.items()}
        return replace(self, **some)

    def concat_steps(self: J, others: Sequence["LeftFactor"], weights: Sequence[float]) -> J:
        """Concatenate the changing tensors along the inner dimension, each times its step's weight."""
        name, dim = self.inner_dim
        steps = [getattr(self, name), *(getattr(expect_representation(type(self), step), name) for step in others)]
        return replace(self, **{name: concat_scaled(steps, weights, dim)})


@dataclass(frozen=True, eq=False)
class LayerJacobian(LeftFactor):
    """One layer's gradients of K outputs at E points."""

    @property
    @abstractmethod
    def commutes_with_average(self) -> bool:
        """Whether the average over t of inner products is the inner product of one average."""

    @property
    @abstractmethod
    def multiplications_per_pair(self) -> int:
        """Multiplications of the inner products of a pair of points and outputs, without averages."""

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Return dense gradients: row by row of the weight, each followed by its bias if the layer has one."""

    def of_output(self: L, k: int) -> L:
        """Return the gradients of one output, for a representation that holds those of each."""
        return replace(self, **{n: getattr(self, n)[k : k + 1] for n, dim in self.point_dims.items() if dim})

    def concat_rows(self: L, others: Sequence["LayerJacobian"]) -> L:
        """Append other points' Jacobians of the same layer."""
        parts = [self, *(expect_representation(type(self), other) for other in others)]
        joined = {n: torch.cat([getattr(part, n) for part in parts], dim=dim) for n, dim in self.point_dims.items()}
        return replace(self, **joined)

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> LeftFactor:
        """Add these evaluations to the average of earlier nodes; only if `commutes_with_average`."""
        [(name, dim)] = self.point_dims.items()
        total = None if before is None else getattr(expect_representation(type(self), before), name)
        return replace(self, **{name: nodes.add(total, getattr(self, name), dim)})

    def multiplies_nodes(self, cost: ContractionCost) -> bool:
        """Whether products for every node and step cost less than dense sums over them."""
        return False

    def add_states(
        self, total: LeftFactor | None, others: Sequence["LayerJacobian"], weights: Sequence[float]
    ) -> LeftFactor:
        """Add the weighted sum of this Jacobian and of the same points at other states to an average."""
        total = self.average(total, NodeWeights(weights[0], None, 0))
        for jacobian, weight in zip(others, weights[1:], strict=True):
            total = jacobian.average(total, NodeWeights(weight, None, 0))
        return total

    @abstractmethod
    def pointwise_products(self, other: "LayerJacobian") -> Float[Tensor, "E K K"]:
        """Compute the inner products of each point with the same row of another Jacobian."""

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Add weight times a random sketch of the gradients to a sum; dense, unless the factors suffice."""
        total.add_dense(self.to_dense(), weight, generator)


def expect_representation(kind: type[J], other: LeftFactor) -> J:
    """Return a factor that must have the given representation."""
    if not isinstance(other, kind):
        raise TypeError(
            f"a layer must keep its representation on both sides and from node to node: {kind.__name__} met "
            f"{type(other).__name__}. This is a bug in epk_gp."
        )
    return other


@final
@dataclass(frozen=True, eq=False)
class DenseJacobian(LayerJacobian):
    """Dense gradients of a layer, or of several parameters: (K, E, P_layer)."""

    values: Float[Tensor, "K E P_layer"]

    point_dims: ClassVar = {"values": 1}
    inner_dim: ClassVar = ("values", 2)
    commutes_with_average = True

    @property
    def multiplications_per_pair(self) -> int:
        """One multiplication per parameter."""
        return self.values.shape[2]

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Return the values."""
        return self.values

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one matrix product."""
        total.add_products(self.values, expect_representation(DenseJacobian, other).values, weight)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row."""
        return self.values.transpose(0, 1) @ other.to_dense().transpose(0, 1).mT


@dataclass(frozen=True, eq=False)
class OuterProductJacobian(LayerJacobian):
    """A layer's gradients as sums of outer products over positions: output_grads[k, e, l] (x) inputs[e, l].

    Attributes:
        inputs: Layer inputs, (E, L, n_in).
        output_grads: Gradients with respect to the layer's outputs, (K, E, L, n_out).
        has_bias: Whether the layer has a trained bias: the inputs have one more entry, 1, which is not stored.
        input_is_constant: Whether the inputs depend neither on weights nor on the step.
        cotangent_is_constant: Whether the output gradients do not depend on the weights.
    """

    inputs: Float[Tensor, "E L n_in"]
    output_grads: Float[Tensor, "K E L n_out"]
    has_bias: bool
    input_is_constant: bool
    cotangent_is_constant: bool

    point_dims: ClassVar = {"inputs": 0, "output_grads": 1}
    inner_dim: ClassVar = ("output_grads", 3)

    @property
    def commutes_with_average(self) -> bool:
        """Whether one of the two factors does not depend on t."""
        return self.input_is_constant or self.cotangent_is_constant

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of inputs and output gradients at every pair of positions."""
        return self.inputs.shape[1] ** 2 * (self.inputs.shape[2] + self.output_grads.shape[3])

    @property
    def joins_states(self) -> bool:
        """Whether only the output gradients change from state to state."""
        return self.inputs.shape[1] == 1 and self.input_is_constant

    @property
    def fits_concatenation(self) -> bool:
        """Whether only the output gradients change from step to step, and are short."""
        return self.inputs.shape[1] == 1 and self.input_is_constant and super().fits_concatenation

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Sum the outer products over positions."""
        return sum_outer_products(self._biased().unsqueeze(2), self.output_grads.unsqueeze(3))

    def _biased(self) -> Tensor:
        """Return the inputs with the 1 of a bias."""
        return append_bias_column(self.inputs) if self.has_bias else self.inputs

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> LeftFactor:
        """Average the factor that depends on t."""
        last = None if before is None else expect_representation(type(self), before)
        inputs, output_grads = (None, None) if last is None else (last.inputs, last.output_grads)
        # output gradients may be constant along the step, but differ between points if each point has its own output
        of_inputs, of_grads = (nodes.place, nodes.add) if self.input_is_constant else (nodes.add, nodes.place)
        output_grads = of_grads(output_grads, self.output_grads, 1)
        return replace(self, inputs=of_inputs(inputs, self.inputs, 0), output_grads=output_grads)

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Multiply the products of both factors; at the end of the run if the inputs are constant."""
        b = expect_representation(type(self), other)
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
        """Add states; in one dense product, with states as positions, if both factors change."""
        if self.commutes_with_average:
            return super().add_states(total, others, weights)
        parts = [self, *(expect_representation(OuterProductJacobian, other) for other in others)]
        inputs = torch.cat([part._biased() for part in parts], dim=1)
        grads = concat_scaled([part.output_grads for part in parts], weights, 2)
        values = sum_outer_products(inputs.unsqueeze(2), grads.unsqueeze(3))
        return DenseJacobian(
            values if total is None else expect_representation(DenseJacobian, total).values.add_(values)
        )

    def input_products(self, other: "OuterProductJacobian") -> Float[Tensor, "N M"]:
        """Compute the inner products of the inputs of layers with one position, including the bias's 1."""
        products = self.inputs[:, 0] @ other.inputs[:, 0].T
        return products.add_(1) if self.has_bias else products

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row, summed over pairs of positions."""
        b = expect_representation(type(self), other)
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


@final
@dataclass(frozen=True, eq=False)
class LogitsLastLayer(LayerJacobian):
    """The last layer's gradients of all C logits: products are 0 for different outputs, and the same for equal ones.

    Attributes:
        inputs: The layer's inputs, (E, n), with the 1 of a bias.
        num_outputs: C.
    """

    inputs: Float[Tensor, "E n"]
    num_outputs: int

    point_dims: ClassVar = {"inputs": 0}
    inner_dim: ClassVar = ("inputs", 1)
    commutes_with_average = True

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of the inputs."""
        return self.inputs.shape[1]

    def _unit_vectors(self) -> Tensor:
        return torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Put each output's inputs into the columns of its row of the weight."""
        return (self._unit_vectors()[:, None, :, None] * self.inputs[None, :, None, :]).flatten(2)

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one product of the inputs for all outputs."""
        total.add_same_class((self.inputs @ expect_representation(LogitsLastLayer, other).inputs.T).mul_(weight))

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        products = (self.inputs * expect_representation(LogitsLastLayer, other).inputs).sum(1)
        return torch.diag_embed(products[:, None].expand(-1, self.num_outputs))

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the inputs with each unit vector."""
        grads = self._unit_vectors()[:, None].expand(-1, len(self.inputs), -1)
        total.add_outer_products(self.inputs, grads, weight, generator)


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayer(OuterProductJacobian):
    """The last, linear layer's gradients of all C log-softmax outputs: output_grads[k, e] = e_k - p_e.

    Attributes:
        probabilities: Softmax probabilities p, (E, C).
    """

    probabilities: Float[Tensor, "E C"]

    point_dims: ClassVar = {"inputs": 0, "output_grads": 1, "probabilities": 0}
    commutes_with_average = True
    fits_concatenation = joins_states = False

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "SoftmaxLastLayerAverage":
        """Average the inputs, and their products with each probability."""
        inputs = self.inputs[:, 0]
        values = torch.cat([inputs[None], self.probabilities.T[:, :, None] * inputs])
        last = None if before is None else expect_representation(SoftmaxLastLayerAverage, before).values
        return SoftmaxLastLayerAverage(nodes.add(last, values, 1))


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayerAverage(LeftFactor):
    """Averages over t of a `SoftmaxLastLayer`: of its inputs a, and of p_c a for every output c; (1 + C, N, n)."""

    values: Float[Tensor, "rows N n"]

    point_dims: ClassVar = {"values": 1}

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add the inner products with the other side's factors, or averages (docs/theory.md, section 5)."""
        if isinstance(other, SoftmaxLastLayerAverage):
            total.add_softmax_averages(self.values, other.values, weight)
        else:
            b = expect_representation(SoftmaxLastLayer, other)
            total.add_softmax_last_layer(self.values, b.inputs[:, 0], b.probabilities, weight)


def append_bias_column(a: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n_and_1"]:
    """Append the 1 that multiplies a bias."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def sum_outer_products(a: Float[Tensor, "E L G n_in"], delta: Float[Tensor, "K E L G n_out"]) -> Float[Tensor, "K E P"]:
    """Return dense gradients of a layer call, summed over its L positions, for G groups that do not mix."""
    K, E, L, G, n_out = delta.shape
    if a.requires_grad or delta.requires_grad or L > _FEW_POSITIONS:
        if L == 1:
            return (delta[:, :, 0, :, :, None] * a[:, 0, :, None]).flatten(2)
        # one batched product per point and group: (K n_out, L) x (L, n_in)
        left = delta.permute(1, 3, 0, 4, 2).flatten(2, 3)  # E G (K n_out) L
        product = left @ a.transpose(1, 2)  # E G (K n_out) n_in
        rows: Tensor = product.unflatten(2, (K, n_out)).permute(2, 0, 1, 3, 4)  # K E G n_out n_in
        return rows.flatten(2)
    out = empty_huge_pages((K, E, G, n_out, a.shape[3]), delta)
    if L == 1:
        torch.mul(delta[:, :, 0, :, :, None], a[:, 0, :, None], out=out)
        return out.flatten(2)
    by_output, inputs = delta.permute(0, 1, 3, 4, 2).flatten(1, 2), a.transpose(1, 2).flatten(0, 1)
    for grads, target in zip(by_output, out.flatten(1, 2), strict=True):
        torch.bmm(grads, inputs, out=target)
    return out.flatten(2)


def concat_rows(parts: Sequence[Sequence[LayerJacobian]]) -> list[LayerJacobian]:
    """Join the layer Jacobians of several blocks of points, layer by layer."""
    if len(parts) == 1:
        return list(parts[0])
    return [layer[0].concat_rows(layer[1:]) for layer in zip(*parts, strict=True)]


def to_flat_order(jacobians: Sequence[LayerJacobian], columns: Int64[Tensor, " P"]) -> Float[Tensor, "K E P"]:
    """Return dense layer Jacobians in the order of the flat weights; `dense.flat_columns` gives their indices."""
    rows = [jacobian.to_dense() for jacobian in jacobians]
    out = rows[0].new_empty(*rows[0].shape[:2], len(columns))
    for row, places in zip(rows, columns.split([row.shape[2] for row in rows]), strict=True):
        out[:, :, places] = row
    return out


def is_short(inner_dim: int) -> bool:
    """Return whether a longer inner dimension would speed up a product with this one."""
    return inner_dim < LONG_INNER_DIM


def concat_scaled(parts: Sequence[Tensor], weights: Sequence[float], dim: int) -> Tensor:
    """Concatenate parts of one shape, each times its weight."""
    if all(weight == 1 for weight in weights):
        return torch.cat(list(parts), dim=dim)
    width = parts[0].shape[dim]
    out = parts[0].new_empty(*parts[0].shape[:dim], width * len(parts), *parts[0].shape[dim + 1 :])
    for target, part, weight in zip(out.split(width, dim=dim), parts, weights, strict=True):
        torch.mul(part, weight, out=target)
    return out
