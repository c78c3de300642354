"""Rows of weights that may be more than memory holds."""

import tempfile

import numpy as np
import torch
from torch import Tensor


def rows_of_weights(num_rows: int, num_weights: int, reference: Tensor, max_rows: int) -> Tensor:
    """Return uninitialised rows: in memory if they fit into it, else in a temporary file that goes with them.

    Args:
        num_rows: Number of rows.
        num_weights: Numbers in each.
        reference: Gives dtype and device; a temporary file is on the CPU.
        max_rows: How many of them memory holds.
    """
    if num_rows <= max_rows:
        return reference.new_empty(num_rows, num_weights)
    kind = np.dtype(str(reference.dtype).removeprefix("torch."))
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="w+", shape=(num_rows, num_weights)))
