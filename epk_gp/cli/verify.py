"""`epk-gp verify`: whether the kernel machine equals the network, and whether the files are undamaged."""

import warnings
from pathlib import Path

import torch
import typer

from epk_gp.cli.data import PointSource, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import Dtype, VerifiedHeads
from epk_gp.cli.parsing import make_folder, parse_path, parse_rule, torch_dtype
from epk_gp.cli.summaries import certificate
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.show import CertificateWarning
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.storage.verify import check_run

_HEADS: dict[str, list[Head]] = {
    "both": ["logits", "log_softmax"],
    "logits": ["logits"],
    "log_softmax": ["log_softmax"],
}
_NUM_POINTS = 10  # by default: each costs about as much as the last, 1 s of a CNN's 100 steps
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


def verify(
    *,
    run: Path,
    checksums: bool,
    head: VerifiedHeads | None,
    rule: str,
    path: str,
    tol: float | None,
    num_points: int | None,
    all_points: bool,
    points: Path | None,
    network: str | None,
    dtype: Dtype | None,
    workers: int | None,
    scheduler: str | None,
    out: Path | None,
    seed: int | None,
    quiet: bool,
) -> None:
    """Rebuild the network's outputs from its training data; exit status 1 if they are not certified, or off."""
    if checksums:
        _check_files(run, quiet)
        return
    if all_points and num_points is not None:
        raise ValueError("--all-points must stand without --num-points, which would be ignored. Pass one of them.")
    if num_points is None and points is None and not all_points:
        num_points = _NUM_POINTS
    require_one_executor(workers, scheduler)
    timer, quadrature, along = Stopwatch(), parse_rule(rule), parse_path(path)
    trajectory = open_run(run, network)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    chosen = read_points(source, trajectory, num_points)
    X = chosen.X
    coarsest = torch.float32 if torch.float32 in (X.dtype, trajectory.dtype) else torch.float64
    allowed = _TOLERANCE[coarsest] if tol is None else tol
    heads = _heads(head, trajectory)
    folder = None if out is None else make_folder(out)
    more = "" if len(X) == chosen.available else " (--all-points takes all, in proportionally more time)"
    typer.echo(f"verifying at {chosen}{more}")
    with open_executor(workers, scheduler) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end, or expected of a fixed rule
        results = {
            name: reconstruct(
                trajectory, X, head=name, rule=quadrature, path=along, progress=not quiet, executor=executor
            )
            for name in heads
        }
    typer.echo(f"{len(X)} points, {trajectory.num_steps} steps, {quadrature.name}")
    typer.echo(_table(results))
    errors = torch.tensor([result.max_error for result in results.values()], dtype=torch.float64)
    error = float(errors.max())  # a NaN stays NaN, as it would not in Python's max
    is_adaptive = isinstance(quadrature, AdaptiveRule)  # a fixed rule leaves what it leaves: --tol judges it
    findings = [finding for result in results.values() for finding in result.findings] if is_adaptive else []
    if folder is not None:
        config = {"run": run, "rule": rule, "tol": allowed, "num_points": len(X), "dtype": str(X.dtype), "seed": seed}
        config |= {"points": str(chosen), "path": path}
        numbers = {name: certificate(result) for name, result in results.items()}
        passed = error <= allowed and not findings
        write_json(folder / "verify.json", "verify", config, numbers | {"passed": passed}, timer)
    if findings:
        raise ValueError(f"the certificate must hold: {'; '.join(findings)}. Do not use results of this run.")
    if not error <= allowed:
        raise ValueError(f"the kernel machine must equal the network to within {allowed:g}: it differs by {error:.3g}.")
    typer.echo(f"verified: the largest error is {error:.2g}, at most {allowed:g} ({timer.total:.1f} s)")


def _heads(head: VerifiedHeads | None, trajectory: Trajectory) -> list[Head]:
    """Return the heads that are verified; by default the logits and, where the loss is of it, their log-softmax."""
    num_outputs = trajectory.num_outputs
    if head is None:
        is_logits = resolve_head(None, trajectory.loss, num_outputs) == "logits"
        head = VerifiedHeads.logits if is_logits else VerifiedHeads.both
    if head is VerifiedHeads.both and num_outputs == 1:
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
