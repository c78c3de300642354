"""Steps of the run added to a tile: one sum for each combination of training and test copies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.nodes import feature_bytes, jacobians_at_nodes, nodes_of_points, shared_nodes
from epk_gp.gram.step_average import StepAverage
from epk_gp.quadrature.rules import AdaptiveRule

T = TypeVar("T")
Steps = list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class CopyBatch:
    """Points that are all training copies, or all test copies."""

    X: Shaped[Tensor, "n ..."]
    is_train: bool

    def __len__(self) -> int:
        """Count the points."""
        return len(self.X)


def add_steps(context: ExecutionContext, steps: Steps, tile: GramAccumulator, x: CopyBatch, y: CopyBatch) -> None:
    """Add steps to a tile: training copies at the steps' starts, test copies at the nodes.

    Args:
        context: The kernel.
        steps: (s, eta_s) of each step.
        tile: The tile; symmetric if both sides are the same points.
        x: The points on the left.
        y: The points on the right; training copies if the left ones are.
    """
    if not y.is_train:
        _add_test_test(context, steps, tile, x.X, y.X)
    elif x.is_train:
        _add_train_train(context, steps, tile, x.X, y.X)
    else:
        _add_test_train(context, steps, tile, x.X, y.X)


def step_batches(context: ExecutionContext, steps: Steps, num_points: int) -> Iterator[Steps]:
    """Split steps into batches whose layer Jacobians fit into the budget together."""
    return _batches(steps, _batch_size(context, num_points * (context.rule.num_contractions + 2)))


def _add_train_train(context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add J_s(x) J_s(y)^T for each step: one evaluation per step and side."""
    starts = [(s, 0.0) for s, _ in steps]
    right = list(jacobians_at_nodes(context, starts, Y))
    left = right if tile.is_symmetric else list(jacobians_at_nodes(context, starts, X))
    tile.add_steps(left, right, [eta for _, eta in steps])


def _add_test_train(context: ExecutionContext, steps: Steps, tile: GramAccumulator, X: Tensor, Y: Tensor) -> None:
    """Add (sum_q w_q J_sq(x)) J_s(y)^T for each step.

    The left side is averaged over nodes before any product; layers without an average are multiplied node by node by
    `StepAverage.accumulate`.
    """
    right = list(jacobians_at_nodes(context, [(s, 0.0) for s, _ in steps], Y))
    averages = []
    for (_, eta), other, nodes in zip(steps, right, nodes_of_points(context, [s for s, _ in steps], X), strict=True):
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
    """Add sum_q w_q J_sq(x) J_sq(y)^T for each step: one product per node."""
    every = X if tile.is_symmetric else torch.cat([X, Y])
    nodes = [(s, t, eta * weight) for s, eta in steps for t, weight in shared_nodes(context, s, every)]
    for batch in _batches(nodes, _batch_size(context, len(X) + len(Y))):
        at_nodes = [(s, t) for s, t, _ in batch]
        left = list(jacobians_at_nodes(context, at_nodes, X))
        right = left if tile.is_symmetric else list(jacobians_at_nodes(context, at_nodes, Y))
        tile.add_steps(left, right, [weight for *_, weight in batch])


def _batch_size(context: ExecutionContext, num_jacobians: int) -> int:
    """Count the steps or nodes that are added together; an adaptive rule takes one at a time."""
    if isinstance(context.rule, AdaptiveRule):
        return 1
    return context.memory.steps_per_batch(num_jacobians * feature_bytes(context))


def _batches(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[first : first + size] for first in range(0, len(values), size))
