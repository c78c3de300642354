"""Derivatives of Gram blocks with respect to the points, step by step: no graph over the run is ever kept.

The derivative of a gradient's inner product needs the network's second derivative, mixed in weights and input. Where
that jumps (ReLU, max-pool) the jump is not seen: the result is the derivative inside the linear piece.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, chosen_outputs, summed_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, DenseJacobian, LayerJacobian, OuterProductJacobian
from epk_gp.autodiff.verification import allclose
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.pairs import (
    PairBlock,
    PairSide,
    PointSets,
    SetFactors,
    SetPairs,
    pair_blocks,
    pair_cotangents,
    pair_products,
    set_factors,
)
from epk_gp.gram.planned_kernel import PlannedKernel
from epk_gp.quadrature.rules import QuadratureRule

# Rounding errors up to which weights count as symmetric, relative to the largest one: those that reach K(Z, Z) through
# GPyTorch's Cholesky factor differ from their transpose by 1 to 3 of them.
_SYMMETRIC = 16

T = TypeVar("T")
Gradients = tuple[Shaped[Tensor, "U n ..."] | None, Shaped[Tensor, "V m ..."] | None]


def pairs_input_gradients(
    kernel: PlannedKernel, pairs: SetPairs, weights: Float[Tensor, "P K n L m"], wanted: tuple[bool, bool]
) -> Gradients:
    """Differentiate a weighted sum of kernel values with respect to the points (`PathKernel`)."""
    results = [torch.zeros_like(s.X) if w else None for s, w in zip((pairs.left, pairs.right), wanted, strict=True)]
    with torch.enable_grad():
        derivative = _prepare(kernel, pairs)
        for block in _blocks(derivative, pairs):
            own = weights[block.of][:, :, block.left[1]][..., block.right[1]]
            found = _block_gradients(derivative, block, own, wanted)
            for result, (sets, points), gradient in zip(results, (block.left, block.right), found, strict=True):
                if result is not None and gradient is not None:
                    result[sets[:, None], points] += gradient
    return results[0], results[1]


def pairs_block(kernel: PlannedKernel, pairs: SetPairs) -> Float[Tensor, "P K n L m"]:
    """Compute the kernel between the sets of pairs (`PathKernel`)."""
    K = kernel.trajectory.num_outputs if pairs.has_all_outputs else 1
    shape = (len(pairs), K, pairs.left.num_points, K, pairs.right.num_points)
    result = kernel.reference.new_zeros(shape)
    derivative = _prepare(kernel, pairs)
    for block in _blocks(derivative, pairs):
        left, right = _sides(kernel, block.pairs, (False, False))
        (_, rows), (_, columns) = block.left, block.right
        for layers, of_nodes in _evaluated_by_steps(derivative, block, left, right):
            products = [pair_products(a, b, left.of_pairs, right.of_pairs, len(of_nodes)) for a, b in layers]
            values = torch.einsum("sqpknjm,sq->pknjm", torch.stack(products).sum(0), of_nodes)
            result[block.of[:, None, None], :, rows[:, None], :, columns] += values.permute(0, 2, 4, 1, 3)
    return result


@dataclass(frozen=True, eq=False)
class _Derivative:
    """How the layer Jacobians of a kernel are computed where its derivative is taken.

    Attributes:
        kernel: The kernel.
        net: Its network, with a plan whose second derivatives were verified.
        cost: Decides the representations: every layer in the one that it has on the other side of a product, the last
            one too.
        max_points: Points on each side of a block that is differentiated at a time, at one weight state.
    """

    kernel: PlannedKernel
    net: PlannedModel
    cost: ContractionCost
    max_points: int = 1

    def jacobians(self, at: WeightLocation, X: Tensor, cotangents: Cotangents) -> list[LayerJacobian]:
        """Compute layer Jacobians, with a graph if X asks for one; layers with several positions are written out."""
        jacobians = layer_jacobians(
            self.net, at, X, replace(cotangents, head=None), self.cost, create_graph=X.requires_grad
        )
        return [
            j if isinstance(j, OuterProductJacobian) and j.inputs.shape[1] == 1 else DenseJacobian(j.to_dense())
            for j in jacobians
        ]


def _prepare(kernel: PlannedKernel, pairs: SetPairs) -> _Derivative:
    num_pairs = 1 if pairs.is_summed else kernel.trajectory.num_outputs if pairs.is_traced else kernel.num_output_pairs
    cost = ContractionCost(num_pairs, kernel.rule.num_contractions, kernel.head == "logits")
    derivative = _Derivative(kernel, kernel.net, cost)
    plan = kernel.net.plan
    if plan.dense_params and plan.supports_vmap:
        derivative = replace(derivative, net=_with_verified_vmap(derivative))
    size = _jacobian_bytes(derivative) if kernel.trajectory.num_steps else 0
    return replace(derivative, max_points=kernel.memory.derivative_points(num_pairs, size))


def _jacobian_bytes(derivative: _Derivative) -> int:
    """Measure the bytes that the layer Jacobians of one point take; once for each way of computing them."""
    kernel, measured = derivative.kernel, derivative.net.model.cache.feature_bytes
    key = ("derivative", kernel.head, derivative.cost, derivative.net.model.spec)
    if key not in measured:
        X = derivative.net.model.spec.cast(kernel.trajectory.inputs[:1]).detach().requires_grad_()
        at = WeightLocation(flat_state(kernel.trajectory, 0, kernel.reference))
        with torch.enable_grad():
            jacobians = derivative.jacobians(at, X, all_outputs(kernel.head))
        measured[key] = sum(jacobian.nbytes for jacobian in jacobians)
    return measured[key]


def _with_verified_vmap(derivative: _Derivative) -> PlannedModel:
    """Let `vmap` differentiate dense parameters only if it equals a loop: torch 2.13 gets layer norms wrong, twice."""
    kernel, net = derivative.kernel, derivative.net
    model, cache = net.model, net.model.cache
    with cache.lock, torch.enable_grad():
        if model.spec not in cache.vmap_second_derivatives:
            X = kernel.trajectory.inputs[:2].to(kernel.reference).requires_grad_()
            start, end = (flat_state(kernel.trajectory, state, kernel.reference) for state in (0, 1))
            at = WeightLocation(torch.lerp(start, end, 0.5))
            gradients = list[Tensor]()
            for supports_vmap in (True, False):
                trial = replace(derivative, net=PlannedModel(model, replace(net.plan, supports_vmap=supports_vmap)))
                values = trial.jacobians(at, X, all_outputs(kernel.head))[-1].to_dense()
                wave = torch.arange(values.numel(), device=X.device).to(values).sin().view_as(values)
                gradients.extend(torch.autograd.grad((values * wave).sum(), [X]))
            cache.vmap_second_derivatives[model.spec] = allclose(gradients[0], gradients[1])
        return PlannedModel(model, replace(net.plan, supports_vmap=cache.vmap_second_derivatives[model.spec]))


def _blocks(derivative: _Derivative, pairs: SetPairs) -> Iterator[PairBlock]:
    """Split pairs into blocks that are computed at all nodes of a step at once."""
    return pair_blocks(pairs, max(1, derivative.max_points // derivative.kernel.rule.num_contractions))


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a block's pairs.

    Attributes:
        X: Its points, set by set, (U * n, ...).
        num_sets: U.
        of_pairs: Where the pairs find their factors.
        num_outputs: Outputs that are computed of each point.
        cotangents: The outputs that are wanted, at a number of weight states.
        is_traced: The outputs are joined to one.
    """

    X: Shaped[Tensor, "rows ..."]
    num_sets: int
    of_pairs: PairSide
    num_outputs: int
    cotangents: Callable[[int], Cotangents]
    is_traced: bool = False

    def jacobians(
        self, derivative: _Derivative, weights: Sequence[Tensor], at_once: int
    ) -> list[tuple[int, list[LayerJacobian]]]:
        """Compute the Jacobians of every layer at weight states, `at_once` of them together: how many, and theirs."""
        parts = []
        for some in _batches(weights, at_once):
            if len(some) == 1:
                at, X = WeightLocation(some[0]), self.X
            else:
                at = WeightLocation(some[0], stacked=torch.stack(list(some)))
                X = self.X.repeat(len(some), *[1] * (self.X.ndim - 1))
            parts.append((len(some), derivative.jacobians(at, X, self.cotangents(len(some)))))
        return parts

    def factors(self, parts: Sequence[tuple[int, list[LayerJacobian]]], layer: int, *, is_dense: bool) -> SetFactors:
        """Arrange one layer's Jacobians at weight states by sets."""
        own = [(count, DenseJacobian(js[layer].to_dense()) if is_dense else js[layer]) for count, js in parts]
        first, *others = (set_factors(jacobian, count, self.num_sets) for count, jacobian in own)
        factors = first.with_states(others) if others else first
        return factors.traced() if self.is_traced else factors


