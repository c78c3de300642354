"""Blocks of a GPyTorch kernel between sets of tagged points, reduced from the C x C block of two points.

Each block is computed once.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import RLock
from typing import Literal

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import ComputeOptions, validate_count, validate_integer
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.pairs import PointsOfPairs, SetPairs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.tagging import PointSets

Kind = Literal["full", "independent", "trace"]
Outputs = Kind | int

# Reductions of n blocks K(x_i, x_i), as equations of `torch.einsum`.
_EQUATIONS: dict[str, str] = {"full": "ncd->ncd", "independent": "ncc->nc", "trace": "ncc->n"}


@dataclass(frozen=True)
class OutputStructure:
    """The values of a kernel from the C x C block K(x, x') of two points.

    Between N and M points a kernel is K matrices of (N * R) x (M * R) numbers. Rows are point-major: row i * R + k is
    output k of point i.

    Attributes:
        kind: "full" - the whole block, one matrix with C rows per point; "independent" - its diagonal, one matrix per
            output; "trace" - one scalar kernel, sum_c K(x, x')[c, c].
        num_outputs: C, the number of the network's outputs.
    """

    kind: Kind
    num_outputs: int

    @property
    def rows_per_point(self) -> int:
        """Number R of rows of a matrix per point."""
        return self.num_outputs if self.kind == "full" else 1

    @property
    def num_matrices(self) -> int:
        """Number K of matrices between two sets of points."""
        return self.num_outputs if self.kind == "independent" else 1

    @property
    def matrices(self) -> Int64[Tensor, "*k"]:
        """The matrices of GPyTorch's batch: one for each output, or one without a batch."""
        return torch.arange(self.num_outputs) if self.kind == "independent" else torch.tensor(0)

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return the reduced form of each of n blocks K(x_i, x_i)."""
        R = self.rows_per_point
        return torch.einsum(_EQUATIONS[self.kind], blocks).reshape(len(blocks), self.num_matrices, R, R)


def parse_outputs(outputs: Outputs, num_outputs: int) -> tuple[OutputStructure, Int[Tensor, "*batch"]]:
    """Return the structure for a kernel's argument `outputs`, and the indices of the matrices that the kernel uses.

    Args:
        outputs: "full", "independent", "trace" or a class index; see `EPKKernel`.
        num_outputs: C.

    Returns:
        The structure, and the index of a matrix for every element of the kernel's batch: 0 .. C - 1 for "independent"
        (batch shape [C]); otherwise the class index or 0 (batch shape []).

    Raises:
        TypeError: `outputs` is neither a string nor an integer.
        ValueError: `outputs` is an unknown string, or no class of the network has that index.
    """
    words = f"one of {list(_EQUATIONS)} or a class index"
    if isinstance(outputs, str):
        if outputs not in _EQUATIONS:
            raise ValueError(f"outputs must be {words}: got {outputs!r}.")
        structure = OutputStructure(outputs, num_outputs)
        return structure, structure.matrices
    validate_integer(outputs, "outputs", words)
    if not 0 <= outputs < num_outputs:
        raise ValueError(f"a class index must lie in 0..{num_outputs - 1} (the network's outputs): got {outputs}.")
    return OutputStructure("independent", num_outputs), torch.tensor(int(outputs))


class BlockCache:
    """A bounded store of blocks that evicts the least recently used one first.

    Blocks are copied on their way in and out, so that nobody can edit a stored one, and only the caller stores: a
    failed computation leaves nothing behind. A deep copy is the same store (GPyTorch deep-copies a kernel whenever it
    is indexed); a pickled store is restored empty. Threads may share a store.

    Args:
        max_bytes: Upper limit for the sum of all stored blocks; 0 stores nothing.

    Raises:
        TypeError: `max_bytes` is not a whole number.
        ValueError: `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        validate_count(max_bytes, "cache_bytes", minimum=0)
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = RLock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored blocks."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Hashable) -> Shaped[Tensor, "..."] | None:
        """Return a copy of the block stored under a key, or None."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return None
            self._blocks.move_to_end(key)
        return block.clone()  # outside the lock: a stored block never changes

    def put(self, key: Hashable, block: Shaped[Tensor, "..."]) -> None:
        """Store a copy of a block, and evict others until the limit holds. A block above the limit is not stored."""
        if block.nbytes > self.max_bytes:
            return
        stored = block.detach().clone()
        with self._lock:
            self._blocks.pop(key, None)
            self._blocks[key] = stored
            while self.num_bytes > self.max_bytes:
                self._blocks.popitem(last=False)

    def computed(self, key: Hashable, compute: Callable[[], Tensor]) -> Shaped[Tensor, "..."]:
        """Return the block stored under a key; compute and store it if there is none."""
        block = self.get(key)
        if block is None:
            block = compute()
            self.put(key, block)
        return block

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._blocks.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockCache":
        return self

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[int]]:
        return BlockCache, (self.max_bytes,)


@dataclass(frozen=True, eq=False)
class KernelConfig:
    """The shared part of all copies of one GPyTorch kernel: the values never change, and the cache only saves time.

    GPyTorch deep-copies a kernel whenever it is indexed or expanded; a deep copy of a configuration is itself.

    Attributes:
        path_kernel: The kernel, with values in C x C blocks.
        structure: The reduction of such a block.
        options: Options of the computation of blocks.
        cache: Computed blocks, in the form of the path kernel.
        is_cosine: Whether values are divided by the square roots of the kernel's own diagonal at both points.
    """

    path_kernel: PathKernel
    structure: OutputStructure
    options: ComputeOptions
    cache: BlockCache
    is_cosine: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> "KernelConfig":
        return self

    @property
    def trajectory(self) -> Trajectory:
        """The run."""
        return self.path_kernel.trajectory

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Everything except the points that a cached block depends on: run, structure, head, rule and path."""
        kernel = self.path_kernel
        return kernel.trajectory.digest, self.structure, kernel.head, repr(kernel.rule), kernel.path

    def _key(self, kind: str, *points: object) -> Hashable:
        """Return the key of a block, for a cache that keeps any block."""
        return (
            (kind, self.cache_key, *(p.key if isinstance(p, PointSets) else p for p in points))
            if self.cache.max_bytes
            else kind
        )

    def _kept(self, key: Hashable, block: Tensor, x: PointSets) -> Tensor:
        """Keep a block in the dtype of the points, and return it."""
        block = block.to(self.trajectory.model.spec_for(x.rows).dtype)
        self.cache.put(key, block)
        return block

    @torch.no_grad()
    def block(self, x: PointSets, y: PointSets) -> Float[Tensor, "K rows cols"]:
        """Evaluate the kernel between all points of both sides, (K, N * R, M * R): K matrices with R rows per point."""
        key = self._key("block", x, y)
        if (found := self.cache.get(key)) is not None:
            return found
        kernel, kind, a = self.path_kernel, self.structure.kind, x.flat()
        b = a if x.equals(y) else y.flat()
        if kind == "full":
            block = kernel.block(a, b, **self.options.settings)
            block = block.reshape(1, block.shape[0] * block.shape[1], -1)
        elif kind == "trace":
            block = kernel.trace_block(a, b, **self.options.settings)[None]
        else:
            block = kernel.block_per_class(a, b, **self.options.settings)
        return self._kept(key, block, x)

    @torch.no_grad()
    def diagonal_blocks(self, x: PointSets) -> Float[Tensor, "N C C"]:
        """Evaluate the C x C block of every point with itself, for any structure, at the cost of N blocks."""
        key = self._key("diagonal", x)
        if (found := self.cache.get(key)) is not None:
            return found
        return self._kept(key, self.path_kernel.diagonal_blocks(x.flat(), **self.options.settings), x)

    @torch.no_grad()
    def pairs_block(self, x: PointSets, y: PointSets, matrices: Int64[Tensor, "*d"]) -> Float[Tensor, "*d rows cols"]:
        """Evaluate one matrix between each pair of sets of a batch; the layer Jacobians of a point are shared."""
        key = self._key("pairs", x, y, content_key(matrices))
        found = self.cache.get(key)
        if found is None:
            block = self.path_kernel.pairs_block(
                self.set_pairs(x, y, matrices), memory_budget=self.options.memory_budget
            )
            found = self._kept(key, block.permute(0, 2, 1, 4, 3).flatten(1, 2).flatten(2), x)
        return found.reshape(*matrices.shape, *found.shape[1:])

    def set_pairs(
        self, x: PointSets, y: PointSets, matrices: Int64[Tensor, "*d"], own_sets: tuple[bool, bool] = (False, False)
    ) -> SetPairs:
        """Return the pairs of sets of a batch.

        Args:
            x: Sets whose batch broadcasts to d.
            y: Sets whose batch broadcasts to d; the sides are the same if they are the same object.
            matrices: The index of each pair's matrix among the structure's K matrices.
            own_sets: Whether equal sets on each side stay separate, so that each has a gradient.
        """

        def side(z: PointSets, stay_apart: bool) -> PointsOfPairs:
            batch, inner = z.batch if stay_apart else z.is_train.shape[:-1], z.X.shape[z.is_train.ndim - 1 :]
            X, mask = z.X.expand(*batch, *inner).reshape(-1, *inner), z.is_train.expand(*batch, z.count)
            of_pairs = torch.arange(len(X), device=X.device).view(batch).expand(matrices.shape).flatten()
            return PointsOfPairs(X, mask.reshape(-1, z.count), of_pairs)

        left, kind = side(x, own_sets[0]), self.structure.kind
        right = left if x is y else side(y, own_sets[1])
        return SetPairs(left, right, kind, matrices.flatten() if kind == "independent" else None)
