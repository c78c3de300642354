"""Inner products of two sets of gradients, accumulated over layers, nodes and steps into one Gram tile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import (
    Average,
    DenseJacobian,
    Feature,
    LastLayerFactors,
    OuterProductJacobian,
    SoftmaxLastLayerAverage,
)
from epk_gp.gram.huge_pages import empty

_PAIR_SCRATCH = 1 << 22
_ROW_BLOCK, _ROW_BLOCKS = 256, 8  # of a symmetric tile: its products cost (1 + 1 / 8) / 2 of a full one's
_WIDE = 256  # inner dimension from which a product gains nothing by a longer one
_REST = -1


@dataclass(eq=False)
class GramAccumulator:
    """A tile of the Gram matrix, class-major: (K, N, K', M), or (K, N, M) for equal classes only.

    Layers with a fixed input keep their part of the sum over steps apart, as sums of delta delta'^T, and are
    multiplied by a a'^T once, in `finished` (engine.md); whatever comes first sums in `total` itself. A last layer's
    share of the logits is nothing for unequal classes and the same for all equal ones: one (N, M) sum.

    Attributes:
        total: Where the result will be. What it holds before the first sum is not read.
        per_class: Only pairs of equal classes.
        symmetric: Both sides are the same: products are computed on and below the diagonal only.
    """

    total: Tensor
    per_class: bool
    symmetric: bool = False
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _equal: Tensor | None = None
    _scratch: Tensor | None = None

    def add(
        self, left: Sequence[Average], right: Sequence[Feature], weight: float, *, fixed_steps: bool = True
    ) -> None:
        """Add `weight` times the inner products of N left and M right points.

        Args:
            left: Features of the N points, layer by layer.
            right: Features of the M points, the same layers.
            weight: Factor eta_s omega_q.
            fixed_steps: The same points come at every step, so that fixed inputs may wait until the end.
        """
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            self.add_layer(number, a, b, weight, fixed_steps=fixed_steps)

    def add_steps(
        self, left: Sequence[Sequence[Average]], right: Sequence[Sequence[Feature]], weights: Sequence[float]
    ) -> None:
        """Add several steps of the same points: narrow products become one with a longer inner dimension."""
        layers = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
        for number, (a, b) in enumerate(layers):
            if len(a) > 1 and _narrow(a[0]) and _narrow(b[0]):
                self.add_layer(number, concat_inner_dim(a, weights), concat_inner_dim(b, [1.0] * len(b)), 1.0)
                continue
            for x, y, weight in zip(a, b, weights, strict=True):
                self.add_layer(number, x, y, weight)

    def add_layer(self, number: int, a: Average, b: Feature, weight: float, *, fixed_steps: bool = True) -> None:
        """Add one layer's share; see `add`."""
        if isinstance(a, DenseJacobian) and isinstance(b, DenseJacobian):
            self._multiply(_REST, a.values, b.values, weight)
        elif isinstance(a, SoftmaxLastLayerAverage) and isinstance(b, LastLayerFactors) and b.p is not None:
            self._add_average(a, b, b.p, weight)
        elif isinstance(a, LastLayerFactors) and isinstance(b, LastLayerFactors) and b.p is None:
            own = _input_products(a, b).mul_(weight)
            self._equal = own if self._equal is None else self._equal.add_(own)
        elif isinstance(a, OuterProductJacobian) and isinstance(b, OuterProductJacobian):
            if a.a.shape[1] > 1:
                self._add_positions(a, b, weight)
            elif a.fixed_input and fixed_steps:
                if number not in self._inputs:
                    self._inputs[number] = _input_products(a, b)
                self._multiply(number, a.delta[:, :, 0], b.delta[:, :, 0], weight)
            else:
                self._add_products(a, b, weight)
        else:
            raise TypeError("both sides of an inner product must have the same form: this is a bug in epk_gp.")

    def empty_rows(self, count: int) -> "GramAccumulator":
        """Start a tile with other left points, for sums that are spread over this one's."""
        return GramAccumulator(empty((self.total.shape[0], count, *self.total.shape[2:]), self.total), self.per_class)

    def add_rows(self, rows: Int64[Tensor, " E"], values: Float[Tensor, "K E ..."]) -> None:
        """Add values to some left points, to a point as often as it occurs."""
        out, beta = self._claim(_REST)
        if not beta:
            out.zero_()
        out.index_add_(1, rows, values)

    def finished(self) -> Float[Tensor, "K N ..."]:
        """Complete the sum and give it."""
        total = self.total
        if not self._sums:
            total.zero_()
        for number, sums in self._sums.items():  # the one that lies in `total` is the first
            factor = None if number == _REST else self._spread(self._inputs[number])
            if sums is total:
                total = total if factor is None else total.mul_(factor)
            else:
                total = total.add_(sums) if factor is None else total.addcmul_(sums, factor)
        if self._equal is not None:
            _equal_classes(total, self.per_class).add_(self._equal[..., None])
        if self.symmetric:
            _mirror(total if self.per_class else self._flat(total)[None])
        self._sums, self._equal = {_REST: total}, None
        self._inputs.clear()
        return total

    def _claim(self, key: int) -> tuple[Tensor, float]:
        """Give the buffer of a sum, and 1 if it holds something or 0 if it is new."""
        if key in self._sums:
            return self._sums[key], 1.0
        self._sums[key] = empty(self.total.shape, self.total) if self._sums else self.total
        return self._sums[key], 0.0

    def _multiply(self, key: int, x: Tensor, y: Tensor, weight: float) -> None:
        out, beta = self._claim(key)
        self._products(out, x, y, weight, beta)

    def _products(self, out: Tensor, x: Tensor, y: Tensor, weight: float, beta: float) -> None:
        """Set out to beta * out + weight * x y^T."""
        if self.per_class:
            for rows, columns in self._blocks(x.shape[1], y.shape[1]):
                part = out[:, rows, columns]
                part.baddbmm_(x[:, rows], y[:, columns].transpose(1, 2), alpha=weight, beta=beta)
            return
        flat, x, y = self._flat(out), x.flatten(0, 1), y.flatten(0, 1)
        for rows, columns in self._blocks(len(x), len(y)):
            flat[rows, columns].addmm_(x[rows], y[columns].T, alpha=weight, beta=beta)

    def _blocks(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        if not self.symmetric:
            yield slice(0, rows), slice(0, columns)
            return
        for block in _row_blocks(rows):
            yield block, slice(0, block.stop)

    def _add_products(self, a: OuterProductJacobian, b: OuterProductJacobian, weight: float) -> None:
        """Add delta delta'^T * a a'^T at once."""
        inputs = self._spread(_input_products(a, b).mul_(weight))
        out, beta = self._claim(_REST)
        if not beta:
            self._products(out, a.delta[:, :, 0], b.delta[:, :, 0], 1.0, 0.0)
            out.mul_(inputs)
            return
        if self._scratch is None:
            self._scratch = empty(self.total.shape, self.total)
        self._products(self._scratch, a.delta[:, :, 0], b.delta[:, :, 0], 1.0, 0.0)
        out.addcmul_(self._scratch, inputs)

    def _add_average(self, a: SoftmaxLastLayerAverage, b: LastLayerFactors, p: Tensor, weight: float) -> None:
        """Add the last layer under a softmax from the products of the averages of a and of p (x) a with a'.

        (e_k (x) a - p (x) a) . (e_l (x) a' - p' (x) a') = ([k = l] - p'_k) a.a' - p_l a.a' + sum_c p'_c p_c a.a'
        """
        every = (a.values.flatten(0, 1) @ b.inputs.T).view(-1, a.values.shape[1], len(b.a)).mul_(weight)
        own, mixed = every[0], every[1:]
        both = mixed[0] * p[:, 0]
        for k in range(1, len(mixed)):
            both.addcmul_(mixed[k], p[:, k])
        mixed = torch.sub(both, mixed)
        out, beta = self._claim(_REST)
        if not beta:
            out.zero_()
        if self.per_class:
            out.add_(mixed.sub_(own * p.T[:, None]))
        else:
            out.add_(mixed.transpose(0, 1))
            for k in range(len(out)):
                out[k].sub_((own * p[:, k])[:, None])
        _equal_classes(out, self.per_class).add_(own[..., None])

    def _spread(self, inputs: Tensor) -> Tensor:
        return inputs if self.per_class else inputs[None, :, None, :]

    def _flat(self, out: Tensor) -> Tensor:
        return out.view(out.shape[0] * out.shape[1], -1)

    def _add_positions(self, a: OuterProductJacobian, b: OuterProductJacobian, weight: float) -> None:
        N, L, _ = a.a.shape
        M, R, _ = b.a.shape
        out, beta = self._claim(_REST)
        if not beta:
            out.zero_()
        rows = max(1, _PAIR_SCRATCH // (L * M * R))
        pairs = (
            [(k, k) for k in range(a.delta.shape[0])]
            if self.per_class
            else [(k, j) for k in range(a.delta.shape[0]) for j in range(b.delta.shape[0])]
        )
        right = b.a.flatten(0, 1)
        for start in range(0, N, rows):
            part = slice(start, min(start + rows, N))
            inputs = a.a[part].flatten(0, 1) @ right.T
            if a.bias:
                inputs += 1
            for k, j in pairs:
                products = (a.delta[k, part].flatten(0, 1) @ b.delta[j].flatten(0, 1).T).mul_(inputs)
                target = out[k, part] if self.per_class else out[k, part, j]
                target.add_(products.view(-1, L, M, R).sum(dim=(1, 3)), alpha=weight)


def empty_tile(
    left: int, N: int, right: int, M: int, like: Float[Tensor, "..."], *, per_class: bool, symmetric: bool = False
) -> GramAccumulator:
    """Start a tile for N points with `left` outputs against M points with `right` outputs."""
    return GramAccumulator(empty((left, N, M) if per_class else (left, N, right, M), like), per_class, symmetric)


def transpose_block(tile: Float[Tensor, "K N ..."], per_class: bool) -> Float[Tensor, "K M ..."]:
    """Exchange rows and columns of a class-major tile."""
    return tile.transpose(1, 2) if per_class else tile.permute(2, 3, 0, 1)


def write(
    tile: Float[Tensor, "K N ..."],
    result: Float[Tensor, "K ..."],
    rows: Int64[Tensor, " N"],
    columns: Int64[Tensor, " M"],
) -> None:
    """Put a tile into its place in a larger one, (K, N, M) or (K, N, K, M)."""
    n, m = _range(rows), _range(columns)
    if isinstance(n, slice) and isinstance(m, slice):
        result[:, n][..., m] = tile
    elif tile.ndim == 3:
        result[:, rows[:, None], columns] = tile
    else:
        classes = torch.arange(tile.shape[2], device=rows.device)
        result[:, rows[:, None, None], classes[:, None], columns] = tile


def diagonal(features: Sequence[Feature]) -> Float[Tensor, "N K K"]:
    """Compute each point's inner products with itself, (N, K, K)."""
    total: Tensor | float = 0.0
    for feature in features:
        if isinstance(feature, DenseJacobian):
            rows = feature.values.transpose(0, 1)
            total = total + rows @ rows.transpose(1, 2)
        else:
            inputs = feature.a @ feature.a.transpose(1, 2) + float(feature.bias)  # N L L
            rows = feature.delta.transpose(0, 1)  # N K L n_out
            weighted = torch.einsum("nlr,nkro->nklo", inputs, rows)
            total = total + rows.flatten(2) @ weighted.flatten(2).transpose(1, 2)
    if not isinstance(total, Tensor):
        raise ValueError("at least one layer is needed.")
    return total


def _narrow(feature: Average) -> bool:
    """Whether steps of these points can be summed in one product, and gain by it."""
    if isinstance(feature, DenseJacobian):
        return feature.values.shape[2] < _WIDE
    if not isinstance(feature, OuterProductJacobian) or feature.a.shape[1] > 1:
        return False
    if isinstance(feature, LastLayerFactors):
        return feature.p is None and feature.a.shape[2] < _WIDE
    return feature.fixed_input and feature.delta.shape[3] < _WIDE


def concat_inner_dim(steps: Sequence[Average], weights: Sequence[float]) -> Feature:
    """Lay what changes from step to step end to end along the inner dimension."""
    first, factors = steps[0], [f for f in steps if isinstance(f, OuterProductJacobian)]
    if isinstance(first, LastLayerFactors):
        heads = [f.inputs for f in factors if isinstance(f, LastLayerFactors)]
        return replace(first, a=_scaled(heads, weights, 1)[:, None], bias=False)
    if isinstance(first, OuterProductJacobian):
        return replace(first, delta=_scaled([f.delta for f in factors], weights, 3))
    return DenseJacobian(_scaled([f.values for f in steps if isinstance(f, DenseJacobian)], weights, 2))


def _scaled(parts: Sequence[Tensor], weights: Sequence[float], dim: int) -> Tensor:
    """Join parts of one shape, each times its weight."""
    if all(weight == 1 for weight in weights):
        return torch.cat(list(parts), dim=dim)
    width = parts[0].shape[dim]
    out = parts[0].new_empty(*parts[0].shape[:dim], width * len(parts), *parts[0].shape[dim + 1 :])
    for target, part, weight in zip(out.split(width, dim=dim), parts, weights, strict=True):
        torch.mul(part, weight, out=target)
    return out


def _input_products(a: OuterProductJacobian, b: OuterProductJacobian) -> Tensor:
    products = a.a[:, 0] @ b.a[:, 0].T
    return products.add_(1) if a.bias else products


def _equal_classes(tile: Tensor, per_class: bool) -> Tensor:
    """View the pairs of equal classes, (N, M, K)."""
    return tile.permute(1, 2, 0) if per_class else tile.diagonal(dim1=0, dim2=2)


def _row_blocks(count: int) -> Iterator[slice]:
    size = max(_ROW_BLOCK, -(-count // _ROW_BLOCKS))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _mirror(matrices: Tensor) -> None:
    """Copy what lies below the diagonal of each matrix to above it."""
    for block in _row_blocks(matrices.shape[1]):
        above = slice(0, block.start)
        matrices[:, above, block] = matrices[:, block, above].mT
        own = matrices[:, block, block]
        own.copy_(own.tril() + own.tril(-1).mT)


def _range(rows: Tensor) -> slice | Tensor:
    """Give consecutive rows as a slice: writing to one costs a copy less."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