def _side(
    kernel: PlannedKernel, pairs: SetPairs, points: PointSets, sets: Int64[Tensor, " P"], *, requires_grad: bool
) -> _Side:
    """Prepare one side: of a set that is asked about one output only that one is computed."""
    head, num_outputs = kernel.head, kernel.trajectory.num_outputs
    X = points.X.flatten(0, 1).detach().requires_grad_(requires_grad)
    if pairs.classes is None:
        cotangents = summed_outputs(head) if pairs.is_summed else all_outputs(head)
        K = 1 if pairs.is_summed else num_outputs
        return _Side(X, points.num_sets, PairSide(sets, None), K, lambda _: cotangents, pairs.is_traced)
    of_sets = pairs.classes.new_zeros(points.num_sets)
    of_sets[sets] = pairs.classes
    if not torch.equal(of_sets[sets], pairs.classes):
        return _Side(X, points.num_sets, PairSide(sets, pairs.classes), num_outputs, lambda _: all_outputs(head))
    of_points = of_sets.repeat_interleave(points.num_points)
    own = PairSide(sets, torch.zeros_like(sets))
    return _Side(X, points.num_sets, own, 1, lambda num_states: chosen_outputs(head, of_points.repeat(num_states)))


def _sides(kernel: PlannedKernel, pairs: SetPairs, wanted: tuple[bool, bool]) -> tuple[_Side, _Side]:
    """Prepare both sides; one is both where they are the same: its derivatives are taken with the other held fixed."""
    is_shared = pairs.have_same_sides
    left = _side(kernel, pairs, pairs.left, pairs.left_index, requires_grad=any(wanted) if is_shared else wanted[0])
    if is_shared:
        return left, left
    return left, _side(kernel, pairs, pairs.right, pairs.right_index, requires_grad=wanted[1])


