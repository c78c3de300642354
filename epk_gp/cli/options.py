"""The options that commands share, and what the words of options stand for: paths, rules, types, folders."""

import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import typer

from epk_gp.quadrature import rules
from epk_gp.storage.run import is_run
from epk_gp.storage.schema import HEADER

PARTIAL = "partial"  # folder of a long job's partial sums, which is removed when the job is done
_MAX_COUNT = 10**9  # no command can do anything this many times; larger numbers overflow in places
_MAX_SEED = 2**63 - 1

_Made = TypeVar("_Made")
Dtype = Literal["float32", "float64"]

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


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
Seed = Annotated[int, count("Seed of everything random.", 0, _MAX_SEED)]
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
_RULES = "adaptive[:TOL], gauss-legendre:N (N <= 1000), left-riemann:N, midpoint:N (N <= 10000) or left-endpoint"
RuleOption = Annotated[str, typer.Option(help=f"{_RULES}; N nodes in each step.")]
_PATH = (
    "How test points get from one recorded state to the next: by straight steps; by straight lines over K "
    "steps at a time, which takes fewer evaluations; or with derivatives averaged operation by operation over "
    "K steps, which takes two. By default straight, and layerwise for large networks."
)
PathOption = Annotated[str | None, typer.Option(metavar="straight|chords:K|layerwise[:K]", help=_PATH)]
Memory = Annotated[float, number("Memory for the computation, GiB, at least 0.001.", 0.001, below=1e6)]
_COLUMNS = (
    "Map over two columns of a table, X,Y, each by its name (--feature-names) or its number from 0. An extent stands "
    "behind it, as in age=0..100, or the name of each value of a column of categories, as in sex=0:female/1:male."
)
Columns = Annotated[str | None, typer.Option(metavar="X,Y", help=_COLUMNS)]
_OTHERS = "With --columns: values of other columns, as in age=40,children=2; by default their medians."
Others = Annotated[str | None, typer.Option(metavar="NAME=VALUE,...", help=_OTHERS)]
FeatureNames = Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the features.")]


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


def parse_path(text: str | None) -> rules.WeightPath | None:
    """Return the path between the recorded states that an option names; None is the default of the library.

    Raises:
        ValueError: There is no path of this name, or its number is missing or wrong.
    """
    kinds: dict[str, Callable[..., rules.WeightPath]] = {"straight": rules.straight, "chords": rules.chords}
    kinds |= {"layerwise": rules.layerwise}
    return None if text is None else _parse_named(text, kinds, "--path must be straight, chords:K or layerwise[:K]")


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


def validate_run(run: Path, out: Path | None) -> None:
    """Raise if a folder holds no run, or if results would be written into it.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: The results would be written into the run's folder, or below it.
    """
    if not is_run(run):
        raise FileNotFoundError(f"RUN must hold a recorded run: {run / HEADER} does not exist. See epk-gp record.")
    if out is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run)):
        raise ValueError(f"--out must lie outside the folder of the run: got {out}, and the run is {run}.")
