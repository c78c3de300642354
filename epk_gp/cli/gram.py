"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
import typer

from epk_gp.cli.kernel_requests import read_block
from epk_gp.cli.options import BlockOptions
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.options import ComputeOptions
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.provenance import Stopwatch, write_arrays, write_json


def gram(
    *,
    out: Path,
    scheduler: str | None,
    **options: Unpack[BlockOptions],
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C).

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, workers = Stopwatch(), options["workers"]
    require_one_executor(workers, scheduler)
    asked = read_block(options)
    a, b, trajectory = asked.a, asked.b, asked.trajectory
    folder = make_folder(out)
    asked.show_sides()
    config: dict[str, object] = {
        "run": str(options["run"]),
        "rows": options["rows"].value,
        "columns": options["columns"].value,
        "head": asked.head,
        "rule": options["rule"],
        "path": options["path"],
    }
    config |= {"dtype": str(a.X.dtype), "seed": options["seed"], "row_points": asked.a_is, "column_points": asked.b_is}
    kernel, budget = PathKernel(trajectory, asked.head, asked.rule, path=asked.path), memory_bytes(options["memory"])
    partial = folder / PARTIAL
    computing = ComputeOptions(budget, progress=not options["quiet"], checkpoint=partial)
    with open_executor(workers, scheduler, resumes=True) as executor:
        K = kernel.block(a, b, replace(computing, executor=executor))
    config |= {"workers": workers, "scheduler": scheduler}
    metadata = {"head": asked.head, "rule": asked.rule.name, "digest": trajectory.digest, "axes": "N C M C"}
    arrays = {"gram": K, "row_inputs": a.X, "column_inputs": b.X}
    arrays["row_is_train"], arrays["column_is_train"] = (points.mask for points in (a, b))
    write_arrays(folder / "gram.safetensors", arrays, metadata)
    low, high = K.aminmax()  # K.abs() would take the memory of K once more
    results = {"shape": list(K.shape), "mean": float(K.mean()), "largest": float(torch.maximum(-low, high))}
    write_json(folder / "gram.json", "gram", config, results, timer)
    typer.echo(f"block of shape {tuple(K.shape)}, {K.dtype}, largest entry {results['largest']:.4g}")
    typer.echo(f"written to {folder}: gram.safetensors, gram.json ({timer.total:.1f} s)")
    shutil.rmtree(partial)
