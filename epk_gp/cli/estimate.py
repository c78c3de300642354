"""`epk-gp estimate`: what another command costs, before it starts."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from epk_gp.analysis.breakdown import step_ranges
from epk_gp.cli import options as opt
from epk_gp.cli.attribute import Explained, NumExplained
from epk_gp.cli.data import read_points
from epk_gp.cli.gram import ColumnsSide, NumColumns, NumRows, RowsSide, read_side, require_test_side
from epk_gp.cli.networks import open_run
from epk_gp.core.losses import resolve_head
from epk_gp.core.trajectory import network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.plan import plan_attribution, plan_gram
from epk_gp.provenance import Stopwatch, write_json

_RULES = {"gram": "gauss-legendre:4", "attribute": "adaptive"}  # the commands' own
_OF_ONE = {"gram": ("rows", "columns", "num_rows", "num_columns"), "attribute": ("num_points", "outputs")}


def estimate(
    ctx: opt.Context,
    run: opt.RunFolder,
    what: Annotated[Literal["gram", "attribute"], typer.Option(help="The command that is meant.")] = "gram",
    out: Annotated[Path | None, typer.Option(help="Folder for estimate.json; none is written by default.")] = None,
    seconds: Annotated[
        float,
        opt.number(
            "Time for measuring. A little more where one piece of each kind takes longer.",
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
    """Say into how many pieces gram or attribute divide with the same options, their bytes, and the seconds they take.

    The first pieces are computed, and the time of the others is extrapolated. Nothing is written but estimate.json if
    --out is given.
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
    budget = opt.memory_bytes(memory)
    if what == "gram":
        require_test_side(points, rows, columns)
    trajectory = open_run(run, network)
    kernel = PathKernel(trajectory, resolve_head(head, trajectory.loss, trajectory.num_outputs), quadrature, path=along)
    if what == "gram":
        (a, rows_are), (b, columns_are) = (
            read_side(trajectory, run, points, side, size, opt.DTYPES.get(dtype), seed)
            for side, size in ((rows, num_rows), (columns, num_columns))
        )
        typer.echo(f"rows: {rows_are}\ncolumns: {columns_are}")
        config |= {"row_points": rows_are, "column_points": columns_are}
        plan = plan_gram(kernel, a, b, seconds=seconds, memory_budget=budget)
    else:
        chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
        typer.echo(f"explaining {chosen}")
        config |= {"points": str(chosen), "outputs": outputs}
        classes = network_outputs(trajectory, chosen.X).argmax(dim=1) if outputs == "predicted" else None
        groupings = [[by_sample(trajectory)], [step_ranges(trajectory)]]
        plan = plan_attribution(kernel, chosen.X, groupings, classes=classes, seconds=seconds, memory_budget=budget)
    of_use = max(1, min(workers or 1, plan.pieces))
    typer.echo(f"pieces:  {plan.pieces}, of up to {_size(plan.piece_bytes)}")
    typer.echo(f"result:  {_size(plan.result_bytes)}")
    typer.echo(f"time:    {_time(plan.seconds)} of one process; {_time(plan.seconds / of_use)} with {of_use} workers")
    if out is not None:
        results = {**asdict(plan), "workers_of_use": of_use, "seconds_with_workers": plan.seconds / of_use}
        write_json(opt.make_folder(out) / "estimate.json", "estimate", config, results, timer)
        typer.echo(f"written to {out}: estimate.json")


def _time(seconds: float) -> str:
    """Return a time in words, with three digits."""
    for unit, factor in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
