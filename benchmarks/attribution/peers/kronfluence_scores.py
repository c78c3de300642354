"""kronfluence: influence functions with eigenvalue-corrected Kronecker factors of the dense layers."""

import tempfile

import torch
from job import Job, Scores, main
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Classification(Task):
    """What kronfluence asks for: the loss, and what is explained, log p(label)."""

    def compute_train_loss(self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        """Return the sum of the losses, of labels that the network itself draws where it is asked to."""
        X, y = batch
        logits = model(X)
        if sample:
            with torch.no_grad():
                y = torch.multinomial(logits.softmax(1), 1).flatten()
        return nn.functional.cross_entropy(logits, y, reduction="sum")

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        """Return the loss of the test samples."""
        return self.compute_train_loss(batch, model)


def ekfac(job: Job) -> Scores:
    """Fit the factors and score all pairs, damped by a tenth of the mean eigenvalue as Grosse et al. do."""
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("job", prepare_model(job.net, task := Classification()), task, cpu=True, output_dir=folder)
        analyzer.fit_all_factors("factors", train := job.data(), per_device_batch_size=250)
        analyzer.compute_pairwise_scores(  # of batches above the number of queries 1.0.1 asks for rows beyond them
            "scores", "factors", TensorDataset(job.X_test, job.y_test), train,
            per_device_query_batch_size=len(job.X_test), per_device_train_batch_size=len(job.X_test),
            score_args=ScoreArguments(damping_factor=None),
        )  # fmt: skip
        yield "", analyzer.load_pairwise_scores("scores")["all_modules"]


if __name__ == "__main__":
    main({"EK-FAC": ekfac})
