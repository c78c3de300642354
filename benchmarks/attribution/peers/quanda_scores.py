"""quanda's wrappers: captum's TracInCP of the last layer and TRAK of one network."""

import tempfile

from job import Job, Scores, define_operators, main
from torch import nn

define_operators()
from quanda.explainers.wrappers import TRAK, CaptumTracInCPFast  # noqa: E402


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


if __name__ == "__main__":
    main({"TracInCPFast": tracin, "TRAK": trak})
