"""The kernel between pairs of sets of points, and its derivatives in the points, step by step: no graph over the run.

Of the products (delta_n . delta'_m) (a_n . a'_m) with weights W_nm, the derivatives in delta_n and a_n are rows of

    (W * (a a'^T)) delta'    and    (W * (delta delta'^T)) a'

the other side held fixed. They are cotangents: a backward pass through the factors of n points makes derivatives in the
points of them, whatever the number of points on the other side.

The derivative of a gradient's inner product needs the network's second derivative, mixed in weights and input. Where
that jumps (ReLU, max-pool) the jump is not seen: the result is the derivative inside the linear piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, chosen_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import DenseJacobian, LayerJacobian, OuterProductJacobian, concat_rows
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.planned_kernel import PlannedKernel, Steps
from epk_gp.quadrature.rules import QuadratureRule

# Rounding errors up to which weights count as symmetric, relative to the largest one: those that reach K(Z, Z) through
# GPyTorch's Cholesky factor differ from their transpose by 1 to 3 of them.
_SYMMETRIC = 16

# Products of some steps that are computed at once. Measured for blocks of 100 x 500 points: 2^17 to 2^18 numbers, which
# stay in the cache, take half the time of 2^21.
_PRODUCTS_AT_ONCE = 1 << 17


@dataclass(frozen=True, eq=False)
class PairedSets:
    """One side of P pairs: U sets of n points each, and which of them each pair has.

    Attributes:
        X: Inputs, (U, n, ...).
        is_train: Whether they are training copies.
        of_pairs: The set of each pair.
    """

    X: Shaped[Tensor, "U n ..."]
    is_train: Bool[Tensor, "U n"]
    of_pairs: Int64[Tensor, " P"]


@dataclass(frozen=True, eq=False)
class SetPairs:
    """P pairs of sets of points, out of U sets on the left and V on the right.

    A pair has K x L matrices of n x m numbers: K = L = C for all pairs of outputs; K = L = 1 for one output of its
    own, or for the trace of their matrix.

    Attributes:
        left: U sets of n points.
        right: V sets of m points; the same object as `left` if every pair has the same set on both sides.
        kind: "full" for all pairs of outputs, "independent" for one output of each pair, "trace" for the sum of each
            output's kernel with itself.
        classes: The output of each pair; None unless they are independent.
    """

    left: PairedSets
    right: PairedSets
    kind: str
    classes: Int64[Tensor, " P"] | None = None


def pairs_block(kernel: PlannedKernel, pairs: SetPairs) -> Float[Tensor, "P K n L m"]:
    """Compute the kernel between the sets of pairs (`PathKernel`)."""
    K = kernel.trajectory.num_outputs if pairs.kind == "full" else 1
    shape = (len(pairs.left.of_pairs), K, pairs.left.X.shape[1], K, pairs.right.X.shape[1])
    result = kernel.reference.new_zeros(shape)
    derivative = _Derivative(kernel, pairs)
    for own, left, right in _blocks(derivative, (False, False)):
        for layers, of_nodes in _evaluated_by_steps(derivative, left, right):
            products = torch.stack([_products(a, b, left, right) for a, b in layers]).sum(0)
            values = torch.einsum("sqpknjm,sq->pknjm", products, of_nodes)
            places = (own[:, None, None], slice(None), left.points[:, None], slice(None), right.points)
            result[places] += values.permute(0, 2, 4, 1, 3)
    return result


def pairs_input_gradients(
    kernel: PlannedKernel, pairs: SetPairs, weights: Float[Tensor, "P K n L m"], wanted: tuple[bool, bool]
) -> tuple[Shaped[Tensor, "U n ..."] | None, Shaped[Tensor, "V m ..."] | None]:
    """Differentiate a weighted sum of kernel values with respect to the points (`PathKernel`)."""
    results = [torch.zeros_like(s.X) if w else None for s, w in zip((pairs.left, pairs.right), wanted, strict=True)]
    with torch.enable_grad():
        derivative = _Derivative(kernel, pairs)
        for own, left, right in _blocks(derivative, wanted):
            of_block = weights[own][:, :, left.points][..., right.points]
            gradients = _block_gradients(derivative, left, right, of_block, wanted)
            for result, side, gradient in zip(results, (left, right), gradients, strict=True):
                if result is not None:
                    result[side.sets[:, None], side.points] += gradient.unflatten(0, (len(side.sets), -1))
    return results[0], results[1]


@dataclass(frozen=True, eq=False)
class _Derivative:
    """How the layer Jacobians of a kernel are computed where its derivative is taken.

    Attributes:
        kernel: The kernel; its cost decides the representations: every layer in the one that it has on the other side
            of a product, the last one too.
        pairs: The pairs.
    """

    kernel: PlannedKernel
    pairs: SetPairs

    def jacobians(self, at: WeightLocation, X: Tensor, cotangents: Cotangents) -> list[LayerJacobian]:
        """Compute layer Jacobians, with a graph if X asks for one; layers with several positions are written out."""
        plain, create_graph, net = replace(cotangents, head=None), X.requires_grad, self.kernel.net
        if create_graph:  # torch 2.13's `vmap` gets layer norms wrong that are differentiated twice
            net = PlannedModel(net.model, replace(net.plan, supports_vmap=False))
        return [
            j if isinstance(j, OuterProductJacobian) and j.inputs.shape[1] == 1 else DenseJacobian(j.to_dense())
            for j in layer_jacobians(net, at, X, plain, self.kernel.cost(), create_graph=create_graph)
        ]

    @cached_property
    def max_points(self) -> int:
        """Points on each side of a block that is differentiated at a time, at one weight state."""
        kernel, model = self.kernel, self.kernel.net.model
        measured, key = model.cache.feature_bytes, ("derivative", kernel.head, kernel.cost(), model.spec)
        if key not in measured:  # what the layer Jacobians of one point take, once for each way of computing them
            X = model.spec.cast(kernel.trajectory.inputs[:1]).detach().requires_grad_()
            at = WeightLocation(flat_state(kernel.trajectory, 0, kernel.reference))
            with torch.enable_grad():
                measured[key] = sum(own.nbytes for own in self.jacobians(at, X, all_outputs(kernel.head)))
        return kernel.memory.derivative_points(kernel.num_output_pairs, measured[key])


@dataclass(frozen=True, eq=False)
class _Factors:
    """One layer's Jacobian of one side's points at S steps: `output_grads`, or their outer products with `inputs`.

    Attributes:
        output_grads: (S, Q, K, U, n, d): Q nodes of each step, K outputs of the n points of U sets.
        inputs: (S, Q, U, n, n_in), or None.
        has_bias: The inputs have one more entry, 1, which is not stored.
    """

    output_grads: Float[Tensor, "S Q K U n d"]
    inputs: Float[Tensor, "S Q U n n_in"] | None = None
    has_bias: bool = False

    def with_graph(self) -> list[Tensor]:
        """List the factors that require a gradient."""
        return [factor for factor in (self.output_grads, self.inputs) if factor is not None and factor.requires_grad]

    def leaves(self, steps: slice, *, is_fixed: bool = False) -> "_Factors":
        """Return the factors at some steps, without what they were computed from."""

        def leaf(factor: Tensor) -> Tensor:
            return factor.detach()[steps].requires_grad_(factor.requires_grad and not is_fixed)

        return _Factors(leaf(self.output_grads), None if self.inputs is None else leaf(self.inputs), self.has_bias)


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a block of pairs: points of one copy.

    Attributes:
        X: The points, set by set, (U * n, ...).
        sets: Which of the sets these are, (U,).
        points: Which of the points of each set, (n,).
        is_train: Whether they are training copies.
        of_pairs: The set of each pair, among the U.
        outputs: The output of each pair among the K that are computed; None if a pair has all K of them.
        cotangents: The K outputs that are computed of each point.
        is_traced: The outputs are joined to one.
    """

    X: Shaped[Tensor, "rows ..."]
    sets: Int64[Tensor, " U"]
    points: Int64[Tensor, " n"]
    is_train: bool
    of_pairs: Int64[Tensor, " P"]
    outputs: Int64[Tensor, " P"] | None
    cotangents: Cotangents
    is_traced: bool

    def weights(self, kernel: PlannedKernel, steps: Steps, nodes: list[tuple[float, float]]) -> list[Tensor]:
        """Return the weights at the nodes of steps: at the start of each for training copies, else along its chord."""
        ends = [(s, s) if self.is_train else (kernel.stretch(s).start, kernel.stretch(s).stop) for s, _ in steps]
        keep = max(b for _, b in ends) - min(a for a, _ in ends) + 1
        states = {state: kernel.states.get(state, keep) for state in sorted({s for pair in ends for s in pair})}
        return [torch.lerp(states[a], states[b], t) for a, b in ends for t, _ in nodes]

    def jacobians(self, derivative: _Derivative, weights: list[Tensor], at_once: int) -> list[LayerJacobian]:
        """Compute the Jacobians of every layer at weight states, `at_once` of them together: rows state by state."""
        parts = []
        for some in (weights[first : first + at_once] for first in range(0, len(weights), at_once)):
            w = torch.stack(some) if len(some) > 1 else some[0]
            X = self.X if len(some) == 1 else self.X.repeat(len(some), *[1] * (self.X.ndim - 1))
            parts.append(derivative.jacobians(WeightLocation(w), X, self.cotangents))
        return concat_rows(parts)

    def factors(self, jacobian: LayerJacobian, num_steps: int) -> _Factors:
        """Arrange a layer's Jacobian at weight states by steps, nodes, sets and points."""
        shape, inputs, has_bias = (num_steps, -1, len(self.sets), len(self.points)), None, False
        if isinstance(jacobian, OuterProductJacobian):
            values, inputs = jacobian.output_grads[:, :, 0], jacobian.inputs[:, 0].unflatten(0, shape)
            has_bias = jacobian.has_bias
        else:
            values = jacobian.to_dense()
        grads = values.unflatten(1, shape).movedim(0, 2)
        if self.is_traced:
            grads = grads.permute(0, 1, 3, 4, 2, 5).flatten(4)[:, :, None]
        return _Factors(grads, inputs, has_bias)

    def grouped(self, grads: Float[Tensor, "S Q K U n d"]) -> tuple[Float[Tensor, "S Q G rows d"], Int64[Tensor, " P"]]:
        """Arrange output gradients so that each pair has one matrix of rows, and return which one it is."""
        if self.outputs is None:
            return grads.transpose(2, 3).flatten(3, 4), self.of_pairs
        return grads.flatten(2, 3), self.outputs * len(self.sets) + self.of_pairs


