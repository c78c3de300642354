"""Steps of the run added to a tile: nodes, layer Jacobians, and one sum for each combination of copies.

With the steps s of a chord, and H the sum of their weights eta_s,

    sum_s eta_s Phi(x) J_s(y)^T = H Phi(x) (sum_s (eta_s / H) J_s(y))^T

so that a chord costs one product for each layer, and the test side is evaluated once. Only a layer that is so large
that its gradients are not written out is multiplied for every node and step. The sums of the training side are kept for
further tiles of the same columns, while memory lasts.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import WeightSegment
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians_at_weights, layer_jacobians_blocked
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    LayerJacobian,
    LeftFactor,
    NodeWeights,
)
from epk_gp.core.plans import MAX_STEP_BATCH
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, StepAverage
from epk_gp.gram.context import ExecutionContext, integral_counts
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, stretches_of


def jacobians_at_nodes(
    context: ExecutionContext,
    nodes: list[tuple[int, float]],
    X: Shaped[Tensor, "n ..."],
    cost: ContractionCost,
    *,
    are_training: bool,
) -> Iterator[list[LayerJacobian]]:
    """Compute layer Jacobians at nodes (s, t), t of the way from w_s to the end of its stretch; small ones together.

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
    weights = (_weights_at(context, s, t, keep) for s, t in nodes)
    return layer_jacobians_at_weights(context.net, weights, X, context.head, cost, context.memory)


def feature_bytes(context: ExecutionContext) -> int:
    """Measure the bytes that the layer Jacobians of one point take; once for each way of computing them."""
    costs = [context.cost] if context.path.every == 1 else [context.cost, context.mixed_cost]
    return max(_feature_bytes(context, cost) for cost in costs)


def _feature_bytes(context: ExecutionContext, cost: ContractionCost) -> int:
    net = context.net
    key = (context.head, cost, tuple(net.plan.bias_of), net.model.spec)
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
    context.integrations.merge(integral_counts(integral))
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


Steps = list[tuple[int, float]]
Averages = dict[int, LeftFactor]  # by number of the layer


def add_chords(
    context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor, columns: Hashable = None
) -> None:
    """Add the products of test copies with training copies for each step.

    Args:
        context: The kernel.
        steps: (s, eta_s) of each step, all that count of each chord.
        tile: The tile.
        X: The test copies, on the left.
        Y: The training copies.
        columns: Tells these training copies from others of the block, for `context.training_sums`.
    """
    chords = context.stretches(steps)
    left, right, weights = list[Averages](), list[Averages](), list[float]()
    at_nodes = nodes_of_points(context, [first for first, _ in chords], X, context.factored_cost)
    for (first, own), nodes in zip(chords, at_nodes, strict=True):
        batches, length = list(nodes), sum(eta for _, eta in own)
        averages = _test_side(context, batches)
        sums = context.training_sums.get((columns, first))
        if sums is None:
            sums = Averages()
            for etas, jacobians in _training_side(context, own, Y):
                for layer in averages:
                    one, *others = (of_step[layer] for of_step in jacobians)
                    sums[layer] = one.add_states(sums.get(layer), others, [eta / length for eta in etas])
                if len(averages) < len(jacobians[0]):
                    for eta, of_step in zip(etas, jacobians, strict=True):
                        product = StepAverage(tile, of_step, eta, averages)
                        for batch in batches:
                            product.accumulate(batch)
            if len(averages) == len(batches[0].jacobians):
                context.training_sums.put((columns, first), sums)
        left.append(averages)
        right.append(sums)
        weights.append(length)
    tile.add_steps(
        [list(of_chord.values()) for of_chord in left], [list(of_chord.values()) for of_chord in right], weights
    )


def _test_side(context: ExecutionContext, batches: Sequence[NodeBatch]) -> Averages:
    """Average test copies over the nodes of a chord, but for layers that are multiplied node by node."""
    averages = Averages()
    for layer, one in enumerate(batches[0].jacobians):
        if one.multiplies_nodes(context.mixed_cost):
            continue
        of_nodes = [batch.jacobians[layer] for batch in batches]
        shared = [batch.nodes.weights for batch in batches if isinstance(batch.nodes.weights, float)]
        if len(shared) == len(batches):
            averages[layer] = one.add_states(None, of_nodes[1:], shared)
            continue
        for jacobian, batch in zip(of_nodes, batches, strict=True):  # each point has nodes of its own
            term = jacobian if jacobian.commutes_with_average else DenseJacobian(jacobian.to_dense())
            averages[layer] = term.average(averages.get(layer), batch.nodes)
    return averages


def _training_side(
    context: ExecutionContext, steps: Steps, Y: Tensor
) -> Iterator[tuple[list[float], list[list[LayerJacobian]]]]:
    """Compute layer Jacobians at the starts of some steps at a time: their weights, and theirs."""
    for first in range(0, len(steps), MAX_STEP_BATCH):
        part = steps[first : first + MAX_STEP_BATCH]
        starts = [(s, 0.0) for s, _ in part]
        found = jacobians_at_nodes(context, starts, Y, context.factored_cost, are_training=True)
        yield [eta for _, eta in part], list(found)


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CopyBatch:
    """Points that are all training copies, or all test copies.

    Attributes:
        X: The inputs.
        is_train: Which copies they are.
        key: Tells them from others of the block.
    """

    X: Shaped[Tensor, "n ..."]
    is_train: bool
    key: Hashable = None

    def __len__(self) -> int:
        """Count the points."""
        return len(self.X)


