"""Test-side gradients averaged over t before any inner product, wherever the algebra allows.

The integral over t is linear in the test side, and the training side of a step stands still. So nodes cost no product
of their own for layers whose input is fixed (average delta), whose delta is fixed (average a), that are written out, or
that are the last before a softmax (average a and p (x) a; engine.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import (
    Average,
    DenseJacobian,
    Feature,
    LastLayerFactors,
    OuterProductJacobian,
    SoftmaxLastLayerAverage,
    to_dense,
)
from epk_gp.gram.accumulator import GramAccumulator

F = TypeVar("F", OuterProductJacobian, DenseJacobian, SoftmaxLastLayerAverage)


@dataclass(frozen=True, eq=False)
class NodeBatch:
    """Gradients of some test points at some nodes of one step.

    Attributes:
        features: E rows, layer by layer.
        weights: Quadrature weights, (E,); or one for all rows, and then row n is point n.
        points: (E,) index of each row's point.
    """

    features: Sequence[Feature]
    weights: Float[Tensor, " E"] | float
    points: Int64[Tensor, " E"] | None = None


def commutes_with_average(feature: Feature) -> bool:
    """Whether the t-average of this layer's inner products is the inner product of one average."""
    if isinstance(feature, OuterProductJacobian):
        return feature.fixed_input or feature.fixed_delta or isinstance(feature, LastLayerFactors)
    return True


class StepAverage:
    """One step's integral against fixed training-side features, taken in node by node and closed into a tile."""

    def __init__(
        self, tile: GramAccumulator, num_points: int, right: Sequence[Feature], eta: float, *, fixed_steps: bool
    ) -> None:
        """Start a step.

        Args:
            tile: Where the step is added.
            num_points: N, rows of the tile.
            right: Training-side features of the step.
            eta: The step's factor.
            fixed_steps: See `GramAccumulator.add`.
        """
        self.tile, self.num_points, self.right, self.eta, self.fixed_steps = tile, num_points, right, eta, fixed_steps
        self.averages: dict[int, Average] = {}

    def take(self, node: NodeBatch) -> None:
        """Take in some evaluations; together they must cover [0, 1] once for every point."""
        for number, (feature, other) in enumerate(zip(node.features, self.right, strict=True)):
            if commutes_with_average(feature):
                self.averages[number] = averaged(self.averages.get(number), feature, node, self.num_points)
            elif isinstance(node.weights, float):
                self.tile.add_layer(number, feature, other, self.eta * node.weights, fixed_steps=False)
            else:
                points = _points(node)
                part = self.tile.empty_rows(len(points))
                part.add_layer(number, feature, other, self.eta, fixed_steps=False)
                values = part.finished()
                self.tile.add_rows(points, values.mul_(node.weights.view(1, -1, *[1] * (values.ndim - 2))))

    def close(self) -> None:
        """Add the averaged layers to the tile."""
        for number, average in self.averages.items():
            self.tile.add_layer(number, average, self.right[number], self.eta, fixed_steps=self.fixed_steps)


def averaged(before: Average | None, feature: Feature, node: NodeBatch, num_points: int) -> Average:
    """Add a node's gradients of one averageable layer to those of the nodes before."""
    if isinstance(feature, DenseJacobian):
        old = None if before is None else _as(DenseJacobian, before).values
        return DenseJacobian(_added(old, feature.values, node, 1, num_points))
    if isinstance(feature, LastLayerFactors) and feature.p is not None:
        values = torch.cat([feature.inputs[None], feature.p.T[:, :, None] * feature.inputs])
        old = None if before is None else _as(SoftmaxLastLayerAverage, before).values
        return SoftmaxLastLayerAverage(_added(old, values, node, 1, num_points))
    earlier = None if before is None else _as(OuterProductJacobian, before)
    if feature.fixed_input:
        delta = _added(None if earlier is None else earlier.delta, feature.delta, node, 1, num_points)
        a = _spread(None if earlier is None else earlier.a, feature.a, node, 0, num_points)
        return replace(feature, a=a, delta=delta)
    a = _added(None if earlier is None else earlier.a, feature.a, node, 0, num_points)
    # fixed along the step, but each point's own where each is asked about another output
    delta = _spread(None if earlier is None else earlier.delta, feature.delta, node, 1, num_points)
    return replace(feature, a=a, delta=delta)


def averaged_jacobian(
    nodes: Iterable[NodeBatch], num_points: int, layout: Int64[Tensor, " P"]
) -> Float[Tensor, "K N P"]:
    """Write the t-averaged gradients Phi of N points out, in the order of the flat weights.

    Args:
        nodes: Evaluations that cover [0, 1] once for every point.
        num_points: N.
        layout: Place in the flat weights of each entry of the features (`flat_layout`).
    """
    averages: dict[int, Average] = {}
    for node in nodes:
        for number, feature in enumerate(node.features):
            kept = commutes_with_average(feature) and not isinstance(feature, LastLayerFactors)
            entry = feature if kept else DenseJacobian(to_dense(feature))
            averages[number] = averaged(averages.get(number), entry, node, num_points)
    return to_flat_order([cast(Feature, averages[number]) for number in sorted(averages)], layout)


def to_flat_order(features: Sequence[Feature], layout: Int64[Tensor, " P"]) -> Float[Tensor, "K E P"]:
    """Write features out in the order of the flat weights."""
    rows = [to_dense(feature) for feature in features]
    out = rows[0].new_empty(*rows[0].shape[:2], len(layout))
    first = 0
    for row in rows:
        out[:, :, layout[first : first + row.shape[2]]] = row
        first += row.shape[2]
    return out


def _added(total: Tensor | None, values: Tensor, node: NodeBatch, dim: int, num_points: int) -> Tensor:
    if isinstance(node.weights, float):
        return values * node.weights if total is None else total.add_(values, alpha=node.weights)
    if total is None:
        total = values.new_zeros(*values.shape[:dim], num_points, *values.shape[dim + 1 :])
    scaled = values * node.weights.view(-1, *[1] * (values.ndim - dim - 1))
    return total.index_add_(dim, _points(node), scaled)


def _spread(total: Tensor | None, values: Tensor, node: NodeBatch, dim: int, num_points: int) -> Tensor:
    """Put what does not depend on t into its points' rows."""
    if isinstance(node.weights, float):
        return values
    if total is None:
        total = values.new_zeros(*values.shape[:dim], num_points, *values.shape[dim + 1 :])
    return total.index_copy_(dim, _points(node), values)


def _points(node: NodeBatch) -> Tensor:
    if node.points is None:
        raise TypeError("rows with weights of their own must name their points: this is a bug in epk_gp.")
    return node.points


def _as(kind: type[F], feature: Average) -> F:
    if not isinstance(feature, kind):
        raise TypeError("a layer must keep its form from node to node: this is a bug in epk_gp.")
    return feature
