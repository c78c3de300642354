"""Inner products of two sets of gradients, accumulated over layers, nodes and steps into one Gram tile."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.engine.features import Factors, Feature, Jacobian

_PAIR_SCRATCH = 1 << 22


@dataclass(eq=False)
class Tile:
    """A tile of the Gram matrix, class-major: (K, N, K', M), or (K, N, M) for equal classes only.

    Layers with a fixed input keep their part of the sum over steps apart, as sums of delta delta'^T, and are
    multiplied by a a'^T once, in `finished` (engine.md).

    Attributes:
        total: What has been summed so far.
        per_class: Only pairs of equal classes.
    """

    total: Tensor
    per_class: bool
    _scratch: Tensor | None = None
    _fixed: dict[int, Tensor] = field(default_factory=dict)
    _inputs: dict[int, Tensor] = field(default_factory=dict)

    def add(
        self, left: Sequence[Feature], right: Sequence[Feature], weight: float, *, fixed_steps: bool = True
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

    def add_layer(self, number: int, a: Feature, b: Feature, weight: float, *, fixed_steps: bool = True) -> None:
        """Add one layer's share; see `add`."""
        if isinstance(a, Jacobian) and isinstance(b, Jacobian):
            self._addmm(self.total, a.values, b.values, weight)
        elif isinstance(a, Factors) and isinstance(b, Factors):
            if a.a.shape[1] > 1:
                self._add_positions(a, b, weight)
            elif a.fixed_input and fixed_steps:
                if number not in self._fixed:
                    self._fixed[number] = torch.zeros_like(self.total)
                    self._inputs[number] = _input_products(a, b)
                self._addmm(self._fixed[number], a.delta[:, :, 0], b.delta[:, :, 0], weight)
            else:
                self._multiply_in(self._products(a.delta[:, :, 0], b.delta[:, :, 0]), _input_products(a, b), weight)
        else:
            raise TypeError("both sides of an inner product must have the same form: this is a bug in epk_gp.")

    def empty_rows(self, count: int) -> "Tile":
        """Start a tile with other left points, for sums that are spread over this one's."""
        return Tile(self.total.new_zeros(self.total.shape[0], count, *self.total.shape[2:]), self.per_class)

    def finished(self) -> Float[Tensor, "K N ..."]:
        """Complete the sum and give it."""
        for number, deltas in self._fixed.items():
            self._multiply_in(deltas, self._inputs[number], 1.0)
        self._fixed.clear()
        return self.total

    def _addmm(self, out: Tensor, x: Tensor, y: Tensor, weight: float) -> None:
        if self.per_class:
            out.baddbmm_(x, y.transpose(1, 2), alpha=weight)
        else:
            out.view(x.shape[0] * x.shape[1], -1).addmm_(x.flatten(0, 1), y.flatten(0, 1).T, alpha=weight)

    def _products(self, x: Tensor, y: Tensor) -> Tensor:
        if self._scratch is None:
            self._scratch = torch.empty_like(self.total)
        if self.per_class:
            return torch.bmm(x, y.transpose(1, 2), out=self._scratch)
        torch.mm(x.flatten(0, 1), y.flatten(0, 1).T, out=self._scratch.view(x.shape[0] * x.shape[1], -1))
        return self._scratch

    def _multiply_in(self, deltas: Tensor, inputs: Tensor, weight: float) -> None:
        self.total.addcmul_(deltas, inputs if self.per_class else inputs[None, :, None, :], value=weight)

    def _add_positions(self, a: Factors, b: Factors, weight: float) -> None:
        N, L, _ = a.a.shape
        M, R, _ = b.a.shape
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
                target = self.total[k, part] if self.per_class else self.total[k, part, j]
                target.add_(products.view(-1, L, M, R).sum(dim=(1, 3)), alpha=weight)


def empty_tile(left: int, N: int, right: int, M: int, like: Float[Tensor, "..."], *, per_class: bool) -> Tile:
    """Start a tile for N points with `left` outputs against M points with `right` outputs."""
    return Tile(like.new_zeros((left, N, M) if per_class else (left, N, right, M)), per_class)


def turned(tile: Float[Tensor, "K N ..."], per_class: bool) -> Float[Tensor, "K M ..."]:
    """Exchange rows and columns of a class-major tile."""
    return tile.transpose(1, 2) if per_class else tile.permute(2, 3, 0, 1)


def write(
    tile: Float[Tensor, "K N ..."],
    result: Float[Tensor, "..."],
    rows: Int64[Tensor, " N"],
    columns: Int64[Tensor, " M"],
) -> None:
    """Put a class-major tile into its place: (K, N, M) into (K, N', M'), or (K, N, K, M) into (N', K, M', K)."""
    n, m = _range(rows), _range(columns)
    if tile.ndim == 3:
        if isinstance(n, slice) and isinstance(m, slice):
            result[:, n, m] = tile
        else:
            result[:, rows[:, None], columns] = tile
        return
    values = tile.permute(1, 0, 3, 2)
    if isinstance(n, slice):
        result[n][:, :, m] = values
    else:
        K = torch.arange(tile.shape[0], device=rows.device)
        result[rows[:, None, None, None], K[:, None, None], columns[:, None], K] = values


def diagonal(features: Sequence[Feature]) -> Float[Tensor, "N K K"]:
    """Compute each point's inner products with itself, (N, K, K)."""
    total: Tensor | float = 0.0
    for feature in features:
        if isinstance(feature, Jacobian):
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


def _input_products(a: Factors, b: Factors) -> Tensor:
    products = a.a[:, 0] @ b.a[:, 0].T
    return products.add_(1) if a.bias else products


def _range(rows: Tensor) -> slice | Tensor:
    """Give consecutive rows as a slice: writing to one costs a copy less."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
