"""Derivatives of weighted inner products of layer Jacobians in their factors: no product is kept for a backward pass.

Of the products (delta_n . delta'_m) (a_n . a'_m) with weights W_nm, the derivatives in delta_n and a_n are rows of

    (W * (a a'^T)) delta'    and    (W * (delta delta'^T)) a'

the other side held fixed. They are cotangents: a backward pass through the factors of n points makes derivatives in the
points of them, whatever the number of points on the other side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.gram.pairs import (
    PairSide,
    SetFactors,
    arrange_by_pairs,
    arrange_by_steps,
    factors_of_pairs,
    products_of_pairs,
)

# Products of some steps that are computed at once. Measured for blocks of 100 x 500 points: 2^17 to 2^18 numbers, which
# stay in the cache, take half the time of 2^21.
PRODUCTS_AT_ONCE = 1 << 17


@dataclass(frozen=True, eq=False)
class PairWeights:
    """What the products of pairs are multiplied by before they are added up.

    Attributes:
        of_values: Weights of each pair's values, (P, K, n, J, m).
        of_nodes: Weights of S steps and their Q nodes, (S, Q).
    """

    of_values: Float[Tensor, "P K n J m"]
    of_nodes: Float[Tensor, "S Q"]

    def transposed(self) -> "PairWeights":
        """Exchange left and right."""
        return PairWeights(self.of_values.permute(0, 3, 4, 1, 2), self.of_nodes)


class FixedInputs:
    """A layer whose inputs are the points themselves, whatever the weights.

    One product of inputs serves all nodes, and what the inputs of the other side are multiplied by is added up over all
    nodes first: an image's pixels are multiplied once, not at every node.

    Args:
        left: Factors on the left, at any weight state.
        right: Factors on the right.
        x: Which factors on the left.
        y: Which factors on the right.
    """

    def __init__(self, left: SetFactors, right: SetFactors, x: PairSide, y: PairSide) -> None:
        if left.inputs is None or right.inputs is None:
            raise TypeError("a layer without inputs has no fixed ones: this is a bug in epk_gp.")
        self._own, self._other = left.inputs.detach()[:1, None], right.inputs.detach()[:1, None]
        self._sets = x.sets, y.sets
        products = products_of_pairs(self._own, self._other, *self._sets)
        self.products: Float[Tensor, "1 1 P n m"] = products + 1 if left.has_bias else products
        self._total = torch.zeros_like(self.products)

    def add(self, weighted: Float[Tensor, "S Q P n m"], of_nodes: Float[Tensor, "S Q"]) -> None:
        """Add what the inputs on the right are multiplied by at some steps."""
        self._total = self._total + torch.einsum("sqpnm,sq->pnm", weighted, of_nodes)

    def gradient(self) -> Float[Tensor, "U n n_in"]:
        """Return the derivative in the points on the left, so far as they are this layer's inputs."""
        own = _of_sets(_times(self._total, self._other, self._sets[1]), self._sets[0], self._own)
        return own[0, 0]


