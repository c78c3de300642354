"""`epk-gp estimate`: what another command costs, before it starts."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from epk_gp.analysis.breakdown import step_ranges
from epk_gp.cli import options as opt
from epk_gp.cli.attribute import Explained, NumExplained
from epk_gp.cli.data import read_points
from epk_gp.cli.gram import ColumnsSide, NumColumns, NumRows, RowsSide, read_side, require_test_side
from epk_gp.cli.networks import open_run
from epk_gp.core.losses import resolve_head
from epk_gp.core.options import ComputeSettings
from epk_gp.core.trajectory import network_outputs
from epk_gp.distributed.cost_estimate import CostEstimate
from epk_gp.gram.estimate import estimate_gram
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.estimate import estimate_attribution
from epk_gp.provenance import Stopwatch, write_json

_RULES = {"gram": "gauss-legendre:4", "attribute": "adaptive"}  # the commands' own
_OF_ONE = {"gram": ("rows", "columns", "num_rows", "num_columns"), "attribute": ("num_points", "outputs")}
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


def estimate(
    ctx: opt.Context,
    run: opt.RunFolder,
    what: Annotated[Literal["gram", "attribute"], typer.Option(help="The command that is meant.")] = "gram",
    out: Annotated[Path | None, typer.Option(help="Folder for estimate.json; none is written by default.")] = None,
    seconds: Annotated[
        float,
        opt.number(
            "Time for measuring; the interval is narrower the longer it is. A little more where three parts of "
            "pieces take longer.",
            0.1,
            below=1e5,
        ),
    ] = 10.0,
    rows: RowsSide = "test",
    columns: ColumnsSide = "train",
    num_rows: NumRows = None,
    num_columns: NumColumns = None,
    num_points: NumExplained = 6,
    outputs: Explained = "all",
    head: opt.HeadOption = None,
    rule: Annotated[str, typer.Option(help="As theirs: gauss-legendre:4, or adaptive.", show_default=False)] = "",
    path: opt.PathOption = "straight",
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    quiet: opt.Quiet = False,
) -> None:
    """Say how long gram or attribute will take with the same options, and how much memory and disk.

    A few of its pieces are computed, spread over the run, and the rest is extrapolated, with an interval. Nothing else
    is computed, and nothing is written but estimate.json if --out is given.
    """
    opt.validate_run(run, out)
    for other, names in _OF_ONE.items():
        for name, option in opt.given_options(ctx).items():
            if other != what and name in names:
                raise ValueError(
                    f"{option} must stand beside --what {other}: got --what {what}. Leave one of them out."
                )
    rule = rule or _RULES[what]
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    if out is not None:
        opt.require_folder(out)
    config: dict[str, object] = {"run": run, "what": what, "rule": rule, "path": path}
    config |= {"memory": memory, "workers": workers}
    computing = ComputeSettings(memory_budget=opt.memory_bytes(memory), progress=not quiet, checkpoint=opt.PARTIAL)
    if what == "gram":
        require_test_side(points, rows, columns)
    trajectory = open_run(run, network)
    asked: Any = {"head": resolve_head(head, trajectory.loss, trajectory.num_outputs), "rule": quadrature}
    asked |= {"path": along, "workers": workers, "seconds": seconds, **computing}
    if what == "gram":
        (a, rows_are), (b, columns_are) = (
            read_side(trajectory, run, points, side, size, opt.DTYPES.get(dtype), seed)
            for side, size in ((rows, num_rows), (columns, num_columns))
        )
        typer.echo(f"rows: {rows_are}\ncolumns: {columns_are}")
        config |= {"row_points": rows_are, "column_points": columns_are}
        found = estimate_gram(trajectory, a, b, **asked)
        written = found.disk.result + sum(side.X.nbytes + len(side) for side in (a, b))
    else:
        chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
        X, ranges = chosen.X, step_ranges(trajectory)
        typer.echo(f"explaining {chosen}")
        config |= {"points": str(chosen), "outputs": outputs}
        classes = network_outputs(trajectory, X).argmax(dim=1) if outputs == "predicted" else None
        found = estimate_attribution(trajectory, X, [[by_sample(trajectory)], [ranges]], classes=classes, **asked)
        # of an output: samples, ranges; initial, decay, total, network, statistics, unexplained
        per_output = (trajectory.num_points + len(ranges.names) + 6) * (
            X.itemsize if X.is_floating_point() else trajectory.dtype.itemsize
        )
        num_outputs = trajectory.num_outputs if outputs == "all" else 1
        written = len(X) * (num_outputs * per_output + 8) + X.nbytes  # 8: the predicted class
    peak = found.memory.owner + written  # a block is copied into the order of its axes when it is written
    _show(found, written, peak)
    if out is not None:
        write_json(opt.make_folder(out) / "estimate.json", "estimate", config, _numbers(found, written, peak), timer)
        typer.echo(f"written to {out}: estimate.json")


def _show(found: CostEstimate, written: int, peak: int) -> None:
    """Print an estimate."""
    disk, memory, costs = found.disk, found.memory, found.costs
    measured = "all pieces" if costs.is_exact else f"{costs.num_measured} parts of pieces, the rest is extrapolated"
    lines = {
        "pieces": found.description,
        "measured": f"{measured} ({_time(costs.sample_seconds)})",
        "work of one process": _interval(found.work_seconds, found.work_interval),
        "longest piece": _time(found.longest_piece),
    }
    if found.workers is None:
        lines["time"] = _interval(found.seconds, found.interval)
    else:
        lines[f"time with {found.workers} workers"] = _interval(found.seconds, found.interval)
        if found.workers > found.num_pieces:
            lines["workers of use"] = f"{found.num_pieces}: there are no more pieces"
    peak_so_far = "" if memory.measured is None else f"{_size(memory.measured)} in the sample; "
    lines |= {
        "time besides": f"{_time(found.setup_seconds)} of it before the first piece; the start of Python comes on top",
        "memory of a process": f"{peak_so_far}with its whole budget {_size(memory.limit)}",
        "memory of the result": f"{_size(peak)} more in the process that writes it",
        "disk": f"{_size(written)} for the result, and at most {_size(disk.scratch)} beside it until it is there",
    }
    if disk.pieces_at_once:
        lines["disk"] += f" ({disk.pieces_at_once} pieces of {_size(disk.piece)} at a time)"
    for name, value in lines.items():
        typer.echo(f"{name + ':':26}{value}")


def _numbers(found: CostEstimate, written: int, peak: int) -> dict[str, object]:
    """Return an estimate as JSON has it."""
    memory, disk, costs = found.memory, found.disk, found.costs
    return {
        "pieces": found.num_pieces,
        "work_seconds": found.work_seconds,
        "work_interval": found.work_interval,
        "seconds": found.seconds,
        "interval": found.interval,
        "longest_piece_seconds": found.longest_piece,
        "setup_seconds": found.setup_seconds,
        "all_measured": costs.is_exact,
        "measured_parts": costs.num_measured,
        "sample_seconds": costs.sample_seconds,
        "memory_of_process_bytes": memory.limit,
        "measured_memory_bytes": memory.measured,
        "memory_of_result_bytes": peak,
        "result_bytes": written,
        "piece_bytes": disk.piece,
        "pieces_at_once": disk.pieces_at_once,
        "scratch_bytes": disk.scratch,
    }


def _interval(seconds: float, interval: tuple[float, float]) -> str:
    low, high = (_time(bound) for bound in interval)
    return _time(seconds) if low == high else f"{_time(seconds)} ({low} to {high})"


def _time(seconds: float) -> str:
    """Return a time in words, with two or three digits."""
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.3g} min"
    return f"{seconds / _HOUR:.3g} h" if seconds < _DAY else f"{seconds / _DAY:.3g} days"


def _size(num_bytes: int) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
