"""Pairs of sets of points, and their parts: which sets, points and copies are computed together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor


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
