"""captum's TracInCP over the checkpoints."""

import torch
from captum.influence import TracInCP
from job import Job, Scores, main
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def tracin(job: Job) -> Scores:
    """Sum products of loss gradients over checkpoints, each with its learning rate."""

    def load(net: nn.Module, number: int) -> float:
        net.load_state_dict(job.checkpoints[number])
        net.eval()
        return job.rates[number]

    numbers = list(range(len(job.checkpoints)))
    loss = nn.CrossEntropyLoss(reduction="none")
    data = job.train_loader() if job.fault == "shuffled" else TensorDataset(job.X, job.y)
    tracer = TracInCP(job.net, data, numbers, load, loss_fn=loss, batch_size=250)
    parts: list[Tensor] = []
    for X, y in job.test_loader(100):
        parts.append(tracer.influence((X, y)))
    yield "", torch.cat(parts)


if __name__ == "__main__":
    main({"TracInCP": tracin})
