"""ExPLAIND: contributions by its exact path kernel, after its own training with its own wrappers."""

import contextlib
import math
import sys

import torch
from explaind.data_paths import DataPath
from explaind.epk_model import ExactPathKernelModel
from explaind.model_paths import ModelPath
from explaind.optimizer_paths import AdamWOptimizerPath
from job import Job, Scores, main
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def contributions(job: Job) -> Scores:
    """Train as the run was, and split log p of all classes, with 10 nodes in every step.

    10 are its default, but for a thousand in each of the first four steps, which cost four times as much as all others.
    """
    job.net.load_state_dict(job.initial)
    net = nn.Sequential(job.net, nn.LogSoftmax(dim=-1))  # its kernel takes networks that return log-probabilities
    device, samples = torch.device("cpu"), TensorDataset(job.X, job.y)
    samples.targets = job.y.tolist()  # what DataPath asks for
    with contextlib.redirect_stdout(sys.stderr):
        model = ModelPath(net, device=device, output_dim=int(job.y.max()) + 1)
        optimizer = AdamWOptimizerPath(model, lr=job.rate, weight_decay=0.01, checkpoints=[], device=device)
        data = DataPath(DataLoader(samples), full_batch=False)
        for batch in job.batches:
            data.log_batch(job.X[batch], job.y[batch], batch)
            optimizer.zero_grad()
            nn.functional.nll_loss(model(job.X[batch]), job.y[batch]).backward()
            optimizer.step()
            model.log_checkpoint()
            optimizer.log_checkpoint()
        # explaind 0.1.0 keeps some steps' matrices in a dictionary that it makes only where predictions are evaluated;
        # no step is a multiple of nan
        kernel = ExactPathKernelModel(
            model, optimizer, nn.CrossEntropyLoss(), data, early_integral_eps=0.1,
            device=device, evaluate_predictions=False, kernel_store_interval=math.nan,
        )  # fmt: skip
        summed = kernel.predict(job.X_test, keep_kernel_matrices=True)[2]
    total = sum(part.squeeze(1) for part in summed.values())  # of all parameters: test sample, class, training sample
    own = total[torch.arange(len(job.y_test)), job.y_test]
    yield "", own / len(job.batches[0])


if __name__ == "__main__":
    main({"contributions": contributions})
