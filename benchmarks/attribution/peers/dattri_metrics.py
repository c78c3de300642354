"""dattri as a judge: its own retrainings, with fresh seeds, and its own metrics.

Usage: python dattri_metrics.py METHOD JOB.pt OUT.pt. METHOD is "lds truth", "loo truth" or "metrics".
"""

import os
import sys
import tempfile
import time
from typing import Any

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = (
    "1"  # dattri 0.3.0 loads whole networks, which torch 2.6 began to refuse
)

import torch
from dattri.benchmark.datasets.mnist import loss_mnist_lr, loss_mnist_mlp, train_mnist_lr, train_mnist_mlp
from dattri.metric import (
    calculate_lds_ground_truth,
    calculate_loo_ground_truth,
    lds,
    loo_corr,
    mislabel_detection_auc,
)
from dattri.model_util.retrain import retrain_lds, retrain_loo
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FUNCTIONS = {"logistic": (train_mnist_lr, loss_mnist_lr), "mlp": (train_mnist_mlp, loss_mnist_mlp)}
Job = dict[str, Any]


def loaders(job: Job) -> tuple[DataLoader, DataLoader]:
    """Return the training samples in batches of 64 and the test samples."""
    train = DataLoader(TensorDataset(job["X"], job["y"]), batch_size=64)
    return train, DataLoader(TensorDataset(job["X_test"], job["y_test"]), batch_size=500)


def lds_truth(job: Job) -> Job:
    """Retrain on random halves: subset i and its network have the seed `start` + i, as dattri draws them."""
    (train, test), (trained, loss) = loaders(job), FUNCTIONS[job["network"]]
    with tempfile.TemporaryDirectory() as folder:
        retrain_lds(trained, train, folder, num_subsets=job["count"], subset_ratio=0.5, seed=job["start"])
        values, indices = calculate_lds_ground_truth(loss, folder, test)
    return {"values": values, "indices": indices}


def loo_truth(job: Job) -> Job:
    """Retrain without one sample at a time, with dattri's seed and its order of the batches: the data's."""

    def losses(net: nn.Module, test: DataLoader) -> Tensor:
        with torch.no_grad():
            return torch.cat([nn.functional.cross_entropy(net.eval()(X), y, reduction="none") for X, y in test])

    (train, test), (trained, _) = loaders(job), FUNCTIONS[job["network"]]
    with tempfile.TemporaryDirectory() as folder:
        retrain_loo(trained, train, folder, indices=job["removed"], seed=job["start"])
        values, removed = calculate_loo_ground_truth(losses, folder, test)
    return {"values": values, "removed": removed.long()}


def metrics(job: Job) -> Job:
    """Return the numbers of each system's scores, (M, n) as dattri has them: one for each test sample."""
    scores = job["scores"]
    if job["metric"] == "mislabel":
        return {name: mislabel_detection_auc(own, job["wrong"])[0] for name, own in scores.items()}
    values, where = job["truth"]["values"], job["truth"].get("indices", job["truth"].get("removed"))
    if job["metric"] == "lds":
        return {name: lds(own, (values[:, : own.shape[1]], where))[0] for name, own in scores.items()}
    return {name: loo_corr(own[where], (values[:, : own.shape[1]], where))[0] for name, own in scores.items()}


if __name__ == "__main__":
    method, file, out = sys.argv[1:]
    torch.set_num_threads(1)
    before = time.process_time()
    done = {"lds truth": lds_truth, "loo truth": loo_truth, "metrics": metrics}[method](torch.load(file))
    torch.save(done | {"seconds": time.process_time() - before}, out)
