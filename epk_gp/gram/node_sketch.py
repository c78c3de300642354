"""Sketched features of points at the nodes of a path, one fixed block of points after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.dense import combined_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import LayerJacobian
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.sketches import FeatureSum, seeded_generator
from epk_gp.core.losses import Head
from epk_gp.core.plans import rows_per_pass, sketched_rows
from epk_gp.gram.accumulator import GramAccumulator

_PRODUCTS = ContractionCost(1, 1)

PIECE_BLOCKS = 4  # blocks of points that a worker computes, and a checkpoint holds, at a time


@dataclass(frozen=True, eq=False)
class NodeSketch:
    """The sum over nodes of a path of sketched gradients: one copy of the points, in one dtype and on one device.

    The features of a point depend on its block of points by rounding, so blocks depend on the network alone.

    Attributes:
        net: The network with its plan.
        states: The weights at the n nodes, and statistics behind them.
        head: Whether f is the logits or their log-softmax.
        coefficients: Of the outputs in each of K gradients, at each node.
        num_features: k.
        key: What the sketches are drawn from.
    """

    net: PlannedModel
    states: tuple[Float[Tensor, " PQ"], ...]
    head: Head
    coefficients: Float[Tensor, "nodes K C"]
    num_features: int
    key: tuple[object, ...]

    def block(self, X: Shaped[Tensor, "E ..."]) -> Float[Tensor, "E K k"]:
        """Compute the features of a block of points."""
        total = self._empty_sum(X)
        for node, jacobians in enumerate(self.jacobians(X, self._sketching)):
            self._add_node(total, node, jacobians)
        return total.result().transpose(0, 1)

    def input_gradients(self, X: Shaped[Tensor, "n ..."], weights: Float[Tensor, "n K k"]) -> Shaped[Tensor, "n ..."]:
        """Differentiate the weighted sum of the features of points with respect to the points, node by node.

        Args:
            X: n inputs.
            weights: Of their features.
        """
        plan = self.net.plan
        if plan.dense_params:  # `vmap` may get second derivatives wrong: torch 2.13 does so for layer norms
            slow = PlannedModel(self.net.model, replace(plan, supports_vmap=False))
            return replace(self, net=slow)._input_gradients(X, weights)
        return self._input_gradients(X, weights)

    def piece(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n K k"]:
        """Compute the features of several blocks of points."""
        return torch.cat([self.block(rows) for rows in X.split(self.block_rows(X))])

    def block_rows(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Return the number of points of a block, which depends on the network alone."""
        jacobians = next(self.jacobians(X[:1], self._sketching))
        num_outputs = self.coefficients.shape[1]
        per_point = sum(jacobian.nbytes for jacobian in jacobians) + 2 * max(jacobian.nbytes for jacobian in jacobians)
        return min(sketched_rows(per_point), rows_per_pass(self.net.plan, self.net.itemsize, num_outputs))

    def product_rows(self, X: Shaped[Tensor, "n ..."], budget: int) -> int:
        """Return the number of points whose layer Jacobians at a node take an eighth of a budget of bytes."""
        jacobians = next(self.jacobians(X[:1], _PRODUCTS))
        by_points = budget // (8 * sum(jacobian.nbytes for jacobian in jacobians))
        bytes_per_pair = 3 * self.net.itemsize * self.coefficients.shape[1]  # three blocks, in half of the budget
        return max(1, min(by_points, int((budget / 2 / bytes_per_pair) ** 0.5)))

    def multiplications_per_pair(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Count the multiplications of a pair of points in `node_products`."""
        jacobians = next(self.jacobians(X[:1], _PRODUCTS))
        return len(self.states) * self.coefficients.shape[1] * sum(j.multiplications_per_pair for j in jacobians)

    def jacobians(
        self, X: Shaped[Tensor, "E ..."], cost: ContractionCost, *, create_graph: bool = False
    ) -> Iterator[list[LayerJacobian]]:
        """Compute the layer Jacobians of the K combined outputs, node by node, times the root of its length."""
        for state, coefficients in zip(self.states, self.coefficients, strict=True):
            cotangents = combined_outputs(self.head, coefficients)
            at = WeightLocation(state)
            yield layer_jacobians(self.net, at, X, cotangents, cost, create_graph=create_graph)

    def _input_gradients(self, X: Tensor, weights: Tensor) -> Tensor:
        parts = []
        for rows in torch.arange(len(X), device=X.device).split(self.block_rows(X)):
            x, own = X[rows].detach().requires_grad_(), weights[rows].transpose(0, 1)
            gradient = torch.zeros_like(x)
            with torch.enable_grad():
                for node, jacobians in enumerate(self.jacobians(x, self._sketching, create_graph=True)):
                    total = self._empty_sum(x)
                    self._add_node(total, node, jacobians)
                    (part,) = torch.autograd.grad(
                        (total.result() * own).sum(), x, allow_unused=True, materialize_grads=True
                    )
                    gradient += part
            parts.append(gradient)
        return torch.cat(parts)

    def _empty_sum(self, X: Tensor) -> FeatureSum:
        return FeatureSum(self.coefficients.shape[1], len(X), self.num_features, self.states[0])

    def _add_node(self, total: FeatureSum, node: int, jacobians: list[LayerJacobian]) -> None:
        for layer, jacobian in enumerate(jacobians):
            jacobian.sketch(total, 1.0, seeded_generator(*self.key, self.num_features, layer, node))

    @property
    def _sketching(self) -> ContractionCost:
        return ContractionCost(1, 1, num_features=self.num_features)


def node_products(
    left: NodeSketch, X: Shaped[Tensor, "n ..."], right: NodeSketch, Y: Shaped[Tensor, "m ..."]
) -> tuple[Float[Tensor, "K n m"], Float[Tensor, "n K"], Float[Tensor, "m K"]]:
    """Compute the products that are sketched, of each of K combined outputs with itself, summed over the nodes.

    Returns:
        The products, and those of each point on the left and on the right with itself.
    """
    is_symmetric = left is right and X is Y
    K = left.coefficients.shape[1]
    total = GramAccumulator((K, len(X), len(Y)), left.states[0], is_symmetric)
    own, other = left.states[0].new_zeros(len(X), K), left.states[0].new_zeros(len(Y), K)
    of_right = None if is_symmetric else right.jacobians(Y, _PRODUCTS)
    for a in left.jacobians(X, _PRODUCTS):
        b = a if of_right is None else next(of_right)
        total.add_steps([a], [b], [1.0])
        own += _square_lengths(a)
        if not is_symmetric:
            other += _square_lengths(b)
    return total.result(), own, own if is_symmetric else other


def _square_lengths(jacobians: list[LayerJacobian]) -> Float[Tensor, "n K"]:
    parts = [jacobian.pointwise_products(jacobian).diagonal(dim1=1, dim2=2) for jacobian in jacobians]
    return torch.stack(parts).sum(0)
