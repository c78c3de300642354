"""The floor: a square matrix product. Its rate converts the operations of the other contenders to time."""

from typing import Any

import numpy as np
import torch
from worker import Run, serve


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Fill two matrices; the result is not the block."""
    generator = torch.Generator().manual_seed(0)
    A, B = (
        torch.randn(problem["floor_size"], problem["floor_size"], generator=generator, dtype=torch.float64).to(
            getattr(torch, problem["dtype"])
        )
        for _ in range(2)
    )
    out = torch.empty_like(A)
    return lambda: torch.mm(A, B, out=out)


if __name__ == "__main__":
    serve(make)
