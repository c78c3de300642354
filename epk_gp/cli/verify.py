"""`epk-gp verify`: whether a run's files are whole, and whether its kernel machine is the network."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from epk_gp.cli import options as opt
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.storage.run import RunSummary, check_run
from epk_gp.storage.schema import chunk_schema

_NUM_POINTS = 10  # by default: each costs about as much as the last, 1 s of a CNN's 100 steps
_BOUNDS = ("max_error", "max_residual", "total_residual", "evaluations", "max_step_mismatch", "certified")


def verify(
    run: opt.RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder for the numbers, as JSON; none by default.")] = None,
    rule: opt.RuleOption = "adaptive",
    tol: Annotated[float | None, opt.number("Largest error allowed; 1e-9, or 1e-3 of a float32 run.")] = None,
    num_points: Annotated[int | None, opt.count("Most points; 10 by default, of a --points file all.")] = None,
    points: opt.PointsFile = None,
    network: opt.Network = None,
) -> None:
    """Check all files of a recording, then rebuild the network's outputs from its training data.

    The exit status is 1 if a file is damaged, or if outputs differ by more than --tol.
    """
    options = dict(locals())
    opt.validate_run(run, out)
    if num_points is None and points is None:
        num_points = _NUM_POINTS
    timer, quadrature = Stopwatch(), opt.parse_rule(rule)
    for line in _describe(check_run(run, progress=True)):
        typer.echo(line)
    trajectory = open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points)
    X, heads = chosen.X, dict.fromkeys(("logits", resolve_head(None, trajectory.loss, trajectory.num_outputs)))
    allowed = (1e-9 if trajectory.dtype == torch.float64 else 1e-3) if tol is None else tol
    folder = None if out is None else opt.make_folder(out)
    more = "" if len(X) == chosen.available else f" (--num-points {chosen.available} takes all)"
    typer.echo(f"verifying at {chosen}{more}")
    # What is not certified is said at the end, or expected of a fixed rule.
    with filter_own_warnings("ignore", CertificateWarning):
        results = {name: reconstruct(trajectory, X, head=name, rule=quadrature, progress=True) for name in heads}
    typer.echo(f"{len(X)} points, {trajectory.num_steps} steps, {quadrature.name}")
    typer.echo(_table(results))
    # a NaN stays NaN, as it would not in Python's max
    error = float(torch.tensor([result.max_error for result in results.values()], dtype=torch.float64).max())
    is_adaptive = isinstance(quadrature, AdaptiveRule)  # a fixed rule leaves what it leaves: --tol judges it
    findings = [finding for result in results.values() for finding in result.findings] if is_adaptive else []
    if folder is not None:
        config = options | {"tol": allowed, "num_points": len(X), "dtype": str(X.dtype), "points": str(chosen)}
        numbers: dict[str, Any] = {name: {bound: getattr(r, bound) for bound in _BOUNDS} for name, r in results.items()}
        numbers["passed"] = error <= allowed and not findings
        write_json(folder / "verify.json", "verify", config, numbers, timer)
    if findings:
        raise ValueError(f"the certificate must hold: {'; '.join(findings)}. Do not use results of this run.")
    if not error <= allowed:
        raise ValueError(f"the kernel machine must equal the network to within {allowed:g}: it differs by {error:.3g}.")
    typer.echo(f"verified: the largest error is {error:.2g}, at most {allowed:g} ({timer.total:.1f} s)")


def _describe(summary: RunSummary) -> tuple[str, str]:
    """Say which run its files hold, and that they are whole."""
    header = summary.header
    ended = "finished" if summary.finished else "not finished (record --resume continues it)"
    return (
        f"run {summary.chunks[-1].digest}: {summary.num_steps} steps of {header['law']['name']} on "
        f"{header['num_points']} points, {sum(chunk_schema(header).sizes)} weights, {ended}",
        f"all {summary.files} files of the recording are those that were written",
    )


def _table(results: dict[Head, Reconstruction]) -> str:
    rows: list[tuple[str, ...]] = [
        ("head", "largest error", "largest residual", "summed residual", "evaluations", "step mismatch")
    ]
    for name, r in results.items():
        numbers = (r.max_error, r.max_residual, r.total_residual)
        rows.append((name, *(f"{x:.2e}" for x in numbers), f"{r.evaluations:.2f}", f"{r.max_step_mismatch:.2e}"))
    return "\n".join("  ".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)
