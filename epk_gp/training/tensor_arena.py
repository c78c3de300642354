"""Memory for the many small tensors that a recorder keeps for the length of a run."""

import torch
from torch import Tensor

_BLOCK_BYTES = 4 << 20  # some 100 states of a network of 10 000 float32 weights


class TensorArena:
    """An arena: copies of small tensors, one after another in large blocks.

    Allocated one by one, the small tensors would lie between the large ones that come and go in training, and split
    every gap that those leave: the process would grow by the memory of a forward pass every few steps (measured: 20 MB
    a step for an MNIST CNN with batches of 250). A block is freed when no tensor on it is used any more.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def copy_in(self, value: Tensor) -> Tensor:
        """Copy a tensor into the arena, and return the copy."""
        key = (value.dtype, value.device)
        block, used = self._blocks.get(key, (value.new_empty(0), 0))
        if used + value.numel() > len(block):
            size = max(value.numel(), _BLOCK_BYTES // value.element_size())
            block, used = torch.empty(size, dtype=value.dtype, device=value.device), 0
        end = used + value.numel()
        self._blocks[key] = (block, end)
        return block[used:end].view(value.shape).copy_(value.detach())
