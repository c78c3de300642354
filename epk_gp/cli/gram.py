"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from epk_gp.cli import options as opt
from epk_gp.cli.data import cast_points, draw_rows, read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.workers import open_executor
from epk_gp.core.inputs import Points
from epk_gp.core.losses import resolve_head
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.provenance import Stopwatch, write_arrays, write_json

Side = Literal["test", "train"]
RowsSide = Annotated[
    Side,
    typer.Option(
        help="test: the points of --points, or the held-out points, or the training inputs of a run without any, "
        "as test copies; train: training copies."
    ),
]
ColumnsSide = Annotated[Side, typer.Option(help="The same for the columns.")]
NumRows = Annotated[int | None, opt.count("Largest number of points along the rows.")]
NumColumns = Annotated[int | None, opt.count("Largest number of points along the columns.")]


def gram(
    run: opt.RunFolder,
    out: opt.Out = Path("gram"),
    rows: RowsSide = "test",
    columns: ColumnsSide = "train",
    num_rows: NumRows = None,
    num_columns: NumColumns = None,
    head: opt.HeadOption = None,
    rule: opt.RuleOption = "gauss-legendre:4",
    path: opt.PathOption = "straight",
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed resumes from its partial sums when it is run again.
    """
    opt.validate_run(run, out, workers, scheduler)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    require_test_side(points, rows, columns)
    trajectory = open_run(run, network)
    resolved = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    (a, rows_are), (b, columns_are) = (
        read_side(trajectory, run, points, side, size, opt.DTYPES.get(dtype), seed)
        for side, size in ((rows, num_rows), (columns, num_columns))
    )
    folder = opt.make_folder(out)
    typer.echo(f"rows: {rows_are}\ncolumns: {columns_are}")
    with open_executor(workers, scheduler, resumes=True) as executor:
        computing = ComputeOptions(
            opt.memory_bytes(memory), progress=not quiet, checkpoint=folder / opt.PARTIAL, executor=executor
        )
        K = PathKernel(trajectory, resolved, quadrature, path=along).block(a, b, computing)
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X, "row_is_train": a.mask, "column_is_train": b.mask}
    metadata = {"head": resolved, "rule": quadrature.name, "digest": trajectory.digest, "axes": "N C M C"}
    write_arrays(folder / "gram.safetensors", arrays, metadata)
    low, high = K.aminmax()  # K.abs() would take the memory of K once more
    largest = float(torch.maximum(-low, high))
    config: dict[str, object] = {"run": run, "rows": rows, "columns": columns, "head": resolved, "rule": rule}
    config |= {"path": path, "dtype": str(a.X.dtype), "seed": seed}
    config |= {"row_points": rows_are, "column_points": columns_are}
    config |= {"workers": workers, "scheduler": scheduler}
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": largest}
    write_json(folder / "gram.json", "gram", config, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {largest:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")
    shutil.rmtree(folder / opt.PARTIAL)


def require_test_side(points: Path | None, rows: Side, columns: Side) -> None:
    """Raise if --points has no side."""
    if points is not None and rows == columns == "train":
        raise ValueError("--points must have a side: got --rows train and --columns train. Make one of them test.")


def read_side(
    trajectory: Trajectory,
    run: Path,
    file: Path | None,
    side: Side,
    size: int | None,
    dtype: torch.dtype | None,
    seed: int | None,
) -> tuple[Points, str]:
    """Return the points of one side of a block, at most so many, and what they are in words."""
    if side == "test":
        chosen = read_points(trajectory, run, file, size, dtype=dtype, seed=seed)
        return Points(chosen.X, is_train=False), f"test copies of {chosen}"
    X = cast_points(trajectory.inputs[draw_rows(trajectory.num_points, size, seed)], trajectory, dtype)
    return Points(X, is_train=True), f"training copies of {len(X)} of {trajectory.num_points} training inputs"