def pair_cotangents(
    left: SetFactors,
    right: SetFactors,
    x: PairSide,
    y: PairSide,
    weights: PairWeights,
    fixed: FixedInputs | None = None,
) -> tuple[Float[Tensor, "L K U n d"] | None, Float[Tensor, "L U n n_in"] | None]:
    """Differentiate a weighted sum of a layer's inner products with respect to the factors on the left.

    Args:
        left: At S steps times the nodes of the left side, or one.
        right: At S steps times the nodes of the right side, or one; the other side's one belongs to all of them.
        x: Which factors on the left.
        y: Which factors on the right.
        weights: Of the products.
        fixed: Of a layer whose inputs are the points: takes the derivatives in them.

    Returns:
        The derivatives in the output gradients and in the inputs; None of a factor without a graph.
    """
    wants_grads = left.output_grads.requires_grad
    wants_inputs = left.inputs is not None and left.inputs.requires_grad
    with torch.no_grad():
        S, Q = weights.of_nodes.shape
        size = max(1, PRODUCTS_AT_ONCE // (Q * weights.of_values.numel()))
        parts = []
        for first in range(0, S, size):
            steps = slice(first, first + size)
            layer = replace(_LayerPart.at_steps(left, right, x, y, steps, S), fixed=fixed)
            scaled = PairWeights(weights.of_values, weights.of_nodes[steps])
            grads = layer.of_output_grads(scaled) if wants_grads else None
            parts.append((grads, layer.of_inputs(scaled) if wants_inputs else None))
        of_grads, of_inputs = (_joined(own) for own in zip(*parts, strict=True))
        if of_grads is not None:  # (L, sets of pairs, rows, d)
            _, K, U, n, _ = left.output_grads.shape
            if x.outputs is None:
                of_grads = of_grads.unflatten(2, (K, n)).transpose(1, 2)
            else:
                of_grads = of_grads.unflatten(1, (K, U))
        return of_grads, of_inputs


@dataclass(frozen=True, eq=False)
class _LayerPart:
    """A layer's factors at some steps, arranged so that each pair has one matrix of rows on each side.

    Attributes:
        grads: Output gradients of both sides, (S, nodes, sets, rows, d).
        index: Which of them each pair has.
        inputs: Inputs of both sides, (S, nodes, sets, points, n_in), or None.
        sets: Which of them each pair has.
        has_bias: The inputs have one more entry, 1.
        fixed: Serves all steps, if the inputs are the points.
    """

    grads: tuple[Tensor, Tensor]
    index: tuple[Int64[Tensor, " P"], Int64[Tensor, " P"]]
    inputs: tuple[Tensor, Tensor] | None
    sets: tuple[Int64[Tensor, " P"], Int64[Tensor, " P"]]
    has_bias: bool
    fixed: FixedInputs | None = None

    @classmethod
    def at_steps(
        cls, left: SetFactors, right: SetFactors, x: PairSide, y: PairSide, steps: slice, num_steps: int
    ) -> "_LayerPart":
        """Take both sides' factors at some of the steps."""
        (a, i), (b, j) = arrange_by_pairs(left.output_grads, x), arrange_by_pairs(right.output_grads, y)
        grads = arrange_by_steps(a, num_steps)[steps], arrange_by_steps(b, num_steps)[steps]
        inputs = None
        if left.inputs is not None and right.inputs is not None:
            own, other = arrange_by_steps(left.inputs, num_steps), arrange_by_steps(right.inputs, num_steps)
            inputs = own[steps], other[steps]
        return cls(grads, (i, j), inputs, (x.sets, y.sets), left.has_bias)

    def of_output_grads(self, weights: PairWeights) -> Tensor:
        """Return the derivatives in the output gradients of the left side, (S nodes, sets, rows, d)."""
        W = weights.of_values
        if self.inputs is None:
            weighted = W.flatten(3, 4).flatten(1, 2)[None, None]
        else:
            inputs = self._input_products(self.inputs)
            weighted = (inputs[:, :, :, None, :, None] * W).flatten(5, 6).flatten(3, 4)
        (own, other), (i, j) = self.grads, self.index
        return _of_sets(_at_nodes(_times(weighted, other, j), weights), i, own).flatten(0, 1)

    def of_inputs(self, weights: PairWeights) -> Tensor | None:
        """Return the derivatives in the inputs of the left side, (S nodes, sets, points, n_in), or add them up."""
        if self.inputs is None:
            raise TypeError("a layer without inputs has no derivative in them: this is a bug in epk_gp.")
        W, (i, j), (own, other) = weights.of_values, self.sets, self.inputs
        weighted = products_of_pairs(*self.grads, *self.index) * W.flatten(3, 4).flatten(1, 2)
        if W.shape[1] * W.shape[3] > 1:
            weighted = weighted.unflatten(4, W.shape[3:]).unflatten(3, W.shape[1:3]).sum((3, 5))
        if own.shape[2] == other.shape[2] == 1:  # all pairs are of the same two sets
            weighted, i, j = weighted.sum(2, keepdim=True), i[:1], j[:1]
        if self.fixed is not None:
            self.fixed.add(weighted, weights.of_nodes)
            return None
        return _of_sets(_at_nodes(_times(weighted, other, j), weights), i, own).flatten(0, 1)

    def _input_products(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        if self.fixed is not None:
            return self.fixed.products
        products = products_of_pairs(*inputs, *self.sets)
        return products + 1 if self.has_bias else products


def _times(weighted: Tensor, factors: Tensor, index: Tensor) -> Tensor:
    """Multiply each pair's matrix with its factors on the right: (S, Q, P, rows, d)."""
    if factors.shape[2] > 1:
        return weighted @ factors_of_pairs(factors, index)
    joint = weighted.flatten(2, 3) @ factors[:, :, 0]  # one matrix product instead of one for each pair
    return torch.unflatten(joint, 2, weighted.shape[2:4])


def _at_nodes(of_pairs: Tensor, weights: PairWeights) -> Tensor:
    return of_pairs * weights.of_nodes[:, :, None, None, None]


def _of_sets(of_pairs: Tensor, index: Tensor, factors: Tensor) -> Tensor:
    """Add up what belongs to the same set and node of the factors: (S, nodes, sets, rows, d)."""
    if factors.shape[1] == 1:
        of_pairs = of_pairs.sum(1, keepdim=True)
    if factors.shape[2] == 1:
        return of_pairs.sum(2, keepdim=True)
    total = of_pairs.new_zeros(*of_pairs.shape[:2], *factors.shape[2:])
    return total.index_add_(2, index, of_pairs)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
