"""The options that commands share, the values that options can have, and the limits of numbers."""

from collections.abc import Callable
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

_MAX_COUNT = 10**9  # no command can do anything this many times; larger numbers overflow in places
_MAX_SEED = 2**63 - 1


class Dtype(StrEnum):
    """Floating-point types."""

    float32 = "float32"
    float64 = "float64"


class HeadName(StrEnum):
    """Heads: what is computed from the network's outputs."""

    logits = "logits"
    log_softmax = "log_softmax"


class VerifiedHeads(StrEnum):
    """The heads whose outputs are verified."""

    both = "both"
    logits = "logits"
    log_softmax = "log_softmax"


class LossName(StrEnum):
    """Losses that can be chosen by name."""

    cross_entropy = "cross-entropy"
    mse = "mse"


class OptimizerName(StrEnum):
    """Optimizers whose update rule is known."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    rmsprop = "rmsprop"
    adagrad = "adagrad"


class ExplainedOutputs(StrEnum):
    """The outputs whose contributions are computed."""

    every = "all"
    predicted = "predicted"


class EstimatedCommand(StrEnum):
    """The commands whose cost is estimated."""

    gram = "gram"
    attribute = "attribute"


class Side(StrEnum):
    """The points along one side of a block of the kernel."""

    test = "test"
    train = "train"


class PlaneName(StrEnum):
    """Planes on which a map is drawn."""

    principal = "principal"
    coordinates = "coordinates"


class CoupledOutputs(StrEnum):
    """How a GP's outputs are correlated."""

    full = "full"
    independent = "independent"


class TargetsName(StrEnum):
    """The targets that a GP is conditioned on."""

    network = "network"
    dirichlet = "dirichlet"


class RunOptions(TypedDict):
    """Options of commands that compute from a run."""

    run: Path
    head: HeadName | None
    memory: float
    points: Path | None
    network: str | None
    dtype: Dtype | None
    seed: int | None
    workers: int | None
    quiet: bool


class PathOptions(RunOptions):
    """Options of commands that compute from a run's kernel, along a path."""

    rule: str
    path: str


class BlockOptions(PathOptions):
    """Options that say which block of the kernel."""

    rows: Side
    columns: Side
    num_rows: int | None
    num_columns: int | None


class PredictionOptions(RunOptions):
    """Options that say which predictions are explained."""

    num_points: int
    outputs: ExplainedOutputs


class ExplainedOptions(PathOptions, PredictionOptions):
    """Options that say which predictions are explained, and by which kernel."""


class EstimatedOptions(BlockOptions, ExplainedOptions):
    """Those of `epk-gp estimate`, which are those of either command."""


def count(minimum: int = 1, maximum: int = _MAX_COUNT) -> Callable[[Any, Any, int | None], int | None]:
    """Return a callback for an option: it raises if the value is not in minimum .. maximum."""

    def validate(_: Any, parameter: Any, value: int | None) -> int | None:
        if value is not None and value < minimum:
            raise ValueError(f"{parameter.opts[0]} must be at least {minimum}: got {value}.")
        if value is not None and value > maximum:
            raise ValueError(f"{parameter.opts[0]} must be at most {maximum}: got {value}.")
        return value

    return validate


def number(
    minimum: float = 0.0, *, below: float = float("inf"), or_equal: bool = True
) -> Callable[[Any, Any, float | None], float | None]:
    """Return a callback for an option: it raises if the value is not finite and in minimum .. below.

    Args:
        minimum: The smallest value that is accepted.
        below: Every value that is accepted is smaller.
        or_equal: Whether the minimum itself is accepted.
    """

    def validate(_: Any, parameter: Any, value: float | None) -> float | None:
        if value is None:
            return None
        large_enough = value >= minimum if or_equal else value > minimum
        if not (isfinite(value) and large_enough and value < below):
            least = f"at least {minimum:g}" if or_equal else "positive" if minimum == 0 else f"above {minimum:g}"
            most = "finite" if below == float("inf") else f"below {below:g}"
            raise ValueError(f"{parameter.opts[0]} must be {least} and {most}: got {value}.")
        return value

    return validate


def _not_a_file(run: Path) -> Path:
    if run.exists() and not run.is_dir():
        raise ValueError(f"RUN must be the folder of a recorded run: {run} is a file.")
    return run


RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.", callback=_not_a_file, show_default=False)
]
Out = Annotated[Path, typer.Option(help="Folder for the results; it is created if it does not exist.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", callback=count(0, _MAX_SEED))]
SeedOfPoints = Annotated[
    int | None,
    typer.Option(
        help="Draw the points at random with this seed; by default the first ones are taken.",
        callback=count(0, _MAX_SEED),
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        help="mlp, cnn, or package.module:factory, a function without arguments that returns the torch.nn.Module "
        "(the current folder is searched too). By default the network that the run's network.json names."
    ),
]
PointsFile = Annotated[
    Path | None,
    typer.Option(
        help="File (.safetensors or .npz) with `inputs`; by default the run's held-out points, or its training inputs "
        "if it has none."
    ),
]
HeadOption = Annotated[
    HeadName | None,
    typer.Option(
        help="Explain the logits (the network's outputs), or their log-softmax. By default as the run's loss has it: "
        "log_softmax for cross entropy, logits otherwise."
    ),
]
RuleOption = Annotated[
    str,
    typer.Option(
        help="adaptive[:TOL], gauss-legendre:N (N up to 1000), left-riemann:N, midpoint:N (N up to 10000) or "
        "left-endpoint."
    ),
]
PathOption = Annotated[
    str,
    typer.Option(
        metavar="straight|chords:K|layerwise[:K]",
        help="How test points get from one recorded state to the next: by straight steps; by straight lines over K "
        "steps at a time, which takes fewer evaluations; or with derivatives averaged operation by operation over "
        "K steps, which takes two (attributions and reports only).",
    ),
]
RunDtype = Annotated[Dtype | None, typer.Option(help="Compute in this type; by default in the run's own.")]
Memory = Annotated[
    float, typer.Option(help="Memory for the computation, GiB, at least 0.001.", callback=number(0.001, below=1e6))
]
RowsSide = Annotated[
    Side,
    typer.Option(
        help="test: the points of --points, or the held-out points, or the training inputs of a run without any, "
        "as test copies; train: training copies."
    ),
]
ColumnsSide = Annotated[Side, typer.Option(help="The same for the columns.")]
NumRows = Annotated[int | None, typer.Option(help="Largest number of points along the rows.", callback=count())]
NumColumns = Annotated[int | None, typer.Option(help="Largest number of points along the columns.", callback=count())]
NumExplained = Annotated[
    int, typer.Option(help="Largest number of points that are explained; the first 6 are drawn.", callback=count())
]
Explained = Annotated[
    ExplainedOutputs,
    typer.Option(help="Every output, or only the one that the network predicts, at a fraction of the cost."),
]
TopListed = Annotated[
    int, typer.Option(help="Training points listed and drawn of either sign, at most 50.", callback=count(1, 50))
]
SmoothingRuns = Annotated[
    int,
    typer.Option(
        help="Average the derivative over so many runs with random weights of the points, trained again: for ReLUs and "
        "long runs. 0 for the derivative itself.",
        callback=count(0, 10_000),
    ),
]
MissRate = Annotated[
    float,
    typer.Option(
        help="Scores: allowed share of sets of classes without the true one.",
        callback=number(below=1.0, or_equal=False),
    ),
]
MeasuringSeconds = Annotated[
    float,
    typer.Option(
        help="Time for measuring. A little more where one piece of each kind takes longer.",
        callback=number(0.1, below=1e5),
    ),
]
CommitSeconds = Annotated[
    float,
    typer.Option(
        help="Seconds between commits: a crash loses at most the steps of this time.", callback=number(or_equal=False)
    ),
]
CheckEvery = Annotated[
    int,
    typer.Option(help="Recompute and check the gradient of one step in N; of every step by default.", callback=count()),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Compute in this many processes of one thread each; by default in this process.", callback=count(1, 4096)
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on the workers of a Dask scheduler: its address, as tcp://host:8786, or its scheduler file.",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        help="Sketched features of each point, or exact for the kernel matrix itself; by default exact up to 5000 "
        "training points if the matrix takes at most 10^13 multiplications, and 4096 features else."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Nodes of the path that stand for all its steps; 20 by default, or as many as outputs up to 256.",
        callback=count(1, 10**6),
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
