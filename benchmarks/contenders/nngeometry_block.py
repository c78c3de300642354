"""nngeometry: the dense Gram matrix of one set of points with itself (it has no blocks between two sets)."""

from typing import Any

import numpy as np
import torch
from networks import network
from nngeometry import GramMatrix
from torch.utils.data import DataLoader, TensorDataset
from worker import Run, serve


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Set network and loader up."""
    net, X = network(problem, arrays), torch.from_numpy(arrays["X"])
    loader = DataLoader(TensorDataset(X), batch_size=len(X))
    return lambda: GramMatrix(net, loader).data


if __name__ == "__main__":
    serve(make, order=(1, 0, 3, 2))
