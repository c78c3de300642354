"""What datamodels.py measures: the predictions of one recorded run, and those of its peers."""

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import nets
import torch
from agreement import mean_rank_correlation
from retraining import checkpoints, record, retrained_outcomes, trained
from rows import WAITING, Row
from scores import HALVES, Trained, peer_process
from settings import Problem
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import epk_gp as epk

if TYPE_CHECKING:  # imported as modules they hide the functions of these names
    from epk_gp.datamodels.model import Datamodel
    from epk_gp.kernel_machine.influence import Influence

PATH, RIDGE, CORRECTED, DERIVATIVE = "path training", "path ridge", "path training + derivative", "exact derivative"
LAST_STATE, CEILING, LINEAR = "the last state's kernel", "ridge datamodel", "linearised training"
FEW = 20  # questions whose derivatives are computed where those of all take too long
FEW_DERIVATIVES = {"MNIST, CNN": FEW, "KMNIST, CNN": FEW, "MNIST, MLP": FEW, "text, transformer": FEW}
CHECKPOINTS = 6  # saved by a plain training
DAMPINGS = (1.0, 0.1, 0.01)  # of the last state's kernel, relative to its mean diagonal
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of the ridge datamodel; chosen on a fifth of its networks
NETWORKS = 2000  # of the ridge datamodel
# the fastest of up to five times counts: the first one loads modules, and asks for memory
WARM_SECONDS, COLD_SECONDS = 5, 20  # after so many there is no further time, and no second one
CHUNK = 50  # samples whose gradients are computed at once
Weights = dict[str, Tensor]  # by truth: sample weights of its networks, (s, M)
T = TypeVar("T")


def least_seconds(compute: Callable[[], T]) -> tuple[T, float]:
    """Compute something, and return it with its processor seconds: the least of several times."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < (WARM_SECONDS if len(times) > 1 else COLD_SECONDS):
        before = time.process_time()
        found = compute()
        times.append(time.process_time() - before)
    return found, min(times)


def datamodel(trajectory: Any, X: Tensor, y: Tensor | None, **options: Any) -> "Datamodel":
    """Return the datamodel of a run, of several, or of checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)  # how far predictions miss is measured here
        return epk.datamodel(trajectory, X, y, **options)


class Asked:
    """A problem's recorded run and what is asked about it: everything is computed once, and timed.

    Attributes:
        problem: The problem.
        weights: By truth: sample weights of its networks, (s, M). The time of predictions is that of the first ones.
    """

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem, self.weights = problem, weights
        self.data = problem.data()

    @cached_property
    def training(self) -> float:
        """Processor seconds of one plain training."""
        return least_seconds(lambda: trained(self.problem))[1]

    @cached_property
    def recorded(self) -> tuple[epk.Trajectory, float]:
        """The recorded run, and the seconds of recording it."""
        return least_seconds(lambda: record(self.problem, positions=True))

    @cached_property
    def job(self) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
        """The file that peers read, and the folder that goes with it."""
        folder = tempfile.TemporaryDirectory()
        Trained(self.problem, self.problem.setting.num_test).save_job(file := Path(folder.name) / "job.pt")
        return file, folder

    @property
    def few(self) -> int:
        """Questions whose derivatives are computed."""
        return FEW_DERIVATIVES.get(self.problem.setting.name, self.problem.setting.num_test)

    @property
    def answers(self) -> Tensor | None:
        """The classes or letters whose log-odds are explained; None of numbers, whose outputs are."""
        return None if self.data.y.is_floating_point() else self.data.y_test

    def model(self, questions: int, **options: Any) -> "Datamodel":
        """Return the datamodel of the first questions."""
        y = None if self.answers is None else self.answers[:questions]
        return datamodel(self.recorded[0], self.data.X_test[:questions], y, **options)

    @cached_property
    def fitted(self) -> "tuple[Datamodel, float]":
        """The datamodel of all questions, and its seconds."""
        return least_seconds(lambda: self.model(self.problem.setting.num_test))

    @cached_property
    def from_checkpoints(self) -> "tuple[Datamodel, float]":
        """The datamodel of the checkpoints of a plain training, and its seconds."""
        data, states = self.data, checkpoints(self.problem, CHECKPOINTS)
        known: dict[str, Any] = {"data": (data.X, data.y), "network": self.problem.network().eval()}
        known["loss"] = epk.MeanSquaredError() if self.answers is None else epk.CrossEntropy()
        return least_seconds(lambda: datamodel(states, data.X_test, self.answers, **known))

    @cached_property
    def derivative(self) -> "tuple[Influence, float]":
        """The exact derivative of the first questions, and its seconds."""
        few = self.few
        asked = {} if self.data.y.is_floating_point() else {"function": self.model(few).questions.as_function}
        return least_seconds(lambda: epk.influence(self.recorded[0], self.data.X_test[:few], **asked))


