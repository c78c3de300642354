"""Inner products of two sets of layer Jacobians, averaged over steps where possible, added up into one tile.

The integral over t is linear in the test side, and the training side of a step is fixed. So nodes cost no separate
product for layers whose inputs are constant (average the output gradients), whose cotangents are constant (average the
inputs), that are dense, or that are the last before a softmax.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import (
    InputProducts,
    LayerJacobian,
    LeftFactor,
    NodeWeights,
    OuterProductJacobian,
    is_short,
)
from epk_gp.core.plans import empty_huge_pages, positions_per_block

SYMMETRIC_BLOCK_ROWS = 256
_SYMMETRIC_BLOCKS = 8

_MAIN = -1  # the sum of everything that is not deferred


@final
@dataclass(eq=False)
class GramAccumulator:
    """A tile of the Gram matrix, class-major: (K, N, J, M), (K, N, M) for equal classes only, or (1, N, M) for a trace.

    Sums over steps are kept separate if that saves products (docs/engine.md, section 6):

    * The main sum receives all products that are complete.
    * A layer with constant inputs has a deferred sum of products of its output gradients, which `result` multiplies by
      the products of its inputs once.
    * The last layer's contribution to the logits is zero for different classes and the same for all equal ones: one
      (N, M) sum serves them all.

    The first sum lies in the tile's own memory. For a trace the outputs belong to the inner dimension of every product,
    and no sum has a dimension for them.

    Args:
        shape: Shape of the tile.
        reference: Tensor that sets dtype and device.
        is_symmetric: Whether both sides are the same points: only products on and below the diagonal are computed.
        num_traced: C if the tile is the sum over pairs of equal classes, otherwise 0.
    """

    shape: tuple[int, ...]
    reference: Float[Tensor, "..."]
    is_symmetric: bool = False
    num_traced: int = 0
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _scales: dict[int, Tensor] = field(default_factory=dict)
    _same_class_sum: Tensor | None = None
    _scratch: Tensor | None = None

    @property
    def is_per_class(self) -> bool:
        """Whether only pairs of equal classes are kept, or their sum."""
        return len(self.shape) == 3

    def add_steps(
        self, left: Sequence[Sequence[LeftFactor]], right: Sequence[Sequence[LeftFactor]], weights: Sequence[float]
    ) -> None:
        """Add several steps or nodes of the same points.

        Products with a short inner dimension are joined into one with a longer inner dimension.

        Args:
            left: The N points: for each step, layer by layer.
            right: The same layers at the M points.
            weights: Factor eta_s omega_q of each step.
        """
        layers = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
        for number, (a, b) in enumerate(layers):
            if len(a) > 1 and a[0].fits_concatenation and b[0].fits_concatenation:
                joined, others = a[0].concat_steps(a[1:], weights), b[0].concat_steps(b[1:], [1.0] * len(b))
                joined.add_inner(others, self, 1.0, layer=number, same_points=True)
                continue
            for x, y, weight in zip(a, b, weights, strict=True):
                x.add_inner(y, self, weight, layer=number, same_points=True)

    def add_nodes(
        self,
        batch: "NodeBatch",
        right: Sequence[LayerJacobian],
        eta: float,
        averages: Collection[int],
        layers: Collection[int] | None = None,
    ) -> None:
        """Add the products of some nodes of a step and its training side, node by node.

        Args:
            batch: The nodes.
            right: Training-side layer Jacobians of the step.
            eta: The step's factor.
            averages: Layers that are left out, because they are averaged over the nodes first (`add_to_averages`).
            layers: The layers to add; None for all.
        """
        nodes = batch.nodes
        for layer, (jacobian, other) in enumerate(zip(batch.jacobians, right, strict=True)):
            if layer in averages or (layers is not None and layer not in layers):
                continue
            if isinstance(nodes.weights, float):
                jacobian.add_inner(other, self, eta * nodes.weights, layer=layer, same_points=False)
                continue
            points = nodes.row_points()
            shape = (self.shape[0], len(points), *self.shape[2:])
            part = GramAccumulator(shape, self.reference, num_traced=self.num_traced)
            jacobian.add_inner(other, part, eta, layer=layer, same_points=False)
            products = part.result()
            weighted = products.mul_(nodes.weights.view(1, -1, *[1] * (products.ndim - 2)))
            self._started_main().index_add_(1, points, weighted)

    def add_states(
        self,
        left: "NodeBatch",
        right: Sequence[LayerJacobian],
        step_weights: Float[Tensor, " T"],
    ) -> None:
        """Add the products of test copies at nodes of T states and training copies at the states.

        Args:
            left: All nodes of each state, state by state, equally many for each; the nodes of point n at state t belong
                to point t N + n.
            right: The M points at each state.
            step_weights: Factor eta_s of each state.
        """
        N, M, T = self.shape[1], self.shape[-1], len(step_weights)
        for number, (x, y) in enumerate(zip(left.jacobians, right, strict=True)):
            if not x.commutes_with_average:
                self._add_pairs(x, y, left.nodes, step_weights)
                continue
            average = x.average(None, left.nodes)
            if average.joins_states and y.joins_states:
                joined, others = average.join_states(T, step_weights), y.join_states(T)
                joined.add_inner(others, self, 1.0, layer=number, same_points=True)
                continue
            for t, weight in enumerate(step_weights.tolist()):
                own, other = average.rows(slice(t * N, (t + 1) * N)), y.rows(slice(t * M, (t + 1) * M))
                own.add_inner(other, self, weight, layer=number, same_points=True)

    def _add_pairs(self, x: LayerJacobian, y: LayerJacobian, nodes: NodeWeights, step_weights: Tensor) -> None:
        """Add the products, for all states at once, of a layer whose two factors both change from node to node."""
        N, M, T = self.shape[1], self.shape[-1], len(step_weights)
        pair, size = nodes.row_points(), len(nodes.row_points()) // T
        weights = (nodes.weights * step_weights[pair // N]).view(T, size)
        if not isinstance(x, OuterProductJacobian) or not isinstance(y, OuterProductJacobian) or x.inputs.shape[1] > 1:
            for t, own in enumerate(weights):
                rows, columns = x.rows(slice(t * size, (t + 1) * size)), y.rows(slice(t * M, (t + 1) * M))
                places = NodeWeights(own, pair[t * size : (t + 1) * size] % N, N)
                self.add_nodes(NodeBatch([rows], places), [columns], 1.0, ())
            return
        of_inputs = (x.inputs.view(T, size, -1) @ y.inputs.view(T, M, -1).mT).add_(float(x.has_bias))
        of_inputs.mul_(weights[..., None])
        a, b = (v.output_grads.squeeze(2).unflatten(1, (T, -1)) for v in (x, y))  # K T size n_out, K T M n_out
        if self.num_traced:
            products = (a.permute(1, 2, 0, 3).flatten(2) @ b.permute(1, 2, 0, 3).flatten(2).mT)[None]
        elif self.is_per_class:
            products = a @ b.mT
        else:
            products = (a.transpose(0, 1).flatten(1, 2) @ b.transpose(0, 1).flatten(1, 2).mT).unflatten(1, (-1, size))
            products = products.unflatten(3, (-1, M)).transpose(0, 1)  # K T size K M
        of_inputs = of_inputs if products.ndim == 4 else of_inputs.unsqueeze(2)
        self._started_main().index_add_(1, pair % N, products.mul_(of_inputs).flatten(1, 2))

    def add_products(self, x: Float[Tensor, "K N P"], y: Float[Tensor, "J M P"], weight: float) -> None:
        """Add weight * <x[k, n], y[j, m]>."""
        out, beta = self._buffer(_MAIN)
        self._multiply(out, x, y, weight, beta)

    def add_deferred_products(self, layer: int, x: Tensor, y: Tensor, weight: float, scale: InputProducts) -> None:
        """Add weight * <x[k, n], y[j, m]> to the layer's own sum; its scale is computed at the first product."""
        if layer not in self._scales:
            self._scales[layer] = scale()
        out, beta = self._buffer(layer)
        self._multiply(out, x, y, weight, beta)

    def add_scaled_products(self, x: Tensor, y: Tensor, scale: Float[Tensor, "N M"]) -> None:
        """Add <x[k, n], y[j, m]> * scale[n, m]."""
        factor = self._broadcast_outputs(scale)
        out, beta = self._buffer(_MAIN)
        if not beta:
            self._multiply(out, x, y, 1.0, 0.0)
            out.mul_(factor)
            return
        if self._scratch is None:
            self._scratch = empty_huge_pages(self.shape, self.reference)
        self._multiply(self._scratch, x, y, 1.0, 0.0)
        out.addcmul_(self._scratch, factor)

    def add_same_class(self, products: Float[Tensor, "N M"]) -> None:
        """Add products[n, m] to every pair of equal classes, at the end. The sum owns the tensor from now on."""
        self._same_class_sum = products if self._same_class_sum is None else self._same_class_sum.add_(products)

    def add_softmax_last_layer(
        self,
        averages: Float[Tensor, "rows N n"],
        inputs: Float[Tensor, "M n"],
        probabilities: Float[Tensor, "M C"],
        weight: float,
    ) -> None:
        """Add the last layer under a softmax from its averages of a and of p_c a (docs/theory.md, section 5).

        (e_k (x) a - p (x) a) . (e_l (x) a' - p' (x) a') = ([k = l] - p'_k) a.a' - p_l a.a' + sum_c p'_c p_c a.a'

        Its trace is (C - 2) a.a' + C sum_c p'_c p_c a.a', because the probabilities sum to 1.
        """
        p, C = probabilities, self.num_traced
        if C:
            self.add_products(averages[:1], inputs[None], weight * (C - 2))
            self.add_products(averages[1:], p.T[:, :, None] * inputs, weight * C)
            return
        products = (averages.flatten(0, 1) @ inputs.T).view(-1, averages.shape[1], len(p)).mul_(weight)
        plain, mixed = products[0], products[1:]
        both = mixed[0] * p[:, 0]
        for k in range(1, len(mixed)):
            both.addcmul_(mixed[k], p[:, k])
        mixed = torch.sub(both, mixed)
        out = self._started_main()
        if self.is_per_class:
            out.add_(mixed.sub_(plain * p.T[:, None]))
        else:
            out.add_(mixed.transpose(0, 1))
            for k in range(len(out)):
                out[k].sub_((plain * p[:, k])[:, None])
        self._same_class(out).add_(plain[..., None])

    def add_softmax_averages(
        self, left: Float[Tensor, "rows N n"], right: Float[Tensor, "rows M n"], weight: float
    ) -> None:
        """Add the last layer under a softmax from averages of a and of p_c a on both sides: m_0, m_c and n_0, n_c.

        (e_k (x) m_0 - sum_c e_c (x) m_c) . (e_l (x) n_0 - sum_c e_c (x) n_c)
            = [k = l] m_0.n_0 - m_0.n_k - m_l.n_0 + sum_c m_c.n_c

        Its trace is (C - 2) m_0.n_0 + C sum_c m_c.n_c, because the probabilities sum to 1.
        """
        if self.num_traced:
            self.add_products(left[:1], right[:1], weight * (self.num_traced - 2))
            self.add_products(left[1:], right[1:], weight * self.num_traced)
            return
        C, N, M = len(left) - 1, left.shape[1], right.shape[1]
        both = (left[1:].transpose(0, 1).flatten(1) @ right[1:].transpose(0, 1).flatten(1).T).mul_(weight)
        of_left = (left[1:].flatten(0, 1) @ right[0].T).view(C, N, M).mul_(weight)
        of_right = (left[0] @ right[1:].flatten(0, 1).T).view(N, C, M).mul_(weight)
        out = self._started_main()
        if self.is_per_class:
            out.add_(both - of_left).sub_(of_right.transpose(0, 1))
        else:
            out.add_((both - of_left).transpose(0, 1)).sub_(of_right.transpose(0, 1)[:, :, None])
        self._same_class(out).add_((left[0] @ right[0].T).mul_(weight)[..., None])

    def add_positionwise(self, inputs: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], weight: float) -> None:
        """Add a layer with several positions: products of inputs and of output gradients, for every pair of positions.

        Args:
            inputs: Inputs of both sides, (N, L, n_in) and (M, R, n_in), with the 1 of a bias.
            grads: Output gradients of both sides, (K, N, L, n_out) and (J, M, R, n_out).
            weight: Factor eta_s omega_q.
        """
        (a, b), (x, y) = inputs, grads
        (N, L, _), (M, R, _) = a.shape, b.shape
        out = self._started_main()
        outputs = range(len(x))
        pairs = list(zip(outputs, outputs, strict=True) if self.is_per_class else product(outputs, range(len(y))))
        right = b.flatten(0, 1)
        for rows in _slices(N, positions_per_block(L, M, R)):
            input_products = a[rows].flatten(0, 1) @ right.T
            if self.num_traced:
                products = x[0, rows].flatten(0, 1) @ y[0].flatten(0, 1).T
                for k in range(1, len(x)):
                    products.addmm_(x[k, rows].flatten(0, 1), y[k].flatten(0, 1).T)
                products = products.mul_(input_products).view(-1, L, M, R)
                out[0, rows].add_(products.sum(dim=(1, 3)), alpha=weight)
                continue
            for k, j in pairs:
                products = (x[k, rows].flatten(0, 1) @ y[j].flatten(0, 1).T).mul_(input_products)
                target = out[k, rows] if self.is_per_class else out[k, rows, j]
                target.add_(products.view(-1, L, M, R).sum(dim=(1, 3)), alpha=weight)

    def result(self) -> Float[Tensor, "K N ..."]:
        """Complete the sum and return it. The accumulator is empty afterwards."""
        first = next(iter(self._sums), None)
        total = empty_huge_pages(self.shape, self.reference).zero_() if first is None else self._sums[first]
        for key, partial in self._sums.items():
            factor = None if key == _MAIN else self._broadcast_outputs(self._scales[key])
            if key == first:
                total = total if factor is None else total.mul_(factor)
            else:
                total = total.add_(partial) if factor is None else total.addcmul_(partial, factor)
        if self._same_class_sum is not None:
            self._same_class(total).add_(self._same_class_sum[..., None], alpha=max(1, self.num_traced))
        if self.is_symmetric:
            _fill_upper(total if self.is_per_class else self._as_matrix(total)[None])
        self._sums, self._scales, self._same_class_sum, self._scratch = {}, {}, None, None
        return total

    def _buffer(self, key: int) -> tuple[Tensor, float]:
        """Return the memory of a sum, and 1 if it holds values or 0 if it is new."""
        if key in self._sums:
            return self._sums[key], 1.0
        self._sums[key] = empty_huge_pages(self.shape, self.reference)
        return self._sums[key], 0.0

    def _started_main(self) -> Tensor:
        out, beta = self._buffer(_MAIN)
        return out if beta else out.zero_()

    def _multiply(self, out: Tensor, x: Tensor, y: Tensor, weight: float, beta: float) -> None:
        """Set out to beta * out + weight * x y^T."""
        if self.num_traced:
            left = _fold_outputs(x)
            for a, b in zip(left, left if y is x else _fold_outputs(y), strict=True):
                for rows, columns in self._row_blocks(len(a), len(b)):
                    out[0, rows, columns].addmm_(a[rows], b[columns].T, alpha=weight, beta=beta)
                beta = 1.0
            return
        if self.is_per_class:
            for rows, columns in self._row_blocks(x.shape[1], y.shape[1]):
                part = out[:, rows, columns]
                part.baddbmm_(x[:, rows], y[:, columns].transpose(1, 2), alpha=weight, beta=beta)
            return
        flat, x, y = self._as_matrix(out), x.flatten(0, 1), y.flatten(0, 1)
        for rows, columns in self._row_blocks(len(x), len(y)):
            flat[rows, columns].addmm_(x[rows], y[columns].T, alpha=weight, beta=beta)

    def _row_blocks(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        if not self.is_symmetric:
            yield slice(0, rows), slice(0, columns)
            return
        for block in _symmetric_blocks(rows):
            yield block, slice(0, block.stop)

    def _broadcast_outputs(self, products: Tensor) -> Tensor:
        return products if self.is_per_class else products[None, :, None, :]

    def _same_class(self, out: Tensor) -> Tensor:
        """View the pairs of equal classes, (N, M, K)."""
        return out.permute(1, 2, 0) if self.is_per_class else out.diagonal(dim1=0, dim2=2)

    def _as_matrix(self, out: Tensor) -> Tensor:
        return out.view(out.shape[0] * out.shape[1], -1)


def transpose_block(block: Float[Tensor, "K N ..."]) -> Float[Tensor, "K M ..."]:
    """Exchange rows and columns of a class-major block."""
    return block.transpose(1, 2) if block.ndim == 3 else block.permute(2, 3, 0, 1)


def scatter_block(
    block: Float[Tensor, "K N ..."],
    result: Float[Tensor, "K ..."],
    rows: Int64[Tensor, " N"],
    columns: Int64[Tensor, " M"],
) -> None:
    """Write a block into its place in a larger one, (K, N, M) or (K, N, K, M)."""
    n, m = _as_slice(rows), _as_slice(columns)
    if isinstance(n, slice) and isinstance(m, slice):
        result[:, n][..., m] = block
    elif block.ndim == 3:
        result[:, rows[:, None], columns] = block
    else:
        classes = torch.arange(block.shape[2], device=rows.device)
        result[:, rows[:, None, None], classes[:, None], columns] = block


def _fold_outputs(x: Tensor) -> Tensor:
    """Put the outputs into the inner dimension, (1, N, K P), if it is short; else multiply one by one."""
    return x.transpose(0, 1).flatten(1)[None] if is_short(x.shape[2]) else x


def _symmetric_blocks(count: int) -> Iterator[slice]:
    return _slices(count, max(SYMMETRIC_BLOCK_ROWS, -(-count // _SYMMETRIC_BLOCKS)))


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _fill_upper(matrices: Tensor) -> None:
    """Copy the lower triangle of each matrix to the upper one."""
    for block in _symmetric_blocks(matrices.shape[1]):
        above = slice(0, block.start)
        matrices[:, above, block] = matrices[:, block, above].mT
        own = matrices[:, block, block]
        own.copy_(own.tril() + own.tril(-1).mT)


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Return consecutive rows as a slice: writing to a slice saves a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


@dataclass(frozen=True, eq=False)
class NodeBatch:
    """Layer Jacobians of test points at nodes of one step.

    Attributes:
        jacobians: E rows, layer by layer.
        nodes: The point and the quadrature weight of each row.
    """

    jacobians: Sequence[LayerJacobian]
    nodes: NodeWeights


def add_to_averages(averages: dict[int, LeftFactor], batch: NodeBatch) -> None:
    """Add some nodes to the averages of the layers that commute with the average, by number of the layer.

    Together the nodes must cover [0, 1] once for every point.
    """
    for layer, jacobian in enumerate(batch.jacobians):
        if jacobian.commutes_with_average:
            averages[layer] = jacobian.average(averages.get(layer), batch.nodes)


# A symmetric tile is computed in blocks of rows up to its diagonal: at least this many rows per block, at most this
# many blocks. Its products then cost (1 + 1 / 8) / 2 of a full tile's.
