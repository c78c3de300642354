"""`epk-gp export`: a run written to one file."""

from pathlib import Path

import typer

from epk_gp.provenance import Stopwatch
from epk_gp.storage.export import export_run


def export(*, run: Path, out: Path, quiet: bool) -> None:
    """Write a recorded run, after checking its files, to one safetensors file."""
    timer = Stopwatch()
    if out.suffix != ".safetensors":
        raise ValueError(f"--out must be a .safetensors file, the one format of exports: got {out}.")
    if out.exists():
        raise FileExistsError(f"--out must be a new file: {out} exists. Choose another name.")
    size = export_run(run, out, progress=not quiet)
    typer.echo(f"exported to {out}: {size / 1e6:.2f} MB ({timer.total:.1f} s)")
