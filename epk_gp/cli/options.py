"""The options that commands share, and what the words of options stand for: paths, rules, types, folders."""

import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
import typer

from epk_gp.core.losses import Head
from epk_gp.quadrature import rules
from epk_gp.storage.run import is_run
from epk_gp.storage.schema import HEADER

PARTIAL = "partial"  # folder of a long job's partial sums, which is removed when the job is done
_MAX_COUNT = 10**9  # no command can do anything this many times; larger numbers overflow in places
_MAX_SEED = 2**63 - 1

if TYPE_CHECKING:
    Context = typer.Context
else:
    Context = typer.Context.__base__  # click's: what a command is given; typer's own is for annotations alone

_Made = TypeVar("_Made")
Dtype = Literal["float32", "float64"]
ExplainedOutputs = Literal["all", "predicted", "answers"]

DTYPES: dict[str | None, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


def count(text: str, minimum: int = 1, maximum: int = _MAX_COUNT) -> Any:
    """Return an option, with its help, whose value must be a whole number in minimum .. maximum."""
    return typer.Option(help=text, min=minimum, max=maximum)


def number(text: str, minimum: float = 0.0, *, below: float = float("inf"), or_equal: bool = True) -> Any:
    """Return an option, with its help, whose value must be finite and in minimum .. below.

    Args:
        text: The help.
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

    return typer.Option(help=text, callback=validate)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.", show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder for the results; it is created if it does not exist.")]
OptionalOut = Annotated[Path | None, typer.Option(help="Folder for the numbers as JSON; none is written by default.")]
_SOURCE = (
    "Score points, by an UncertainClassifier fitted with labelled points that the network has not seen: a "
    "file (.safetensors or .npz) with `inputs` and `labels`, a folder of MNIST-format files (its test part), or "
    "held-out, the run's own. Without --points half of them, drawn with --seed, are kept to be scored."
)
Source = Annotated[str | None, typer.Option(metavar="SOURCE", help=_SOURCE)]
Seed = Annotated[int, count("Seed of everything random.", 0, _MAX_SEED)]
_DRAWN = "Draw the points at random with this seed; by default the first ones are taken."
SeedOfPoints = Annotated[int | None, count(_DRAWN, 0, _MAX_SEED)]
_NETWORK = (
    "mlp, cnn, or package.module:factory, a function without arguments that returns the torch.nn.Module, or "
    "a pair of it and the recorder's output= (the current folder is searched too). By default the network that the "
    "run's network.json names."
)
Network = Annotated[str | None, typer.Option(help=_NETWORK)]
_POINTS = (
    "File (.safetensors or .npz) with `inputs`, and perhaps `labels`; by default the run's held-out points, "
    "or its training inputs if it has none."
)
PointsFile = Annotated[Path | None, typer.Option(help=_POINTS)]
_HEAD = "Explain the logits, or their log-softmax; by default log_softmax for cross entropy, else logits."
HeadOption = Annotated[Head | None, typer.Option(help=_HEAD)]
_RULES = "adaptive[:TOL], gauss-legendre:N (N <= 1000), left-riemann:N, midpoint:N (N <= 10000) or left-endpoint"
RuleOption = Annotated[str, typer.Option(help=f"{_RULES}; N nodes in each step.")]
_PATH = (
    "How test points get from one recorded state to the next: by straight steps; by straight lines over K "
    "steps at a time, which takes fewer evaluations; or with derivatives averaged operation by operation over "
    "K steps, which takes two (attributions and reports only, and by default for large networks there)."
)
PathOption = Annotated[str, typer.Option(metavar="straight|chords:K|layerwise[:K]", help=_PATH)]
DataDtype = Annotated[Dtype, typer.Option(help="Type of data and weights.")]
RunDtype = Annotated[Dtype | None, typer.Option(help="Compute in this type; by default in the run's own.")]
Memory = Annotated[float, number("Memory for the computation, GiB, at least 0.001.", 0.001, below=1e6)]
Workers = Annotated[int | None, count("Processes of one thread each; by default this process computes.", 1, 4096)]
_SCHEDULER = "Workers of a Dask scheduler: tcp://host:8786, or scheduler file."
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help=_SCHEDULER)]
NumExplained = Annotated[int, count("Largest number of points that are explained; the first 6 are drawn.")]
_EXPLAINED = (
    "Every output; only the one that the network predicts, at a fraction of the cost; or the log-probability "
    "of the classes or words that the file of --points holds as `answers`."
)
Explained = Annotated[ExplainedOutputs, typer.Option(help=_EXPLAINED)]
TopListed = Annotated[int, count("Training points listed and drawn of either sign, at most 50.", 1, 50)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


def parse_rule(text: str) -> rules.Rule:
    """Return the quadrature rule that an option names.

    Raises:
        ValueError: There is no rule of this name, or its number is missing or wrong.
    """
    kinds: dict[str, Callable[..., rules.Rule]] = {
        "adaptive": rules.adaptive,
        "left-endpoint": rules.QuadratureRule.left_endpoint,
    }
    kinds |= {
        "gauss-legendre": rules.gauss_legendre,
        "left-riemann": rules.QuadratureRule.left_riemann,
        "midpoint": rules.QuadratureRule.midpoint,
    }
    return _parse_named(text, kinds, f"--rule must be {_RULES}")


def parse_path(text: str) -> rules.WeightPath:
    """Return the path between the recorded states that an option names.

    Raises:
        ValueError: There is no path of this name, or its number is missing or wrong.
    """
    kinds: dict[str, Callable[..., rules.WeightPath]] = {"straight": rules.straight, "chords": rules.chords}
    kinds |= {"layerwise": rules.layerwise}
    return _parse_named(text, kinds, "--path must be straight, chords:K or layerwise[:K]")


def _parse_named(text: str, kinds: Mapping[str, Callable[..., _Made]], message: str) -> _Made:
    """Return the value for a name, made with the number after its colon if there is one."""
    name, colon, value = text.partition(":")
    try:
        number = float if name == "adaptive" else int
        return kinds[name](number(value)) if colon else kinds[name]()
    except TypeError as error:
        raise ValueError(f"{message}: got {text[:60]!r}, with a number too many or without one.") from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"{message}: got {text[:60]!r} ({str(error)[:100]}).") from error


def make_folder(out: Path) -> Path:
    """Create the folder for the results, before anything is computed, and return it.

    Raises:
        OSError: The folder cannot be created, or a file has its name.
    """
    out.mkdir(parents=True, exist_ok=True)
    return out


def validate_run(run: Path, out: Path | None, workers: int | None = None, scheduler: str | None = None) -> None:
    """Raise if a folder holds no run, or if results would be written into it, or if a command would compute twice.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: The results would be written into the run's folder, or below it; or both workers are given.
    """
    if not is_run(run):
        raise FileNotFoundError(f"RUN must hold a recorded run: {run / HEADER} does not exist. See epk-gp record.")
    if out is not None:
        require_outside(run, out, "--out")
    if workers is not None and scheduler is not None:
        raise ValueError("--workers and --scheduler must not stand together. Pass one of them.")


def given_options(ctx: Context) -> dict[str, str]:
    """Return the parameters that are on the command line, and the option of each."""
    options = {parameter.name: parameter.opts[0] for parameter in ctx.command.params if parameter.name is not None}
    sources = {name: getattr(ctx.get_parameter_source(name), "name", None) for name in options}
    return {name: option for name, option in options.items() if sources[name] == "COMMANDLINE"}


def require_outside(run: Path, out: Path, option: str) -> None:
    """Raise if results would be written into the folder of a run.

    Raises:
        ValueError: They would.
    """
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run)):
        raise ValueError(f"{option} must lie outside the folder of the run: got {out}, and the run is {run}.")
