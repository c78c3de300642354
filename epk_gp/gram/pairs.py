"""The kernel between pairs of sets of points, and its derivatives in the points, by autograd through some steps.

The derivative of a gradient's inner product needs the network's second derivative, mixed in weights and input. If the
first derivative jumps (ReLU, max-pool), the jump is not seen: the result is the derivative inside the linear piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
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

_START = [(0.0, 1.0)]  # the node of training copies, with its weight


@dataclass(frozen=True, eq=False)
class PointsOfPairs:
    """One side of P pairs: U sets of n points each, and the set of each pair.

    Attributes:
        X: Inputs, (U, n, ...).
        is_train: Whether the points are training copies.
        of_pairs: The set of each pair.
    """

    X: Shaped[Tensor, "U n ..."]
    is_train: Bool[Tensor, "U n"]
    of_pairs: Int64[Tensor, " P"]


@dataclass(frozen=True, eq=False)
class SetPairs:
    """P pairs of sets of points.

    A pair has K x L matrices of n x m numbers: K = L = C for all pairs of outputs; K = L = 1 for the pair's own output,
    or for the trace of its matrix.

    Attributes:
        left: Sets of n points.
        right: Sets of m points; the same object as `left` if every pair has the same set on both sides.
        kind: "full" for all pairs of outputs, "independent" for one output of each pair, "trace" for the sum of each
            output's kernel with itself.
        classes: The output of each pair, (P,); None unless they are independent.
    """

    left: PointsOfPairs
    right: PointsOfPairs
    kind: str
    classes: Int64[Tensor, " P"] | None = None


def pairs_block(kernel: PlannedKernel, pairs: SetPairs) -> Float[Tensor, "P K n L m"]:
    """Compute the kernel between the sets of pairs (`PathKernel`)."""
    K = kernel.trajectory.num_outputs if pairs.kind == "full" else 1
    shape = (len(pairs.left.of_pairs), K, pairs.left.X.shape[1], K, pairs.right.X.shape[1])
    result = kernel.reference.new_zeros(shape)
    for own, left, right in _blocks(kernel, pairs, (False, False)):
        for products, of_nodes in _products_by_steps(kernel, left, right):
            result[own, :, left.points, :, right.points] += torch.einsum("sqpknjm,sq->pknjm", products, of_nodes)
    return result


def pairs_input_gradients(
    kernel: PlannedKernel, pairs: SetPairs, weights: Float[Tensor, "P K n L m"], wanted: tuple[bool, bool]
) -> tuple[Shaped[Tensor, "U n ..."] | None, Shaped[Tensor, "V m ..."] | None]:
    """Differentiate a weighted sum of kernel values with respect to the points (`PathKernel`)."""
    results = [torch.zeros_like(s.X) if w else None for s, w in zip((pairs.left, pairs.right), wanted, strict=True)]
    if pairs.left is pairs.right:
        results[1] = results[0]
    for own, left, right in _blocks(kernel, pairs, wanted):
        of_block = weights[own, :, left.points, :, right.points]
        sides = [side for side in ((left,) if right is left else (left, right)) if side.X.requires_grad]
        with torch.enable_grad():
            for products, of_nodes in _products_by_steps(kernel, left, right):
                if not products.requires_grad:  # no layer depends on the points
                    continue
                value = torch.einsum("sqpknjm,pknjm,sq->", products, of_block, of_nodes)
                found = torch.autograd.grad(value, [s.X for s in sides], allow_unused=True, materialize_grads=True)
                for side, gradient in zip(sides, found, strict=True):
                    total = results[0 if side is left else 1]
                    if total is not None:
                        total[side.sets, side.points] += gradient
    return results[0], None if pairs.left is pairs.right else results[1]


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a block of pairs.

    Attributes:
        X: Some points of some sets, (U, n, ...).
        is_train: Whether each point is a training copy, (U * n,).
        sets: Indices of these sets.
        points: Indices of the points in each set.
        of_pairs: The set of each of the block's p pairs, among the U sets.
        outputs: The only computed output of each point, (U * n,); None for all outputs.
        chosen: The output of each pair among all outputs, (p,); None if it takes the computed one.
        is_traced: Whether the outputs are joined to one.
    """

    X: Shaped[Tensor, "U n ..."]
    is_train: Bool[Tensor, " rows"]
    sets: Int64[Tensor, " U"]
    points: slice
    of_pairs: Int64[Tensor, " p"]
    outputs: Int64[Tensor, " rows"] | None
    chosen: Int64[Tensor, " p"] | None
    is_traced: bool

    def factors(self, kernel: PlannedKernel, steps: Steps) -> list[LayerJacobian]:
        """Compute the Jacobian of every layer at the nodes of steps: rows step by step, node by node."""
        is_train, nodes = self.is_train, _nodes(kernel)
        starts = [(s, s, 0.0) for s, _ in steps]
        if is_train.all():
            return self._jacobians(kernel, starts)
        ends = [(kernel.stretch(s).start, kernel.stretch(s).stop) for s, _ in steps]
        moved = [(start, stop, t) for start, stop in ends for t, _ in nodes]
        if not is_train.any():
            return self._jacobians(kernel, moved)
        of_train, of_test = self._jacobians(kernel, starts, is_train), self._jacobians(kernel, moved, ~is_train)
        row, count = torch.where(is_train, is_train.cumsum(0), (~is_train).cumsum(0)) - 1, int(is_train.sum())
        node = torch.arange(len(moved), device=row.device)[:, None]
        first = len(steps) * count  # first row of the test copies
        place = torch.where(is_train, node // len(nodes) * count, first + node * (len(row) - count)) + row
        return [a.concat_rows([b]).rows(place.flatten()) for a, b in zip(of_train, of_test, strict=True)]

    def _jacobians(
        self, kernel: PlannedKernel, nodes: list[tuple[int, int, float]], some: Bool[Tensor, " rows"] | None = None
    ) -> list[LayerJacobian]:
        """Compute the Jacobian of every layer on the line from one state to another, at some points."""
        X, outputs = self.X.flatten(0, 1), self.outputs
        if some is not None:
            X, outputs = X[some], None if outputs is None else outputs[some]
        cotangents = all_outputs(kernel.head) if outputs is None else chosen_outputs(kernel.head, outputs)
        numbers = sorted({state for a, b, _ in nodes for state in (a, b)})
        states = {state: kernel.states.get(state, numbers[-1] - numbers[0] + 1) for state in numbers}
        weights = torch.stack([torch.lerp(states[a], states[b], t) for a, b, t in nodes])
        at_once = kernel.memory.stacked_weights(1 + len(X)) if kernel.net.plan.supports_stacking else 1
        every = ((w, X.repeat(len(w), *[1] * (X.ndim - 1))) for w in weights.split(at_once))
        at = ((WeightLocation(w if len(w) > 1 else w[0]), rows) for w, rows in every)
        return concat_rows([_layer_jacobians(kernel, own, rows, cotangents) for own, rows in at])

    def grouped(self, grads: Float[Tensor, "K rows d"], num_steps: int) -> Float[Tensor, "S Q U rows_of_a_set columns"]:
        """Arrange a layer's output gradients so that each set, or each pair, has one matrix."""
        of_outputs = torch.unflatten(grads, 1, (num_steps, -1, *self.X.shape[:2]))  # (K, S, Q, U, n, d)
        if self.is_traced:
            return self.selected(of_outputs.permute(1, 2, 3, 4, 0, 5).flatten(4))
        if self.chosen is not None:
            return of_outputs[self.chosen, :, :, self.of_pairs].movedim(0, 2)
        return self.selected(of_outputs.permute(1, 2, 3, 0, 4, 5).flatten(3, 4))

    def selected(self, of_sets: Float[Tensor, "S Q U rows d"]) -> Float[Tensor, "S Q pairs rows d"]:
        """Select each pair's matrix; nothing is copied if all share one, or each has its own in order."""
        in_order = torch.arange(len(self.of_pairs), device=of_sets.device)
        is_whole = len(self.sets) == 1 or (len(self.sets) == len(in_order) and torch.equal(self.of_pairs, in_order))
        return of_sets if is_whole else of_sets.index_select(2, self.of_pairs)


def _nodes(kernel: PlannedKernel) -> list[tuple[float, float]]:
    """Return the nodes of test copies with their weights."""
    return list(kernel.rule) if isinstance(kernel.rule, QuadratureRule) else []


def _layer_jacobians(
    kernel: PlannedKernel, at: WeightLocation, X: Tensor, cotangents: Cotangents
) -> list[LayerJacobian]:
    """Compute layer Jacobians, with a graph if X requires gradients; layers with several positions are dense."""
    net = kernel.net
    if X.requires_grad:  # torch 2.13's `vmap` is wrong for layer norms that are differentiated twice
        net = PlannedModel(net.model, replace(net.plan, supports_vmap=False))
    return [
        j if isinstance(j, OuterProductJacobian) and j.inputs.shape[1] == 1 else DenseJacobian(j.to_dense())
        for j in layer_jacobians(
            net, at, X, replace(cotangents, head=None), kernel.cost(), create_graph=X.requires_grad
        )
    ]


def _max_points(kernel: PlannedKernel) -> int:
    """Return the number of points on each side of a block at one state whose Jacobians and graph fit into memory."""
    model = kernel.net.model
    measured, key = model.cache.feature_bytes, ("derivative", kernel.head, kernel.cost(), model.spec)
    if key not in measured:  # bytes of the layer Jacobians of one point, once for each way of computing them
        X = model.spec.cast(kernel.trajectory.inputs[:1]).detach().requires_grad_()
        at = WeightLocation(flat_state(kernel.trajectory, 0, kernel.reference))
        with torch.enable_grad():
            measured[key] = sum(own.nbytes for own in _layer_jacobians(kernel, at, X, all_outputs(kernel.head)))
    return kernel.memory.derivative_points(kernel.num_output_pairs, measured[key])


def _slices(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _blocks(kernel: PlannedKernel, pairs: SetPairs, wanted: tuple[bool, bool]) -> Iterator[tuple[slice, _Side, _Side]]:
    """Split pairs into blocks that are computed at all nodes of a step at once: the pairs, and both of their sides.

    A single side serves both if they are the same.
    """
    size, sides = max(1, _max_points(kernel) // kernel.rule.num_contractions), (pairs.left, pairs.right)
    counts = [min(size, s.X.shape[1]) if len(s.X) > 1 else 1 for s in sides]  # points that come with each pair
    parts = [_slices(s.X.shape[1], size) for s in sides]
    for own, rows, columns in product(_slices(len(pairs.left.of_pairs), max(1, size // max(counts))), *parts):
        left = _side(kernel, pairs, pairs.left, own, rows, wanted[0])
        is_one = pairs.left is pairs.right and rows == columns
        yield own, left, left if is_one else _side(kernel, pairs, pairs.right, own, columns, wanted[1])


def _side(
    kernel: PlannedKernel, pairs: SetPairs, of: PointsOfPairs, own: slice, points: slice, requires_grad: bool
) -> _Side:
    """Prepare one side of some pairs; if a set is asked about one output only, only that output is computed."""
    sets, of_pairs = of.of_pairs[own].unique(return_inverse=True)
    X, is_train = of.X[sets, points].detach().requires_grad_(requires_grad), of.is_train[sets, points].flatten()
    outputs, chosen = None, None if pairs.classes is None else pairs.classes[own]
    if chosen is not None:
        of_sets = chosen.new_zeros(len(sets)).index_put_((of_pairs,), chosen)
        if torch.equal(of_sets[of_pairs], chosen):
            outputs, chosen = of_sets.repeat_interleave(X.shape[1]), None
    return _Side(X, is_train, sets, points, of_pairs, outputs, chosen, pairs.kind == "trace")


def _products_by_steps(
    kernel: PlannedKernel, left: _Side, right: _Side
) -> Iterator[tuple[Float[Tensor, "S Q P K n J m"], Float[Tensor, "S Q"]]]:
    """Compute the products of both sides' gradients at the nodes of some steps at a time, and eta_s omega_q."""
    sides, every = [left] if right is left else [left, right], kernel.steps
    omegas = [1.0] if all(side.is_train.all() for side in sides) else [omega for _, omega in _nodes(kernel)]
    if not any(side.is_train.any() for side in sides):  # the first step of a chord represents all of it
        every = [(first, sum(eta for _, eta in own)) for first, own in kernel.stretches(every)]
    most = max(len(side.is_train) for side in sides)
    for steps in (every[own] for own in _slices(len(every), max(1, _max_points(kernel) // (most * len(omegas))))):
        factors = [side.factors(kernel, steps) for side in sides]
        products = [_products(x, y, left, right, len(steps)) for x, y in zip(factors[0], factors[-1], strict=True)]
        of_nodes = [[eta * omega for omega in omegas] for _, eta in steps]
        yield reduce(torch.add, products), kernel.reference.new_tensor(of_nodes)


def _products(
    left: LayerJacobian, right: LayerJacobian, x: _Side, y: _Side, num_steps: int
) -> Float[Tensor, "S Q P K n J m"]:
    """Multiply a layer's gradients of both sides of every pair, at every node."""

    def of_outputs(a: Tensor, b: Tensor) -> Tensor:
        products = _of_pairs(x.grouped(a, num_steps), y.grouped(b, num_steps))
        return torch.unflatten(torch.unflatten(products, -1, (-1, y.X.shape[1])), -3, (-1, x.X.shape[1]))

    if not (isinstance(left, OuterProductJacobian) and isinstance(right, OuterProductJacobian)):
        return of_outputs(left.to_dense(), right.to_dense())  # without a graph fewer layers are dense
    p, q = (
        torch.unflatten(j.inputs[:, 0], 0, (num_steps, -1, *side.X.shape[:2])) for side, j in ((x, left), (y, right))
    )
    if len(y.sets) == 1 or torch.equal(x.of_pairs, y.of_pairs):  # several pairs (of classes) share one product
        inputs = x.selected(_of_pairs(p, q))
    else:
        inputs = _of_pairs(x.selected(p), y.selected(q))
    products = of_outputs(left.output_grads[:, :, 0], right.output_grads[:, :, 0])
    return products * (inputs + 1 if left.has_bias else inputs)[..., None, :, None, :]


def _of_pairs(
    x: Float[Tensor, "S Qx U rows d"], y: Float[Tensor, "S Qy V columns d"]
) -> Float[Tensor, "S Q pairs rows columns"]:
    """Multiply the matrices of each pair, or of the set that all share, in one matrix product instead of one each."""
    if y.shape[2] == 1:
        return torch.unflatten(x.flatten(2, 3) @ y[:, :, 0].mT, 2, (x.shape[2], -1))
    return _of_pairs(y, x).mT if x.shape[2] == 1 else x @ y.mT
