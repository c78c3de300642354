"""Pairs of sets of points: inner products of their layer Jacobians, and the derivatives of these.

Of the products (delta_n . delta'_m) (a_n . a'_m) with weights W_nm, the derivatives in delta_n and a_n are rows of

    (W * (a a'^T)) delta'    and    (W * (delta delta'^T)) a'

the other side held fixed. They are cotangents: a backward pass through the factors of n points makes derivatives in the
points of them, whatever the number of points on the other side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.representations import LayerJacobian, OuterProductJacobian


@dataclass(frozen=True, eq=False)
class PointSets:
    """U sets of n points each.

    Attributes:
        X: Inputs, (U, n, ...).
        is_train: Whether they are training copies.
    """

    X: Shaped[Tensor, "U n ..."]
    is_train: Bool[Tensor, "U n"]

    @property
    def num_sets(self) -> int:
        """U."""
        return self.X.shape[0]

    @property
    def num_points(self) -> int:
        """Points of each set, n."""
        return self.X.shape[1]

    def part(self, sets: Int64[Tensor, " u"], points: Int64[Tensor, " k"]) -> "PointSets":
        """Return some points of some sets."""
        return PointSets(self.X[sets][:, points], self.is_train[sets][:, points])


@dataclass(frozen=True, eq=False)
class SetPairs:
    """P pairs of sets of points, out of U sets on the left and V on the right.

    A pair has K x L matrices of n x m numbers: K = L = C for all pairs of outputs; K = L = 1 for one output of its
    own, for the sum of the outputs, or for the trace of their matrix.

    Attributes:
        left: U sets of n points.
        right: V sets of m points; the same object as `left` if they are the same.
        left_index: The set on the left of each pair.
        right_index: The set on the right of each pair.
        classes: The output of each pair; None for all pairs of outputs, for their sum or for their trace.
        is_summed: For the sum of the outputs.
        is_traced: For the trace, the sum of each output's kernel with itself.
    """

    left: PointSets
    right: PointSets
    left_index: Int64[Tensor, " P"]
    right_index: Int64[Tensor, " P"]
    classes: Int64[Tensor, " P"] | None = None
    is_summed: bool = False
    is_traced: bool = False

    def __len__(self) -> int:
        """Count the pairs."""
        return len(self.left_index)

    @property
    def has_all_outputs(self) -> bool:
        """Whether a pair has a matrix for every pair of outputs."""
        return self.classes is None and not self.is_summed and not self.is_traced

    @property
    def have_same_sides(self) -> bool:
        """Whether both sides of every pair are the same set."""
        return self.left is self.right and torch.equal(self.left_index, self.right_index)

    def transposed(self) -> "SetPairs":
        """Exchange left and right."""
        left, right = (self.right, self.right_index), (self.left, self.left_index)
        return replace(self, left=left[0], left_index=left[1], right=right[0], right_index=right[1])


@dataclass(frozen=True, eq=False)
class PairBlock:
    """A part of some pairs that is computed at once: points of one copy on each side.

    Attributes:
        pairs: The part, as pairs of their own.
        of: Which pairs these are.
        left: Which sets on the left, and which of their points.
        right: Which sets on the right, and which of their points.
        is_train: Whether the points on the left are training copies, and those on the right.
    """

    pairs: SetPairs
    of: Int64[Tensor, " P"]
    left: tuple[Int64[Tensor, " U"], Int64[Tensor, " n"]]
    right: tuple[Int64[Tensor, " V"], Int64[Tensor, " m"]]
    is_train: tuple[bool, bool]


def pair_blocks(pairs: SetPairs, size: int) -> Iterator[PairBlock]:
    """Split pairs into blocks of at most `size` points on each side, all of one copy.

    Args:
        pairs: The pairs.
        size: Points. Those of a set that all pairs of a block share count once.
    """
    for selected, left_is_train, right_is_train in _with_equal_copies(pairs):
        n, m = min(size, pairs.left.num_points), min(size, pairs.right.num_points)
        shared = [len(index[selected].unique()) == 1 for index in (pairs.left_index, pairs.right_index)]
        points_per_pair = max(1 if is_shared else k for is_shared, k in zip(shared, (n, m), strict=True))
        for of in selected.split(max(1, size // points_per_pair)):
            for is_train in product((True, False), (True, False)):
                left_points = (left_is_train == is_train[0]).nonzero().squeeze(1)
                right_points = (right_is_train == is_train[1]).nonzero().squeeze(1)
                for rows, columns in product(left_points.split(size), right_points.split(size)):
                    if len(rows) and len(columns):
                        yield _block(pairs, of, rows, columns, is_train)


def _with_equal_copies(pairs: SetPairs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group pairs whose sets have training copies at the same places: which pairs, and which copies on each side."""
    left, left_kind = pairs.left.is_train.unique(dim=0, return_inverse=True)
    right, right_kind = pairs.right.is_train.unique(dim=0, return_inverse=True)
    kinds = left_kind[pairs.left_index] * len(right) + right_kind[pairs.right_index]
    for kind in kinds.unique().tolist():
        yield (kinds == kind).nonzero().squeeze(1), left[kind // len(right)], right[kind % len(right)]


def _block(pairs: SetPairs, of: Tensor, rows: Tensor, columns: Tensor, is_train: tuple[bool, bool]) -> PairBlock:
    left_sets, left_index = pairs.left_index[of].unique(return_inverse=True)
    right_sets, right_index = pairs.right_index[of].unique(return_inverse=True)
    left = pairs.left.part(left_sets, rows)
    is_same = pairs.left is pairs.right and torch.equal(left_sets, right_sets) and torch.equal(rows, columns)
    right = left if is_same else pairs.right.part(right_sets, columns)
    classes = None if pairs.classes is None else pairs.classes[of]
    part = replace(pairs, left=left, right=right, left_index=left_index, right_index=right_index, classes=classes)
    return PairBlock(part, of, (left_sets, rows), (right_sets, columns), is_train)


@dataclass(frozen=True, eq=False)
class SetFactors:
    """One layer's Jacobian at U sets of n points and at L weight states, for K outputs of each point.

    The gradients are `output_grads`, or their outer products with `inputs`.

    Attributes:
        output_grads: (L, K, U, n, d).
        inputs: (L, U, n, n_in), or None.
        has_bias: The inputs have one more entry, 1, which is not stored.
    """

    output_grads: Float[Tensor, "L K U n d"]
    inputs: Float[Tensor, "L U n n_in"] | None = None
    has_bias: bool = False

    def traced(self) -> "SetFactors":
        """Join the outputs to one, whose inner products are the sums over the outputs."""
        return replace(self, output_grads=self.output_grads.permute(0, 2, 3, 1, 4).flatten(3)[:, None])

    def with_graph(self) -> list[Tensor]:
        """List the factors that require a gradient."""
        return [factor for factor in (self.output_grads, self.inputs) if factor is not None and factor.requires_grad]

    def leaves(self, steps: slice, num_steps: int, *, is_fixed: bool = False) -> "SetFactors":
        """Return the factors at some steps, without what they were computed from."""

        def leaf(factor: Tensor) -> Tensor:
            own = arrange_by_steps(factor.detach(), num_steps)[steps].flatten(0, 1)
            return own.requires_grad_(factor.requires_grad and not is_fixed)

        inputs = None if self.inputs is None else leaf(self.inputs)
        return replace(self, output_grads=leaf(self.output_grads), inputs=inputs)

    def with_states(self, others: Sequence["SetFactors"]) -> "SetFactors":
        """Append other weight states."""
        parts = [self, *others]
        inputs = [part.inputs for part in parts if part.inputs is not None]
        return replace(
            self,
            output_grads=torch.cat([part.output_grads for part in parts]),
            inputs=torch.cat(inputs) if inputs else None,
        )


@dataclass(frozen=True, eq=False)
class PairSide:
    """Where the pairs find their factors on one side.

    Attributes:
        sets: The set of each pair.
        outputs: The output of each pair among the K outputs; None if a pair has all of them.
    """

    sets: Int64[Tensor, " P"]
    outputs: Int64[Tensor, " P"] | None


def set_factors(jacobian: LayerJacobian, num_states: int, num_sets: int) -> SetFactors:
    """Arrange a layer's Jacobian by weight states, sets and points, in this order of its rows."""
    if not isinstance(jacobian, OuterProductJacobian):
        values = jacobian.to_dense()
        return SetFactors(values.unflatten(1, (num_states, num_sets, -1)).movedim(0, 1))
    inputs = jacobian.inputs[:, 0].unflatten(0, (num_states, num_sets, -1))
    grads = jacobian.output_grads[:, :, 0].unflatten(1, (num_states, num_sets, -1)).movedim(0, 1)
    return SetFactors(grads, inputs, jacobian.has_bias)


def pair_products(
    left: SetFactors, right: SetFactors, x: PairSide, y: PairSide, num_steps: int
) -> Float[Tensor, "S Q P K n J m"]:
    """Multiply the layer's gradients of both sides of every pair, at every node.

    Args:
        left: At S steps times the nodes of the left side, or one.
        right: At S steps times the nodes of the right side, or one; the other side's one belongs to all of them.
        x: Which factors on the left.
        y: Which factors on the right.
        num_steps: S.
    """
    a, i = arrange_by_pairs(left.output_grads, x)
    b, j = arrange_by_pairs(right.output_grads, y)
    n, m = left.output_grads.shape[3], right.output_grads.shape[3]
    products = products_of_pairs(arrange_by_steps(a, num_steps), arrange_by_steps(b, num_steps), i, j)
    products = torch.unflatten(torch.unflatten(products, -1, (-1, m)), -3, (-1, n))
    if left.inputs is None or right.inputs is None:
        return products
    own, other = arrange_by_steps(left.inputs, num_steps), arrange_by_steps(right.inputs, num_steps)
    inputs = products_of_pairs(own, other, x.sets, y.sets)
    if left.has_bias:
        inputs = inputs + 1
    return products * inputs[..., None, :, None, :]


def arrange_by_pairs(
    output_grads: Float[Tensor, "L K U n d"], side: PairSide
) -> tuple[Float[Tensor, "L sets rows d"], Int64[Tensor, " P"]]:
    """Arrange output gradients so that each pair has one matrix of rows, and return which one it is."""
    _, _, num_sets, _, _ = output_grads.shape
    if side.outputs is None:
        return output_grads.transpose(1, 2).flatten(2, 3), side.sets
    return output_grads.flatten(1, 2), side.outputs * num_sets + side.sets


def arrange_by_steps(factors: Float[Tensor, "L ..."], num_steps: int) -> Float[Tensor, "S Q ..."]:
    """Split weight states into steps and their nodes."""
    return torch.unflatten(factors, 0, (num_steps, -1))


def products_of_pairs(
    x: Float[Tensor, "S Qx U rows d"],
    y: Float[Tensor, "S Qy V columns d"],
    i: Int64[Tensor, " P"],
    j: Int64[Tensor, " P"],
) -> Float[Tensor, "S Q pairs rows columns"]:
    """Multiply the rows of set i_p on the left with those of set j_p on the right; once if all pairs are the same."""
    if y.shape[2] == 1:  # one matrix product instead of one for each pair
        joint = torch.unflatten(x.flatten(2, 3) @ y[:, :, 0].mT, 2, (x.shape[2], -1))
        return joint if x.shape[2] == 1 else factors_of_pairs(joint, i)
    if x.shape[2] == 1:
        return products_of_pairs(y, x, j, i).mT
    return factors_of_pairs(x, i) @ factors_of_pairs(y, j).mT


def factors_of_pairs(factors: Float[Tensor, "S Q sets ..."], index: Int64[Tensor, " P"]) -> Float[Tensor, "S Q P ..."]:
    """Select each pair's factors; they are the same tensor where each pair has its own, in order."""
    if len(index) == factors.shape[2] and torch.equal(index, torch.arange(len(index), device=index.device)):
        return factors
    return factors.index_select(2, index)


# Products of some steps that are computed at once. Measured for blocks of 100 x 500 points: 2^17 to 2^18 numbers, which
# stay in the cache, take half the time of 2^21.
PRODUCTS_AT_ONCE = 1 << 17


def pair_cotangents(
    left: SetFactors,
    right: SetFactors,
    x: PairSide,
    y: PairSide,
    weights: Float[Tensor, "P K n J m"],
    of_nodes: Float[Tensor, "S Q"],
) -> list[tuple[Tensor, Tensor]]:
    """Differentiate a weighted sum of a layer's inner products in the factors on the left, the right held fixed.

    Args:
        left: At S steps times the nodes of the left side, or one.
        right: At S steps times the nodes of the right side, or one; the other side's one belongs to all of them.
        x: Which factors on the left.
        y: Which factors on the right.
        weights: Of each pair's values.
        of_nodes: Weights of S steps and their Q nodes.

    Returns:
        Each factor with a graph, and the derivative in it: a backward pass through these makes derivatives in the
        points of them, whatever the number of points on the other side.
    """
    if not left.with_graph():
        return []
    S, Q = of_nodes.shape
    size = max(1, PRODUCTS_AT_ONCE // (Q * weights.numel()))
    parts = []
    for steps in (slice(first, first + size) for first in range(0, S, size)):
        own, other = left.leaves(steps, S), right.leaves(steps, S, is_fixed=True)
        with torch.enable_grad():
            products = pair_products(own, other, x, y, len(of_nodes[steps]))
            values = torch.einsum("sqpknjm,sq->pknjm", products, of_nodes[steps])
        parts.append(torch.autograd.grad(values, own.with_graph(), weights.sum_to_size(values.shape)))
    return [(factor, torch.cat(part)) for factor, part in zip(left.with_graph(), zip(*parts, strict=True), strict=True)]
