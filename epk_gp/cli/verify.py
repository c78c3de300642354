"""`epk-gp verify`: whether the kernel machine equals the network, and whether the files are undamaged."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.cli.app import app
from epk_gp.cli.data import PointSource, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import (
    Network,
    PointsFile,
    Quiet,
    RuleOption,
    RunDtype,
    RunFolder,
    SeedOfPoints,
    make_folder,
    parse_rule,
    torch_dtype,
)
from epk_gp.cli.summaries import certificate
from epk_gp.core.head import Head, resolve_head
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.storage.check import check_run

_HEADS: dict[str, list[Head]] = {
    "both": ["logits", "log_softmax"],
    "logits": ["logits"],
    "log_softmax": ["log_softmax"],
}
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class Heads(StrEnum):
    """The heads whose outputs are verified."""

    both = "both"
    logits = "logits"
    log_softmax = "log_softmax"


@app.command(short_help="Check that the kernel machine equals the network.")
def verify(
    run: RunFolder,
    checksums: Annotated[bool, typer.Option("--checksums", help="Check the files only.")] = False,
    head: Annotated[
        Heads | None,
        typer.Option(help="Outputs that are verified; by default both for cross entropy, the logits otherwise."),
    ] = None,
    rule: RuleOption = "adaptive",
    tol: Annotated[
        float | None, typer.Option(help="Largest error allowed; by default 1e-9, or 1e-3 if float32 is used.")
    ] = None,
    num_points: Annotated[int | None, typer.Option(help="Largest number of points; all by default.")] = None,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    out: Annotated[Path | None, typer.Option(help="Folder for verify.json; none is written by default.")] = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Rebuild the network's outputs from its training data; exit status 1 if they differ by more than --tol."""
    if checksums:
        _check_files(run, quiet)
        return
    timer, quadrature = Stopwatch(), parse_rule(rule)
    trajectory = open_run(run, network)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    X = read_points(source, trajectory, num_points)
    coarsest = torch.float32 if torch.float32 in (X.dtype, trajectory.dtype) else torch.float64
    allowed = _TOLERANCE[coarsest] if tol is None else tol
    if not allowed >= 0:
        raise ValueError(f"--tol must not be negative: got {allowed}.")
    heads = _heads(head, trajectory)
    folder = None if out is None else make_folder(out)
    results = {name: reconstruct(trajectory, X, head=name, rule=quadrature, progress=not quiet) for name in heads}
    typer.echo(f"{len(X)} points, {trajectory.num_steps} steps, {quadrature.name}")
    typer.echo(_table(results))
    errors = torch.tensor([result.max_error for result in results.values()], dtype=torch.float64)
    error = float(errors.max())  # a NaN stays NaN, as it would not in Python's max
    if folder is not None:
        config = {"run": run, "rule": rule, "tol": allowed, "num_points": len(X), "dtype": str(X.dtype), "seed": seed}
        numbers = {name: certificate(result) for name, result in results.items()}
        write_json(folder / "verify.json", "verify", config, numbers | {"passed": error <= allowed}, timer)
    if not error <= allowed:
        raise ValueError(f"the kernel machine must equal the network to within {allowed:g}: it differs by {error:.3g}.")
    typer.echo(f"verified: the largest error is {error:.2g}, at most {allowed:g} ({timer.total:.1f} s)")


def _heads(head: Heads | None, trajectory: Trajectory) -> list[Head]:
    """Return the heads that are verified; by default the logits and, where the loss is of it, their log-softmax."""
    num_outputs = trajectory.num_outputs
    if head is None:
        head = Heads.logits if resolve_head(None, trajectory.loss, num_outputs) == "logits" else Heads.both
    if head is Heads.both and num_outputs == 1:
        return ["logits"]  # the log-softmax of a single output is the constant 0
    return _HEADS[head.value]


def _table(results: dict[Head, Reconstruction]) -> str:
    rows: list[tuple[str, ...]] = [
        ("head", "largest error", "largest residual", "summed residual", "evaluations", "step mismatch")
    ]
    for name, r in results.items():
        numbers = (r.max_error, r.max_residual, r.total_residual)
        rows.append((name, *(f"{x:.2e}" for x in numbers), f"{r.evaluations:.2f}", f"{r.max_step_mismatch:.2e}"))
    return "\n".join("  ".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)


def _check_files(run: Path, quiet: bool) -> None:
    summary = check_run(run, progress=not quiet)
    state = "finished" if summary.finished else "not finished: record --resume resumes it"
    typer.echo(
        f"all {summary.files} files have the checksums they were committed with: {summary.num_steps} steps, {state}"
    )
