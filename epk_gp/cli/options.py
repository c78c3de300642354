"""The options that several commands share, and how their values are parsed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.quadrature.rules import Rule, adaptive, gauss_legendre, left_endpoint, left_riemann, midpoint

PARTIAL = "partial"  # folder of a long job's partial sums, which is removed when the job is done


class Dtype(StrEnum):
    """Floating-point types."""

    float32 = "float32"
    float64 = "float64"


class HeadName(StrEnum):
    """Heads: what is computed from the network's outputs."""

    logits = "logits"
    log_softmax = "log_softmax"


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; it is created if it does not exist.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
SeedOfPoints = Annotated[
    int | None, typer.Option(help="Draw the points at random with this seed; by default the first ones are taken.")
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
    typer.Option(help="File (.safetensors or .npz) with `inputs`; by default the run's held-out points."),
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
    typer.Option(help="adaptive[:TOL], gauss-legendre:N, left-riemann:N, midpoint:N or left-endpoint."),
]
RunDtype = Annotated[Dtype | None, typer.Option(help="Compute in this type; by default in the run's own.")]
Memory = Annotated[float, typer.Option(help="Memory for the computation, GiB.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


def parse_rule(text: str) -> Rule:
    """Return the quadrature rule that an option names.

    Raises:
        ValueError: There is no rule of this name, or its number is missing or wrong.
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
    """Return torch's dtype of this name."""
    return torch.float32 if dtype is Dtype.float32 else torch.float64


def memory_bytes(memory: float) -> int:
    """Convert GiB to bytes.

    Raises:
        ValueError: The number is not positive and finite.
    """
    if not 0 < memory < float("inf"):
        raise ValueError(f"--memory must be positive: got {memory}.")
    return int(memory * 2**30)


def make_folder(out: Path) -> Path:
    """Create the folder for the results, before anything is computed, and return it.

    Raises:
        OSError: The folder cannot be created, or a file has its name.
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out must be a folder: {out} is a file.")
    out.mkdir(parents=True, exist_ok=True)
    return out
