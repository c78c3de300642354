"""A peer's process: reads a trained network and its data, computes scores, and writes them with its processor seconds.

Usage: python PEER.py METHOD JOB.pt OUT.pt. Needs torch only, so that it starts in every peer's own environment.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import nets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Scores = Iterator[tuple[str, Tensor]]  # by option (a damping, a number of projections): (n, M)


class Job:
    """A trained network and its data.

    Attributes:
        net: The network with its final weights, in evaluation mode.
        X: Training inputs.
        y: Their targets.
        X_test: Test inputs.
        y_test: Their targets.
        final: The final weights.
        checkpoints: Weights along the run, the last ones included.
        rates: Learning rate at each checkpoint.
        halves: Weights of networks that were trained on random halves.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        for name in ("X", "y", "X_test", "y_test", "checkpoints", "rates", "halves"):
            setattr(self, name, stored[name])
        self.net: nn.Module = nets.build(stored["network"], tuple(stored["X"].shape[1:]), stored["num_classes"])
        self.final = self.checkpoints[-1]
        self.net.load_state_dict(self.final)
        self.net.eval()

    def train_loader(self, size: int = 250) -> DataLoader:
        """Return the training samples in their order."""
        return DataLoader(TensorDataset(self.X, self.y), batch_size=size)

    def test_loader(self, size: int = 250) -> DataLoader:
        """Return the test samples in their order."""
        return DataLoader(TensorDataset(self.X_test, self.y_test), batch_size=size)


def main(methods: dict[str, Callable[[Job], Scores]]) -> None:
    """Compute one method's scores."""
    method, job, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaded = Job(torch.load(job, weights_only=True))
    scores: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    shape = (len(loaded.X_test), len(loaded.X))
    before = time.process_time()
    for option, values in methods[method](loaded):
        seconds[option], before = time.process_time() - before, time.process_time()
        if tuple(values.shape) != shape:
            raise ValueError(f"{method} {option}: scores must have the shape {shape}: got {tuple(values.shape)}.")
        if not values.isfinite().all():
            raise ValueError(f"{method} {option}: scores must be finite.")
        scores[option] = values.detach().to(torch.float32).contiguous()
    torch.save({"scores": scores, "seconds": seconds}, out)
