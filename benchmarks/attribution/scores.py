"""The scores: the package's own in this process, its peers' in processes and environments of their own."""

import copy
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import nets
import torch
from retraining import record, retrained, weights_at
from rows import Row
from settings import Problem
from torch import Tensor
from torch.nn import functional as F

import epk_gp as epk

PEERS = Path(__file__).parent / "peers"
PACKAGES = {  # by environment
    "dattri": ["torch==2.13.0", "dattri==0.3.0"],
    "captum": ["torch==2.13.0", "captum==0.9.0"],
    "trak": ["torch==2.13.0", "traker==0.3.2"],
    "torchopt": ["torch==2.13.0", "torchopt==0.7.3"],
    "kronfluence": ["torch==2.13.0", "kronfluence==1.0.1"],
    # it asks for Python 3.12, for which there is no torch without CUDA; what is used here runs on this one, with these
    "explaind": [
        "torch==2.13.0", "explaind==0.1.0", "--no-deps", "--ignore-requires-python", "numpy==2.4.6", "networkx==3.6",
        "sympy==1.14.0", "mpmath==1.3.0", "filelock", "fsspec", "jinja2", "markupsafe", "tqdm", "typing_extensions",
    ],
    "bergson": ["torch==2.13.0", "bergson==2.5.1"],
    # its captum needs NumPy 1, which later versions of datasets and pyarrow do not take; it does not name omegaconf
    "quanda": ["torch==2.13.0", "quanda==0.5.0", "datasets==4.8.4", "pyarrow==21.0.0", "omegaconf"],
}  # fmt: skip
CHECKPOINTS = 10  # of TracIn, evenly spaced
HALVES = 10  # networks of TRAK, each trained on a random half
PEER_SECONDS = 7200


class Trained:
    """A problem's recorded run, its data, and the file that its peers read."""

    def __init__(self, problem: Problem, points: int) -> None:
        self.problem = problem
        self.data = problem.data()
        self.run = record(problem)
        self.X_test, self.y_test = self.data.X_test[:points], self.data.y_test[:points]

    def first(self, count: int) -> "Trained":
        """Return the same run with the first of its explained samples."""
        part = copy.copy(self)
        part.X_test, part.y_test = self.X_test[:count], self.y_test[:count]
        return part

    @property
    def explained(self) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Return the inputs that are explained, as the recorded network takes them, and one output for each."""
        if self.data.y.ndim > 1:
            return (self.X_test, self.y_test), torch.zeros(len(self.X_test), dtype=torch.int64)
        return self.X_test, self.y_test

    def save_job(self, file: Path) -> None:
        """Write what peers need: data, checkpoints along the run, and networks that were trained on halves."""
        states = torch.linspace(self.run.num_steps / CHECKPOINTS, self.run.num_steps, CHECKPOINTS).round().long()
        states = states.clamp(min=1).unique().tolist()
        # other halves than those of the truth; of texts with padding nobody asks for them
        subsets = self.problem.subsets(0.5, HALVES, purpose=5)
        halves = {} if nets.padded(self.data.y) else retrained(self.problem, subsets)
        torch.save(
            {
                "network": self.problem.setting.network,
                "num_classes": self.data.num_classes,
                "X": self.data.X,
                "y": self.data.y,
                "X_test": self.X_test,
                "y_test": self.y_test,
                "checkpoints": [weights_at(self.run, state) for state in states],
                "rates": [self.problem.setting.lr for _ in states],
                "halves": [{name: value[k] for name, value in halves.items()} for k in range(HALVES)],
                "initial": weights_at(self.run, 0),
                "batches": self.problem.batches(),
            },
            file,
        )


Compute = Callable[[Trained], Tensor]


@dataclass(frozen=True)
class Score:
    """One score.

    Attributes:
        name: Its name in the tables.
        compute: Of a score of this process, the function that returns (n, M): larger where a sample raises log p.
        peer: Of a peer: environment, script and method.
        retrainings: Networks that it needs besides the recorded one.
        texts: Why it cannot explain texts; empty if it can.
        labels: Whether wrong labels are looked for by a sample's value for itself.
        most: Test samples that it explains at most, where more take hours; None for all that are asked for.
    """

    name: str
    compute: Compute | None = None
    peer: tuple[str, str, str] | None = None
    retrainings: int = 0
    texts: str = ""
    labels: bool = True
    most: int | None = None

    def num_explained(self, problem: Problem, points: int) -> int:
        """Return how many of the first test samples are explained where so many are asked for.

        Where wrong labels are to be found they are training samples, and all are.
        """
        return points if self.most is None or problem.flipped else min(points, self.most)

    def left_out(self, problem: Problem) -> str:
        """Return why the score is not computed for a problem, or nothing."""
        if problem.flipped and not self.labels:
            return "is not asked for wrong labels"
        return self.texts if problem.setting.source == "text" else ""


def _influence(**options: object) -> Compute:
    def compute(trained: Trained) -> Tensor:
        X, classes = trained.explained
        return epk.influence(trained.run, X, classes=classes, **options).values[:, 0]

    return compute


def _smoothed(**options: object) -> Compute:
    def compute(trained: Trained) -> Tensor:
        smoothing = import_module("epk_gp.kernel_machine.influence").Smoothing
        return _influence(smoothing=smoothing(**options))(trained)

    return compute


def _contributions(rule: object) -> Compute:
    def compute(trained: Trained) -> Tensor:
        X, classes = trained.explained
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", epk.CertificateWarning)  # a rule that is coarse on purpose
            return epk.attribute(trained.run, X, classes=classes, rule=rule).samples[:, 0]

    return compute


def _similarity(trained: Trained, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Return cosines, negative where a training sample has another label."""
    left, right = F.normalize(rows(trained.X_test)), F.normalize(rows(trained.data.X))
    similar = left @ right.T
    if trained.data.y.ndim > 1:
        return similar
    return torch.where(trained.y_test[:, None] == trained.data.y, similar, -similar)


