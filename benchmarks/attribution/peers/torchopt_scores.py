"""TorchOpt: the training loop as one differentiable function of the samples' weights."""

import nets
import torch
import torchopt
from job import Job, Scores, main
from torch import Tensor
from torch.func import functional_call

ROOT = 1e-20  # added under Adam's root, whose derivative at 0 is not a number; torch's own AdamW adds nothing there


def unrolled(job: Job) -> Scores:
    """Differentiate log p(target) after training in the weight of every sample, through all steps of AdamW."""
    names, weights = list(job.initial), tuple(value.clone().requires_grad_() for value in job.initial.values())
    adamw = torchopt.adamw(job.rate, weight_decay=0.01, eps_root=ROOT)
    state, shares = adamw.init(weights), torch.ones(len(job.X), requires_grad=True)

    def log_p(X: Tensor, y: Tensor) -> Tensor:
        return nets.total_log_p(functional_call(job.net, dict(zip(names, weights, strict=True)), (X,)), y)

    for number, batch in enumerate(job.batches):
        if job.fault == "no Adam state" and number == len(job.batches) // 2:
            state = adamw.init(weights)  # as after a restart from a checkpoint that holds the network alone
        rows = batch[torch.randperm(len(batch))] if job.fault == "shuffled" else batch
        y = job.y[batch]
        loss = -(shares[rows] * log_p(job.X[batch], y)).sum() / (y >= 0).sum()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        updates, state = adamw.update(gradients, state, params=weights, inplace=False)
        weights = torchopt.apply_updates(weights, updates, inplace=False)
    found = log_p(job.X_test, job.y_test)
    yield "", torch.stack([torch.autograd.grad(value, shares, retain_graph=True)[0] for value in found])


if __name__ == "__main__":
    main({"unrolled": unrolled})
