"""`epk-gp gram`: a block of the exact path kernel."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.cli.app import (
    PARTIAL,
    HeadName,
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
    app,
    make_folder,
    memory_bytes,
    parse_rule,
    torch_dtype,
)
from epk_gp.cli.data import draw_rows, read_points
from epk_gp.cli.networks import open_run
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import gram_block
from epk_gp.provenance import Stopwatch, write_arrays, write_json


class Side(StrEnum):
    """Which points stand along a side of the block."""

    test = "test"
    train = "train"


@app.command(short_help="Write a block of the exact path kernel.")
def gram(
    run: RunFolder,
    out: Out = Path("gram"),
    rows: Annotated[
        Side, typer.Option(help="test: held-out points, as test copies; train: training copies.")
    ] = Side.test,
    columns: Annotated[Side, typer.Option(help="The same, along the columns.")] = Side.train,
    num_rows: Annotated[int | None, typer.Option(help="Points along the rows, at most.")] = None,
    num_columns: Annotated[int | None, typer.Option(help="Points along the columns, at most.")] = None,
    head: HeadOption = HeadName.log_softmax,
    rule: RuleOption = "gauss-legendre:4",
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed goes on where it was when it is given again.
    """
    watch, quadrature = Stopwatch(), parse_rule(rule)
    trajectory = open_run(run, network)
    kind = None if dtype is None else torch_dtype(dtype)
    a = _points(run, points, trajectory, rows, num_rows, kind, seed, "--num-rows")
    b = _points(run, points, trajectory, columns, num_columns, kind, seed, "--num-columns")
    folder = make_folder(out)
    partial = folder / PARTIAL
    K = gram_block(
        trajectory,
        a,
        b,
        head=head.value,
        rule=quadrature,
        checkpoint=partial,
        memory_budget=memory_bytes(memory),
        progress=not quiet,
    )
    about = {"head": head.value, "rule": quadrature.name, "digest": trajectory.digest, "axes": "N C M C"}
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X}
    arrays["row_is_train"], arrays["column_is_train"] = (torch.full((len(p),), bool(p.is_train)) for p in (a, b))
    write_arrays(folder / "gram.safetensors", arrays, about)
    shutil.rmtree(partial)
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": float(K.abs().max())}
    config = {"run": run, "rows": rows.value, "columns": columns.value, "head": head.value, "rule": rule}
    write_json(folder / "gram.json", "gram", config | {"dtype": str(K.dtype), "seed": seed}, results, watch)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {results['largest']:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({watch.total:.1f} s)")


def _points(
    run: Path,
    file: Path | None,
    trajectory: Trajectory,
    side: Side,
    count: int | None,
    dtype: torch.dtype | None,
    seed: int | None,
    option: str,
) -> Points:
    if count is not None and count < 1:
        raise ValueError(f"{option} must be at least 1: got {count}.")
    if side is Side.test:
        return Points(read_points(run, file, trajectory, count, dtype, seed), is_train=False)
    X = trajectory.inputs[draw_rows(trajectory.num_points, count, seed)]
    return Points(X.to(trajectory.dtype if dtype is None else dtype) if X.is_floating_point() else X, is_train=True)
