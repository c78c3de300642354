"""Nodes of the steps, and the layer Jacobians there."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.directional import WeightSegment
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians_at_weights, layer_jacobians_blocked
from epk_gp.autodiff.representations import LayerJacobian, NodeWeights, to_flat_order
from epk_gp.autodiff.dense import flat_columns
from epk_gp.autodiff.representations import DenseJacobian
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.accumulator import NodeBatch
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.quadrature.paths import ManhattanPath, moved_parts, stretches_of
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule


def jacobians_at_nodes(
    context: ExecutionContext,
    nodes: list[tuple[int, float]],
    X: Shaped[Tensor, "n ..."],
    cost: ContractionCost,
    *,
    are_training: bool,
) -> Iterator[list[LayerJacobian]]:
    """Compute layer Jacobians at nodes (s, t), t of the way from w_s to the end of its stretch; small ones together.

    On a Manhattan path they are dense, one for each module: that of test copies is taken where the module moves.

    Args:
        context: The kernel.
        nodes: Steps s and positions t, in the order of the steps. A stretch of the path has its first step; training
            copies have t = 0.
        X: n inputs.
        cost: Decides the representations.
        are_training: The points are training copies.
    """
    steps = [s for s, _ in nodes]
    keep = 1 + max(steps, default=0) - min(steps, default=0)
    if isinstance(context.path, ManhattanPath):
        return _jacobians_by_module(context, nodes, X, keep, are_training=are_training)
    weights = (_weights_at(context, s, t, keep) for s, t in nodes)
    return layer_jacobians_at_weights(context.net, weights, X, context.head, cost, context.memory)


def feature_bytes(context: ExecutionContext) -> int:
    """Measure the bytes that the layer Jacobians of one point take; once for each way of computing them."""
    costs = [context.cost] if context.path.every == 1 else [context.cost, context.mixed_cost]
    return max(_feature_bytes(context, cost) for cost in costs)


def _feature_bytes(context: ExecutionContext, cost: ContractionCost) -> int:
    net = context.net
    key = (context.head, cost, isinstance(context.path, ManhattanPath), tuple(net.plan.bias_of), net.model.spec)
    measured = net.model.cache.feature_bytes
    if key not in measured:
        X = net.model.spec.cast(context.trajectory.inputs[:1])
        jacobians = next(jacobians_at_nodes(context, [(0, 0.0)], X, cost, are_training=True))
        measured[key] = sum(jacobian.nbytes for jacobian in jacobians)
    return measured[key]


def shared_nodes(context: ExecutionContext, s: int, X: Shaped[Tensor, "n ..."]) -> list[tuple[float, float]]:
    """List nodes and weights that all points share on the stretch of the path that begins with a step."""
    if isinstance(context.rule, QuadratureRule):
        return list(context.rule)
    return union_mesh(_integrate(context, _segment(context, s), X, context.rule), context.rule)


def nodes_of_points(
    context: ExecutionContext, steps: list[int], X: Shaped[Tensor, "n ..."], cost: ContractionCost
) -> Iterator[Iterator[NodeBatch]]:
    """Evaluate test copies at the nodes of each stretch of the path: all at the same ones, or each at its own.

    Args:
        context: The kernel.
        steps: The first step of each stretch.
        X: n inputs.
        cost: Decides the representations.
    """
    if isinstance(context.rule, AdaptiveRule):
        yield from (_adaptive_nodes(context, s, context.rule, X, cost) for s in steps)
        return
    rule = list(context.rule)
    at_nodes = [(s, t) for s in steps for t, _ in rule]
    jacobians = jacobians_at_nodes(context, at_nodes, X, cost, are_training=False)
    for _ in steps:
        yield (NodeBatch(next(jacobians), NodeWeights(weight, None, len(X))) for _, weight in rule)


def _adaptive_nodes(
    context: ExecutionContext, s: int, rule: AdaptiveRule, X: Tensor, cost: ContractionCost
) -> Iterator[NodeBatch]:
    segment = _segment(context, s)
    integral = _integrate(context, segment, X, rule)
    for part in torch.arange(len(integral.point), device=X.device).split(len(X)):
        points = integral.point[part]
        at = WeightLocation(segment.w, segment.d, integral.t[part])
        jacobians = layer_jacobians_blocked(context.net, at, X[points], context.head, cost)
        yield NodeBatch(jacobians, NodeWeights(integral.weight[part], points, len(X)))


def _integrate(context: ExecutionContext, segment: WeightSegment, X: Tensor, rule: AdaptiveRule) -> Integral:
    integral = integrate(segment, X, rule, len(stretches_of(context.path, context.trajectory.num_steps)))
    context.integrations.add(integral)
    return integral


def _weights_at(context: ExecutionContext, s: int, t: float, keep: int) -> Float[Tensor, " PQ"]:
    start = context.prefetcher.get(s, keep)
    if t == 0:
        return start
    stretch = context.stretch(s)
    return torch.lerp(start, context.prefetcher.get(stretch.stop, keep + len(stretch)), t)


def _segment(context: ExecutionContext, s: int) -> WeightSegment:
    stretch = context.stretch(s)
    start, end = context.prefetcher.get(s, 1), context.prefetcher.get(stretch.stop, 1 + len(stretch))
    return WeightSegment(context.net, start, end - start, context.head, context.options.memory_budget)


def _jacobians_by_module(
    context: ExecutionContext, nodes: list[tuple[int, float]], X: Tensor, keep: int, *, are_training: bool
) -> Iterator[list[LayerJacobian]]:
    """Compute the dense Jacobians of the modules that move one after another, at nodes of straight steps."""
    net, cost = context.net, context.cost
    parts = [part for part in moved_parts(context.path, net.model) if part.start < net.model.num_weights]
    columns = flat_columns(net, all_dense=cost.all_dense).to(X.device)

    def weights() -> Iterator[Tensor]:
        for s, t in nodes:
            start = context.prefetcher.get(s, keep)
            if are_training:
                yield start
                continue
            end = context.prefetcher.get(s + 1, keep + 1)
            for part in parts:
                yield torch.cat([end[: part.start], torch.lerp(start[part], end[part], t), start[part.stop :]])

    found = layer_jacobians_at_weights(net, weights(), X, context.head, cost, context.memory)
    for _ in nodes:
        written_out = None
        blocks = list[LayerJacobian]()
        for part in parts:
            if written_out is None or not are_training:
                written_out = to_flat_order(next(found), columns)
            blocks.append(DenseJacobian(written_out[:, :, part].contiguous()))
        yield blocks
