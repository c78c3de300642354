"""The app that commands are added to, the options they share, and how it ends."""

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from typer.core import TyperGroup

from epk_gp.quadrature.rules import Rule, adaptive, gauss_legendre, left_endpoint, left_riemann, midpoint

# typer either uses click or brings a copy of its own: the base of what both say about wrong words on the command line
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_INTERRUPTED = 130  # 128 + SIGINT
PARTIAL = "partial"  # folder of a long job's partial sums, gone when it is done
_ORDER = ("demo", "record", "info", "verify", "export", "attribute", "gram", "uncertainty")


class _InOrder(TyperGroup):
    """Lists the commands in the order of a run's life."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List them for --help."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="epk-gp",
    cls=_InOrder,
    help="Exact path kernels: which training points made a prediction, exactly, and how sure is it?",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Dtype(StrEnum):
    """Floating types."""

    float32 = "float32"
    float64 = "float64"


class HeadName(StrEnum):
    """What the outputs f are."""

    logits = "logits"
    log_softmax = "log_softmax"


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if need be.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
SeedOfPoints = Annotated[
    int | None, typer.Option(help="Draw the points at random with this seed; by default the first ones are taken.")
]
Network = Annotated[
    str | None,
    typer.Option(
        help="mlp, cnn, or package.module:factory, a function without arguments that returns the torch.nn.Module "
        "(the current folder is searched too). By default what the run's network.json says.",
    ),
]
PointsFile = Annotated[
    Path | None,
    typer.Option(help="File (.safetensors or .npz) with `inputs`; by default the run's held-out points."),
]
HeadOption = Annotated[HeadName, typer.Option(help="Explain the logits, or their log-softmax.")]
RuleOption = Annotated[
    str,
    typer.Option(help="adaptive[:TOL], gauss-legendre:N, left-riemann:N, midpoint:N or left-endpoint."),
]
RunDtype = Annotated[Dtype | None, typer.Option(help="Compute in this type; by default in the run's own.")]
Memory = Annotated[float, typer.Option(help="Memory for the computation, GiB.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


def parse_rule(text: str) -> Rule:
    """Read a quadrature rule.

    Raises:
        ValueError: No such rule, or no number where one must stand.
    """
    name, colon, number = text.partition(":")
    try:
        if name == "adaptive":
            return adaptive(float(number)) if colon else adaptive()
        if name == "left-endpoint" and not colon:
            return left_endpoint()
        if name in ("gauss-legendre", "left-riemann", "midpoint") and colon:
            if not number.removeprefix("-").isdecimal():
                raise ValueError(f"N must be a whole number of nodes, as in {name}:4: got {number!r}.")
            count = int(number)
            fixed = {"gauss-legendre": gauss_legendre, "left-riemann": left_riemann, "midpoint": midpoint}
            return fixed[name](count)
    except ValueError as error:
        if name == "adaptive":
            raise ValueError(
                f"--rule adaptive:TOL needs a positive number as its tolerance: got {number!r}."
            ) from error
        raise ValueError(f"--rule {text}: {error}") from error
    raise ValueError(
        f"--rule must be adaptive[:TOL], gauss-legendre:N, left-riemann:N, midpoint:N or left-endpoint: got {text!r}."
    )


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Translate an option's value."""
    return torch.float32 if dtype is Dtype.float32 else torch.float64


def memory_bytes(memory: float) -> int:
    """Translate an option's GiB.

    Raises:
        ValueError: Not positive.
    """
    if not 0 < memory < float("inf"):
        raise ValueError(f"--memory must be positive: got {memory}.")
    return int(memory * 2**30)


def make_folder(out: Path) -> Path:
    """Make the folder for results before any work is done.

    Raises:
        OSError: It cannot be made, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out must be a folder: {out} is a file.")
    out.mkdir(parents=True, exist_ok=True)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what typer or the package refuses becomes one line on stderr and exit status 1.

    Args:
        arguments: Words after `epk-gp`; the process's own by default.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m`: --network finds the user's modules
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=words or ["--help"], prog_name="epk-gp", standalone_mode=False)
    except _UsageError as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "epk-gp")
        said: str = error.format_message()  # type: ignore[attr-defined]  # click's protocol
        _end(f"{said.strip().rstrip('.')}. See {command} --help.")
    except typer.Abort:
        _end("interrupted.", _INTERRUPTED)
    except (ValueError, TypeError, OSError, ImportError, IndexError) as error:
        _end(str(error))
    if status == _INTERRUPTED:  # newer versions of typer give it back instead
        _end("interrupted.", _INTERRUPTED)
    if isinstance(status, int) and status:
        sys.exit(status)


def _end(message: str, status: int = 1) -> NoReturn:
    typer.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(status)
