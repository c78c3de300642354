"""`epk-gp gram`: a block of the exact path kernel between two sets of points."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
import typer
from jaxtyping import Float
from torch import Tensor

from epk_gp.cli.kernel_requests import read_block
from epk_gp.cli.options import BlockOptions
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.gram.block_parts import Share, StepInterval
from epk_gp.gram.part_files import write_gram_part
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.provenance import Stopwatch, write_arrays, write_json

# Names of the files of parts, as `epk-gp reduce` finds them in a folder
PART_FILES = ("part-*-of-*.safetensors", "steps-*-*.safetensors")


def gram(
    *,
    out: Path,
    scheduler: str | None,
    **options: Unpack[BlockOptions],
) -> None:
    """Write a block of the kernel between all outputs of two sets of points, shape (N, C, M, C), or a part of it.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, workers = Stopwatch(), options["workers"]
    require_one_executor(workers, scheduler)
    asked = read_block(options)
    a, b, which, trajectory = asked.a, asked.b, asked.which, asked.trajectory
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
    partial = folder / (PARTIAL if which is None else f"{PARTIAL}-{_name(which)}")
    computing = ComputeOptions(budget, progress=not options["quiet"], checkpoint=partial)
    if which is None:
        with open_executor(workers, scheduler, resumes=True) as executor:
            K = kernel.block(a, b, replace(computing, executor=executor))
        metadata = {"head": asked.head, "rule": asked.rule.name, "digest": trajectory.digest}
        config |= {"workers": workers, "scheduler": scheduler}
        write_block(folder, K, (a, b), metadata, ("gram", config, timer))
    else:
        with open_executor(workers, scheduler, resumes=True) as executor:
            computed = kernel.block_part(a, b, which, replace(computing, executor=executor))
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
