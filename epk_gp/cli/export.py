"""`epk-gp export`: a run written to one file, or to a folder with fewer weight states."""

import shutil
from pathlib import Path

import typer

from epk_gp.cli.manifest import copy_manifest
from epk_gp.cli.options import StoredDtype
from epk_gp.provenance import Stopwatch
from epk_gp.storage.export import export_run
from epk_gp.storage.schema import STORED_DTYPES
from epk_gp.storage.thinning import thin_run
from epk_gp.storage.writer import Storage


def export(*, run: Path, out: Path, keep_every: int | None, weights_dtype: StoredDtype | None, quiet: bool) -> None:
    """Write a recorded run, after checking its files, to one safetensors file; or a copy with fewer weight states."""
    timer = Stopwatch()
    if keep_every is not None or weights_dtype is not None:
        _thin(run, out, keep_every or 1, weights_dtype, quiet=quiet)
        return
    if out.suffix != ".safetensors":
        raise ValueError(f"--out must be a .safetensors file, the one format of exports: got {out}.")
    if out.exists():
        raise FileExistsError(f"--out must be a new file: {out} exists. Choose another name.")
    size = export_run(run, out, progress=not quiet)
    typer.echo(f"exported to {out}: {size / 1e6:.2f} MB ({timer.total:.1f} s)")


def _thin(run: Path, out: Path, keep_every: int, weights_dtype: StoredDtype | None, *, quiet: bool) -> None:
    timer = Stopwatch()
    if out.suffix == ".safetensors":
        raise ValueError(f"--out must be a new folder, for the copy is a run: got {out}. Pass --out FOLDER.")
    stored = None if weights_dtype is None else STORED_DTYPES[f"torch.{weights_dtype}"]
    thinned = thin_run(run, out, Storage(keep_every=keep_every, weights_dtype=stored), progress=not quiet)
    try:
        copy_manifest(run, out, {"keep_every": keep_every, "weights_dtype": weights_dtype and str(weights_dtype)})
    except BaseException:
        shutil.rmtree(out)
        raise
    typer.echo(
        f"exported to {out}: {thinned.bytes / 1e6:.2f} MB of {thinned.source_bytes / 1e6:.2f} MB ({timer.total:.1f} s)"
    )
    if thinned.per_weight:
        typer.echo(
            f"one number per weight and step stays: {', '.join(thinned.per_weight)}, which no gradient says (an update "
            "rule of one's own, or one that decides by signs or masks)"
        )
    typer.echo(f"epk-gp verify {out} says whether its steps lead from one kept state to the next")