@dataclass(frozen=True)
class System:
    """One way to predict what networks say after training on other samples.

    Attributes:
        name: Its name in the tables.
        compute: Of the package, and of what is written here: the function that returns a row.
        peer: Of a peer: environment, script and method.
        networks: Trainings that its seconds do not hold. TRAK-10 does not need the network that is explained.
        only: Names of the settings whose first seed has it; empty for all. Peers explain classes alone.
        texts: Whether it explains texts, and nothing else; the others explain none.
    """

    name: str
    compute: Callable[[Asked], Row] | None = None
    peer: tuple[str, str, str] | None = None
    networks: int = 0
    only: tuple[str, ...] = ()
    texts: bool = False

    def left_out(self, problem: Problem) -> bool:
        """Return whether a problem does not have it."""
        if self.only and (problem.setting.name not in self.only or problem.seed):
            return True
        y = problem.data().y
        has_numbers = y.is_floating_point()
        return self.texts != (y.ndim > 1 and not has_numbers) or (self.peer is not None and has_numbers)


def predict(asked: Asked, model: "Datamodel") -> tuple[dict[str, Tensor], float]:
    """Return the predictions for the networks of all truths, and the seconds of those of the first truth."""
    kind, weights = next(iter(asked.weights.items()))
    first, seconds = least_seconds(lambda: model.predict(weights))
    rest = {name: first if W is weights else model.predict(W) for name, W in asked.weights.items()}
    return {kind: first} | rest, seconds


def _predicted(asked: Asked, model: "Datamodel", parts: dict[str, float]) -> Row:
    """Return the row of a datamodel's predictions, from the seconds of the parts before them."""
    predictions, predicting = predict(asked, model)
    parts |= {"predictions": predicting}
    return {"predictions": {"": predictions}, "seconds": {"": sum(parts.values())}, "parts": parts}


def path_training(asked: Asked) -> Row:
    """Simulate every training in the path kernel of the recorded run; of texts, linearise its end."""
    (model, fitting), (_, recording) = asked.fitted, asked.recorded
    return _predicted(asked, model, {"recording": recording, "datamodel": fitting})


def path_ridge(asked: Asked) -> Row:
    """Take the linear scores of the same datamodel."""
    (model, fitting), (_, recording) = asked.fitted, asked.recorded
    parts = {"recording": recording, "datamodel": fitting}
    return {"scores": {"": model.scores}, "seconds": {"": sum(parts.values())}, "parts": parts}


def checkpoint_training(asked: Asked) -> Row:
    """Simulate every training in the path kernel of a plain training's checkpoints."""
    model, fitting = asked.from_checkpoints
    return _predicted(asked, model, {"datamodel": fitting})


def checkpoint_ridge(asked: Asked) -> Row:
    """Take the linear scores of the same datamodel."""
    model, seconds = asked.from_checkpoints
    return {"scores": {"": model.scores}, "seconds": {"": seconds}, "parts": {"datamodel": seconds}}


def halves_training(asked: Asked, count: int) -> Row:
    """Average path training over runs on pairs of complementary halves, with the seeds of the recorded run."""
    drawn = asked.problem.subsets(0.5, count // 2, purpose=9).bool()  # other halves than those of the truth
    runs, recording = least_seconds(lambda: [record(asked.problem, half) for half in torch.cat([drawn, ~drawn])])
    model, fitting = least_seconds(lambda: datamodel(runs, asked.data.X_test, asked.answers))
    return _predicted(asked, model, {"recording": recording, "datamodel": fitting})


def path_training_and_derivative(asked: Asked) -> Row:
    """Add a quarter of what the exact derivative says otherwise."""
    (_, recording), (derivative, differentiating) = asked.recorded, asked.derivative
    model, fitting = least_seconds(lambda: asked.model(asked.few, derivative=derivative))
    predictions, predicting = predict(asked, model)
    parts = {
        "recording": recording, "datamodel": fitting, "predictions": predicting, "derivative": differentiating,
    }  # fmt: skip
    return {"predictions": {"": predictions}, "seconds": {"": sum(parts.values())}, "parts": parts}


def exact_derivative(asked: Asked) -> Row:
    """Differentiate the recorded training in the weight of each sample."""
    (_, recording), (derivative, seconds) = asked.recorded, asked.derivative
    values = derivative.values[:, 0]
    parts = {"recording": recording, "derivative": seconds}
    return {"scores": {"": values}, "seconds": {"": recording + seconds}, "parts": parts}


def last_state_kernel(asked: Asked) -> Row:
    """Take the kernel of gradients at the end of the training, in the optimizer's metric, by plain torch.

    Its contributions are k r, r the slopes of the losses at the end; and with a damping k (K + c mean diagonal)^-1 r.
    """
    rows = [_last_state_kernel(asked)]
    while len(rows) < 2 and sum(rows[0]["seconds"].values()) < COLD_SECONDS:
        rows.append(_last_state_kernel(asked))  # the first one loads modules too
    return rows[-1]


def _last_state_kernel(asked: Asked) -> Row:
    data, M = asked.data, len(asked.data.y)
    before = time.process_time()
    net, optimizer = trained(asked.problem)
    X, y = torch.cat([data.X, data.X_test]), torch.cat([data.y, data.y_test])
    J = margin_gradients(net, optimizer, X, y)
    K = J @ J[:M].T
    with torch.no_grad():
        z = net(data.X)
        r = (data.y - z)[:, 0] if data.y.is_floating_point() else -torch.expm1(nets.log_p(z, data.y))
    scores = {"contributions": K[M:] * r}
    seconds = {"contributions": (start := time.process_time()) - before}
    for damping in DAMPINGS:
        A = K[:M].clone()
        A.diagonal().add_(damping * K[:M].diagonal().mean())
        scores[f"damping {damping:g}"] = torch.linalg.solve(A, K[M:].T).T * r
        now = time.process_time()
        seconds[f"damping {damping:g}"], start = seconds["contributions"] + now - start, now
    return {"scores": scores, "seconds": seconds}


def margin_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, X: Tensor, y: Tensor) -> Tensor:
    """Return gradients of margins, or of outputs, times the square root of the optimizer's metric: (n, P)."""
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def margin(w: Weights, x: Tensor, target: Tensor) -> Tensor:
        z = functional_call(net, w, (x[None],))
        if target.is_floating_point():
            return z[0, 0]
        others = z[0].masked_fill(torch.arange(z.shape[1]) == target, -torch.inf)
        return z[0].gather(0, target[None])[0] - others.logsumexp(0)

    rows = []
    for part, targets in zip(X.split(CHUNK), y.split(CHUNK), strict=True):
        each = vmap(grad(margin), (None, 0, 0))(weights, part, targets)
        rows.append(
            torch.cat([(each[name] * _metric(optimizer, p).sqrt()).flatten(1) for name, p in net.named_parameters()], 1)
        )
    return torch.cat(rows)


