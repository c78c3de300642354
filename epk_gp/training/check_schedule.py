"""Which steps of a run have their gradient recomputed while they are recorded."""

import hashlib


def is_recomputed(index: int, every: int) -> bool:
    """Return whether the gradient of a step is recomputed: of one step in each block of `every` consecutive ones.

    In the first block it is the first step; in the others a hash of the block's number chooses, so that no loop can
    have a period that avoids all of them.
    """
    block, place = divmod(index, every)
    chosen = int.from_bytes(hashlib.blake2b(str(block).encode(), digest_size=8).digest()) % every if block else 0
    return place == chosen
