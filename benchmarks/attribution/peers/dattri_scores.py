"""dattri's attributors: TracIn, cosines of gradients, TRAK, influence functions, representer points."""

import nets
import torch
from dattri.algorithm import (
    IFAttributorCG,
    IFAttributorEKFAC,
    RPSAttributor,
    TracInAttributor,
    TRAKAttributor,
)
from dattri.task import AttributionTask
from job import Job, Scores, main
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]

DAMPINGS = (1e-1, 1e-2, 1e-3)  # of dattri's own search space; the best is chosen on the answer, as dattri does it
PROJECTIONS = (32, 128, 512)  # dattri takes 512; the normal matrix needs fewer than there are training samples


class Functions:
    """What dattri asks for: functions of weights and of one sample, or of a batch."""

    def __init__(self, job: Job) -> None:
        self.net, self.ndim = job.net, job.X.ndim

    def log_p(self, weights: Weights, pair: Pair) -> Tensor:
        """Return log p(target) of the samples of a batch, or of a single sample."""
        x, y = pair
        if x.ndim < self.ndim:
            x, y = x[None], y[None]
        return nets.log_p(functional_call(self.net, weights, (x,)), y)

    def loss(self, weights: Weights, pair: Pair) -> Tensor:
        """Return the mean loss."""
        return -self.log_p(weights, pair).mean()

    def margin(self, weights: Weights, pair: Pair) -> Tensor:
        """Return log(p / (1 − p)), which TRAK explains."""
        log_p = self.log_p(weights, pair).mean()
        return log_p - torch.log(-torch.expm1(log_p))

    def p(self, weights: Weights, pair: Pair) -> Tensor:
        """Return the probability of the target."""
        return self.log_p(weights, pair).mean().exp()


def tracin(job: Job, *, normalised: bool = False) -> Scores:
    """Sum products of loss gradients over checkpoints; without the projection that dattri makes by default."""
    task = AttributionTask(Functions(job).loss, job.net, list(job.checkpoints))
    attributor = TracInAttributor(task, torch.tensor(job.rates), normalised)
    attributor.projector_kwargs = None  # passing None keeps a projection to 512 numbers
    with torch.no_grad():
        values = attributor.attribute(job.train_loader(), job.test_loader()).T
    yield "", values


def trak(job: Job, checkpoints: list[Weights]) -> Scores:
    """Run TRAK with several numbers of projections."""
    functions = Functions(job)
    for dim in [dim for dim in PROJECTIONS if dim <= max(PROJECTIONS[0], len(job.X) // 2)]:
        task = AttributionTask(functions.margin, job.net, checkpoints)
        attributor = TRAKAttributor(task, functions.p, {"proj_dim": dim, "device": "cpu"}, regularization=1e-6)
        attributor.cache(job.train_loader())
        with torch.no_grad():
            values = attributor.attribute(job.test_loader()).T
        yield f"{dim} projections", values


def conjugate_gradients(job: Job) -> Scores:
    """Influence functions: the inverse Hessian by ten steps of conjugate gradients."""
    for damping in DAMPINGS:
        task = AttributionTask(Functions(job).loss, job.net, job.final)
        attributor = IFAttributorCG(task, max_iter=10, regularization=damping)
        attributor.cache(job.train_loader(len(job.X)))
        with torch.no_grad():
            values = attributor.attribute(job.train_loader(), job.test_loader(20)).T
        yield f"damping {damping:g}", values


def ekfac(job: Job) -> Scores:
    """Influence functions: eigenvalue-corrected Kronecker factors of the dense layers."""
    for damping in DAMPINGS:
        task = AttributionTask(Functions(job).loss, job.net, job.final)
        attributor = IFAttributorEKFAC(task, damping=damping)
        attributor.cache(job.train_loader())
        with torch.no_grad():
            values = attributor.attribute(job.train_loader(), job.test_loader()).T
        yield f"damping {damping:g}", values


def representer(job: Job) -> Scores:
    """Representer points: the last layer trained on with weight decay."""
    last = [name for name, module in job.net.named_modules() if isinstance(module, nn.Linear)][-1]
    for decay in DAMPINGS:
        job.net.load_state_dict(job.final)
        task = AttributionTask(nn.functional.cross_entropy, job.net, job.final)
        attributor = RPSAttributor(task, last, normalize_preactivate=True, l2_strength=decay)
        attributor.cache(job.train_loader())
        yield f"decay {decay:g}", attributor.attribute(job.train_loader(), job.test_loader()).T


if __name__ == "__main__":
    main(
        {
            "TracIn": tracin,
            "Grad-Cos": lambda job: tracin(job, normalised=True),
            "TRAK-1": lambda job: trak(job, [job.final]),
            "TRAK-10": lambda job: trak(job, list(job.halves)),
            "conjugate gradients": conjugate_gradients,
            "EK-FAC": ekfac,
            "representer points": representer,
        }
    )
