"""Averages over a step before any inner product, wherever the algebra allows (docs/engine.md, section 6).

The integral over t is linear in the test side, and the training side of a step stands still. So nodes cost no product
of their own for layers whose inputs are constant (average the output gradients), whose cotangents are constant (average
the inputs), that are dense, or that are the last before a softmax.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import LayerJacobian, LeftFactor, NodeWeights, to_flat_order
from epk_gp.autodiff.representations import DenseJacobian
from epk_gp.gram.accumulator import GramAccumulator


@dataclass(frozen=True, eq=False)
class NodeBatch:
    """Layer Jacobians of test points at nodes of one step.

    Attributes:
        jacobians: E rows, layer by layer.
        nodes: Whose row is whose, with which quadrature weight.
    """

    jacobians: Sequence[LayerJacobian]
    nodes: NodeWeights


class StepAverage:
    """One step's average against fixed training-side Jacobians, accumulated node by node and finalized into a tile."""

    def __init__(
        self,
        tile: GramAccumulator,
        right: Sequence[LayerJacobian],
        eta: float,
        averages: dict[int, LeftFactor] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        """Start a step.

        Args:
            tile: Where the step is added.
            right: Training-side layer Jacobians of the step.
            eta: The step's factor.
            averages: Those of all nodes, where several steps share them (`add_to_averages`); their layers are left out.
            layers: The layers that are added; None for all.
        """
        self.tile, self.right, self.eta = tile, right, eta
        self._layers = range(len(right)) if layers is None else layers
        self._has_averages = averages is not None
        self.averages: dict[int, LeftFactor] = {} if averages is None else averages

    def accumulate(self, batch: NodeBatch) -> None:
        """Add some nodes; together they must cover [0, 1] once for every point.

        Layers that do not commute with the average are multiplied node by node, at once.
        """
        nodes = batch.nodes
        for layer, (jacobian, other) in enumerate(zip(batch.jacobians, self.right, strict=True)):
            if layer not in self._layers or (self._has_averages and layer in self.averages):
                continue
            if jacobian.commutes_with_average:
                self.averages[layer] = jacobian.average(self.averages.get(layer), nodes)
            elif isinstance(nodes.weights, float):
                jacobian.add_inner(other, self.tile, self.eta * nodes.weights, layer=layer, same_points=False)
            else:
                points = nodes.row_points()
                part = self.tile.empty_rows(len(points))
                jacobian.add_inner(other, part, self.eta, layer=layer, same_points=False)
                products = part.result()
                self.tile.add_rows(points, products.mul_(nodes.weights.view(1, -1, *[1] * (products.ndim - 2))))

    def finalize(self) -> None:
        """Add the averaged layers to the tile."""
        for layer, average in self.averages.items():
            if layer in self._layers:
                average.add_inner(self.right[layer], self.tile, self.eta, layer=layer, same_points=False)


def add_to_averages(averages: dict[int, LeftFactor], batch: NodeBatch) -> None:
    """Add some nodes to the averages of the layers that commute with it, by number of the layer.

    Together the nodes must cover [0, 1] once for every point.
    """
    for layer, jacobian in enumerate(batch.jacobians):
        if jacobian.commutes_with_average:
            averages[layer] = jacobian.average(averages.get(layer), batch.nodes)


def averaged_jacobian(batches: Iterable[NodeBatch], columns: Int64[Tensor, " P"]) -> Float[Tensor, "K N P"]:
    """Write the averages Phi of N points' Jacobians over a step out, in the order of the flat weights.

    Args:
        batches: Nodes that cover [0, 1] once for every point.
        columns: Place in the flat weights of each entry (`flat_columns`).
    """
    averages: dict[int, LeftFactor] = {}
    for batch in batches:
        for layer, jacobian in enumerate(batch.jacobians):
            term = jacobian if jacobian.commutes_with_average else DenseJacobian(jacobian.to_dense())
            averages[layer] = term.average(averages.get(layer), batch.nodes)
    return to_flat_order([cast(LayerJacobian, averages[layer]) for layer in sorted(averages)], columns)
