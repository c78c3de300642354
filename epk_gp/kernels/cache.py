"""A bounded store of computed blocks, keyed by the content of the points."""

from collections import OrderedDict
from collections.abc import Hashable
from numbers import Integral
from threading import Lock

from jaxtyping import Shaped
from torch import Tensor


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
        given: object = max_bytes  # NumPy's integers count too
        if isinstance(given, bool) or not isinstance(given, Integral):
            raise TypeError(f"the cache's size must be a whole number of bytes: got {max_bytes!r}.")
        if max_bytes < 0:
            raise ValueError(f"the cache's size must be at least 0 bytes: got {max_bytes}. 0 turns it off.")
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self._blocks: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored blocks."""
        with self._lock:
            return self._sum_of_bytes()

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
            while self._sum_of_bytes() > self.max_bytes:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._blocks.clear()

    def _sum_of_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockCache":
        return self

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[int]]:
        return BlockCache, (self.max_bytes,)