def _blocks(derivative: _Derivative, wanted: tuple[bool, bool]) -> Iterator[tuple[Int64[Tensor, " p"], _Side, _Side]]:
    """Split pairs into blocks that are computed at all nodes of a step at once: which pairs, and both of their sides.

    A block has at most so many points on each side, all of one copy; those of a set that all of its pairs share count
    once. One side is both where they are the same: its derivatives are taken with the other held fixed.
    """
    pairs, sides = derivative.pairs, (derivative.pairs.left, derivative.pairs.right)
    size = max(1, derivative.max_points // derivative.kernel.rule.num_contractions)
    left_kinds, left_kind = pairs.left.is_train.unique(dim=0, return_inverse=True)
    right_kinds, right_kind = pairs.right.is_train.unique(dim=0, return_inverse=True)
    kinds = left_kind[pairs.left.of_pairs] * len(right_kinds) + right_kind[pairs.right.of_pairs]
    for kind in kinds.unique().tolist():  # sets with training copies at the same places
        selected = (kinds == kind).nonzero().squeeze(1)
        masks = left_kinds[kind // len(right_kinds)], right_kinds[kind % len(right_kinds)]
        counts = [1 if len(s.of_pairs[selected].unique()) == 1 else min(size, s.X.shape[1]) for s in sides]
        parts = [
            [(c, part) for c in (True, False) for part in (mask == c).nonzero().squeeze(1).split(size) if len(part)]
            for mask in masks
        ]
        for own in selected.split(max(1, size // max(counts))):
            for (x_is_train, rows), (y_is_train, columns) in product(*parts):
                if pairs.left is pairs.right and torch.equal(rows, columns):
                    left = right = _side(derivative, pairs.left, own, rows, x_is_train, requires_grad=any(wanted))
                else:
                    left = _side(derivative, pairs.left, own, rows, x_is_train, requires_grad=wanted[0])
                    right = _side(derivative, pairs.right, own, columns, y_is_train, requires_grad=wanted[1])
                yield own, left, right


def _side(
    derivative: _Derivative, side: PairedSets, own: Tensor, points: Tensor, is_train: bool, *, requires_grad: bool
) -> _Side:
    """Prepare one side of some pairs: of a set that is asked about one output only that one is computed."""
    sets, of_pairs = side.of_pairs[own].unique(return_inverse=True)
    X = side.X[sets][:, points].flatten(0, 1).detach().requires_grad_(requires_grad)
    pairs, head, outputs = derivative.pairs, derivative.kernel.head, None
    cotangents = all_outputs(head)
    if pairs.classes is not None:
        classes = pairs.classes[own]
        of_sets = classes.new_zeros(len(sets)).index_put_((of_pairs,), classes)
        if torch.equal(of_sets[of_pairs], classes):
            cotangents = chosen_outputs(head, of_sets.repeat_interleave(len(points)))
        else:
            outputs = classes
    return _Side(X, sets, points, is_train, of_pairs, outputs, cotangents, pairs.kind == "trace")


def _evaluated_by_steps(
    derivative: _Derivative, left: _Side, right: _Side
) -> Iterator[tuple[list[tuple[_Factors, _Factors]], Float[Tensor, "S Q"]]]:
    """Compute layer Jacobians, some steps at a time: each layer's factors on both sides, and eta_s omega_q.

    The factors are one object where the sides are the same. Between test copies the first step of a chord stands for
    all of it.
    """
    kernel, C = derivative.kernel, derivative.kernel.trajectory.num_outputs
    sides = [left] if right is left else [left, right]
    start = [(0.0, 1.0)]  # the node of training copies
    rule = list(kernel.rule) if isinstance(kernel.rule, QuadratureRule) else start
    nodes = [start if side.is_train else rule for side in sides]
    omegas = kernel.reference.new_tensor([omega for _, omega in max(nodes, key=len)])
    # the plan counts forward and backward passes of all outputs, and their Jacobians
    points = [1 + len(side.X) * ((C if side.cotangents.head else 1) + 2) // (C + 2) for side in sides]
    at_once = [kernel.memory.stacked_weights(own) if kernel.net.plan.supports_stacking else 1 for own in points]
    steps_at_once = max(1, min(max(at_once), derivative.max_points // max(points)) // len(omegas))
    every = kernel.steps
    if not any(side.is_train for side in sides):
        every = [(first, sum(eta for _, eta in own)) for first, own in kernel.stretches(every)]
    for steps in (every[first : first + steps_at_once] for first in range(0, len(every), steps_at_once)):
        of_sides = [
            side.jacobians(derivative, side.weights(kernel, steps, own), count)
            for side, own, count in zip(sides, nodes, at_once, strict=True)
        ]
        layers = []
        for jacobians in zip(*of_sides, strict=True):
            if any(isinstance(jacobian, DenseJacobian) for jacobian in jacobians):  # without a graph fewer are
                jacobians = tuple(DenseJacobian(jacobian.to_dense()) for jacobian in jacobians)
            factors = [side.factors(own, len(steps)) for side, own in zip(sides, jacobians, strict=True)]
            layers.append((factors[0], factors[-1]))
        yield layers, kernel.reference.new_tensor([eta for _, eta in steps])[:, None] * omegas


def _block_gradients(
    derivative: _Derivative, left: _Side, right: _Side, weights: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Differentiate a block with respect to the wanted sides."""
    transposed = weights.permute(0, 3, 4, 1, 2)
    tolerance = _SYMMETRIC * torch.finfo(weights.dtype).eps * weights.abs().max()
    is_symmetric = right is left and bool((weights - transposed).abs().max() <= tolerance)
    sums = [torch.zeros_like(side.X) for side in (left, right)]
    keeps = right is left and all(wanted) and not is_symmetric
    for layers, of_nodes in _evaluated_by_steps(derivative, left, right):
        if wanted[0] or is_symmetric:
            sums[0] += _gradient(left, right, layers, weights, of_nodes, keeps)
        if wanted[1] and not is_symmetric:  # K(x, y) at y = x: that in x with the weights transposed
            sums[1] += _gradient(right, left, [(b, a) for a, b in layers], transposed, of_nodes, False)
    return sums[0], sums[0 if is_symmetric else 1]


def _gradient(
    own: _Side, other: _Side, layers: list[tuple[_Factors, _Factors]], weights: Tensor, of_nodes: Tensor, keeps: bool
) -> Tensor:
    """Differentiate a weighted sum of the products of some steps in the points of one side, the other held fixed.

    The graph of the points is kept where the other side asks for it once more.
    """
    found = [pair for a, b in layers for pair in _cotangents(a, b, own, other, weights, of_nodes)]
    if not found:
        return torch.zeros_like(own.X)
    factors, cotangents = zip(*found, strict=True)
    (gradient,) = torch.autograd.grad(
        factors, [own.X], cotangents, retain_graph=keeps, allow_unused=True, materialize_grads=True
    )
    return gradient


def _cotangents(
    left: _Factors, right: _Factors, x: _Side, y: _Side, weights: Tensor, of_nodes: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Differentiate a weighted sum of a layer's products in its factors on the left, the right held fixed.

    Args:
        left: At S steps and the nodes of the left side, or one.
        right: At S steps and the nodes of the right side, or one; the other side's one belongs to all of them.
        x: The left side.
        y: The right side.
        weights: Of each pair's values, (P, K, n, J, m).
        of_nodes: Weights of S steps and their Q nodes, (S, Q).

    Returns:
        Each factor with a graph, and the derivative in it.
    """
    if not left.with_graph():
        return []
    S, Q = of_nodes.shape
    size = max(1, _PRODUCTS_AT_ONCE // (Q * weights.numel()))
    parts = []
    for steps in (slice(first, first + size) for first in range(0, S, size)):
        own = left.leaves(steps)
        with torch.enable_grad():
            products = _products(own, right.leaves(steps, is_fixed=True), x, y)
            values = torch.einsum("sqpknjm,sq->pknjm", products, of_nodes[steps])
        parts.append(torch.autograd.grad(values, own.with_graph(), weights.sum_to_size(values.shape)))
    return [(factor, torch.cat(part)) for factor, part in zip(left.with_graph(), zip(*parts, strict=True), strict=True)]


def _products(left: _Factors, right: _Factors, x: _Side, y: _Side) -> Float[Tensor, "S Q P K n J m"]:
    """Multiply the layer's gradients of both sides of every pair, at every node; arguments as of `_cotangents`."""
    (a, i), (b, j) = x.grouped(left.output_grads), y.grouped(right.output_grads)
    products = _products_of_pairs(a, b, i, j)
    products = torch.unflatten(torch.unflatten(products, -1, (-1, len(y.points))), -3, (-1, len(x.points)))
    if left.inputs is None or right.inputs is None:
        return products
    inputs = _products_of_pairs(left.inputs, right.inputs, x.of_pairs, y.of_pairs)
    if left.has_bias:
        inputs = inputs + 1
    return products * inputs[..., None, :, None, :]


def _products_of_pairs(
    x: Float[Tensor, "S Qx U rows d"],
    y: Float[Tensor, "S Qy V columns d"],
    i: Int64[Tensor, " P"],
    j: Int64[Tensor, " P"],
) -> Float[Tensor, "S Q pairs rows columns"]:
    """Multiply the rows of set i_p on the left with those of set j_p on the right; once if all pairs are the same."""
    if y.shape[2] == 1:  # one matrix product instead of one for each pair
        joint = torch.unflatten(x.flatten(2, 3) @ y[:, :, 0].mT, 2, (x.shape[2], -1))
        return joint if x.shape[2] == 1 else _of_pairs(joint, i)
    if x.shape[2] == 1:
        return _products_of_pairs(y, x, j, i).mT
    return _of_pairs(x, i) @ _of_pairs(y, j).mT


def _of_pairs(factors: Float[Tensor, "S Q sets ..."], index: Int64[Tensor, " P"]) -> Float[Tensor, "S Q P ..."]:
    """Select each pair's factors; they are the same tensor where each pair has its own, in order."""
    if len(index) == factors.shape[2] and torch.equal(index, torch.arange(len(index), device=index.device)):
        return factors
    return factors.index_select(2, index)
