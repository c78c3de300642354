"""`epk-gp gram`: a block of the exact path kernel."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from epk_gp.cli import options as opt
from epk_gp.cli.data import cast_points, draw_rows, read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.workers import computing
from epk_gp.core.inputs import Points
from epk_gp.core.losses import resolve_head
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.provenance import Stopwatch, write_arrays, write_json

Side = Literal["test", "train"]
_ROWS = (
    "test: the points of --points, or the held-out points, or the training inputs of a run without any, as test "
    "copies; train: training copies."
)


def gram(
    run: opt.RunFolder,
    out: opt.Out = Path("gram"),
    rows: Annotated[Side, typer.Option(help=_ROWS)] = "test",
    columns: Annotated[Side, typer.Option(help="The same for the columns.")] = "train",
    num_rows: Annotated[int | None, opt.count("Largest number of points along the rows.")] = None,
    num_columns: Annotated[int | None, opt.count("Largest number of points along the columns.")] = None,
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
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    if points is not None and rows == columns == "train":
        raise ValueError("--points must have a side: got --rows train and --columns train. Make one of them test.")
    trajectory = open_run(run, network)
    resolved = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    sides = ((rows, num_rows), (columns, num_columns))
    own: dict[str, Any] = {"dtype": opt.DTYPES.get(dtype), "seed": seed}
    (a, rows_are), (b, columns_are) = _read_sides(trajectory, run, points, sides, **own)
    kernel = PathKernel(trajectory, resolved, quadrature, path=along)
    folder = opt.make_folder(out)
    with computing(memory, workers, scheduler, quiet, folder / opt.PARTIAL) as settings:
        K = kernel.block(a, b, **settings)
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X, "row_is_train": a.mask, "column_is_train": b.mask}
    metadata = {"head": resolved, "rule": quadrature.name, "digest": trajectory.digest, "axes": "N C M C"}
    write_arrays(folder / "gram.safetensors", arrays, metadata)
    low, high = K.aminmax()  # K.abs() would take the memory of K once more
    largest = float(torch.maximum(-low, high))
    config = options | {"head": resolved, "dtype": str(a.X.dtype), "row_points": rows_are, "column_points": columns_are}
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": largest}
    write_json(folder / "gram.json", "gram", config, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {largest:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")
    shutil.rmtree(folder / opt.PARTIAL)


def _read_sides(
    trajectory: Trajectory, run: Path, file: Path | None, sides: Sequence[tuple[Side, int | None]], **options: Any
) -> Iterator[tuple[Points, str]]:
    """Give the points of rows and columns of a block, at most so many each, and say what they are."""
    for name, (side, size) in zip(("rows", "columns"), sides, strict=True):
        if side == "test":
            chosen = read_points(trajectory, run, file, size, **options)
            X, said = chosen.X, f"test copies of {chosen}"
        else:
            rows = draw_rows(trajectory.num_points, size, options["seed"])
            X = cast_points(trajectory.inputs[rows], trajectory, options["dtype"])
            said = f"training copies of {len(X)} of {trajectory.num_points} training inputs"
        typer.echo(f"{name}: {said}")
        yield Points(X, is_train=side == "train"), said
