"""Derivatives of Gram blocks with respect to the points, step by step: no graph over the run is ever kept.

The derivative of a gradient's inner product needs the network's second derivative, mixed in weights and input. Where
that jumps (ReLU, max-pool) the jump is not seen: the result is the derivative inside the linear piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.contraction_cost import ContractionCost
from epk_gp.autodiff.cotangents import Cotangents, all_outputs, summed_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.layer_jacobian import LayerJacobian
from epk_gp.autodiff.planned_model import PlannedModel
from epk_gp.autodiff.representations import DenseJacobian, OuterProductJacobian
from epk_gp.autodiff.verification import allclose
from epk_gp.core.points import Points
from epk_gp.core.trajectory import flat_weights
from epk_gp.gram.accumulation import CopyBatch
from epk_gp.gram.context import ExecutionContext
from epk_gp.quadrature.rules import QuadratureRule


@dataclass(frozen=True, eq=False)
class _Derivative:
    """A block whose derivative in the left points is taken.

    Attributes:
        context: The kernel.
        net: Its network, with a plan whose second derivatives were verified.
        cotangents: The outputs that the weights of the sum belong to.
        cost: Decides the representations.
    """

    context: ExecutionContext
    net: PlannedModel
    cotangents: Cotangents
    cost: ContractionCost

    def jacobians(self, s: int, t: float, X: Tensor) -> list[LayerJacobian]:
        """Compute layer Jacobians with a graph to X; layers with several positions are written out."""
        jacobians = layer_jacobians(self.net, self._at(s, t), X, self.cotangents, self.cost, create_graph=True)
        return [j if _has_one_position(j) else DenseJacobian(j.to_dense()) for j in jacobians]

    def with_input_grad(self, s: int, t: float, X: Tensor) -> tuple[Tensor, list[LayerJacobian]]:
        """Return inputs that the layer Jacobians can be differentiated with respect to, and these."""
        X = X.detach().requires_grad_()
        return X, self.jacobians(s, t, X)

    def detached(self, s: int, t: float, X: Tensor) -> list[LayerJacobian]:
        """Compute layer Jacobians without a graph, in the representations that those with one take."""
        return [jacobian.detach() for jacobian in self.jacobians(s, t, X.detach())]

    def points_per_block(self) -> int:
        """Count the points on each side of a block that is differentiated at a time."""
        size = 0
        if self.context.trajectory.num_steps:
            X = self.net.model.spec.cast(self.context.trajectory.inputs[:1])
            size = sum(jacobian.nbytes for jacobian in self.jacobians(0, 0.0, X.detach()))
        return self.context.memory.derivative_points(self.cost.num_output_pairs, size)

    def _at(self, s: int, t: float) -> WeightLocation:
        reference = self.context.reference
        start, end = (flat_weights(self.context.trajectory, state, reference) for state in (s, s + 1))
        return WeightLocation(torch.lerp(start, end, t))


def block_input_gradient(
    context: ExecutionContext,
    a: Points,
    b: Points,
    weights: Float[Tensor, "K N J M"] | Float[Tensor, "K N M"],
    *,
    is_summed: bool,
) -> Shaped[Tensor, "N ..."]:
    """Differentiate a weighted sum of kernel values with respect to the points on the left (`PathKernel`)."""
    pairs = weights.shape[0] * (weights.shape[2] if weights.ndim == 4 else 1)
    result = torch.zeros_like(a.X)
    with torch.enable_grad():
        derivative = _prepare(context, pairs, summed_outputs(context.head) if is_summed else all_outputs(context.head))
        size = derivative.points_per_block()
        for rows, x_is_train in _blocks_of_points(a, size):
            for columns, y_is_train in _blocks_of_points(b, size):
                x, y = CopyBatch(a.X[rows], x_is_train), CopyBatch(b.X[columns], y_is_train)
                result[rows] += _block(derivative, x, y, weights[:, rows][..., columns])
    return result


def diagonal_input_gradient(
    context: ExecutionContext, a: Points, weights: Float[Tensor, "N C C"]
) -> Shaped[Tensor, "N ..."]:
    """Differentiate a weighted sum of the blocks K(a_n, a'_n) with respect to a_n, at a'_n = a_n (`PathKernel`)."""
    result = torch.zeros_like(a.X)
    with torch.enable_grad():
        derivative = _prepare(context, weights.shape[1] ** 2, all_outputs(context.head))
        for rows, is_train in _blocks_of_points(a, derivative.points_per_block()):
            for s, eta in context.steps:
                for t, omega in _nodes(context, is_train):
                    X, jacobians = derivative.with_input_grad(s, t, a.X[rows])
                    blocks = torch.stack([j.pointwise_products(j.detach()) for j in jacobians]).sum(0)
                    result[rows] += eta * omega * _gradient((blocks * weights[rows]).sum(), X)
    return result


def _prepare(context: ExecutionContext, num_output_pairs: int, cotangents: Cotangents) -> _Derivative:
    cost = ContractionCost(num_output_pairs, context.rule.num_contractions, cotangents.are_constant)
    # every layer in the representation that it has on the other side of a product, the last one too
    derivative = _Derivative(context, context.net, replace(cotangents, head=None), cost)
    plan = context.net.plan
    if not (plan.dense_params and plan.supports_vmap):
        return derivative
    return replace(derivative, net=_with_verified_vmap(derivative))


def _with_verified_vmap(derivative: _Derivative) -> PlannedModel:
    """Let `vmap` differentiate dense parameters only if it equals a loop: torch 2.13 gets layer norms wrong, twice."""
    net, trajectory = derivative.net, derivative.context.trajectory
    model, cache = net.model, net.model.cache
    with cache.lock:
        if model.spec not in cache.vmap_second_derivatives:
            X = trajectory.inputs[:2].to(derivative.context.reference)
            gradients = []
            for supports_vmap in (True, False):
                trial = replace(derivative, net=PlannedModel(model, replace(net.plan, supports_vmap=supports_vmap)))
                point, jacobians = trial.with_input_grad(0, 0.5, X)
                values = jacobians[-1].to_dense()
                wave = torch.arange(values.numel(), device=X.device).to(values).sin().view_as(values)
                gradients.append(_gradient((values * wave).sum(), point))
            cache.vmap_second_derivatives[model.spec] = allclose(gradients[0], gradients[1])
        return PlannedModel(model, replace(net.plan, supports_vmap=cache.vmap_second_derivatives[model.spec]))


def _blocks_of_points(points: Points, size: int) -> Iterator[tuple[Tensor, bool]]:
    for is_train in (True, False):
        yield from ((rows, is_train) for rows in points.copies(is_train).split(size) if len(rows))


def _block(derivative: _Derivative, x: CopyBatch, y: CopyBatch, weights: Tensor) -> Tensor:
    """Differentiate one block of points, all of one copy, against points of one copy."""
    total = torch.zeros_like(x.X)
    is_per_class = weights.ndim == 3
    for s, eta in derivative.context.steps:
        fixed_x = derivative.with_input_grad(s, 0.0, x.X) if x.is_train else None
        fixed_y = derivative.detached(s, 0.0, y.X) if y.is_train else None
        value = derivative.context.reference.new_zeros(())
        for t, omega in _nodes(derivative.context, x.is_train and y.is_train):
            X, left = fixed_x or derivative.with_input_grad(s, t, x.X)
            right = fixed_y or derivative.detached(s, t, y.X)
            products = [
                (f.products(g, per_class=is_per_class) * weights).sum() for f, g in zip(left, right, strict=True)
            ]
            at_node = torch.stack(products).sum()
            if fixed_x is None:
                total += _gradient(eta * omega * at_node, X)
            else:
                value = value + eta * omega * at_node
        if fixed_x is not None:
            total += _gradient(value, fixed_x[0])
    return total


def _nodes(context: ExecutionContext, is_train: bool) -> list[tuple[float, float]]:
    """List the nodes of a step: its start alone where all points are training copies."""
    if is_train or not isinstance(context.rule, QuadratureRule):
        return [(0.0, 1.0)]
    return list(context.rule)


def _has_one_position(jacobian: LayerJacobian) -> bool:
    return isinstance(jacobian, OuterProductJacobian) and jacobian.inputs.shape[1] == 1


def _gradient(value: Tensor, X: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, X, allow_unused=True, materialize_grads=True)
    return gradient
