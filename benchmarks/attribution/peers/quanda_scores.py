"""quanda's wrappers: captum's TracInCP of the last layer, TRAK of one network, and EK-FAC by kronfluence."""

import tempfile

import torch
from job import Job, Scores, define_operators, main
from torch import Tensor, nn

define_operators()
from kronfluence.arguments import FactorArguments, ScoreArguments  # noqa: E402
from kronfluence.task import Task  # noqa: E402
from quanda.explainers.wrappers import TRAK, CaptumTracInCPFast, Kronfluence  # noqa: E402


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


def tracin(job: Job) -> Scores:
    """Sum products of the last layer's loss gradients over checkpoints."""

    def load(net: nn.Module, number: int) -> float:
        net.load_state_dict(job.checkpoints[number])
        return job.rates[number]

    last = [module for module in job.net.modules() if isinstance(module, nn.Linear)][-1]
    numbers = list(range(len(job.checkpoints)))
    explainer = CaptumTracInCPFast(job.net, last, job.data(), numbers, checkpoints_load_func=load, batch_size=200)
    yield "", explainer.explain(job.X_test, job.y_test)


def trak(job: Job) -> Scores:
    """Run TRAK with 128 projections."""
    with tempfile.TemporaryDirectory() as folder:
        explainer = TRAK(job.net, job.data(), "network", cache_dir=folder, proj_dim=128, batch_size=200)
        yield "", explainer.explain(job.X_test, job.y_test)


def kronfluence(job: Job) -> Scores:
    """Influence functions with eigenvalue-corrected Kronecker factors, damped by a tenth of their mean."""
    with tempfile.TemporaryDirectory() as folder:
        explainer = Kronfluence(  # of batches above the number of queries kronfluence 1.0.1 asks for rows beyond them
            job.net, Classification(), job.data(), batch_size=len(job.X_test), cache_dir=folder,
            factor_args=FactorArguments(strategy="ekfac"), score_args=ScoreArguments(damping_factor=None),
        )  # fmt: skip
        yield "", explainer.explain(job.X_test, job.y_test)


if __name__ == "__main__":
    main({"TracInCPFast": tracin, "TRAK": trak, "Kronfluence": kronfluence})
