"""Blocks of a GPyTorch kernel between sets of tagged points, of what is made of the C x C block of two points.

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
from epk_gp.core.inputs import Points
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.pairs import PairedSets, SetPairs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.tagging import as_points, distinct_points, same_points

Kind = Literal["full", "independent", "trace"]
Outputs = Kind | int

# What is made of each of n blocks K(x_i, x_i), as an equation of `torch.einsum`.
_EQUATIONS: dict[str, str] = {"full": "ncd->ncd", "independent": "ncc->nc", "trace": "ncc->n"}


@dataclass(frozen=True)
class OutputStructure:
    """What a kernel makes of the C x C block K(x, x') of two points.

    Between N and M points a kernel is K matrices of (N * R) x (M * R) numbers. Rows are point-major: row i * R + k is
    output k of point i.

    Attributes:
        kind: "full" - all of the block, one matrix with C rows per point; "independent" - its diagonal, one matrix per
            output; "trace" - one scalar kernel, sum_c K(x, x')[c, c].
        num_outputs: C, the network's outputs.
    """

    kind: Kind
    num_outputs: int

    @property
    def rows_per_point(self) -> int:
        """R, the rows of a matrix that belong to one point."""
        return self.num_outputs if self.kind == "full" else 1

    @property
    def num_matrices(self) -> int:
        """K, the matrices between two sets of points."""
        return self.num_outputs if self.kind == "independent" else 1

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the matrices between N and M points, (K, N * R, M * R)."""
        if self.kind == "independent":
            return kernel.block_per_class(a, b, options)
        if self.kind == "trace":
            return kernel.trace_block(a, b, options)[None]
        block = kernel.block(a, b, options)
        return block.reshape(1, block.shape[0] * block.shape[1], -1)

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return what the structure makes of each of n blocks K(x_i, x_i)."""
        R = self.rows_per_point
        return torch.einsum(_EQUATIONS[self.kind], blocks).reshape(len(blocks), self.num_matrices, R, R)


def parse_outputs(outputs: Outputs, num_outputs: int) -> tuple[OutputStructure, Int[Tensor, "*batch"]]:
    """Return the structure that a kernel's argument `outputs` asks for, and the matrices that the kernel takes of it.

    Args:
        outputs: "full", "independent", "trace" or a class index; see `EPKKernel`.
        num_outputs: C.

    Returns:
        The structure, and the index of a matrix for every element of the kernel's batch: 0 .. C - 1 for "independent"
        (batch shape [C]), the class index or 0 else (batch shape []).

    Raises:
        TypeError: `outputs` is neither a string nor an integer.
        ValueError: `outputs` is an unknown string, or no class of the network has that index.
    """
    words = f"one of {list(_EQUATIONS)} or a class index"
    if isinstance(outputs, str):
        if outputs not in _EQUATIONS:
            raise ValueError(f"outputs must be {words}: got {outputs!r}.")
        matrices = torch.arange(num_outputs) if outputs == "independent" else torch.tensor(0)
        return OutputStructure(outputs, num_outputs), matrices
    validate_integer(outputs, "outputs", words)
    if not 0 <= outputs < num_outputs:
        raise ValueError(f"a class index must lie in 0..{num_outputs - 1} (the network's outputs): got {outputs}.")
    return OutputStructure("independent", num_outputs), torch.tensor(int(outputs))


class BlockCache:
    """A bounded store of blocks that evicts the least recently used one first.

    Blocks are copied on their way in and out, so that nobody can edit a stored one, and only the caller stores: a
    computation that fails leaves nothing behind. A deep copy is the same store (a GPyTorch kernel is deep-copied
    whenever it is indexed); a pickled one is restored empty. Threads may share a store.

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
        """Return a copy of the block that is stored under a key, or None."""
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
        """Return the block that is stored under a key; compute and store it if there is none."""
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
    """What all copies of one GPyTorch kernel share: the values never change, and the cache only saves time.

    GPyTorch deep-copies a kernel whenever it is indexed or expanded; a deep copy of a configuration is itself.

    Attributes:
        path_kernel: The kernel, with values in C x C blocks.
        structure: What is made of such a block.
        options: How blocks are computed.
        cache: Blocks that have been computed, as the path kernel has them.
        is_cosine: Values are divided by the square roots of the kernel's own diagonal at both points.
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
        """What a cached block depends on beside the points: run, structure, head, rule and path."""
        kernel = self.path_kernel
        return kernel.trajectory.digest, self.structure, kernel.head, repr(kernel.rule), kernel.path

    def computed(self, kind: str, points: str, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return a block in the dtype of the points x, without a graph: from the cache, or as it is computed."""

        def block() -> Tensor:
            with torch.no_grad():
                return compute().to(self.trajectory.model.spec_for(x).dtype)

        return self.cache.computed((kind, self.cache_key, points), block)


def block(
    config: KernelConfig, x: Shaped[Tensor, "n columns"], y: Shaped[Tensor, "m columns"]
) -> Float[Tensor, "K rows cols"]:
    """Evaluate the kernel between two sets of points, (K, n * R, m * R): K matrices with R rows per point.

    Nobody may edit the points meanwhile: whoever takes them from a user copies them first (`distinct_points`).

    Args:
        config: The kernel.
        x: (n, D + 1).
        y: (m, D + 1).
    """

    def compute() -> Tensor:
        a = as_points(config.trajectory, x)
        b = a if same_points(x, y) else as_points(config.trajectory, y)
        return config.structure.evaluate(config.path_kernel, a, b, config.options)

    return config.computed("block", content_key(x, y), x, compute)


def diagonal_blocks(config: KernelConfig, x: Shaped[Tensor, "n columns"]) -> Float[Tensor, "n C C"]:
    """Evaluate the C x C block of every point with itself, whatever the structure, at the cost of n blocks, not n^2.

    Args:
        config: The kernel.
        x: (n, D + 1).
    """

    def compute() -> Tensor:
        return config.path_kernel.diagonal_blocks(as_points(config.trajectory, x), config.options)

    return config.computed("diagonal", content_key(x), x, compute)


def set_pairs(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*d"],
) -> SetPairs:
    """Return the pairs of sets of a batch, and what each asks of the outputs.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1); b and c broadcast to d.
        matrices: Which of the structure's K matrices each pair has.
    """

    def side(z: Tensor) -> PairedSets:
        batch, points = z.shape[:-2], as_points(config.trajectory, z.reshape(-1, z.shape[-1]))
        shape = (batch.numel(), z.shape[-2])
        of_pairs = torch.arange(batch.numel(), device=z.device).view(batch).expand(matrices.shape).flatten()
        return PairedSets(torch.unflatten(points.X, 0, shape), points.mask.view(shape), of_pairs)

    kind, left = config.structure.kind, side(x)
    right = left if same_points(x, y) else side(y)
    return SetPairs(left, right, kind, matrices.flatten() if kind == "independent" else None)


def _pairs_of_sets(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
    """Evaluate each pair of sets of a batch by itself, (*d, n R, m R): the layer Jacobians of a point are shared."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)

    def compute() -> Tensor:
        values = config.path_kernel.pairs_block(set_pairs(config, x, y, matrices.expand(batch)), config.options)
        return values.permute(0, 2, 1, 4, 3).flatten(1, 2).flatten(2)

    values = config.computed("pairs", content_key(x, y, matrices), x, compute)
    return values.reshape(*batch, *values.shape[1:])


def batch_of_blocks(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c m columns"],
    matrices: Int64[Tensor, "*k"],
) -> Float[Tensor, "*d rows cols"]:
    """Evaluate one matrix of one block per element of a batch.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, m, D + 1).
        matrices: Which of the structure's K matrices, (*k); b, c and k broadcast.

    Returns:
        (*d, n * R, m * R). A batch dimension along which x, y and the matrices only repeat themselves has size 1 or is
        missing.
    """
    x, y = distinct_points(x, y)
    P, Q = (z.shape[:-2].numel() for z in (x, y))
    if x.shape[-2] == 1 and same_points(x, y):
        blocks = config.structure.reduce_blocks(diagonal_blocks(config, x.reshape(P, -1)))
        return _select(blocks.reshape(*x.shape[:-2], *blocks.shape[1:]), matrices)
    if min(P, Q) > 1 or _every_set_has_its_matrix(config, x, y, matrices):
        return _pairs_of_sets(config, x, y, matrices)
    # one set against many sets is one block against one long set
    joint = block(config, x.reshape(P * x.shape[-2], -1), y.reshape(Q * y.shape[-2], -1))
    by_sets = joint.unflatten(1, (P, -1)).unflatten(3, (Q, -1)).permute(1, 3, 0, 2, 4)  # (P, Q, K, n R, m R)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return _select(by_sets.reshape(*batch, *by_sets.shape[2:]), matrices)


def _select(values: Tensor, matrices: Tensor) -> Tensor:
    """Select a matrix for each element of a batch: (*d, K, rows, cols) becomes (*d, rows, cols)."""
    batch = values.shape[:-3]
    if values.shape[-3] == 1:  # no choice, and no copy
        return values.squeeze(-3)
    position = torch.arange(batch.numel(), device=values.device).view(batch)
    return values.reshape(-1, *values.shape[-3:])[position, matrices]


def _every_set_has_its_matrix(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> bool:
    """Return whether the sets differ, as inducing points of each class do, and each is asked about one output only."""
    sides = [z.shape[:-2] for z in (x, y) if z.shape[:-2].numel() > 1]
    if not (sides and matrices.numel() > 1 and config.structure.kind == "independent"):
        return False
    batch = torch.broadcast_shapes(*sides, matrices.shape)
    return all(batch == torch.broadcast_shapes(side, [1] * len(batch)) for side in sides)