def _evaluated_by_steps(
    derivative: _Derivative, block: PairBlock, left: _Side, right: _Side
) -> Iterator[tuple[list[tuple[SetFactors, SetFactors]], Float[Tensor, "S Q"]]]:
    """Compute layer Jacobians, some steps at a time: each layer's factors on both sides, and eta_s omega_q.

    The factors are one object where the sides are the same.
    """
    kernel = derivative.kernel
    nodes = [_nodes(kernel, is_train) for is_train in block.is_train]
    omegas = kernel.reference.new_tensor([omega for _, omega in max(nodes, key=len)])
    # the plan counts forward and backward passes of all outputs, and their Jacobians
    points = [1 + len(side.X) * (side.num_outputs + 2) // (kernel.trajectory.num_outputs + 2) for side in (left, right)]
    stacks = derivative.net.plan.supports_stacking
    at_once = [kernel.memory.stacked_weights(own) if stacks else 1 for own in points]
    steps_at_once = max(1, min(max(at_once), derivative.max_points // max(points)) // len(omegas))
    for steps in _batches(_steps_between(kernel, block.is_train), steps_at_once):
        at_nodes = [
            _weights_at_nodes(kernel, steps, own, is_train) for own, is_train in zip(nodes, block.is_train, strict=True)
        ]
        x = left.jacobians(derivative, at_nodes[0], at_once[0])
        y = x if right is left else right.jacobians(derivative, at_nodes[1], at_once[1])
        layers = []
        for layer, kinds in enumerate(zip(x[0][1], y[0][1], strict=True)):
            is_dense = any(isinstance(jacobian, DenseJacobian) for jacobian in kinds)  # without a graph fewer are
            a = left.factors(x, layer, is_dense=is_dense)
            layers.append((a, a if right is left else right.factors(y, layer, is_dense=is_dense)))
        yield layers, kernel.reference.new_tensor([eta for _, eta in steps])[:, None] * omegas


def _block_gradients(
    derivative: _Derivative, block: PairBlock, weights: Tensor, wanted: tuple[bool, bool]
) -> list[Tensor | None]:
    """Differentiate a block with respect to the wanted sides."""
    left, right = _sides(derivative.kernel, block.pairs, wanted)
    transposed = weights.permute(0, 3, 4, 1, 2)
    tolerance = _SYMMETRIC * torch.finfo(weights.dtype).eps * weights.abs().max()
    is_symmetric = right is left and bool((weights - transposed).abs().max() <= tolerance)
    sums = [torch.zeros_like(side.X) for side in (left, right)]
    retains = right is left and all(wanted) and not is_symmetric
    for layers, of_nodes in _evaluated_by_steps(derivative, block, left, right):
        if wanted[0] or is_symmetric:
            sums[0] += _gradient(left, right, layers, weights, of_nodes, retain_graph=retains)
        if wanted[1] and not is_symmetric:  # K(x, y) at y = x: that in x with the weights transposed
            sums[1] += _gradient(right, left, [(b, a) for a, b in layers], transposed, of_nodes)
    totals = [sums[0 if is_symmetric else side] if wanted[side] else None for side in (0, 1)]
    return [
        None if total is None else total.unflatten(0, sets.X.shape[:2])
        for total, sets in zip(totals, (block.pairs.left, block.pairs.right), strict=True)
    ]


def _gradient(
    own: _Side,
    other: _Side,
    layers: Sequence[tuple[SetFactors, SetFactors]],
    weights: Tensor,
    of_nodes: Tensor,
    *,
    retain_graph: bool = False,
) -> Tensor:
    """Differentiate a weighted sum of the products of some steps in the points of one side, the other held fixed."""
    found = [pair for a, b in layers for pair in pair_cotangents(a, b, own.of_pairs, other.of_pairs, weights, of_nodes)]
    if not found:
        return torch.zeros_like(own.X)
    factors, cotangents = zip(*found, strict=True)
    (gradient,) = torch.autograd.grad(
        factors, [own.X], cotangents, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    return gradient


def _batches(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[first : first + size] for first in range(0, len(values), size))


def _nodes(kernel: PlannedKernel, is_train: bool) -> list[tuple[float, float]]:
    """List the nodes of a step: its start alone for training copies."""
    if is_train or not isinstance(kernel.rule, QuadratureRule):
        return [(0.0, 1.0)]
    return list(kernel.rule)


def _steps_between(kernel: PlannedKernel, is_train: tuple[bool, bool]) -> list[tuple[int, float]]:
    """List the steps that count with their weights; between test copies the first one of a chord stands for all."""
    if any(is_train):
        return kernel.steps
    return [(first, sum(eta for _, eta in own)) for first, own in kernel.stretches(kernel.steps)]


def _weights_at_nodes(
    kernel: PlannedKernel, steps: Sequence[tuple[int, float]], nodes: list[tuple[float, float]], is_train: bool
) -> list[Tensor]:
    """Return the weights at the nodes of steps: of the steps themselves for training copies, else of their chords."""
    ends = [(s, s) if is_train else (kernel.stretch(s).start, kernel.stretch(s).stop) for s, _ in steps]
    keep = max(b for _, b in ends) - min(a for a, _ in ends) + 1
    needed = sorted({state for pair in ends for state in pair})
    states = {state: kernel.prefetcher.get(state, keep) for state in needed}
    return [torch.lerp(states[a], states[b], t) for a, b in ends for t, _ in nodes]
