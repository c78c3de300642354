"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.cli.app import app
from epk_gp.cli.data import PointSource, cast_points, draw_rows, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import (
    PARTIAL,
    HeadOption,
    Memory,
    Network,
    Out,
    PointsFile,
    Quiet,
    RuleOption,
    RunDtype,
    RunFolder,
    SeedOfPoints,
    make_folder,
    memory_bytes,
    parse_rule,
    torch_dtype,
)
from epk_gp.core.head import resolve_head
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import gram_block
from epk_gp.provenance import Stopwatch, write_arrays, write_json


class Side(StrEnum):
    """The points along one side of the block."""

    test = "test"
    train = "train"


@app.command(short_help="Write a block of the exact path kernel.")
def gram(
    run: RunFolder,
    out: Out = Path("gram"),
    rows: Annotated[
        Side, typer.Option(help="test: held-out points, as test copies; train: training copies.")
    ] = Side.test,
    columns: Annotated[Side, typer.Option(help="The same for the columns.")] = Side.train,
    num_rows: Annotated[int | None, typer.Option(help="Largest number of points along the rows.")] = None,
    num_columns: Annotated[int | None, typer.Option(help="Largest number of points along the columns.")] = None,
    head: HeadOption = None,
    rule: RuleOption = "gauss-legendre:4",
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, quadrature = Stopwatch(), parse_rule(rule)
    trajectory = open_run(run, network)
    head_name = resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)
    for option, count in (("--num-rows", num_rows), ("--num-columns", num_columns)):
        if count is not None and count < 1:
            raise ValueError(f"{option} must be at least 1: got {count}.")
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    a, b = (_points(source, trajectory, *side) for side in ((rows, num_rows), (columns, num_columns)))
    folder = make_folder(out)
    partial = folder / PARTIAL
    K = gram_block(
        trajectory,
        a,
        b,
        head=head_name,
        rule=quadrature,
        checkpoint=partial,
        memory_budget=memory_bytes(memory),
        progress=not quiet,
    )
    metadata = {"head": head_name, "rule": quadrature.name, "digest": trajectory.digest, "axes": "N C M C"}
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X}
    arrays["row_is_train"], arrays["column_is_train"] = (torch.full((len(p),), bool(p.is_train)) for p in (a, b))
    write_arrays(folder / "gram.safetensors", arrays, metadata)
    shutil.rmtree(partial)
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": float(K.abs().max())}
    config = {"run": run, "rows": rows.value, "columns": columns.value, "head": head_name, "rule": rule}
    write_json(folder / "gram.json", "gram", config | {"dtype": str(K.dtype), "seed": seed}, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {results['largest']:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")


def _points(source: PointSource, trajectory: Trajectory, side: Side, count: int | None) -> Points:
    if side is Side.test:
        return Points(read_points(source, trajectory, count), is_train=False)
    X = trajectory.inputs[draw_rows(trajectory.num_points, count, source.seed)]
    return Points(cast_points(X, trajectory, source.dtype), is_train=True)
