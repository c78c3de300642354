"""Test against training copies along chords: both sides of a chord are averaged before they are multiplied.

With the steps s of a chord, and H the sum of their weights eta_s,

    sum_s eta_s Phi(x) J_s(y)^T = H Phi(x) (sum_s (eta_s / H) J_s(y))^T

so that a chord costs one product for each layer, and the test side is evaluated once. Only a layer that is so large
that its gradients are not written out is multiplied for every node and step. The sums of the training side are kept for
further tiles of the same columns, while memory lasts.
"""

from collections.abc import Hashable, Iterator, Sequence

from torch import Tensor

from epk_gp.autodiff.representations import LayerJacobian, LeftFactor
from epk_gp.autodiff.representations import DenseJacobian
from epk_gp.core.plans import MAX_STEP_BATCH
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.sums import jacobians_at_nodes, nodes_of_points
from epk_gp.gram.accumulator import NodeBatch, StepAverage

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