def add_steps(context: ExecutionContext, steps: Steps, tile: GramAccumulator, x: CopyBatch, y: CopyBatch) -> None:
    """Add steps to a tile: training copies at the steps' starts, test copies at the nodes.

    Args:
        context: The kernel.
        steps: (s, eta_s) of each step; where there are test copies, all that count of each chord.
        tile: The tile; symmetric if both sides are the same points.
        x: The points on the left.
        y: The points on the right; training copies if the left ones are.
    """
    if not y.is_train:
        _add_test_test(context, steps, tile, x.X, y.X)
    elif x.is_train:
        _add_train_train(context, steps, tile, x.X, y.X)
    elif context.path.every > 1:
        add_chords(context, steps, tile, x.X, y.X, y.key)
    else:
        _add_test_train(context, steps, tile, x.X, y.X)


def step_batches(
    context: ExecutionContext, steps: Steps, num_points: int, *, are_training: bool = False
) -> Iterator[Steps]:
    """Split steps into batches whose layer Jacobians fit into the budget together; chords stay whole.

    Args:
        context: The kernel.
        steps: The steps.
        num_points: Points of the larger side.
        are_training: All points are training copies, which do not move along chords.
    """
    size = _batch_size(context, num_points * (context.rule.num_contractions + 2))
    if are_training or context.path.every == 1:
        yield from _batches(steps, size)
        return
    for group in _batches(context.stretches(steps), max(1, min(size, MAX_STEP_BATCH // context.path.every))):
        yield [step for _, own in group for step in own]


def _add_train_train(context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add J_s(x) J_s(y)^T for each step: one evaluation per step and side."""
    starts = [(s, 0.0) for s, _ in steps]
    right = list(jacobians_at_nodes(context, starts, Y, context.cost, are_training=True))
    left = right if tile.is_symmetric else list(jacobians_at_nodes(context, starts, X, context.cost, are_training=True))
    tile.add_steps(left, right, [eta for _, eta in steps])


def _add_test_train(context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add (sum_q w_q J_sq(x)) J_s(y)^T for each step.

    The left side is averaged over nodes before any product; layers without an average are multiplied node by node by
    `StepAverage.accumulate`.
    """
    right = list(jacobians_at_nodes(context, [(s, 0.0) for s, _ in steps], Y, context.cost, are_training=True))
    averages = []
    at_nodes = nodes_of_points(context, [s for s, _ in steps], X, context.cost)
    for (_, eta), other, nodes in zip(steps, right, at_nodes, strict=True):
        average = StepAverage(tile, other, eta)
        for batch in nodes:
            average.accumulate(batch)
        averages.append(average.averages)
    # averages are joined over steps before they are multiplied; `StepAverage.finalize` would multiply step by step
    layers = sorted(averages[0])
    tile.add_steps(
        [[of_step[layer] for layer in layers] for of_step in averages],
        [[of_step[layer] for layer in layers] for of_step in right],
        [eta for _, eta in steps],
    )


def _add_test_test(context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add sum_q w_q J_sq(x) J_sq(y)^T for each step: one product per node. Steps of a chord share their nodes."""
    every = X if tile.is_symmetric else torch.cat([X, Y])
    nodes = test_nodes(context, steps, every)
    for batch in _batches(nodes, _batch_size(context, len(X) + len(Y))):
        at_nodes = [(s, t) for s, t, _ in batch]
        left = list(jacobians_at_nodes(context, at_nodes, X, context.cost, are_training=False))
        right = (
            left
            if tile.is_symmetric
            else list(jacobians_at_nodes(context, at_nodes, Y, context.cost, are_training=False))
        )
        tile.add_steps(left, right, [weight for *_, weight in batch])


def test_nodes(context: ExecutionContext, steps: Steps, X: Shaped[Tensor, "n ..."]) -> list[tuple[int, float, float]]:
    """List the nodes (s, t) that test copies share, s the first step of a stretch, with the weights of their products.

    Args:
        context: The kernel.
        steps: (s, eta_s) of each step.
        X: The points, at which an adaptive rule chooses its nodes.
    """
    return [
        (first, t, sum(eta for _, eta in own) * weight)
        for first, own in context.stretches(steps)
        for t, weight in shared_nodes(context, first, X)
    ]


def _batch_size(context: ExecutionContext, num_jacobians: int) -> int:
    """Count the steps or nodes that are added together; an adaptive rule takes one at a time."""
    if isinstance(context.rule, AdaptiveRule):
        return 1
    return context.memory.steps_per_batch(num_jacobians * feature_bytes(context))


def _batches(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[first : first + size] for first in range(0, len(values), size))