def _metric(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    state, options = optimizer.state[parameter], optimizer.param_groups[0]
    if "exp_avg_sq" not in state:
        return torch.ones_like(parameter)
    v = state["exp_avg_sq"] / (1 - options["betas"][1] ** float(state["step"]))
    return 1 / (v.sqrt() + options["eps"])


def ridge_datamodel(asked: Asked) -> Row:
    """Regress log-odds on which samples were there, by ridge on many networks: what no cheap prediction surpasses."""
    problem = asked.problem
    drawn = problem.subsets(0.5, NETWORKS, purpose=7)
    log_p = torch.cat([retrained_outcomes(problem, part) for part in drawn.split(problem.setting.together)])
    margins = (log_p - torch.log(-torch.expm1(log_p.clamp(max=-1e-7)))).double()
    W, held, before = drawn.double(), NETWORKS // 5, time.process_time()

    def fit(rows: slice, penalty: float) -> Tensor:
        A, T = (part[rows] - part[rows].mean(0) for part in (W, margins))
        return torch.linalg.solve(A.T @ A + penalty * torch.eye(A.shape[1], dtype=A.dtype), A.T @ T).T

    def agreement(penalty: float) -> float:
        return mean_rank_correlation(fit(slice(held, None), penalty) @ W[:held].T, margins[:held].T)

    scores = fit(slice(None), max(PENALTIES, key=agreement)).float()
    return {"scores": {"": scores}, "seconds": {"": time.process_time() - before}}


SYSTEMS = [
    System(PATH, path_training),
    System(RIDGE, path_ridge),
    System(f"{PATH}, six checkpoints", checkpoint_training, networks=1),
    System(f"{RIDGE}, six checkpoints", checkpoint_ridge, networks=1),
    System(f"{PATH}, 2 halves", partial(halves_training, count=2), only=("MNIST, MLP",)),
    System(f"{PATH}, 4 halves", partial(halves_training, count=4)),
    System(LINEAR, path_training, texts=True),
    System(CORRECTED, path_training_and_derivative),
    System(DERIVATIVE, exact_derivative),
    System(LAST_STATE, last_state_kernel),
    System("TRAK-1 (traker)", peer=("trak", "trak_scores.py", "TRAK-1"), networks=1),
    System("TRAK-10 (traker)", peer=("trak", "trak_scores.py", "TRAK-10"), networks=HALVES),
    System("TRAK-1 (dattri)", peer=("dattri", "dattri_scores.py", "TRAK-1"), networks=1),
    System("TRAK-10 (dattri)", peer=("dattri", "dattri_scores.py", "TRAK-10"), networks=HALVES),
    System("EK-FAC (kronfluence)", peer=("kronfluence", "kronfluence_scores.py", "EK-FAC"), networks=1),
    System(CEILING, ridge_datamodel, networks=NETWORKS, only=("digits",)),
]


def computed(system: System, asked: Asked, pythons: dict[str, Path | str]) -> Row:
    """Compute a system's row: scores or predictions and seconds by option, those of a plain training; or a failure."""
    if system.compute is not None:
        row = system.compute(asked)
    else:
        environment, script, method = system.peer or ("", "", "")
        python = pythons.get(environment, WAITING)
        if isinstance(python, str):
            return {"failure": python}
        row = peer_process(python, script, method, asked.job[0])
    return row if "failure" in row else row | {"training": asked.training}