def _in_inputs(trained: Trained) -> Tensor:
    def rows(X: Tensor) -> Tensor:
        return (X if X.is_floating_point() else F.one_hot(X, trained.data.num_classes).float()).flatten(1)

    return _similarity(trained, rows)


def _in_features(trained: Trained) -> Tensor:
    net = trained.problem.network()
    net.load_state_dict(weights_at(trained.run, trained.run.num_steps))
    return _similarity(trained, lambda X: nets.hidden(net, X))


def _random(trained: Trained) -> Tensor:
    return torch.randn(len(trained.X_test), len(trained.data.X), generator=trained.problem.generator(6))


INFLUENCE = "influence (epk_gp)"
ONE_LABEL = "takes one label per sample"
SCORES = [
    Score(INFLUENCE, _influence()),
    Score("smoothed influence (epk_gp)", _smoothed(), most=20),
    Score("smoothed influence, weights 0 to 1 (epk_gp)", _smoothed(high=1.0), most=20, labels=False),
    Score("smoothed influence, 16 runs (epk_gp)", _smoothed(num_runs=16), most=20, labels=False),
    Score("contributions (epk_gp)", _contributions(epk.adaptive(1e-6))),
    Score("first-order In-Run Shapley (epk_gp)", _contributions(epk.QuadratureRule.left_endpoint())),
    Score("TracInCP (captum)", peer=("captum", "captum_scores.py", "TracInCP"), texts=ONE_LABEL),
    Score("TracIn (dattri)", peer=("dattri", "dattri_scores.py", "TracIn")),
    Score("Grad-Cos (dattri)", peer=("dattri", "dattri_scores.py", "Grad-Cos"), labels=False),
    Score("TRAK-1 (dattri)", peer=("dattri", "dattri_scores.py", "TRAK-1")),
    Score("TRAK-10 (dattri)", peer=("dattri", "dattri_scores.py", "TRAK-10"), retrainings=HALVES),
    Score(
        "TRAK-10 (traker)", peer=("trak", "trak_scores.py", "TRAK-10"), retrainings=HALVES,
        texts="its tasks are classification, CLIP and two of BERT's",
    ),
    Score(
        "influence functions by EK-FAC (dattri)",
        peer=("dattri", "dattri_scores.py", "EK-FAC"),
        texts="dattri 0.3.0 fails at layers on sequences: UnboundLocalError",
    ),
    Score("influence functions by CG (dattri)", peer=("dattri", "dattri_scores.py", "conjugate gradients")),
    Score("representer points (dattri)", peer=("dattri", "dattri_scores.py", "representer points"), texts=ONE_LABEL),
    Score("neighbours in features", _in_features, labels=False),
    Score("neighbours in inputs", _in_inputs, labels=False),
    Score("random", _random),
]  # fmt: skip


def computed(score: Score, trained: Trained, pythons: dict[str, Path | str], job: Path) -> Row:
    """Compute a score: {"scores": {option: (n, M)}, "seconds": {option: processor seconds}} or {"failure": why not}."""
    if score.compute is not None:
        before = time.process_time()
        try:
            values = score.compute(trained.first(score.num_explained(trained.problem, len(trained.X_test))))
        except (AttributeError, ImportError) as error:
            return {"failure": f"this version of epk_gp has none: {error}"}
        return {"scores": {"": values.float()}, "seconds": {"": time.process_time() - before}}
    environment, script, method = score.peer or ("", "", "")
    python = pythons[environment]
    if isinstance(python, str):
        return {"failure": python}
    return peer_process(python, script, method, job)


def peer_process(python: Path, script: str, method: str, job: Path) -> Row:
    """Run a peer's script on one thread, and return what it wrote, or the last line of what it complained of."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        command = [str(python), str(PEERS / script), method, str(job), str(out)]
        variables = os.environ | threads | {"PYTHONPATH": str(PEERS.parent)}
        try:
            found = subprocess.run(
                command, env=variables, cwd=folder, capture_output=True, text=True, check=False, timeout=PEER_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"stopped after {PEER_SECONDS} s"}
        if found.returncode:
            return {"failure": ([line for line in found.stderr.splitlines() if line.strip()] or ["no message"])[-1]}
        row: Row = torch.load(out, weights_only=True)
        return row
