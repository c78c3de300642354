"""Steps of the run added to a tile: one sum for each combination of training and test copies."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.plans import MAX_STEP_BATCH
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.sums import Steps, add_chords
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.sums import feature_bytes, jacobians_at_nodes, nodes_of_points, shared_nodes
from epk_gp.gram.accumulator import StepAverage
from epk_gp.quadrature.rules import AdaptiveRule

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
