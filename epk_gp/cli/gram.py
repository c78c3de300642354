"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
import typer
from jaxtyping import Float
from torch import Tensor

from epk_gp.cli.data import PointSource, cast_points, draw_rows, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import Dtype, HeadName, Side
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes, parse_part, parse_rule, torch_dtype
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.compute_options import ComputeOptions
from epk_gp.core.head import resolve_head
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.block_parts import Share, StepInterval
from epk_gp.gram.part_files import write_gram_part
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.provenance import Stopwatch, write_arrays, write_json

# Names of the files of parts, as `epk-gp reduce` finds them in a folder
PART_FILES = ("part-*-of-*.safetensors", "steps-*-*.safetensors")


def gram(
    *,
    run: Path,
    out: Path,
    rows: Side,
    columns: Side,
    num_rows: int | None,
    num_columns: int | None,
    steps: str | None,
    part: str | None,
    head: HeadName | None,
    rule: str,
    memory: float,
    points: Path | None,
    network: str | None,
    dtype: Dtype | None,
    seed: int | None,
    workers: int | None,
    scheduler: str | None,
    quiet: bool,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C), or a part of it.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, quadrature, which = Stopwatch(), parse_rule(rule), parse_part(steps, part)
    require_one_executor(workers, scheduler)
    require_test_side(points, rows, columns)
    trajectory = open_run(run, network)
    head_name = resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    (a, a_is), (b, b_is) = (
        points_of_side(source, trajectory, *side) for side in ((rows, num_rows), (columns, num_columns))
    )
    folder = make_folder(out)
    typer.echo(f"rows: {a_is}")
    typer.echo(f"columns: {b_is}")
    config: dict[str, object] = {
        "run": str(run),
        "rows": rows.value,
        "columns": columns.value,
        "head": head_name,
        "rule": rule,
    }
    config |= {"dtype": str(a.X.dtype), "seed": seed, "row_points": a_is, "column_points": b_is}
    kernel, budget = PathKernel(trajectory, head_name, quadrature), memory_bytes(memory)
    partial = folder / (PARTIAL if which is None else f"{PARTIAL}-{_name(which)}")
    options = ComputeOptions(budget, progress=not quiet, checkpoint=partial)
    if which is None:
        with open_executor(workers, scheduler, resumes=True) as executor:
            K = kernel.block(a, b, replace(options, executor=executor))
        metadata = {"head": head_name, "rule": quadrature.name, "digest": trajectory.digest}
        config |= {"workers": workers, "scheduler": scheduler}
        write_block(folder, K, (a, b), metadata, ("gram", config, timer))
    else:
        with open_executor(workers, scheduler, resumes=True) as executor:
            computed = kernel.block_part(a, b, which, replace(options, executor=executor))
        file = folder / f"{_name(which)}.safetensors"
        write_gram_part(file, replace(computed, notes={"config": config}))
        pieces = f"{len(computed.sums)} of {len(computed.layout.places)} pieces of the block"
        typer.echo(f"written to {folder}: {file.name}, {pieces} ({timer.total:.1f} s)")
    shutil.rmtree(partial)


def write_block(
    folder: Path,
    K: Float[Tensor, "N C M C"],
    points: tuple[Points, Points],
    metadata: dict[str, str],
    described: tuple[str, dict[str, object], Stopwatch],
) -> None:
    """Write a block of the kernel: gram.safetensors and gram.json.

    Args:
        folder: The folder.
        K: The block.
        points: The points along the rows, and along the columns.
        metadata: Head, rule and digest of the run.
        described: Name of the command, its options, and its timer.
    """
    (a, b), (command, config, timer) = points, described
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X}
    arrays["row_is_train"], arrays["column_is_train"] = (p.mask for p in points)
    write_arrays(folder / "gram.safetensors", arrays, {**metadata, "axes": "N C M C"})
    low, high = K.aminmax()  # K.abs() would take the memory of K once more
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": float(torch.maximum(-low, high))}
    write_json(folder / "gram.json", command, config, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {results['largest']:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")


def _name(which: StepInterval | Share) -> str:
    """Return the name of a part's file."""
    if isinstance(which, StepInterval):
        return f"steps-{which.first}-{which.last}"
    return f"part-{which.number:0{len(str(which.count))}d}-of-{which.count}"


def require_test_side(points: Path | None, rows: Side, columns: Side) -> None:
    """Raise if --points has no side.

    Raises:
        ValueError: Both sides are training copies.
    """
    if points is not None and rows is Side.train and columns is Side.train:
        raise ValueError("--points must have a side: got --rows train and --columns train. Make one of them test.")


def points_of_side(source: PointSource, trajectory: Trajectory, side: Side, count: int | None) -> tuple[Points, str]:
    """Return the points of one side of a block, and what they are in words.

    Args:
        source: Where points of the command come from.
        trajectory: The run.
        side: Whether they are training or test copies.
        count: How many of them, at most.
    """
    if side is Side.test:
        chosen = read_points(source, trajectory, count)
        return Points(chosen.X, is_train=False), f"test copies of {chosen}"
    X = cast_points(trajectory.inputs[draw_rows(trajectory.num_points, count, source.seed)], trajectory, source.dtype)
    return Points(X, is_train=True), f"training copies of {len(X)} of {trajectory.num_points} training inputs"
