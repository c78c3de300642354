"""Computed blocks, found again by the content of the points."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from jaxtyping import Shaped
from torch import Tensor


class BlockCache:
    """A bounded store of blocks: what was used least recently goes first.

    Blocks are copied on their way in and out, so nobody can edit a stored one. A deep copy is the same store (a
    GPyTorch kernel is deep-copied whenever it is indexed); a pickled one comes back empty.

    Args:
        max_bytes: Upper limit for the sum of all stored blocks; 0 stores nothing.

    Attributes:
        hits: Number of blocks found.
        misses: Number of blocks not found.
    """

    def __init__(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
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
        """Bytes held now."""
        return sum(block.nbytes for block in self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Hashable) -> Shaped[Tensor, "..."] | None:
        """Look a block up.

        Args:
            key: What the block was stored under.

        Returns:
            A copy of the block, or None.
        """
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                self.misses += 1
                return None
            self.hits += 1
            self._blocks.move_to_end(key)
        return block.clone()  # outside the lock: a stored block never changes

    def put(self, key: Hashable, block: Shaped[Tensor, "..."]) -> None:
        """Store a copy of a block, and drop old ones until the limit holds. A block above the limit is not stored."""
        if block.nbytes > self.max_bytes:
            return
        stored = block.detach().clone()
        with self._lock:
            self._blocks.pop(key, None)
            self._blocks[key] = stored
            while self.num_bytes > self.max_bytes:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockCache":
        return self

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[int]]:
        return BlockCache, (self.max_bytes,)
