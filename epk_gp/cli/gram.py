"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from pathlib import Path

import torch
import typer

from epk_gp.cli.data import PointSource, cast_points, draw_rows, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import Dtype, HeadName, Side
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes, parse_rule, torch_dtype
from epk_gp.core.head import resolve_head
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import gram_block
from epk_gp.provenance import Stopwatch, write_arrays, write_json


def gram(
    *,
    run: Path,
    out: Path,
    rows: Side,
    columns: Side,
    num_rows: int | None,
    num_columns: int | None,
    head: HeadName | None,
    rule: str,
    memory: float,
    points: Path | None,
    network: str | None,
    dtype: Dtype | None,
    seed: int | None,
    quiet: bool,
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, quadrature = Stopwatch(), parse_rule(rule)
    if points is not None and rows is Side.train and columns is Side.train:
        raise ValueError("--points must have a side: got --rows train and --columns train. Make one of them test.")
    trajectory = open_run(run, network)
    head_name = resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    (a, a_is), (b, b_is) = (_points(source, trajectory, *side) for side in ((rows, num_rows), (columns, num_columns)))
    folder = make_folder(out)
    typer.echo(f"rows: {a_is}")
    typer.echo(f"columns: {b_is}")
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
    config: dict[str, object] = {
        "run": run,
        "rows": rows.value,
        "columns": columns.value,
        "head": head_name,
        "rule": rule,
    }
    config |= {"dtype": str(K.dtype), "seed": seed, "row_points": a_is, "column_points": b_is}
    write_json(folder / "gram.json", "gram", config, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {results['largest']:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")


def _points(source: PointSource, trajectory: Trajectory, side: Side, count: int | None) -> tuple[Points, str]:
    """Return the points of one side, and what they are in words."""
    if side is Side.test:
        chosen = read_points(source, trajectory, count)
        return Points(chosen.X, is_train=False), f"test copies of {chosen}"
    X = cast_points(trajectory.inputs[draw_rows(trajectory.num_points, count, source.seed)], trajectory, source.dtype)
    return Points(X, is_train=True), f"training copies of {len(X)} of {trajectory.num_points} training inputs"
