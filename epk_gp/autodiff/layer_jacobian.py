"""Representations of a layer's Jacobian, and what can be done with each (docs/engine.md, section 3).

A layer Jacobian holds the gradients of K outputs at E points with respect to one layer's parameters. Every
representation can be multiplied with another of its kind, averaged over nodes, written out, and split into rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.sketches import FeatureSum
from epk_gp.core.plans import empty_huge_pages

# Inner dimension from which products of several steps are not joined into one with a longer inner dimension. Measured
# on one thread (AMD EPYC), blocks of 8 to 1000 points, 16 to 100 steps: joined, layers of 32 and 64 outputs take 0.94
# to 1.03 of the time of one product per step; layers of 200 to 300 outputs 0.99 to 1.07, once 1.35.
LONG_INNER_DIM = 256

# Positions up to which gradients are written out output by output, into the memory of the result. Measured on one
# thread, float64: 1200 points, 2 outputs, a layer of 64 x 65 and 1 to 8 positions take 13 to 19 ms in place of 34 to
# 55, most of which were new pages; 100 points, 10 outputs, 16 x 72 and 196 positions 28 in place of 19.
_FEW_POSITIONS = 64

J = TypeVar("J", bound="LeftFactor")
InputProducts = Callable[[], Tensor]  # the inner products of a layer's inputs, (N, M), computed when they are needed


@runtime_checkable
class ProductSum(Protocol):
    """A sum of inner products of N points with M points; `gram.accumulator.GramAccumulator` is one."""

    def add_products(self, x: Tensor, y: Tensor, weight: float) -> None:
        """Add weight * <x[k, n], y[j, m]>, from (K, N, P) and (J, M, P)."""

    def add_scaled_products(self, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """Add <x[k, n], y[j, m]> * scale[n, m]."""

    def add_deferred_products(self, layer: int, x: Tensor, y: Tensor, weight: float, scale: InputProducts) -> None:
        """Add weight * <x[k, n], y[j, m]> to a sum of the layer's own, which is multiplied by its scale at the end."""

    def add_same_class(self, products: Tensor) -> None:
        """Add products[n, m] to every pair of equal outputs."""

    def add_positionwise(
        self, inputs: tuple[Tensor, Tensor], output_grads: tuple[Tensor, Tensor], weight: float
    ) -> None:
        """Add the inner products of layers with several positions, from (N, L, n_in), (M, R, n_in) and their grads."""

    def add_softmax_last_layer(self, averages: Tensor, inputs: Tensor, probabilities: Tensor, weight: float) -> None:
        """Add the inner products of a last layer under the softmax: its averages, (1 + C, N, n), with a and p."""

    def add_softmax_averages(self, left: Tensor, right: Tensor, weight: float) -> None:
        """Add the inner products of averages of such a layer with others, (1 + C, N, n) and (1 + C, M, n)."""


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
        self, other: "LeftFactor", total: ProductSum, weight: float, *, layer: int, same_points: bool
    ) -> None:
        """Add weight times the inner products with the other side's points to a sum.

        Args:
            other: The same layer's Jacobian at M points, or an average of some.
            total: The sum.
            weight: Factor eta_s omega_q.
            layer: Number of the layer, which names its deferred sum.
            same_points: The same points come at every step, so that constant inputs may be multiplied at the end.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the representation takes."""

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
    def multiplications_per_pair(self) -> int:
        """Multiplications of the inner products of a pair of points and outputs, without averages."""

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

    def multiplies_nodes(self, cost: ContractionCost) -> bool:
        """Whether products for every node and step cost less than writing sums over them out."""
        return False

    def add_states(
        self, total: LeftFactor | None, others: Sequence["LayerJacobian"], weights: Sequence[float]
    ) -> LeftFactor:
        """Add the weighted sum of this Jacobian and those of the same points at other states to an average.

        Args:
            total: The average so far.
            others: The Jacobians at other states.
            weights: Of this one, and of the others; all that are ever added sum to 1.
        """
        for jacobian, weight in zip((self, *others), weights, strict=True):
            total = jacobian.average(total, NodeWeights(weight, None, 0))
        if total is None:
            raise ValueError("a sum over states must have some: there are none.")
        return total

    @abstractmethod
    def pointwise_products(self, other: "LayerJacobian") -> Float[Tensor, "E K K"]:
        """Compute the inner products of each point with the same row of another Jacobian."""

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Add weight times a random sketch of the gradients to a sum; written out, unless the factors will do.

        Args:
            total: The sum.
            weight: Factor.
            generator: Draws the sketch, the same for the same state.
        """
        total.add_dense(self.to_dense(), weight, generator)


def append_bias_column(a: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n_and_1"]:
    """Append the 1 that a bias is multiplied by."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def sum_outer_products(a: Float[Tensor, "E L G n_in"], delta: Float[Tensor, "K E L G n_out"]) -> Float[Tensor, "K E P"]:
    """Write a layer call's gradients out, summed over its L positions, for G groups that do not mix."""
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
    """Write layer Jacobians out in the order of the flat weights.

    Args:
        jacobians: One per layer.
        columns: Place in the flat weights of each entry (`autodiff.planned_model.flat_columns`).
    """
    rows = [jacobian.to_dense() for jacobian in jacobians]
    out = rows[0].new_empty(*rows[0].shape[:2], len(columns))
    first = 0
    for row in rows:
        out[:, :, columns[first : first + row.shape[2]]] = row
        first += row.shape[2]
    return out


def is_short(inner_dim: int) -> bool:
    """Return whether a product with this inner dimension gains by a longer one."""
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


def same_representation(own: J, other: LeftFactor) -> J:
    """Return the other factor, which must have the representation of this one."""
    return expect_representation(type(own), other)


def expect_representation(kind: type[J], other: LeftFactor) -> J:
    """Return a factor that must have the given representation.

    Raises:
        TypeError: It has another one.
    """
    if not isinstance(other, kind):
        raise TypeError(
            f"a layer must keep its representation on both sides and from node to node: {kind.__name__} met "
            f"{type(other).__name__}. This is a bug in epk_gp."
        )
    return other
