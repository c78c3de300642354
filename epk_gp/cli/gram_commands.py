"""The commands of Gram blocks: names, options and help, as in `epk_gp.cli.commands`."""

from pathlib import Path
from typing import Annotated

import typer

from epk_gp.cli.app import command
from epk_gp.cli.commands import attribute
from epk_gp.cli.options import (
    ColumnsSide,
    EstimatedCommand,
    HeadOption,
    MeasuringSeconds,
    Memory,
    Network,
    NumColumns,
    NumRows,
    Out,
    PathOption,
    PointsFile,
    Quiet,
    RowsSide,
    RuleOption,
    RunDtype,
    RunFolder,
    Scheduler,
    SeedOfPoints,
    Side,
    Workers,
)


@command("Write a block of the exact path kernel.")
def gram(
    run: RunFolder,
    out: Out = Path("gram"),
    rows: RowsSide = Side.test,
    columns: ColumnsSide = Side.train,
    num_rows: NumRows = None,
    num_columns: NumColumns = None,
    head: HeadOption = None,
    rule: RuleOption = "gauss-legendre:4",
    path: PathOption = "straight",
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed resumes from its partial sums when it is run again.
    """


@command(
    "Say what gram or attribute will cost.",
    completed_by="epk_gp.cli.estimate",
    options_of=(gram, attribute),
    but=("top", "scheduler"),
)
def estimate(
    ctx: typer.Context,
    run: RunFolder,
    what: Annotated[EstimatedCommand, typer.Option(help="The command that is meant.")] = EstimatedCommand.gram,
    out: Annotated[Path | None, typer.Option(help="Folder for estimate.json; none is written by default.")] = None,
    seconds: MeasuringSeconds = 10.0,
    *,
    rule: Annotated[str, typer.Option(help="As theirs: gauss-legendre:4, or adaptive.", show_default=False)] = "",
) -> None:
    """Say into how many pieces gram or attribute divide with the same options, their bytes, and the seconds they take.

    The first pieces are computed, and the time of the others is extrapolated. Nothing is written but estimate.json if
    --out is given.
    """
