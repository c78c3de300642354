"""A peer's process: reads a trained network and its data, computes scores, and writes them with its processor seconds.

Usage: python PEER.py METHOD JOB.pt OUT.pt. Needs torch only, so that it starts in every peer's own environment.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import nets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

OPERATORS: list[torch.library.Library] = []  # they go with their library
WARM_SECONDS = 10
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
        initial: Weights before the run.
        batches: Samples of every step.
        rate: Learning rate of AdamW; its other options are torch's.
        fault: A fault that is planted on purpose: "bfloat16", "no Adam state" or "shuffled"; "" is none.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        for name in ("X", "y", "X_test", "y_test", "checkpoints", "rates", "halves", "initial", "batches"):
            setattr(self, name, stored[name])
        self.rate: float = self.rates[0]
        self.fault: str = stored.get("fault", "")
        self.net: nn.Module = nets.build(stored["network"], tuple(stored["X"].shape[1:]), stored["num_classes"])
        self.final = self.checkpoints[-1]
        self.net.load_state_dict(self.final)
        self.net.eval()
        if self.fault == "bfloat16":
            self._round()

    def _round(self) -> None:
        """Compute in bfloat16 from here on, as a script does to save memory."""
        self.net.bfloat16()
        for name in ("X", "X_test"):
            setattr(self, name, _rounded(getattr(self, name)))
        self.initial = {name: _rounded(value) for name, value in self.initial.items()}
        self.checkpoints, self.halves = (
            [{name: _rounded(value) for name, value in state.items()} for state in states]
            for states in (self.checkpoints, self.halves)
        )
        self.final = self.checkpoints[-1]

    def data(self) -> TensorDataset:
        """Return the training samples, in their order unless the fault is another one."""
        order = torch.randperm(len(self.X)) if self.fault == "shuffled" else torch.arange(len(self.X))
        return TensorDataset(self.X[order], self.y[order])

    def train_loader(self, size: int = 250) -> DataLoader:
        """Return the training samples in their order, or as training takes them: shuffled, which is a fault here."""
        return DataLoader(TensorDataset(self.X, self.y), batch_size=size, shuffle=self.fault == "shuffled")

    def test_loader(self, size: int = 250) -> DataLoader:
        """Return the test samples in their order."""
        return DataLoader(TensorDataset(self.X_test, self.y_test), batch_size=size)


def define_operators() -> None:
    """Let torchvision load beside a torch without CUDA: on PyPI it holds CUDA code, which nothing here calls."""
    if not torch.version.cuda:
        library = torch.library.Library("torchvision", "DEF")
        OPERATORS.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _rounded(value: Tensor) -> Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def main(methods: dict[str, Callable[[Job], Scores]]) -> None:
    """Compute one method's scores, and keep what its library warns of.

    A short computation is made twice, and the second one's seconds count: the first one loads modules too.
    """
    method, job, out = sys.argv[1:]
    torch.set_num_threads(1)
    stored = torch.load(job, weights_only=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scores, seconds = _computed(methods[method], Job(stored))
        if sum(seconds.values()) < WARM_SECONDS and not stored.get("fault"):
            seconds = _computed(methods[method], Job(stored))[1]
    sentences = list(dict.fromkeys(" ".join(str(warning.message).split()) for warning in said))
    torch.save({"scores": scores, "seconds": seconds, "warnings": sentences}, out)


def _computed(method: Callable[[Job], Scores], job: Job) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return scores and processor seconds by option."""
    torch.manual_seed(0)
    scores: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    shape = (len(job.X_test), len(job.X))
    before = time.process_time()
    for option, values in method(job):
        seconds[option], before = time.process_time() - before, time.process_time()
        if tuple(values.shape) != shape:
            raise ValueError(f"{option or 'scores'} must have the shape {shape}: got {tuple(values.shape)}.")
        if not values.isfinite().all():
            raise ValueError(f"{option or 'scores'} must be finite.")
        scores[option] = values.detach().to(torch.float32).contiguous()
    return scores, seconds
