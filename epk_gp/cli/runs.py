"""`epk-gp info` and `verify`: what a run holds, and whether it is sound."""

from typing import Annotated, Any, Literal

import torch
import typer

from epk_gp.cli import options as opt
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run, read_manifest
from epk_gp.cli.workers import computing
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.storage.schema import chunk_schema
from epk_gp.storage.verify import check_run

_HEAD = "Outputs that are verified; by default both for cross entropy, the logits otherwise."
_NUM_POINTS = 10  # by default: each costs about as much as the last, 1 s of a CNN's 100 steps
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_BOUNDS = ("max_error", "max_residual", "total_residual", "evaluations", "max_step_mismatch", "certified")


def info(run: opt.RunFolder, out: opt.OptionalOut = None, quiet: opt.Quiet = False) -> None:
    """Show the contents of a recorded run, after checking its files; no network is built."""
    opt.validate_run(run, out)
    timer = Stopwatch()
    summary, manifest = check_run(run, progress=not quiet), read_manifest(run)
    header = summary.header
    gradients = {None: "as many as took 5 % of the time", 1: "every step's"}
    check_every = header["check_every"]
    sizes = [header["num_points"] if step.batch is None else len(step.batch) for step in summary.steps]
    size = sum(file.stat().st_size for file in run.iterdir() if file.is_file())
    lines: dict[str, object] = {
        "network": manifest.network.name if manifest else "not in the manifest (pass --network to the other commands)",
        "steps": summary.num_steps,
        "step sizes": _range([step.lr for step in summary.steps]),
        "points per step": _range(sizes),
        "weights": f"{sum(chunk_schema(header).sizes)} in {len(header['names'])} tensors",
        "dtype": header["dtype"].removeprefix("torch."),
        "outputs": header["num_outputs"],
        "training points": f"{header['num_points']} of shape {tuple(summary.data['inputs'].shape[1:])}",
        "loss": f"{header['loss']['kind']}, {header['loss'].get('reduction')}",
        "update rule": header["law"]["name"],
        "gradients": f"{gradients.get(check_every, f'one in {check_every}')} recomputed while recording",
        "digest": summary.chunks[-1].digest,
        "data digest": header["data_digest"],
        "chunks": len(summary.chunks),
        "size on disk": f"{size / 1e6:.2f} MB",
        "recording": "finished" if summary.finished else "not finished: record --resume resumes it",
        "files": f"all {summary.files} verified against their checksums",
    }
    if header["keep_every"] > 1:
        lines["weight states"] = f"one in {header['keep_every']} is kept, the others are computed when read"
    if header["statistics"]:
        lines["moving statistics"] = f"{chunk_schema(header).num_statistics} in {len(header['statistics'])} tensors"
    if summary.num_passes:
        num_bytes = sum(forward.num_bytes for step in summary.steps for forward in step.passes)
        lines["forward passes"] = f"{summary.num_passes} recorded, {num_bytes / 1e6:.2f} MB"
    if header["unexplained"] is not None:
        lines["unexplained"] = f"up to {header['unexplained']:g} of a step"
    if out is not None:
        write_json(opt.make_folder(out) / "info.json", "info", {"run": run}, lines, timer)
    for name, value in lines.items():
        typer.echo(f"{name + ':':19}{value}")


def _range(values: list[float] | list[int]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def verify(
    run: opt.RunFolder,
    head: Annotated[Literal["both", "logits", "log_softmax"] | None, typer.Option(help=_HEAD)] = None,
    rule: opt.RuleOption = "adaptive",
    path: opt.PathOption = "straight",
    tol: Annotated[float | None, opt.number("Largest error allowed; 1e-9, or 1e-3 if float32 is used.")] = None,
    num_points: Annotated[int | None, opt.count("Most points; 10 by default, of a --points file all.")] = None,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    out: opt.OptionalOut = None,
    seed: opt.SeedOfPoints = None,
    quiet: opt.Quiet = False,
) -> None:
    """Rebuild the network's outputs from its training data; exit status 1 if they differ by more than --tol."""
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    if num_points is None and points is None:
        num_points = _NUM_POINTS
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    trajectory = open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
    X = chosen.X
    coarsest = torch.float32 if torch.float32 in (X.dtype, trajectory.dtype) else torch.float64
    allowed = _TOLERANCE[coarsest] if tol is None else tol
    heads = _verified_heads(head, trajectory)
    folder = None if out is None else opt.make_folder(out)
    more = "" if len(X) == chosen.available else f" (--num-points {chosen.available} takes all)"
    typer.echo(f"verifying at {chosen}{more}")
    how: dict[str, Any] = {"rule": quadrature, "path": along}
    # What is not certified is said at the end, or expected of a fixed rule.
    with computing(1.0, workers, scheduler, quiet) as settings, filter_own_warnings("ignore", CertificateWarning):
        results = {name: reconstruct(trajectory, X, head=name, **how, **settings) for name in heads}
    typer.echo(f"{len(X)} points, {trajectory.num_steps} steps, {quadrature.name}")
    typer.echo(_table(results))
    # a NaN stays NaN, as it would not in Python's max
    error = float(torch.tensor([result.max_error for result in results.values()], dtype=torch.float64).max())
    is_adaptive = isinstance(quadrature, AdaptiveRule)  # a fixed rule leaves what it leaves: --tol judges it
    findings = [finding for result in results.values() for finding in result.findings] if is_adaptive else []
    if folder is not None:
        config = options | {"tol": allowed, "num_points": len(X), "dtype": str(X.dtype), "points": str(chosen)}
        numbers = {name: {bound: getattr(result, bound) for bound in _BOUNDS} for name, result in results.items()}
        passed = error <= allowed and not findings
        write_json(folder / "verify.json", "verify", config, numbers | {"passed": passed}, timer)
    if findings:
        raise ValueError(f"the certificate must hold: {'; '.join(findings)}. Do not use results of this run.")
    if not error <= allowed:
        raise ValueError(f"the kernel machine must equal the network to within {allowed:g}: it differs by {error:.3g}.")
    typer.echo(f"verified: the largest error is {error:.2g}, at most {allowed:g} ({timer.total:.1f} s)")


def _verified_heads(head: Literal["both"] | Head | None, trajectory: Trajectory) -> list[Head]:
    """Return the heads that are verified; by default the logits and, where the loss is of it, their log-softmax."""
    if head is None:
        is_logits = resolve_head(None, trajectory.loss, trajectory.num_outputs) == "logits"
        head = "logits" if is_logits else "both"
    if head != "both":
        return [head]
    return ["logits"] if trajectory.num_outputs == 1 else ["logits", "log_softmax"]  # of one output: the constant 0


def _table(results: dict[Head, Reconstruction]) -> str:
    rows: list[tuple[str, ...]] = [
        ("head", "largest error", "largest residual", "summed residual", "evaluations", "step mismatch")
    ]
    for name, r in results.items():
        numbers = (r.max_error, r.max_residual, r.total_residual)
        rows.append((name, *(f"{x:.2e}" for x in numbers), f"{r.evaluations:.2f}", f"{r.max_step_mismatch:.2e}"))
    return "\n".join("  ".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)
