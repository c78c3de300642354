"""ExPLAIND's exact path kernel: the midpoint rule with 100 nodes a step, in float32 (it takes no other weights).

The optimizers are "gradient descent" (the problem of attribution.py) and "AdamW" (its own example, small). The result
is the largest |initial outputs + contributions + decay - outputs of the network|.
"""

import contextlib
import math
import sys
from typing import Any

import numpy as np
import torch
from explaind.data_paths import DataPath
from explaind.epk_model import ExactPathKernelModel
from explaind.model_paths import ModelPath
from explaind.optimizer_paths import AdamWOptimizerPath, SGDOptimizerPath
from modulo_network import modulo_network
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from worker import Run, serve

NODES = 100


class Targets(Dataset):
    """What DataPath asks for: a data set whose targets can be numbered."""

    def __init__(self, X: Tensor, labels: Tensor) -> None:
        self.X, self.targets = X, labels.tolist()

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.X[index], self.targets[index]


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Train the network with its wrappers."""
    torch.manual_seed(0)
    if problem["optimizer"] == "AdamW":
        X, Y, labels = (torch.from_numpy(arrays[name]) for name in ("X", "Y", "labels"))
        net, outputs = modulo_network(problem), problem["tokens"]
    else:
        X, Y = (torch.from_numpy(arrays[name]).float() for name in ("X", "Y"))
        labels, outputs = torch.arange(len(Y)) % 3, 3
        layers = nn.Linear(Y.shape[1], problem["width"]), nn.ReLU(), nn.Linear(problem["width"], outputs)
        net = nn.Sequential(*layers, nn.LogSoftmax(dim=-1))
    device = torch.device("cpu")
    with contextlib.redirect_stdout(sys.stderr):
        model = ModelPath(net, device=device, output_dim=outputs)
        optimizer = _optimizer(problem, model, device)
        data = DataPath(DataLoader(Targets(Y, labels), batch_size=len(Y)), full_batch=False)
        for _ in range(problem["steps"]):
            for batch in data.dataloader:
                inputs, targets = data.get_batch(batch)
                optimizer.zero_grad()
                nn.functional.nll_loss(model(inputs), targets).backward()
                optimizer.step()
                model.log_checkpoint()
                optimizer.log_checkpoint()
        # no step is a multiple of nan: the matrices that it would store at some steps belong into a dictionary that
        # explaind 0.1.0 does not make where predictions are not evaluated
        kernel = ExactPathKernelModel(
            model, optimizer, nn.CrossEntropyLoss(), data, integral_eps=1 / NODES, early_integral_eps=1 / NODES,
            device=device, evaluate_predictions=False, kernel_store_interval=math.nan,
        )  # fmt: skip

    def error() -> Tensor:
        with contextlib.redirect_stdout(sys.stderr):
            predicted = kernel.predict(X, keep_kernel_matrices=True)[0]
            return (predicted - model.forward(X, step=len(model.checkpoints) - 1)).detach().abs().max()

    return error


def _optimizer(problem: dict[str, Any], model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    if problem["optimizer"] == "AdamW":
        decay, lr = problem["decay"], problem["lr"]
        return AdamWOptimizerPath(model, lr=lr, weight_decay=decay, checkpoints=[], device=device)
    return SGDOptimizerPath(
        model, lr=0.1, weight_decay=0.0, momentum=0.0, checkpoints=[], buffer_float16=False, device=device
    )


if __name__ == "__main__":
    serve(make)
