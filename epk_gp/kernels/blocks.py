"""Blocks of a GPyTorch kernel between sets of tagged points, and batches of them; each is computed once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from threading import RLock

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_count
from epk_gp.core.options import ComputeOptions
from epk_gp.core.step import content_key
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import PathSketch
from epk_gp.kernels.output_structure import OutputStructure, diagonals
from epk_gp.kernels.tagging import as_points, as_set_pairs, distinct_points, same_points


class BlockCache:
    """A bounded store of blocks that evicts the least recently used one first.

    Blocks are copied on their way in and out, so that nobody can edit a stored one, and only the caller stores: a
    computation that fails leaves nothing behind. A deep copy is the same store (a GPyTorch kernel is deep-copied
    whenever it is indexed); a pickled one is restored empty. Threads may share a store.

    Args:
        max_bytes: Upper limit for the sum of all stored blocks; 0 stores nothing.

    Attributes:
        hits: Number of look-ups that returned a block.
        misses: Number of look-ups that did not.

    Raises:
        TypeError: `max_bytes` is not a whole number.
        ValueError: `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        validate_count(max_bytes, "cache_bytes", minimum=0)
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
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
                self.misses += 1
                return None
            self.hits += 1
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
        sketch: Sketches the gradients of all outputs; None for the kernel itself.
    """

    path_kernel: PathKernel
    structure: OutputStructure
    options: ComputeOptions
    cache: BlockCache
    is_cosine: bool = False
    sketch: PathSketch | None = None

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


def _pairs_of_sets(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
    """Evaluate one output's kernel between the sets of each element of a batch, and no other output's: (*d, n, m)."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], matrices.shape)

    def compute() -> Tensor:
        pairs = replace(as_set_pairs(config.trajectory, x, y, batch), classes=matrices.expand(batch).flatten())
        return config.path_kernel.pairs_block(pairs, config.options)

    values = config.computed("pairs", content_key(x, y, matrices), x, compute)
    return values.reshape(*batch, x.shape[-2], y.shape[-2])


# Points on each side of the blocks that a batch of small blocks is joined into. Measured for 256 pairs of sets of 2
# points and a network of 200,000 weights: 3.8 s with 16, 1.8 with 64, 1.6 with 128, 2.0 with 256, 3.0 with 512. Small
# networks are 2 times faster with 64, but each block reads every weight state of a run on disk: few blocks are better.
PAIR_POINTS = 256


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
    if _every_set_has_its_matrix(config, x, y, matrices):
        return _pairs_of_sets(config, x, y, matrices)
    return _select(_every_matrix(config, x, y), matrices, 2)


def _every_matrix(config: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate all K matrices of each element of a batch, (*d, K, n R, m R)."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    n, m = x.shape[-2], y.shape[-2]
    P, Q = x.shape[:-2].numel(), y.shape[:-2].numel()
    if P == 1 or Q == 1:  # one set against many sets is one block against one long set
        joint = block(config, x.reshape(P * n, -1), y.reshape(Q * m, -1))
        K, R = joint.shape[0], config.structure.rows_per_point
        parts = joint.reshape(K, P, n * R, Q, m * R).permute(1, 3, 0, 2, 4)
        return parts.reshape(*batch, K, n * R, m * R)
    left, right = (z.expand(*batch, *z.shape[-2:]).flatten(0, -3) for z in (x, y))
    if n == 1 and same_points(left, right):
        blocks = config.structure.reduce_blocks(diagonal_blocks(config, left.flatten(0, 1)))
    else:
        blocks = _paired_blocks(config, left, right)
    return blocks.reshape(*batch, *blocks.shape[1:])


def batch_of_diagonals(
    config: KernelConfig,
    x: Shaped[Tensor, "*b n columns"],
    y: Shaped[Tensor, "*c n columns"],
    matrices: Int64[Tensor, "*k"],
) -> Float[Tensor, "*d rows"]:
    """Evaluate only the diagonals of `batch_of_blocks`.

    Args:
        config: The kernel.
        x: (*b, n, D + 1).
        y: (*c, n, D + 1), usually the same points.
        matrices: (*k).

    Returns:
        (*d, n * R).
    """
    x, y = distinct_points(x, y)
    R, n = config.structure.rows_per_point, x.shape[-2]
    if same_points(x, y):
        batch = x.shape[:-2]
        diagonal = config.structure.diagonal(diagonal_blocks(config, x.reshape(-1, x.shape[-1])))
    else:
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        single_points = (z.expand(*batch, *z.shape[-2:]).reshape(-1, 1, z.shape[-1]) for z in (x, y))
        diagonal = diagonals(_paired_blocks(config, *single_points))
    K = diagonal.shape[0]
    return _select(diagonal.reshape(K, -1, n * R).movedim(0, 1).reshape(*batch, K, n * R), matrices, 1)


def _select(values: Tensor, matrices: Tensor, value_ndim: int) -> Tensor:
    """Select a matrix, or a diagonal, for each element of a batch: (*d, K, ...) becomes (*d, ...)."""
    batch = values.shape[: -value_ndim - 1]
    if values.shape[-value_ndim - 1] == 1:  # no choice, and no copy
        return values.squeeze(-value_ndim - 1)
    position = torch.arange(batch.numel(), device=values.device).view(batch)
    return values.reshape(-1, *values.shape[-value_ndim - 1 :])[position, matrices]


def _every_set_has_its_matrix(config: KernelConfig, x: Tensor, y: Tensor, matrices: Tensor) -> bool:
    """Return whether the sets differ, as inducing points of each class do, and each is asked about one output only."""
    sides = [z.shape[:-2] for z in (x, y) if z.shape[:-2].numel() > 1]
    if not (sides and matrices.numel() > 1 and config.structure.kind == "independent"):
        return False
    batch = torch.broadcast_shapes(*sides, matrices.shape)
    return all(batch == torch.broadcast_shapes(side, [1] * len(batch)) for side in sides)


def _paired_blocks(config: KernelConfig, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate the blocks of x_p against y_p for P pairs of sets, (P, K, n R, m R).

    A group of pairs is computed as one block of which only the diagonal blocks are kept. Layer Jacobians, which cost
    most, are computed once per point; the size of a group bounds the products that are thrown away.
    """
    P, n, m, R = x.shape[0], x.shape[-2], y.shape[-2], config.structure.rows_per_point
    group = max(1, PAIR_POINTS // max(n, m))
    parts = []
    for start in range(0, P, group):
        u, v = x[start : start + group], y[start : start + group]
        g = u.shape[0]
        joint = block(config, u.flatten(0, 1), v.flatten(0, 1)).reshape(-1, g, n * R, g, m * R)
        parts.append(joint.diagonal(dim1=1, dim2=3).movedim(-1, 0))
    return torch.cat(parts)
