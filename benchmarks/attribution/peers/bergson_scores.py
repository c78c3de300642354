"""bergson's MAGIC: the derivative through the recorded training, by its own trainer and its own backward pass."""

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import nets
import torch
import torchopt
from job import Job, Scores, define_operators, main
from torch import Tensor, nn

define_operators()
sys.modules["torchaudio"] = None  # type: ignore[assignment]  # it holds CUDA code too, and nothing here needs it
from bergson.magic import BackwardState, Trainer  # noqa: E402
from torchopt.pytree import tree_iter  # noqa: E402

ROOT = 1e-20  # bergson's default, 1e-17, is another optimizer; torch's AdamW has 0, where the root has no derivative


class Loss(nn.Module):
    """The network with its loss, as bergson's trainer takes any module: it returns a scalar."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor, example_weight: Tensor, shift_loss_mask: Tensor) -> Tensor:
        """Return the loss of a batch whose samples have weights, over the number of its targets."""
        return -(example_weight * nets.total_log_p(self.net(x), y)).sum() / shift_loss_mask.sum()


class Stream:
    """The batches of the recorded run, with a weight for each sample, under the names of bergson's `DataStream`."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, torch.device("cpu")
        self.weights = nn.Parameter(torch.ones(len(job.X)))
        generator = torch.Generator().manual_seed(0)
        self.rows = [
            batch[torch.randperm(len(batch), generator=generator)] if job.fault == "shuffled" else batch
            for batch in job.batches
        ]

    @property
    def requires_grad(self) -> bool:
        """Return whether weights are differentiated."""
        return self.weights.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.weights.requires_grad = value

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        batch = self.job.batches[number]
        y = self.job.y[batch]
        return {"x": self.job.X[batch], "y": y, "example_weight": self.weights[self.rows[number]],
                "shift_loss_mask": y >= 0}  # fmt: skip

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


def magic(job: Job) -> Scores:
    """Train again as bergson does, and go back through the training for every test sample."""
    job.net.load_state_dict(job.initial)
    stream, optimizer = Stream(job), torchopt.adamw(job.rate, weight_decay=0.01, eps_root=ROOT)
    trainer, state = Trainer.initialize(model := Loss(job.net), optimizer)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        state = trainer.train(state, stream, save_dir=folder)
        final = state.to("cpu").detach_()
        for x, y in zip(job.X_test, job.y_test, strict=True):
            state.detach_()
            state.copy_(final)
            with state.activate(model) as weights:
                found = torch.autograd.grad(nets.total_log_p(model.net(x[None]), y[None]).sum(), list(weights.values()))
            zeros = [torch.zeros_like(t) for t in tree_iter(state.opt_state) if t.is_floating_point()]
            start = BackwardState(dict(zip(weights, found, strict=True)), zeros, torch.zeros(len(job.X)))
            state.detach_()
            rows.append(trainer.backward(folder, stream, start, state, cleanup=False).weight_grads)
    yield "", torch.stack(rows)


if __name__ == "__main__":
    main({"MAGIC": magic})
